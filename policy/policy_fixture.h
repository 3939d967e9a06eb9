// A head whose statistics own their memory, for tests.
#pragma once

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "policy/stats.h"

namespace kvtamp::policy {

inline auto Near(double x) { return testing::FloatNear(static_cast<float>(x), 2e-6f); }

struct OwnedHead {
  std::vector<std::int32_t> positions;
  std::vector<float> sum, rows, window, last, max, k, v, mean, variance;
  Head head;

  // Views of what is there; n is that of the longest.
  const Head& View(std::uint32_t dim_k = 0, std::uint32_t dim_v = 0, std::uint32_t n_query = 1) {
    head.n = 0;
    for (std::size_t size :
         {positions.size(), sum.size(), window.size(), last.size(), max.size(),
          dim_k == 0 ? 0 : k.size() / dim_k, dim_v == 0 ? 0 : v.size() / dim_v}) {
      head.n = std::max(head.n, static_cast<std::uint32_t>(size));
    }
    head.positions = positions;
    head.attention_sum = sum;
    head.attention_rows = rows;
    head.attention_window = window;
    head.attention_last = last;
    head.attention_max = max;
    head.k = {k.data(), nullptr, head.n, dim_k, dim_k};
    head.v = {v.data(), nullptr, head.n, dim_v, dim_v};
    head.queries = {n_query, mean, variance};
    return head;
  }
};

inline std::vector<float> RandomFloats(std::mt19937& rng, std::size_t n, float low, float high) {
  std::uniform_real_distribution<float> spread(low, high);
  std::vector<float> x(n);
  for (float& value : x) value = spread(rng);
  return x;
}

// One with everything, n entries at positions with gaps; K of 8 elements, V of 6, two query heads.
inline constexpr std::uint32_t kDimK = 8, kDimV = 6, kQueryHeads = 2;
inline OwnedHead FullHead(std::uint32_t n, std::uint32_t seed) {
  std::mt19937 rng(seed);
  OwnedHead own;
  for (std::uint32_t i = 0; i < n; ++i) own.positions.push_back(static_cast<std::int32_t>(3 * i));
  for (auto* p : {&own.sum, &own.window, &own.last, &own.max}) *p = RandomFloats(rng, n, 0.01f, 1);
  own.rows = RandomFloats(rng, n, 1, 100);
  own.k = RandomFloats(rng, std::size_t{n} * kDimK, -2, 2);
  own.v = RandomFloats(rng, std::size_t{n} * kDimV, -1, 1);
  own.mean = RandomFloats(rng, kQueryHeads * kDimK, -1, 1);
  own.variance = RandomFloats(rng, kQueryHeads * kDimK, 0, 1);
  own.View(kDimK, kDimV, kQueryHeads);
  return own;
}

}  // namespace kvtamp::policy
