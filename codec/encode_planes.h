// kKPlanes, all but the search of a grid, which is the caller's (plain or vector code).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "codec/encode.h"
#include "codec/layout.h"
#include "codec/widths.h"
#include "cpu/convert.h"

namespace kvtamp::codec {

// Scratch of one encoding thread, kept: a page of a head is up to 290 KB of floats.
struct PlanesScratch {
  std::vector<float> x;             // [dim][n]
  std::vector<float> magnitude;     // [dim]
  std::vector<float> lo, hi;        // [dim]
  std::vector<std::uint8_t> codes;  // [dim][n]
  std::vector<KChannelGrid> grids;  // [dim]
  Planes planes;
  std::uint8_t valid[kMaxPageSize];
};

inline void LoadColumns(const PageShape& shape, const EncodeInput& in, const float* mean,
                        PlanesScratch& s, KColumns& columns) {
  std::uint32_t n = 0;
  for (std::uint32_t r = 0; r < shape.rows; ++r)
    if (IsValid(in, r)) s.valid[n++] = static_cast<std::uint8_t>(r);
  s.x.resize(std::size_t{shape.dim} * n);
  s.magnitude.assign(shape.dim, 0.0f);
  s.lo.assign(shape.dim, std::numeric_limits<float>::max());
  s.hi.assign(shape.dim, -std::numeric_limits<float>::max());
  s.codes.resize(s.x.size());
  s.grids.assign(shape.dim, {});
  float row[kMaxDim];
  for (std::uint32_t i = 0; i < n; ++i) {
    cpu::HalfToFloat(in.rows + s.valid[i] * in.stride, row, shape.dim);
    float *magnitude = s.magnitude.data(), *lo = s.lo.data(), *hi = s.hi.data();
    for (std::uint32_t c = 0; c < shape.dim; ++c) {
      const float x = std::abs(row[c]) <= 65504.0f ? row[c] : 0.0f, size = std::abs(x);
      magnitude[c] = magnitude[c] < size ? size : magnitude[c];
      row[c] = x - (mean == nullptr ? 0.0f : mean[c]);
      lo[c] = row[c] < lo[c] ? row[c] : lo[c];
      hi[c] = hi[c] < row[c] ? row[c] : hi[c];
    }
    for (std::uint32_t c = 0; c < shape.dim; ++c) s.x[std::size_t{c} * n + i] = row[c];
  }
  columns = {s.x.data(), n, shape.dim, s.lo.data(), s.hi.data()};
}

// Width 0: the value of least squared error is the mean one.
inline KChannelGrid AverageGrid(const float* x, std::uint32_t n) {
  double sum = 0;
  for (std::uint32_t i = 0; i < n; ++i) sum += x[i];
  return ConstantGrid(static_cast<float>(sum / n));
}

inline void CodesOnGrid(const float* x, std::uint32_t n, const KChannelGrid& grid,
                        std::uint8_t* codes) {
  const float scale = KScale(grid.width, grid.k), steps = static_cast<float>(1u << grid.width);
  const float min = KMinFactor(grid.z) * scale * steps;
  for (std::uint32_t i = 0; i < n; ++i)
    codes[i] = static_cast<std::uint8_t>(
        std::clamp(std::nearbyint((x[i] - min) / scale), 0.0f, steps - 1));
}

// Scales, minima and widths, then the planes.
inline void WritePlanes(const PageShape& shape, PlanesScratch& s, std::uint32_t n,
                        std::uint8_t* out) {
  const PageBytes bytes = EncodedBytes(Coding::kKPlanes, shape);
  std::memset(out, 0, bytes.total);
  for (std::uint32_t c = 0; c < shape.dim; ++c) {
    const KChannelGrid& grid = s.grids[c];
    out[c] = grid.k;
    out[shape.dim + c] = static_cast<std::uint8_t>(grid.z);
    out[2 * shape.dim + c / 2] |= static_cast<std::uint8_t>(grid.width << (c % 2 * 4));
  }
  PlanesOf(out, shape, s.planes);
  std::uint8_t* codes = out + bytes.scales;
  for (std::uint32_t e = 0; e < s.planes.total(); ++e) {
    const std::uint32_t c = s.planes.channel[e];
    const std::uint8_t* from = s.codes.data() + std::size_t{c} * n;
    const std::uint32_t shift = PlaneShift(s.planes, e, s.grids[c].width),
                        bits = PlaneBits(s.planes, e), mask = (1u << bits) - 1;
    std::uint8_t* to = codes + PlanePlace(shape, s.planes, 0, e).byte;
    // Powers of two all: no divisions in the loop.
    const std::uint32_t chunk = std::min(shape.rows, 128 / bits), side = chunk * bits / 8;
    const auto log_chunk = static_cast<std::uint32_t>(std::countr_zero(chunk)),
               log_side = static_cast<std::uint32_t>(std::countr_zero(side));
    for (std::uint32_t i = 0; i < n; ++i) {
      const std::uint32_t t = s.valid[i], r = t & (chunk - 1);
      const std::size_t byte = ((t >> log_chunk << log_side) + (r & (side - 1))) * 4;
      to[byte] |=
          static_cast<std::uint8_t>(((from[i] >> shift) & mask) << ((r >> log_side) * bits));
    }
  }
}

// search(width, channels): sets grids and codes of these channels, all to be `width` bits wide.
template <class Search>
void EncodePlanes(const PageShape& shape, const EncodeInput& in, const float* mean,
                  PlanesScratch& s, std::uint8_t* out, Search&& search) {
  KColumns columns;
  LoadColumns(shape, in, mean, s, columns);
  const std::uint32_t n = columns.n;
  std::uint8_t widths[kMaxDim];
  if (!RecogniseGrids(shape, columns, s.magnitude.data(), s.grids)) {
    ChooseWidths(shape, columns, in.weight, widths);
    for (std::uint32_t c = 0; c < shape.dim; ++c) s.grids[c] = {widths[c], 0, 0, n == 0};
  }
  std::vector<std::uint16_t> channels;
  for (std::uint8_t width = 0; width <= 8; ++width) {
    channels.clear();
    for (std::uint32_t c = 0; c < shape.dim; ++c) {
      KChannelGrid& grid = s.grids[c];
      if (grid.width != width) continue;
      const float* x = s.x.data() + std::size_t{c} * n;
      std::uint8_t* codes = s.codes.data() + std::size_t{c} * n;
      if (grid.known) {
        CodesOnGrid(x, n, grid, codes);
      } else if (width == 0) {
        grid = AverageGrid(x, n);
        std::fill_n(codes, n, std::uint8_t{0});
      } else {
        channels.push_back(static_cast<std::uint16_t>(c));
      }
    }
    if (!channels.empty()) search(width, channels);
  }
  WritePlanes(shape, s, n, out);
}

}  // namespace kvtamp::codec
