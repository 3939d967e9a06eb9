// How much each KV head's precision matters: the engine of `kvtamp sensitivity`.
//
// The text's first n_tokens run once through the host's own f16 cache and once for each head and
// side with that one coded at a bit (K int1_pc+qw, V tcq1_pt+had) and all others at eight. Its
// sensitivity is the mean KL divergence over the last n_scored positions, less that of a run with
// all at eight. Layers go first, all their heads at once; heads apart only where the layer is worth
// more than `split_above`.
#pragma once

#include <string>
#include <vector>

#include "control/profile.h"
#include "tools/kvtamp/host_model.h"
#include "tools/kvtamp/layout.h"
#include "tools/kvtamp/progress.h"

namespace kvtamp::tool {

struct SensitivityConfig {
  std::string model, text;
  std::uint32_t n_tokens = 640, n_scored = 256, n_ubatch = 64;
  int n_threads = 1;
  double split_above = 1.5e-3;
};

struct SensitivityResult {
  control::Profile profile;
  double floor = 0;  // KL of the run with all at eight bits
  std::uint32_t n_runs = 0;
};

// An end that `progress` wants is an error.
Result<SensitivityResult> MeasureSensitivity(ModelPair models, const SensitivityConfig& config,
                                             const ModelLayout& layout,
                                             const ProgressCall& progress);

}  // namespace kvtamp::tool
