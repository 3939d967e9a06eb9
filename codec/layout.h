// Where the code of one element lies in a page: the layouts of codec.h as arithmetic, for code that
// may be slow. Kernels walk the same bytes in order instead.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "codec/codec.h"

namespace kvtamp::codec {

// From the start of the codes. A 4-bit code is the nibble at `shift`.
struct Place {
  std::size_t byte;
  unsigned shift;
};

inline Place KPlace(Coding coding, const PageShape& shape, std::uint32_t token,
                    std::uint32_t channel) {
  const std::size_t group = channel / 4, j = channel % 4;
  if (coding == Coding::kKInt8) return {group * shape.rows * 4 + token * 4 + j, 0};
  const std::uint32_t chunk = std::min<std::uint32_t>(32, shape.rows), half = chunk / 2;
  const std::uint32_t r = token % chunk;
  const std::size_t byte = group * shape.rows * 2 + token / chunk * chunk * 2 + r % half * 4 + j;
  return {byte, r < half ? 0u : 4u};
}

inline Place VPlace(Coding coding, const PageShape& shape, std::uint32_t token,
                    std::uint32_t channel) {
  const std::size_t block = channel / 16, within = channel % 16 * 4 + token % 4;
  if (coding == Coding::kVInt8) return {block * shape.rows * 16 + token / 4 * 64 + within, 0};
  return {block * shape.rows * 8 + token / 8 * 64 + within, token / 4 % 2 == 0 ? 0u : 4u};
}

}  // namespace kvtamp::codec
