#include "policy/scores/random.h"

namespace kvtamp::policy {
namespace {

// The finaliser of SplitMix64.
std::uint64_t Mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

void Random(const Head& head, std::uint64_t seed, std::uint32_t layer, std::uint32_t head_index,
            std::span<float> score) {
  const std::uint64_t place = Mix(Mix(seed) ^ (std::uint64_t{layer} << 32 | head_index));
  for (std::uint32_t i = 0; i < head.n; ++i) {
    const std::uint64_t bits = Mix(place ^ static_cast<std::uint32_t>(head.positions[i]));
    score[i] = static_cast<float>(bits >> 40) * 0x1p-24f;
  }
}

}  // namespace kvtamp::policy
