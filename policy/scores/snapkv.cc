#include "policy/scores/snapkv.h"

#include <algorithm>

#include "policy/scores/pool.h"

namespace kvtamp::policy {

void SnapKv(const Head& head, std::uint32_t window, std::uint32_t kernel, std::span<float> score) {
  const std::uint32_t before = head.n - std::min(window, head.n);
  for (std::uint32_t i = 0; i < head.n; ++i) {
    const float attention = head.attention_window[i];
    // The window's own attention goes to few queries and does not count.
    score[i] = i >= before && std::isfinite(attention) ? 0 : attention;
  }
  Smooth(Pool::kMean, kernel, score.first(before));
  KeepWindow(window, score);
}

}  // namespace kvtamp::policy
