// What policies look at: numbers that attention measured, and the rows themselves. Plain views,
// valid during one call; whoever gathers them owns them.
//
// Entries of a head are sorted by position, oldest first. Heads of a layer need not hold the same
// tokens: once something is evicted per head, a token is known by its position, not by its index.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/half.h"

namespace kvtamp::policy {

// Rows of K or of V, in one of two types.
struct Rows {
  const float* f32 = nullptr;   // [n, stride], or null
  const half_t* f16 = nullptr;  // the same, if f32 is null
  std::uint32_t n = 0, dim = 0;
  std::size_t stride = 0;  // elements from one row to the next

  bool empty() const { return n == 0 || (f32 == nullptr && f16 == nullptr); }
  void Load(std::uint32_t row, float* out) const;  // out[dim]
};

// What is known of the queries of one KV head, before positions turn them.
struct Queries {
  std::uint32_t n_head = 0;         // query heads that share the KV head
  std::span<const float> mean;      // [n_head, dim of K]
  std::span<const float> variance;  // [n_head, dim of K], the diagonal of the covariance
};

// How a position turns a query: pair i by position * angle[i] radians. No angles: not at all.
struct Rope {
  std::span<const float> angle;  // [n_rot / 2]
  bool interleaved = false;      // pairs are (2i, 2i + 1), else (i, i + n_rot / 2)
};

// One KV head. Sums are over query rows, those of all query heads that share it; each row adds up
// to one. A policy says which of these it needs; the others may be empty.
struct Head {
  std::uint32_t n = 0;                      // entries
  std::span<const std::int32_t> positions;  // [n], ascending
  std::span<const float> attention_sum;     // [n] p, summed over all query rows so far
  std::span<const float> attention_rows;    // [n] query rows that are in attention_sum
  std::span<const float> attention_window;  // [n] p, summed over the observation window
  std::span<const float> attention_last;    // [n] p, summed over the query rows of the last token
  std::span<const float> attention_max;     // [n] largest p while the context was replayed
  Rows k, v;                                // [n, dim]; K as it is attended, turned by its position
  Queries queries;
};

struct Layer {
  std::uint32_t index = 0;
  std::span<const Head> heads;
  std::int32_t next_position = 0;    // of the next token; not the number of entries
  float scale = 0;                   // of q·k; 0: 1 / sqrt(dim)
  std::uint32_t window_queries = 0;  // query rows of one KV head in attention_window
  Rope rope;
};

// A set of statistics, as bits.
using Needs = std::uint32_t;
inline constexpr Needs kPositions = 1u << 0;
inline constexpr Needs kAttentionSum = 1u << 1;
inline constexpr Needs kAttentionRows = 1u << 2;
inline constexpr Needs kAttentionWindow = 1u << 3;  // and Layer::window_queries
inline constexpr Needs kAttentionLast = 1u << 4;
inline constexpr Needs kAttentionMax = 1u << 5;
inline constexpr Needs kK = 1u << 6;
inline constexpr Needs kV = 1u << 7;
inline constexpr Needs kQueries = 1u << 8;  // and Layer::next_position, scale, rope

// "attention_sum, v": the members of Head, in their order; "nothing" for none.
std::string NeedNames(Needs needs);

// The first of `needs` that a head lacks, or whose size is not that of its entries; 0: none.
Needs MissingNeed(const Layer& layer, const Head& head, Needs needs);

// What is no number, or infinite, is worth less than anything finite.
inline constexpr float kWorst = -std::numeric_limits<float>::infinity();
inline float FiniteOrWorst(double x) {
  const float f = static_cast<float>(x);
  return std::isfinite(f) ? f : kWorst;
}

}  // namespace kvtamp::policy
