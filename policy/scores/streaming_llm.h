// StreamingLLM (arXiv:2309.17453): the first tokens, which take the attention nothing else wants,
// and the newest. Score: an entry's index; the first n_sink entries are worth n, more than any
// other.
#pragma once

#include <cstdint>
#include <span>

namespace kvtamp::policy {

// score: [n], one for each entry, oldest first.
void StreamingLlm(std::uint32_t n_sink, std::span<float> score);

}  // namespace kvtamp::policy
