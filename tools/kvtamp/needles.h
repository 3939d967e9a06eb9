// How many needles each of several caches finds: one column of `kvtamp bench quality`.
#pragma once

#include "tools/kvtamp/evaluate.h"

namespace kvtamp::tool {

struct NeedlesFound {
  std::size_t asked = 0, base = 0;
  std::vector<std::size_t> tested;  // as given
};

// One needle at each depth (percent) of prompts of config.n_ctx tokens cut from config.text.
Result<NeedlesFound> FindNeedles(const ModelPair& models, const EvalConfig& config,
                                 std::span<const TestedCache> tested,
                                 const std::vector<double>& depths, const EvalHooks& hooks);

}  // namespace kvtamp::tool
