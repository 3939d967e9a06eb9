// Where the code of one element lies in a page: the layouts of codec.h as arithmetic, for code that
// may be slow. Kernels walk the same bytes in order instead.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
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

// The planes of a page: code of channel[e] += plane e << PlaneShift(planes, e, its width). First
// those of 4 bits, then of 2, then of 1, each list in channel order as a width's binary digits say
// (8 is twice 4 bits), highest bits first. So that each list is a whole number of groups of four,
// its last one to three entries are cut into two of half as many bits, which end the next list; the
// sum of all being a multiple of four, the last list comes out even.
struct Planes {
  static constexpr std::uint32_t kMax = (3 * kMaxDim + 16 + 31) / 32 * 32;
  std::uint32_t n[3] = {};  // of 4, 2 and 1 bits
  std::uint32_t total() const { return n[0] + n[1] + n[2]; }
  std::uint16_t channel[kMax];
  std::uint8_t above[kMax];  // bits of the channel's code that lie above the plane
};

// The lists before the last entries are cut. Room for a vector more than there can be.
template <class Channel>
struct PlaneLists {
  static constexpr std::uint32_t kRoom = 2 * kMaxDim + 80;
  std::uint32_t n[3] = {};
  Channel channel[3][kRoom];
  std::uint8_t above[3][kRoom];
};

template <class Channel>
inline void CutPlanes(PlaneLists<Channel>& lists, const PageShape& shape, Planes& planes) {
  for (int list = 0; list < 2; ++list) {
    const std::uint32_t end = lists.n[list], bits = 4u >> list;
    lists.n[list] = end / 4 * 4;
    for (std::uint32_t e = lists.n[list]; e < end; ++e) {
      for (const std::uint32_t down : {0u, bits / 2}) {
        std::uint32_t& to = lists.n[list + 1];
        lists.channel[list + 1][to] = lists.channel[list][e];
        lists.above[list + 1][to++] = static_cast<std::uint8_t>(lists.above[list][e] + down);
      }
    }
  }
  // The widths of a damaged page may have any sum: no plane lies outside the page.
  std::uint32_t left = shape.budget, at = 0;
  for (int list = 0; list < 3; ++list) {
    const std::uint32_t bits = 4u >> list;
    planes.n[list] = std::min(lists.n[list], left / bits) / 4 * 4;
    left -= planes.n[list] * bits;
    std::copy_n(lists.channel[list], planes.n[list], planes.channel + at);
    std::copy_n(lists.above[list], planes.n[list], planes.above + at);
    at += planes.n[list];
  }
}

inline void PlanesOf(const std::uint8_t* page, const PageShape& shape, Planes& planes) {
  // Every entry is written and counted only if it is one: widths are as good as random to a branch
  // predictor.
  PlaneLists<std::uint16_t> lists;
  auto& [n, channel, above] = lists;
  std::uint32_t n4 = 0, n2 = 0, n1 = 0;
  for (std::uint32_t c = 0; c < shape.dim; ++c) {
    const std::uint32_t w = std::min(8u, KWidth(page, shape.dim, c));
    const auto c16 = static_cast<std::uint16_t>(c);
    channel[0][n4] = c16;
    above[0][n4] = 0;
    n4 += w >= 4;
    channel[0][n4] = c16;
    above[0][n4] = 4;
    n4 += w == 8;
    channel[1][n2] = c16;
    above[1][n2] = static_cast<std::uint8_t>(w & 4u);
    n2 += (w >> 1) & 1u;
    channel[2][n1] = c16;
    above[2][n1] = static_cast<std::uint8_t>(w & 6u);
    n1 += w & 1u;
  }
  n[0] = n4;
  n[1] = n2;
  n[2] = n1;
  CutPlanes(lists, shape, planes);
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
// `width`: that of its channel.
inline std::uint32_t PlaneShift(const Planes& planes, std::uint32_t entry, std::uint32_t width) {
  return width - PlaneBits(planes, entry) - planes.above[entry];
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
// Of which step s has so many.
inline std::uint32_t TrellisBits(std::uint32_t rate8, std::uint32_t step) {
  return TrellisEnd(rate8, step) - step * rate8 / 8;
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
