#include "policy/scores/pool.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "policy/stats.h"

namespace kvtamp::policy {

void Smooth(Pool pool, std::uint32_t kernel, std::span<float> values) {
  const std::size_t side = kernel / 2, n = values.size();
  std::vector<float> padded(n + 2 * side);
  for (std::size_t i = 0; i < n; ++i) padded[side + i] = std::isfinite(values[i]) ? values[i] : 0;
  for (std::size_t i = 0; i < n; ++i) {
    const float* around = padded.data() + i;
    double sum = 0;
    for (std::uint32_t j = 0; j < kernel; ++j) sum += around[j];
    const double smooth =
        pool == Pool::kMean ? sum / kernel : *std::max_element(around, around + kernel);
    values[i] = std::isfinite(values[i]) ? FiniteOrWorst(smooth) : kWorst;
  }
}

void KeepWindow(std::uint32_t window, std::span<float> score) {
  float top = kWorst;
  for (float s : score) top = std::max(top, FiniteOrWorst(s));
  for (float& s : score.last(std::min<std::size_t>(window, score.size()))) {
    s = std::isfinite(s) ? top : kWorst;
  }
}

}  // namespace kvtamp::policy
