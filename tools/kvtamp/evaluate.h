// The engine of `kvtamp eval` and `bench quality`: one text through contexts of libllama in
// lockstep, batch by batch, and the distance of their predictions. The base is the host's own f16
// cache on the CPU; the tested ones are the same model with other caches. The base uses flash
// attention.
//
// The text is cut into chunks of n_ctx tokens, each run from an empty cache with its first token
// replaced by BOS if the model wants one; the second half of a chunk is scored (positions n_ctx/2 …
// n_ctx-2), as llama-perplexity does. Lockstep means that no logits are kept beyond one batch:
// memory is n_batch * n_vocab floats for each context.
#pragma once

#include <ggml.h>

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "tools/kvtamp/cache_size.h"
#include "tools/kvtamp/divergence.h"
#include "tools/kvtamp/host_model.h"
#include "tools/kvtamp/progress.h"
#include "tools/kvtamp/run_log.h"

namespace kvtamp::tool {

// A cache that is tested: on kvtamp's device, or the host's own with these types.
struct TestedCache {
  std::string name;  // in messages and in a RunLog: "tested", "k4v4@n_sink=0", "host q8_0"
  bool host = false;
  ggml_type type_k = GGML_TYPE_F16, type_v = GGML_TYPE_F16;
  bool flash_attention = true;
  // Settings of ours, as variables ("" takes one away): set while its context is made.
  std::vector<std::pair<std::string, std::string>> environment = {};
};
// f16 through kvtamp: what a change of rounding alone makes.
TestedCache FloorCache();

struct EvalConfig {
  std::string model;
  std::string text;  // the text itself
  std::uint32_t n_ctx = 2048;
  std::uint32_t n_batch = 512;
  std::uint32_t n_ubatch = 512;
  std::uint32_t n_ubatch_base = 512;
  std::uint32_t max_chunks = 0;  // 0 = all the text has
  std::uint32_t n_scored = 0;    // last positions of a chunk; 0 = its second half
  bool decode_only = false;      // what is scored goes token by token, in all contexts
  int n_threads = 1;
};

struct ChunkResult {
  Divergence divergence;
  double seconds = 0;  // in llama_decode, tested
  double seconds_base = 0;
  CacheSize size;  // of the tested cache at its end
};

struct TestedResult {
  Divergence total;
  std::vector<ChunkResult> chunks;  // those done: as many for each
};

struct EvalResult {
  ModelFacts model;
  std::uint32_t n_chunks = 0;        // asked for and there
  std::vector<TestedResult> tested;  // as given
  Json stats;                        // the plug-in's last snapshot of them all, null without one
  std::vector<std::string> warnings;
};

// What an evaluation asks of its caller.
struct EvalHooks {
  // False stops after the current batch, and what is complete by then is the result.
  ProgressCall progress;
  RunLog* log = nullptr;  // never null: chunks found there are not run again, others are added
};
// `models` without the plug-in's will do where all tested caches are the host's.
Result<EvalResult> Evaluate(const ModelPair& models, const EvalConfig& config,
                            std::span<const TestedCache> tested, const ModelLayout& layout,
                            const EvalHooks& hooks);

}  // namespace kvtamp::tool
