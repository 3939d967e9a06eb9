// Knorm (arXiv:2406.11430): keys of small L2 norm get the most attention. Score: -|k|.
#pragma once

#include <span>

#include "policy/stats.h"

namespace kvtamp::policy {

// score: [head.n], at most 0. Needs k.
void Knorm(const Head& head, std::span<float> score);

}  // namespace kvtamp::policy
