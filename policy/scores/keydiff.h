// KeyDiff (arXiv:2504.15364): keys unlike the others stay. Score: minus the cosine of a key and the
// mean of all keys, each first brought to length one. The lengths of keys do not matter.
#pragma once

#include <span>
#include <vector>

#include "policy/stats.h"

namespace kvtamp::policy {

// score: [head.n], -1 to 1. Needs k. A key of length 0 scores 0.
void KeyDiff(const Head& head, std::span<float> score);

// [rows.n, rows.dim] the rows at length one; all zeros where a row is zero or not finite, and in
// the latter case finite[row] is 0.
struct UnitRows {
  std::vector<float> x;
  std::vector<std::uint8_t> finite;  // [rows.n]
  std::vector<double> sum;           // [rows.dim] of all rows
};
UnitRows Normalise(const Rows& rows);

}  // namespace kvtamp::policy
