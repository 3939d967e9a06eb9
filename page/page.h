// A page: the K and V of up to page_size rows of one layer and stream, all its KV heads.
// docs/page-states.md draws the life of one.
//
// Rows are appended in the order of writing and never move inside a page; each knows its cell. The
// two sides are coded apart (a restored state brings all K before any V). An f16 side is
// [rows][n_embd] halves, grown in steps while the page fills, with a bit per row that says which
// were written; a coded side holds one block per head (codec/codec.h) and has all its live rows.
#pragma once

#include <cstdint>

#include "codec/codec.h"

namespace kvtamp::page {

inline constexpr std::uint32_t kMaxRows = codec::kMaxPageSize;
inline constexpr std::uint32_t kMaskWords = kMaxRows / 64;

enum class State : std::uint8_t {
  kFree,     // no page here: its number can be used again
  kOpen,     // f16, being filled
  kSettled,  // f16, full (or pinned); recent, or its writer may still be attending
  kSealed,   // final format on every side that is written
  kDemoted,  // coded anew: a head of it has fewer bits than the format says, or nothing
  kPruned,   // its entries lie in pages of one head each; it keeps only which cells they were
};

inline constexpr std::uint16_t kAllHeads = 0x7FFF;

struct RowMask {
  std::uint64_t word[kMaskWords] = {};

  bool test(std::uint32_t r) const { return (word[r / 64] >> (r % 64)) & 1u; }
  void set(std::uint32_t r) { word[r / 64] |= std::uint64_t{1} << (r % 64); }
  void reset(std::uint32_t r) { word[r / 64] &= ~(std::uint64_t{1} << (r % 64)); }
  std::uint32_t count() const {
    std::uint32_t n = 0;
    for (std::uint64_t w : word) n += static_cast<std::uint32_t>(__builtin_popcountll(w));
    return n;
  }
  bool contains(const RowMask& other) const {
    for (std::uint32_t i = 0; i < kMaskWords; ++i)
      if (other.word[i] & ~word[i]) return false;
    return true;
  }
  bool operator==(const RowMask&) const = default;
};

// One side of a page. There are many, and their bytes count: one word tells what only f16 has, or
// what only codes have.
class Block {
 public:
  std::uint8_t* data = nullptr;  // null: nothing of this side was written
  std::uint32_t bytes = 0;       // of data, as allocated

  bool coded() const { return coded_; }
  const codec::SideLayout* layout() const { return coded_ ? layout_ : nullptr; }  // null: f16
  // Which rows were; f16 only, else null. Beside the data, so that rows fill whole slabs.
  RowMask* written() const { return coded_ ? nullptr : written_; }
  void SetCoded(const codec::SideLayout* layout) {
    coded_ = true;
    layout_ = layout;
  }
  void SetF16(RowMask* written) {
    coded_ = false;
    written_ = written;
  }

 private:
  bool coded_ = false;
  union {
    RowMask* written_ = nullptr;
    const codec::SideLayout* layout_;
  };
};
static_assert(sizeof(Block) == 24);

struct Page {
  Block k, v;
  RowMask live;
  std::uint32_t* cells = nullptr;  // [capacity] when the cells are not one run
  std::uint32_t first_cell = 0;
  std::uint16_t capacity = 0;
  std::uint16_t rows = 0;  // appended so far, dead ones included
  // By how many positions each key is still to be turned (a context shift): one number for all
  // rows, or [capacity] where rows differ.
  std::int32_t* shifts = nullptr;
  std::int32_t shift = 0;
  State state = State::kFree;
  bool pinned : 1 = false;  // holds sinks: stays f16
  bool zero : 1 = false;    // rows of zeros: neither side has bytes, none is ever sealed
  // Whose rows they are, those of all heads or of one. Of one: an f16 row is that head's alone, and
  // a coded side has no bytes for the others.
  std::uint16_t head = kAllHeads;
  bool single() const { return head != kAllHeads; }

  std::int32_t shift_of(std::uint32_t row) const { return shifts ? shifts[row] : shift; }
  std::uint32_t cell(std::uint32_t row) const { return cells ? cells[row] : first_cell + row; }
  Block& side(codec::Side s) { return s == codec::Side::kK ? k : v; }
  const Block& side(codec::Side s) const { return s == codec::Side::kK ? k : v; }
};

static_assert(sizeof(Page) == 96);

inline half_t* F16Row(const Block& b, std::uint32_t n_embd, std::uint32_t row) {
  return reinterpret_cast<half_t*>(b.data) + std::size_t{row} * n_embd;
}

}  // namespace kvtamp::page
