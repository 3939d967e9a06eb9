#include "policy/scores/h2o.h"

namespace kvtamp::policy {

void H2o(const Head& head, std::span<float> score) {
  for (std::uint32_t i = 0; i < head.n; ++i) score[i] = FiniteOrWorst(head.attention_sum[i]);
}

void ObservedAttention(const Head& head, std::span<float> score) {
  for (std::uint32_t i = 0; i < head.n; ++i) {
    const float rows = head.attention_rows[i];
    const float mean = rows == 0 ? 0 : head.attention_sum[i] / rows;
    score[i] = std::isfinite(rows) ? FiniteOrWorst(mean) : kWorst;
  }
}

}  // namespace kvtamp::policy
