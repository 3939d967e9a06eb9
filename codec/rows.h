// kRows: any format of the grammar that has no layout made for speed, on either side, row after
// row. Attention decodes such pages to f16 rows.
//
//   outliers   [n] u16 channel, then [n][rows] f16 values (without the mean, rotated if +had)
//   scales     f16 scale, and f16 minimum unless the levels are symmetric, of each unit: per
//              channel [dim][rows / group], per token [rows][dim / group]
//   codes      [rows] rows of dim * bits bits, low bits first, each row to a whole byte
//
//   x = min + scale * code          int, asymmetric
//   x = scale * (code - 2^(bits-1)) int, _sym
//   x = scale * level(code)         lm (Lloyd-Max levels of N(0,1), Max 1960), fp8 (OCP 8-bit
//                                   floating point, E4M3 without infinities, E5M2)
#pragma once

#include "codec/codec.h"

namespace kvtamp::codec {

PageBytes RowsBytes(const PageShape& shape);
// mean: [dim] or null, taken off; hadamard: rows are rotated first.
void EncodeRowsPage(const PageShape& shape, const EncodeInput& in, const float* mean, bool hadamard,
                    std::uint8_t* out);
void DecodeRowsRow(const PageShape& shape, const std::uint8_t* page, const float* mean,
                   bool hadamard, std::uint32_t row, float* out);

}  // namespace kvtamp::codec
