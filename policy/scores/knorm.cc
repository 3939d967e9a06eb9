#include "policy/scores/knorm.h"

#include <vector>

namespace kvtamp::policy {

void Knorm(const Head& head, std::span<float> score) {
  std::vector<float> k(head.k.dim);
  for (std::uint32_t i = 0; i < head.n; ++i) {
    head.k.Load(i, k.data());
    double squares = 0;
    for (float x : k) squares += double{x} * x;
    score[i] = FiniteOrWorst(-std::sqrt(squares));
  }
}

}  // namespace kvtamp::policy
