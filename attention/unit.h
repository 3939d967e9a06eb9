// What the driver (attention.cc) and the kernels share: a unit of work, its result, its scratch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention/attention.h"

namespace kvtamp::attention {

inline constexpr std::uint32_t kMaxGqa = 64;
// Query rows per KV head up to which decoding beats prefill, on every instruction set
// (bench/attention_bench, decode and prefill around it).
inline constexpr std::uint32_t kMaxDecodeRows = 24;
inline constexpr std::uint32_t kMaxPrefillRows = 192;  // of one unit

inline constexpr std::uint32_t RoundUp(std::uint32_t n, std::uint32_t to) {
  return (n + to - 1) / to * to;
}

// Of one block of query rows: which pages are read.
struct PageChoice {
  std::uint32_t n_pages = 0, rows = 0;
  float* bounds = nullptr;        // [rows][n_pages] (attention/choose.h)
  std::uint64_t* read = nullptr;  // bit per page
  bool reads(std::uint32_t page) const { return (read[page / 64] >> (page % 64) & 1) != 0; }
};

// A block of query rows of one KV head against a run of pages. Query row r of a KV head is head
// r % gqa of its group, of token r / gqa.
struct Unit {
  const Layer* layer;
  const Job* job;
  const Params* params;
  std::uint32_t head_kv;
  std::uint32_t row0, rows;
  std::uint32_t page0, page1;
  const PageChoice* choice = nullptr;  // null: all pages are read

  std::uint32_t gqa() const { return params->n_head / layer->n_head_kv; }
  std::uint32_t token(std::uint32_t r) const { return (row0 + r) / gqa(); }
  std::uint32_t head(std::uint32_t r) const { return head_kv * gqa() + (row0 + r) % gqa(); }
  const float* q(std::uint32_t r) const {
    return job->q + token(r) * job->q_tok_stride + head(r) * job->q_head_stride;
  }
};

// Softmax so far of one query row, not normalised: sum of exp(s - max) and of exp(s - max) * v, in
// the model's basis. Row r of a unit's result lies at r * PartialStride().
struct Partial {
  float* base;
  float& max() const { return base[0]; }  // -inf: nothing was attended
  float& sum() const { return base[1]; }
  float* acc() const { return base + 16; }  // [dim_v, rounded up to 16]
};
inline std::uint32_t PartialStride(const Layer& layer) { return 16 + RoundUp(layer.dim_v, 16); }

// Hands out pieces of scratch, 64-byte aligned. From a null base it only counts.
class Arena {
 public:
  explicit Arena(std::uint8_t* base) : base_(base) {}
  template <class T>
  T* Take(std::size_t n) {
    T* p = reinterpret_cast<T*>(base_ == nullptr ? nullptr : base_ + used_);
    used_ += (n * sizeof(T) + 63) / 64 * 64;
    return p;
  }
  std::size_t used() const { return used_; }

 private:
  std::uint8_t* base_;
  std::size_t used_ = 0;
};

inline std::uint64_t LowBits(std::uint32_t n) {
  return n == 0 ? 0 : n >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1;
}

// Rows of a page that may be attended at all: in use, live, of a cell below n_kv.
struct OpenRows {
  std::uint64_t bits[codec::kMaxPageSize / 64] = {};
  std::uint32_t count = 0;
  bool test(std::uint32_t r) const { return (bits[r / 64] >> (r % 64) & 1) != 0; }
  // They are the first `count`.
  bool first() const {
    static_assert(codec::kMaxPageSize == 128);
    return bits[0] == LowBits(count) && bits[1] == LowBits(count < 64 ? 0 : count - 64);
  }
};

inline OpenRows OpenRowsOf(const Page& page, std::uint32_t n_kv) {
  OpenRows open;
  std::uint32_t rows = page.rows;
  if (page.cells == nullptr)
    rows = page.first_cell >= n_kv ? 0 : std::min(rows, n_kv - page.first_cell);
  for (std::uint32_t w = 0; w * 64 < rows; ++w) {
    open.bits[w] = LowBits(rows - w * 64);
    if (page.live != nullptr) open.bits[w] &= page.live[w];
    if (page.cells != nullptr) {
      for (std::uint64_t left = open.bits[w]; left != 0; left &= left - 1) {
        const auto b = static_cast<std::uint32_t>(__builtin_ctzll(left));
        if (page.cells[w * 64 + b] >= n_kv) open.bits[w] &= ~(std::uint64_t{1} << b);
      }
    }
    open.count += static_cast<std::uint32_t>(__builtin_popcountll(open.bits[w]));
  }
  return open;
}

// Whether the KV head has anything in the page.
inline bool Holds(const Page& page, std::uint32_t head) {
  if (page.head != kAllHeads) return page.head == head;
  return page.k_layout == nullptr || page.k_layout->heads[head].bytes != 0;
}

// A head's part of an f16 side: its first row, and elements from one to the next.
struct HalfRows {
  const half_t* at;
  std::size_t stride;
};
inline HalfRows HalfRowsOf(const Page& page, const std::uint8_t* side, std::uint32_t n_head_kv,
                           std::uint32_t head, std::uint32_t dim) {
  const auto* rows = reinterpret_cast<const half_t*>(side);
  if (page.alone) return {rows, dim};
  return {rows + std::size_t{head} * dim, std::size_t{n_head_kv} * dim};
}

// Shapes that the kernels can take.
Status Check(const Layer& layer, std::span<const Job> jobs, const Params& params);

// q . (turn of k) = (turn back of q) . k: copies a query of dim_k channels, scaled, turned back by
// `turn` (null: not at all); out's channels lie `stride` apart.
void TurnedQuery(const Layer& layer, const float* turn, const float* q, float scale, float* out,
                 std::size_t stride);

// The head's slope for ALiBi, as the host computes it.
float Slope(std::uint32_t head, std::uint32_t n_head, float max_bias);

}  // namespace kvtamp::attention
