// The baseline: any other policy must beat it. Score: a hash of seed, layer, head and position,
// evenly spread over [0, 1). A token keeps its score for life, so whatever the number of rounds,
// what is left is a sample in which every token had the same chance.
#pragma once

#include <cstdint>
#include <span>

#include "policy/stats.h"

namespace kvtamp::policy {

// score: [head.n]. Needs positions. The same arguments give the same scores on every machine.
void Random(const Head& head, std::uint64_t seed, std::uint32_t layer, std::uint32_t head_index,
            std::span<float> score);

}  // namespace kvtamp::policy
