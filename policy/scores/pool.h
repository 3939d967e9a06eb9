// What scores made from the attention of an observation window share: smoothing over neighbours, so
// that a token keeps its surroundings, and the rule that the window itself stays.
#pragma once

#include <cstdint>
#include <span>

namespace kvtamp::policy {

enum class Pool : std::uint8_t { kMean, kMax };

// Each value becomes the mean or the largest of the `kernel` (odd) values around it; beyond the
// ends lie zeros. What is not finite counts as 0 for its neighbours and becomes kWorst itself.
void Smooth(Pool pool, std::uint32_t kernel, std::span<float> values);

// The last `window` scores become the largest there is, but for those that are not finite.
void KeepWindow(std::uint32_t window, std::span<float> score);

}  // namespace kvtamp::policy
