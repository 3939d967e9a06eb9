// R-KV (arXiv:2505.24133): important and not said twice. Score: lambda * importance - (1 - lambda)
// * redundancy.
//
// Importance: attention from the observation window, a mean over its query rows, each entry taking
// the largest of its neighbours'. Redundancy: softmax over entries of the mean cosine of a key with
// all others (itself counted as 0), where each key leaves out its newest look-alikes: they lose
// that term, so of entries that say the same the newest stay. The window itself always stays.
#pragma once

#include <cstdint>
#include <span>

#include "policy/stats.h"

namespace kvtamp::policy {

struct RKvOptions {
  std::uint32_t window = 8, kernel = 7;  // tokens; kernel is odd
  float lambda = 0.1f;                   // weight of importance
  float threshold = 0.5f;                // cosine from which keys look alike
  std::uint32_t n_retain = 1;            // newest look-alikes left out, for each key
};

// score: [head.n]. Needs attention_window and k; window_queries as in Layer. Costs n * dim where
// keys find look-alikes near the end, n² * dim where they have none.
void RKv(const Head& head, std::uint32_t window_queries, const RKvOptions& options,
         std::span<float> score);

// [head.n], adding up to 1 over keys that are finite; 0 for the others.
void Redundancy(const Head& head, const RKvOptions& options, std::span<float> redundancy);

}  // namespace kvtamp::policy
