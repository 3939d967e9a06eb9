// H2O (arXiv:2306.14048): heavy hitters, the entries with the most attention over all queries so
// far.
//
// A sum favours old entries: more queries have seen them. ObservedAttention is kvpress's form of
// it, divided by the number of query rows that were added up.
#pragma once

#include <span>

#include "policy/stats.h"

namespace kvtamp::policy {

// score: [head.n]. Needs attention_sum.
void H2o(const Head& head, std::span<float> score);
// Needs attention_sum and attention_rows; an entry that no query has seen scores 0.
void ObservedAttention(const Head& head, std::span<float> score);

}  // namespace kvtamp::policy
