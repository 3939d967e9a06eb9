// Where the loss of a format comes from: the engine of `kvtamp errors`.
//
// The model runs on the host's own f16 cache, and what its graph hands to the cache and to
// attention (rows of SET_ROWS, queries and masks of FLASH_ATTN_EXT) goes to four stores beside it:
// f16, K coded alone, V coded alone, and both. The error of a head is the length of the difference
// of its attention outputs from those over f16, over the length of the latter, both summed over the
// scored positions. Errors do not travel from layer to layer here: each layer sees exact input.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "control/settings.h"
#include "tools/kvtamp/host_model.h"
#include "tools/kvtamp/layout.h"
#include "tools/kvtamp/progress.h"

namespace kvtamp::tool {

struct ErrorsConfig {
  std::string model, text;
  std::uint32_t n_ctx = 2048, n_ubatch = 64, n_scored = 1024;
  int n_threads = 1;
};

struct HeadErrors {
  std::uint32_t layer = 0, head = 0;  // KV head; its query heads are taken together
  double k = 0, v = 0, both = 0;      // relative error of attention output
};

struct ErrorsResult {
  std::vector<HeadErrors> heads;     // by layer, then head
  std::vector<std::string> skipped;  // layers that were not measured, and why
};

Result<ErrorsResult> MeasureErrors(llama_model* model, const ErrorsConfig& config,
                                   const ModelLayout& layout, const control::Settings& settings,
                                   const ProgressCall& progress);

}  // namespace kvtamp::tool
