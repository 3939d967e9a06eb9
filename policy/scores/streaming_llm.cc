#include "policy/scores/streaming_llm.h"

#include <cstddef>

namespace kvtamp::policy {

void StreamingLlm(std::uint32_t n_sink, std::span<float> score) {
  for (std::size_t i = 0; i < score.size(); ++i) {
    score[i] = static_cast<float>(i < n_sink ? score.size() : i);
  }
}

}  // namespace kvtamp::policy
