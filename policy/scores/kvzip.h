// KVzip (arXiv:2505.23416): the context is given to the model a second time with the order to
// repeat it; an entry is worth the largest attention any query of that replay paid to it.
#pragma once

#include <span>

#include "policy/stats.h"

namespace kvtamp::policy {

// score: [head.n]. Needs attention_max, the maximum over query rows of the replay alone.
void KvZip(const Head& head, std::span<float> score);

}  // namespace kvtamp::policy
