// TOVA (arXiv:2401.06104): the attention of the last token alone. One choice for all heads of a
// layer: a token's score is the mean over the heads that hold it, so heads that hold the same
// tokens drop the same ones.
#pragma once

#include <span>

#include "policy/stats.h"

namespace kvtamp::policy {

// scores: for each head [head.n]. Needs positions, by which tokens of different heads are matched,
// and attention_last. A head in which a token's attention is not finite counts as not holding it.
void Tova(std::span<const Head> heads, std::span<const std::span<float>> scores);

}  // namespace kvtamp::policy
