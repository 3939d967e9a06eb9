// One page of one head: f16 rows <-> bytes. docs/formats.md draws the layouts; this header defines
// them, and the plain functions here define the values that every faster kernel must reproduce.
//
// A page holds `rows` tokens (16, 32, 64 or 128) of `dim` elements (a multiple of 8, 32…576).
//
// K, per channel (kKInt8, kKInt4), asymmetric, x = mean + min + scale * code:
//   u8  scale[dim]              index k: scale = 2^(k/16 - 6 - bits)
//   i8  min[dim]                index z: min = MinFactor(z) * scale * 2^bits. The grid is that of
//                               the middle of the codes (min + scale * 2^(bits-1)): fine around
//                               the mean, coarser away from it, and z = 0 puts a code on the mean
//   group of 4 channels g = 0 … dim/4-1, each one plane (so that later each group can have its own
//   width as a sum of planes):
//     8 bits: rows*4 bytes, byte t*4 + j                 = code of token t, channel 4g+j
//     4 bits: rows*2 bytes in chunks of C = min(32, rows) tokens; token t = chunk*C + r:
//             byte chunk*(C*2) + (r % (C/2))*4 + j, low nibble for r < C/2, else high nibble
//   One 8-bit dot instruction thus feeds 4 channels into the lane of one token.
//
// V, per token (kVInt8, kVLm4), symmetric, x = scale * level(code), in the rotated basis if +had:
//   u8  scale[dim/group][rows]  index k: scale = 2^(k/12 - 17), and 0 for k = 0
//   block of 16 channels b = 0 … ceil(dim/16)-1 (the last padded with code 0):
//     8 bits: rows*16 bytes, byte (t/4)*64 + (c%16)*4 + t%4   = i8 level itself, -127 … 127
//     4 bits: rows*8 bytes,  byte (t/8)*64 + (c%16)*4 + t%4, low nibble for (t/4) even, else high;
//             level = kLm4Levels[nibble]
//   One 8-bit dot instruction thus feeds 4 tokens into the lane of one channel.
//
// K, kKPlanes: as kKInt4, but each channel has a width of its own, 0 to 8 bits (the widths' sum is
// PageShape::budget), and a code is a sum of planes of 4, 2 and 1 bits:
//   u8 scale[dim], i8 min[dim], of each channel's own width
//   u8 width[dim/2]             channel c in the low nibble of byte c/2 for even c, else the high
//   planes of 4 bits, then of 2, then of 1, each list in groups of 4 entries (layout.h says which
//   entry is which plane of which channel); of a p-bit list a group is rows*p/2 bytes, in chunks of
//   C = min(rows, 128/p) tokens of which L = C*p/8 lie side by side:
//             byte chunk*(L*4) + (r % L)*4 + j, bits p*(r / L) … of it
//
// V, kVTrellis: scales as kVLm4. The levels are those of a trellis code with a window of 8 bits
// (trellis-coded quantisation, Marcellin & Fischer 1990; bit-shift trellis as in QTIP,
// arXiv:2406.11235): level = kTrellisLevels[window], the window being the last 8 bits of a bit
// string that ends at this value. One string for the page and head:
//   lane l = t%4 + 4*(c%16), 64 of them; step s = (c/16)*(rows/4) + t/4; value number l*S + s
//   the first n values of a lane take floor(n*rate8/8) bits; each lane has S*rate8/64 bytes
//   byte b of lane l lies at b*64 + l, its first bit the highest
//   the window reaches back into the bytes of the lane before; before lane 0 there are zeros
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/half.h"
#include "codec/format.h"

