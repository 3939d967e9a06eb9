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

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "tools/kvtamp/divergence.h"
#include "tools/kvtamp/layout.h"
#include "tools/kvtamp/plugin.h"
#include "tools/kvtamp/stored_size.h"

namespace kvtamp::tool {

// A cache that is tested: on kvtamp's device, or the host's own with these types.
struct TestedCache {
  bool host = false;
  ggml_type type_k = GGML_TYPE_F16, type_v = GGML_TYPE_F16;
  bool flash_attention = true;
  // Settings of ours, as variables: set while its context is made, over what the environment says.
  std::vector<std::pair<std::string, std::string>> environment;
};

// Ours without any coding: what a change of rounding alone makes.
inline const TestedCache kF16Cache{.environment = {{"KVTAMP_CACHE_TYPE", "f16"},
                                                   {"KVTAMP_CACHE_TYPE_K", ""},
                                                   {"KVTAMP_CACHE_TYPE_V", ""},
                                                   {"KVTAMP_CACHE_PROFILE", ""},
                                                   {"KVTAMP_CONFIG", ""}}};

struct EvalConfig {
  std::string model;
  std::string text;  // the text itself
  std::uint32_t n_ctx = 2048;
  std::uint32_t n_batch = 512;
  std::uint32_t n_ubatch = 512;
  std::uint32_t n_ubatch_base = 512;
  std::uint32_t max_chunks = 0;  // 0 = all the text has
  std::uint32_t n_scored = 0;    // last positions of a chunk, 0 = its second half
  bool decode_only = false;      // what is scored goes token by token, in all contexts
  int n_threads = 1;
  const Plugin* plugin = nullptr;  // may be null where all tested caches are the host's
};

struct ChunkResult {
  Divergence divergence;
  double seconds = 0;  // in llama_decode, tested
  double seconds_base = 0;
  CacheSize size;  // at its end; all zero when the plug-in tells nothing
};

struct TestedResult {
  Divergence total;
  std::vector<ChunkResult> chunks;  // those done
  std::string format_k, format_v;   // as resolved for the model
};

struct EvalResult {
  std::string model_type;  // as libllama describes it
  std::uint64_t model_size = 0;
  std::uint64_t n_params = 0;
  std::size_t n_tokens_text = 0;
  std::uint32_t n_chunks = 0;        // asked for and there
  std::vector<TestedResult> tested;  // as given
  std::string stats_json;            // the plug-in's last snapshot, "" without one
  std::vector<std::string> warnings;
};

// Bytes of the host's own cache at n tokens.
CacheSize HostCacheSize(const ModelLayout& layout, const TestedCache& cache, std::uint32_t n);

// `progress(chunk, fraction of all work)`; returning false stops after the current batch, and what
// is complete by then is the result.
using EvalProgress = std::function<bool(std::uint32_t, double)>;
Result<EvalResult> Evaluate(const EvalConfig& config, std::span<const TestedCache> tested,
                            const ModelLayout& layout, const EvalProgress& progress);

}  // namespace kvtamp::tool
