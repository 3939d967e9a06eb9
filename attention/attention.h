// softmax(q·K + mask)·V of one layer over pages, coded or not.
//
// Semantics are those of ggml's FLASH_ATTN_EXT (ggml-cpu ops.cpp,
// ggml_compute_forward_flash_attn_ext):
//   s = scale * q·k;  with softcap c: s = c * tanh(scale / c * q·k);  s += slope(head) * mask
//   slope by ALiBi's rule from max_bias, 1 if max_bias is 0; sinks enter the maximum and the sum
//   once; a row whose mask is -inf everywhere gives 0, never NaN; masked rows are never used,
//   whatever they hold.
//
// Two ways to the same result (attention/reference.h defines it, in double):
//   decode  few query rows per KV head: integer dot products on the codes. q folded with the K
//   scales
//           is rounded to 15 bits per page and head, p folded with the V scales likewise, and all
//           integer sums are exact, so every instruction set gives the same integers.
//   prefill many query rows: a page is decoded once into a float tile in L2, then small matrix
//   products.
// Work is split over (stream, KV head, query block, run of pages); partial softmaxes are merged.
// Pages that the mask hides entirely are skipped unread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/executor.h"
#include "base/half.h"
#include "codec/codec.h"

namespace kvtamp::attention {

inline constexpr std::uint16_t kAllHeads = 0x7FFF;

// One page of one layer and stream, all KV heads or one of them. A coded side is one block for each
// head, as its layout says; a head whose block of K has no bytes has nothing here and passes over
// the page. Of an f16 side head h lies at element h*dim of rows of n_head_kv*dim elements, or, if
// the page is one head's alone, at the start of rows of dim elements.
struct Page {
  const std::uint8_t* k = nullptr;  // null: rows never written, read as zeros
  const std::uint8_t* v = nullptr;
  const std::uint64_t* live = nullptr;   // bit per row, words of 64; dead rows are not attended
  const std::uint32_t* cells = nullptr;  // [rows] cell of each row; null: cells first_cell, +1, …
  std::uint32_t first_cell = 0;
  std::uint16_t rows = 0;               // rows in use, at most page_size
  std::uint16_t head : 15 = kAllHeads;  // the others pass over the page
  std::uint16_t alone : 1 = 0;          // f16 rows hold that head alone
  // Keys that a context shift moved: [Layer::turn.pairs] (cos, sin) by which each stored key is
  // still to be turned; null: as stored. The turn is put on the query instead, so coded keys are
  // not touched.
  const float* turn = nullptr;
  // How a coded side lies; null: f16. Those of a stream's pages are few, and shared.
  const codec::SideLayout* k_layout = nullptr;
  const codec::SideLayout* v_layout = nullptr;
};
static_assert(sizeof(Page) == 64);  // one cache line: every call reads them all

// Where rotary positions act on a key: pairs of channels from `first` on, (2i, 2i+1), or (i, i +
// pairs) in NeoX order.
struct TurnShape {
  std::uint32_t first = 0, pairs = 0;
  bool neox = false;
  std::uint32_t a(std::uint32_t i) const { return first + (neox ? i : 2 * i); }  // of pair i
  std::uint32_t b(std::uint32_t i) const { return a(i) + (neox ? pairs : 1); }
  bool operator==(const TurnShape&) const = default;
};

struct Layer {
  std::uint32_t n_head_kv = 0;
  std::uint32_t dim_k = 0, dim_v = 0;
  std::uint32_t page_size = 64;
  std::uint32_t v_group = 64;  // elements per V scale, in every V layout
  bool v_hadamard = false;     // coded V pages are in the rotated basis
  // Latent attention (DeepSeek-V2, arXiv:2405.04434): V is the first dim_v channels of K, and pages
  // have no V of their own.
  bool v_in_k = false;
  const float* k_mean = nullptr;  // [n_head_kv, dim_k] taken off coded K pages, or null
  TurnShape turn;
};

// One stream's share of the op. Strides in elements of the pointed-to type.
struct Job {
  std::span<const Page> pages;
  const float* q = nullptr;  // [n_tok][n_head][dim_k]
  std::size_t q_tok_stride = 0, q_head_stride = 0;
  float* out = nullptr;  // [n_tok][n_head][dim_v]
  std::size_t out_tok_stride = 0, out_head_stride = 0;
  const half_t* mask = nullptr;  // [n_tok][n_kv] by cell; null: all cells below n_kv open
  std::size_t mask_tok_stride = 0;
  std::size_t mask_head_stride = 0;  // 0: shared by all heads
  std::uint32_t n_tok = 0;
  std::uint32_t n_kv = 0;  // rows of cells >= n_kv are not attended
};

struct Params {
  std::uint32_t n_head = 0;  // query heads, a multiple of n_head_kv
  float scale = 1.0f;
  float max_bias = 0.0f;
  float softcap = 0.0f;
  const float* sinks = nullptr;  // [n_head] or null
  // Decoding reads at most so many coded pages of each KV head, those over whose keys q·k can be
  // largest (Quest, arXiv:2406.10774); 0: all. A page's scales say how large, without its codes.
  // Pages in f16 (sinks, the recent window, pages being filled) are always read and not counted.
  // Not with ALiBi, nor in prefill.
  std::uint32_t top_pages = 0;
};

// What a call did, pages by KV head added up. Of prefill nothing is counted.
struct PagesRead {
  std::uint64_t seen = 0;  // by some query of a KV head's
  std::uint64_t read = 0;  // of these
};

// Scratch kept between calls; grows, never shrinks. One per calling context.
class Workspace {
 public:
  std::size_t bytes() const { return storage_.size(); }
  // Storage of at least n bytes, 64-byte aligned; contents undefined. Null if memory is refused.
  std::uint8_t* Get(std::size_t n);

 private:
  std::vector<std::uint8_t> storage_;
};

// Computes all jobs of one layer. Fails only for lack of scratch memory or impossible shapes.
// `counts`, if not null, is added to where pages were chosen.
Status Attend(const Layer& layer, std::span<const Job> jobs, const Params& params,
              Workspace& workspace, Executor& executor, PagesRead* counts = nullptr);

}  // namespace kvtamp::attention