namespace kvtamp::codec {

inline constexpr std::uint32_t kMaxPageSize = 128;
inline constexpr std::uint32_t kMaxDim = 576;

// Lloyd-Max levels of N(0,1) for 16 levels (Max 1960), scaled to fill a signed byte.
inline constexpr std::int8_t kLm4Levels[16] = {-127, -96, -75, -58, -44, -31, -18, -6,
                                               6,    18,  31,  44,  58,  75,  96,  127};

// The table of kVTrellis, in signed bytes: made for Gaussian noise by Lloyd's steps at 2 bits (used
// up to 2.5) and at 3 (used above).
const std::int8_t* TrellisLevels(std::uint32_t rate8);  // [256]

// kRows: how its codes are made.
struct RowsFormat {
  Levels levels = Levels::kInt;
  std::uint8_t bits = 0;
  Axis axis = Axis::kToken;
  bool sym = false, hadamard = false;
  std::uint16_t outliers = 0;
  bool operator==(const RowsFormat&) const = default;
};

struct PageShape {
  std::uint32_t rows = 0;    // page size, in tokens
  std::uint32_t dim = 0;     // head size
  std::uint32_t group = 0;   // V: elements per scale (resolved); K: unused
  std::uint32_t budget = 0;  // kKPlanes: bits of a token's codes, a multiple of 4
  std::uint32_t rate8 = 0;   // kVTrellis: bits of eight values
  bool weighted = false;     // kKPlanes: widths differ by channel
  RowsFormat format = {};    // kRows
  bool operator==(const PageShape&) const = default;
};
// That of a format Resolve() made.
PageShape ShapeOf(const Format& resolved, Side side, std::uint32_t dim, std::uint32_t rows);

struct PageBytes {
  std::size_t total = 0;   // one page of one head
  std::size_t scales = 0;  // of which scales and minima; codes start here
};
PageBytes EncodedBytes(Coding coding, const PageShape& shape);

// Scale and minimum tables: scale of index k for the coding; factor of index z.
float KScale(std::uint32_t bits, std::uint8_t k);
float KMinFactor(std::int8_t z);  // 24.5/64 * sinh(z/24.5) - 1/2
float VScale(std::uint8_t k);
const float* KScaleTable(std::uint32_t bits);  // [256], bits 0 to 8
const float* KMinFactorTable();                // [256], index static_cast<uint8_t>(z)
const float* VScaleTable();                    // [256]

// Rows to encode: f16, row r at rows + r*stride (elements). Bit r of `valid` (words of 64, low
// first) says whether row r matters; others do not influence the grid and get any code.
struct EncodeInput {
  const half_t* rows = nullptr;
  std::size_t stride = 0;
  const std::uint64_t* valid = nullptr;
  // kKPlanes, weighted: [dim] how much a squared error of each channel matters, e.g. the mean of q²
  // over the queries it will meet. Null: all the same.
  const float* weight = nullptr;
};

// `mean`: [dim] or null. Grid by least squared error. Non-finite input is treated as 0.
void EncodeK(Coding coding, const PageShape& shape, const EncodeInput& in, const float* mean,
             std::uint8_t* out);
void EncodeV(Coding coding, const PageShape& shape, const EncodeInput& in, bool hadamard,
             std::uint8_t* out);

// One row back, in the model's own basis (mean added, rotation undone): out[dim]. Exact definition,
// plain C++, also the reference of every kernel.
void DecodeRowK(Coding coding, const PageShape& shape, const std::uint8_t* page, const float* mean,
                std::uint32_t row, float* out);
void DecodeRowV(Coding coding, const PageShape& shape, const std::uint8_t* page, bool hadamard,
                std::uint32_t row, float* out);

// One side of a page: a block for each KV head, one after the other.
struct SideLayout {
  struct Head {
    Coding coding = Coding::kF16;
    PageShape shape;
    std::uint32_t offset = 0, scales = 0, bytes = 0;  // within the side; as EncodedBytes
  };
  std::vector<Head> heads;
  std::uint32_t scales = 0, bytes = 0;  // of all heads
  void Add(Coding coding, const PageShape& shape);
};

// In place on x[dim]: block-diagonal, blocks of the largest power of two that divides dim,
// normalised, hence its own inverse.
void Hadamard(float* x, std::uint32_t dim);

}  // namespace kvtamp::codec
