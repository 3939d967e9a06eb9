// Where the code of one element lies in a page: the layouts of codec.h as arithmetic, for code that
// may be slow. Kernels walk the same bytes in order instead.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>

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

// -------------------------------------------------------------------------------- kKPlanes

inline std::uint32_t KWidth(const std::uint8_t* page, std::uint32_t dim, std::uint32_t channel) {
  return (page[2 * dim + channel / 2] >> (channel % 2 * 4)) & 15u;
}

// The planes of a page: code of channel[e] += plane e << shift[e]. First those of 4 bits, then of
// 2, then of 1, each list in channel order as a width's binary digits say (8 is twice 4 bits),
// highest bits first. So that each list is a whole number of groups of four, its last one to three
// entries are cut into two of half as many bits, which end the next list; the sum of all being a
// multiple of four, the last list comes out even.
struct Planes {
  static constexpr std::uint32_t kMax = (3 * kMaxDim + 16 + 15) / 16 * 16;
  std::uint32_t n[3] = {};  // of 4, 2 and 1 bits
  std::uint32_t total() const { return n[0] + n[1] + n[2]; }
  std::uint16_t channel[kMax];
  std::uint8_t shift[kMax];
};

inline void PlanesOf(const std::uint8_t* page, const PageShape& shape, Planes& planes) {
  const std::uint32_t dim = shape.dim;
  std::uint32_t count[3] = {};
  for (std::uint32_t c = 0; c < dim; ++c) {
    const std::uint32_t w = std::min(8u, KWidth(page, dim, c));
    count[0] += w / 4;
    count[1] += w / 2 % 2;
    count[2] += w % 2;
  }
  const std::uint32_t cut4 = count[0] % 4, n2 = count[1] + 2 * cut4, cut2 = n2 % 4;
  planes.n[0] = count[0] - cut4;
  planes.n[1] = n2 - cut2;
  planes.n[2] = count[2] + 2 * cut2;
  // The widths of a damaged page may have any sum: no plane lies outside the page.
  std::uint32_t left = shape.budget;
  planes.n[0] = std::min(planes.n[0], left / 16 * 4);
  left -= 4 * planes.n[0];
  planes.n[1] = std::min(planes.n[1], left / 8 * 4);
  left -= 2 * planes.n[1];
  planes.n[2] = std::min(planes.n[2], left) / 4 * 4;
  std::uint32_t at[3] = {0, planes.n[0], planes.n[0] + planes.n[1]};
  const std::uint32_t end[3] = {at[1], at[2], planes.total()};
  std::uint32_t late[2][6], late_shift[2][6], n_late[2] = {};
  const auto put = [&](int list, std::uint32_t c, std::uint32_t shift) {
    if (at[list] < end[list]) {
      planes.channel[at[list]] = static_cast<std::uint16_t>(c);
      planes.shift[at[list]++] = static_cast<std::uint8_t>(shift);
    } else if (list < 2 && n_late[list] < 6) {
      late[list][n_late[list]] = c;
      late_shift[list][n_late[list]++] = shift;
    }
  };
  for (std::uint32_t c = 0; c < dim; ++c) {
    const std::uint32_t w = std::min(8u, KWidth(page, dim, c));
    if (w >= 4) put(0, c, w - 4);
    if (w == 8) put(0, c, 0);
    if (w / 2 % 2 != 0) put(1, c, w % 2);
    if (w % 2 != 0) put(2, c, 0);
  }
  for (std::uint32_t i = 0; i < n_late[0]; ++i) {
    put(1, late[0][i], late_shift[0][i] + 2);
    put(1, late[0][i], late_shift[0][i]);
  }
  for (std::uint32_t i = 0; i < n_late[1]; ++i) {
    put(2, late[1][i], late_shift[1][i] + 1);
    put(2, late[1][i], late_shift[1][i]);
  }
}

// Where plane `entry` of a token lies, from the start of the codes.
inline Place PlanePlace(const PageShape& shape, const Planes& planes, std::uint32_t token,
                        std::uint32_t entry) {
  std::size_t base = 0;
  std::uint32_t bits = 4, first = 0;
  for (int list = 0; list < 2 && entry >= first + planes.n[list]; ++list) {
    base += std::size_t{planes.n[list]} * shape.rows * bits / 8;
    first += planes.n[list];
    bits /= 2;
  }
  const std::uint32_t chunk = std::min(shape.rows, 128 / bits), side = chunk * bits / 8;
  const std::uint32_t e = entry - first, r = token % chunk;
  base += std::size_t{e / 4} * (shape.rows * bits / 2) + token / chunk * side * 4;
  return {base + r % side * 4 + e % 4, bits * (r / side)};
}

inline std::uint32_t PlaneBits(const Planes& planes, std::uint32_t entry) {
  return entry < planes.n[0] ? 4 : entry < planes.n[0] + planes.n[1] ? 2 : 1;
}

// ------------------------------------------------------------------------------- kVTrellis

inline constexpr std::uint32_t kTrellisLanes = 64;
inline constexpr std::uint32_t kMaxTrellisRate8 = 40;

inline std::uint32_t TrellisSteps(const PageShape& shape) {
  return (shape.dim + 15) / 16 * (shape.rows / 4);
}
// The nearest rate at which a lane has whole bytes.
inline std::uint32_t TrellisRate8(std::uint32_t rows, std::uint32_t dim, std::uint32_t centibits) {
  const std::uint32_t step = 64 / std::gcd(64u, TrellisSteps({rows, dim}));
  const std::uint32_t n = (centibits * 8 + step * 50) / (step * 100);
  return std::clamp(n, 1u, kMaxTrellisRate8 / step) * step;
}
// Bits of a lane up to and with step s.
inline std::uint32_t TrellisEnd(std::uint32_t rate8, std::uint32_t step) {
  return (step + 1) * rate8 / 8;
}
inline std::uint32_t TrellisLane(std::uint32_t token, std::uint32_t channel) {
  return token % 4 + 4 * (channel % 16);
}
inline std::uint32_t TrellisStep(const PageShape& shape, std::uint32_t token,
                                 std::uint32_t channel) {
  return channel / 16 * (shape.rows / 4) + token / 4;
}
// The window that ends at a step of a lane.
inline std::uint32_t TrellisWindow(const PageShape& shape, const std::uint8_t* codes,
                                   std::uint32_t lane, std::uint32_t step) {
  const std::uint32_t end = TrellisEnd(shape.rate8, step), at = (end - 1) / 8, used = end - 8 * at;
  const std::uint32_t last = TrellisSteps(shape) * shape.rate8 / 64 - 1;
  const std::uint32_t now = codes[at * kTrellisLanes + lane];
  std::uint32_t before = 0;
  if (at > 0) {
    before = codes[(at - 1) * kTrellisLanes + lane];
  } else if (lane > 0) {
    before = codes[last * kTrellisLanes + lane - 1];
  }
  return ((before << used) | (now >> (8 - used))) & 255u;
}

}  // namespace kvtamp::codec
