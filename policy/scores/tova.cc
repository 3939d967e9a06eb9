#include "policy/scores/tova.h"

#include <unordered_map>

namespace kvtamp::policy {
namespace {

struct Mean {
  double sum = 0;
  std::uint32_t n = 0;
};

}  // namespace

void Tova(std::span<const Head> heads, std::span<const std::span<float>> scores) {
  std::unordered_map<std::int32_t, Mean> means;
  for (const Head& head : heads) {
    for (std::uint32_t i = 0; i < head.n; ++i) {
      if (!std::isfinite(head.attention_last[i])) continue;
      Mean& mean = means[head.positions[i]];
      mean.sum += head.attention_last[i];
      mean.n++;
    }
  }
  for (std::size_t h = 0; h < heads.size(); ++h) {
    for (std::uint32_t i = 0; i < heads[h].n; ++i) {
      const auto mean = means.find(heads[h].positions[i]);
      scores[h][i] =
          mean == means.end() ? kWorst : FiniteOrWorst(mean->second.sum / mean->second.n);
    }
  }
}

}  // namespace kvtamp::policy
