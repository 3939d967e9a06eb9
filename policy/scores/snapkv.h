// SnapKV (arXiv:2404.14469): the attention that the last tokens of the prompt, the observation
// window, pay to each entry before it, smoothed over neighbours. The window itself always stays.
//
// Smoothed by the mean, as kvpress does (the paper's figures use the largest of 5 or 7). Neighbours
// are the entries the head still holds.
#pragma once

#include <cstdint>
#include <span>

#include "policy/stats.h"

namespace kvtamp::policy {

// score: [head.n]. Needs attention_window. `kernel` is odd; `window`: tokens.
void SnapKv(const Head& head, std::uint32_t window, std::uint32_t kernel, std::span<float> score);

}  // namespace kvtamp::policy
