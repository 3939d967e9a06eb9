// Attention times the length of what it brings in (VATP, arXiv:2406.12335): a token that many
// attend to adds little to the output if its value is near zero. The paper's length is the L1 norm.
//
// As a policy of its own, all attention taken as equal: |v|.
#pragma once

#include <span>

#include "policy/stats.h"

namespace kvtamp::policy {

// score: [head.n]. Needs v.
void ValueNorm(const Head& head, std::span<float> score);
// Multiplies scores, which are to be 0 or more where finite, by it.
void WeightByValueNorm(const Head& head, std::span<float> score);

}  // namespace kvtamp::policy
