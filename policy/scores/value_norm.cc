#include "policy/scores/value_norm.h"

#include <algorithm>
#include <vector>

namespace kvtamp::policy {

void ValueNorm(const Head& head, std::span<float> score) {
  std::fill(score.begin(), score.end(), 1.0f);
  WeightByValueNorm(head, score);
}

void WeightByValueNorm(const Head& head, std::span<float> score) {
  std::vector<float> v(head.v.dim);
  for (std::uint32_t i = 0; i < head.n; ++i) {
    head.v.Load(i, v.data());
    double norm = 0;
    for (float x : v) norm += std::abs(double{x});
    score[i] = FiniteOrWorst(score[i] * norm);
  }
}

}  // namespace kvtamp::policy
