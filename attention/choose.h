// Which pages decoding reads, from bounds on q·k (Quest, arXiv:2406.10774).
//
// A bound is what q·k of a query row can be at most over the keys of a page; +inf: not known, such
// a page is always read; -inf: the row sees nothing of it. A page is worth what its bound is, less
// the row's highest, for the row to which it is worth most.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/unit.h"

namespace kvtamp::attention {

// Sets choice.read: pages whose bounds are not known, and `top_pages` of the others. Of
// equal ones the later. Returns how many are read. worth: scratch.
std::uint32_t ChoosePages(const PageChoice& choice, std::uint32_t top_pages,
                          std::vector<float>& worth);

}  // namespace kvtamp::attention
