// The engine of `kvtamp eval`: one text through two contexts of libllama in lockstep, batch by
// batch, and the distance of their predictions. The base is the host's own f16 cache on the CPU;
// the tested one is the same model with another cache. The base uses flash attention.
//
// The text is cut into chunks of n_ctx tokens, each run from an empty cache with its first token
// replaced by BOS if the model wants one; the second half of a chunk is scored (positions n_ctx/2 …
// n_ctx-2), as llama-perplexity does. Lockstep means that no logits are kept beyond one batch:
// memory is 2 * n_batch * n_vocab floats.
#pragma once

#include <ggml.h>

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "tools/kvtamp/cache_size.h"
#include "tools/kvtamp/divergence.h"
#include "tools/kvtamp/host_model.h"
#include "tools/kvtamp/plugin.h"
#include "tools/kvtamp/run_log.h"

namespace kvtamp::tool {

struct EvalConfig {
  std::string model;
  std::string text;  // the text itself
  std::uint32_t n_ctx = 2048;
  std::uint32_t n_batch = 512;
  std::uint32_t n_ubatch = 512;
  std::uint32_t n_ubatch_base = 512;
  std::uint32_t max_chunks = 0;  // 0 = all the text has
  bool decode_only = false;      // the scored half token by token, in both contexts
  int n_threads = 1;
  // The tested cache: on this device, or the host's own with these types when null.
  const Plugin* plugin = nullptr;
  ggml_type type_k = GGML_TYPE_F16;
  ggml_type type_v = GGML_TYPE_F16;
  bool flash_attention = true;  // of the tested context
};

struct ChunkResult {
  Divergence divergence;
  double seconds = 0;  // in llama_decode, tested
  double seconds_base = 0;
  CacheSize size;  // of the tested cache at its end
};

struct EvalResult {
  ModelFacts model;
  std::size_t n_tokens_text = 0;
  std::uint32_t n_chunks = 0;  // asked for and there
  Divergence total;
  std::vector<ChunkResult> chunks;  // those done
  std::string stats_json;           // the plug-in's last snapshot, "" for the host
  std::vector<std::string> warnings;
};

// What an evaluation asks of its caller.
struct EvalHooks {
  // The fraction of all work that is done, and a word on what; false stops after the current batch,
  // and what is complete by then is the result.
  std::function<bool(double, const std::string&)> progress;
  // Of the host's cache with n tokens.
  std::function<CacheSize(std::uint32_t)> size_of_host;
  RunLog* log = nullptr;  // never null: chunks found there are not run again, others are added
  std::string pass;       // by which they are known there
};
Result<EvalResult> Evaluate(const EvalConfig& config, const EvalHooks& hooks);

}  // namespace kvtamp::tool
