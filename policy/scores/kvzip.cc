#include "policy/scores/kvzip.h"

namespace kvtamp::policy {

void KvZip(const Head& head, std::span<float> score) {
  for (std::uint32_t i = 0; i < head.n; ++i) score[i] = FiniteOrWorst(head.attention_max[i]);
}

}  // namespace kvtamp::policy
