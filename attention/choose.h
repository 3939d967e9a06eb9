// Which pages decoding reads, from bounds on q·k (Quest, arXiv:2406.10774), and in what order.
//
// A bound is what q·k of a query row can be at most over the keys of a page; +inf: not known, such
// a page is always read; -inf: the row sees nothing of it. A page is worth what its bound is, less
// the row's highest, for the row to which it is worth most.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/unit.h"

namespace kvtamp::attention {

// Sets choice.read: pages whose bounds are not known, and `top_pages` (0: all) of the others. Of
// equal ones the later. Returns how many are read. worth: scratch.
std::uint32_t ChoosePages(const PageChoice& choice, std::uint32_t top_pages,
                          std::vector<float>& worth);

// Fills order, left and top from bounds and read; returns the number of pages in order. Pages whose
// bounds are not known come first, and are not in `left`.
std::uint32_t OrderPages(const PageChoice& choice, std::uint32_t page_size);

// Whether the pages from order[at] on hold at most `share` of the softmax of every row, given its
// maximum and sum so far.
bool LittleLeft(const PageChoice& choice, std::uint32_t at, float share, const float* max,
                const float* sum);

}  // namespace kvtamp::attention
