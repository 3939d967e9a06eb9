// Expected Attention (arXiv:2510.00636): what future queries will pay, from how past ones were
// spread.
//
// Queries before rotary positions are taken as Gaussian, mean m and covariance S (here its
// diagonal). With R the mean of the turns of the next n_future positions, the expected exp(q·k) is
//   exp(scale * (R m)·k + scale² / 2 * k·(R S Rᵀ) k),
// which is brought to sum 1 over the entries, averaged over the query heads of the KV head, and, to
// say what an entry brings in, multiplied by |v|: score = (expected attention + epsilon) * |v|₂.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policy/stats.h"

namespace kvtamp::policy {

struct ExpectedAttentionOptions {
  std::uint32_t n_future = 512;  // positions, from Layer::next_position on; at least 1
  std::uint32_t n_sink =
      4;  // first entries: left out of the sum, they score as the best of the rest
  float epsilon = 0;
  bool use_vnorm = true;  // needs v
};

// score: [head.n]. `head` is one of layer.heads. Needs k and queries, and v with use_vnorm.
void ExpectedAttention(const Layer& layer, const Head& head,
                       const ExpectedAttentionOptions& options, std::span<float> score);

// The mean over n positions from `first` on of (cos, sin) of position * angle: that of the middle
// one, shortened.
struct Turn {
  double cos = 1, sin = 0;
};
Turn MeanTurn(float angle, std::int32_t first, std::uint32_t n);

}  // namespace kvtamp::policy
