// kKPlanes: how many bits each channel of a page gets.
//
// The error of a score q·k is the sum over channels of q² times the squared error of k. With b bits
// over a range r that is about r²·4^-b/12, so giving bits one by one to the channel with the
// largest r²·w·4^-b, w being what is known of q², is the best there is for a given sum (reverse
// water-filling; MixKVQ, arXiv:2512.19206, and Kitty, arXiv:2511.18643, weigh channels into two to
// four classes). The ranges are those of the page, the sum is exact.
#pragma once

#include <cstdint>
#include <span>

#include "codec/codec.h"

namespace kvtamp::codec {

// A page's values without the mean: x[channel * n + i], i < n valid rows.
struct KColumns {
  const float* x = nullptr;
  std::uint32_t n = 0, dim = 0;
  const float *lo = nullptr, *hi = nullptr;  // [dim] the range of each channel
};

// One channel's numbers, as they are stored.
struct KChannelGrid {
  std::uint8_t width = 0, k = 0;
  std::int8_t z = 0;
  bool known = false;  // k and z need not be searched
};

// widths[dim], 0 to 8, whose sum is shape.budget (or all 8). weight: [dim] or null.
void ChooseWidths(const PageShape& shape, const KColumns& columns, const float* weight,
                  std::uint8_t* widths);

// If the page is one that was decoded (and rounded to f16) before: the grids it had, or others that
// hold its values within that rounding; for a channel where there is none only a width. The widths
// add up to the budget. `magnitude`: [dim] the largest |value|, mean included, which says how f16
// rounded. False for any other page.
bool RecogniseGrids(const PageShape& shape, const KColumns& columns, const float* magnitude,
                    std::span<KChannelGrid> grids);

// Width 0: every value is the same.
KChannelGrid ConstantGrid(float value);

}  // namespace kvtamp::codec
