#include "codec/widths.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "codec/encode.h"

namespace kvtamp::codec {
namespace {

constexpr float kOctave = 16;  // scale indices of one

struct Range {
  float lo, hi;
};

Range RangeOf(const KColumns& columns, std::uint32_t c) { return {columns.lo[c], columns.hi[c]}; }

// Bits for channels of a given importance (r² w), the widths they have already being part of it.
void Spend(std::span<float> left, std::uint32_t bits, std::uint8_t* widths) {
  for (; bits > 0; --bits) {
    std::size_t best = 0;
    for (std::size_t c = 1; c < left.size(); ++c)
      if (left[c] > left[best]) best = c;
    if (left[best] < 0) return;  // all have as many as there can be
    widths[best]++;
    left[best] = widths[best] == 8 ? -1.0f : left[best] * 0.25f;
  }
}

void Importance(const PageShape& shape, const KColumns& columns, const float* weight,
                std::vector<float>& importance) {
  double sum = 0;
  for (std::uint32_t c = 0; c < shape.dim && weight != nullptr; ++c) sum += weight[c];
  const float floor = static_cast<float>(sum / shape.dim / 100);
  importance.resize(shape.dim);
  for (std::uint32_t c = 0; c < shape.dim; ++c) {
    const Range r = RangeOf(columns, c);
    const float w = weight == nullptr || sum <= 0 ? 1.0f : weight[c] + floor;
    importance[c] = (r.hi - r.lo) * (r.hi - r.lo) * w;
    if (!std::isfinite(importance[c])) importance[c] = 1e30f;
  }
}

// The middle of the codes at width w, in units of scale * 2^w, to an index of the minimum.
int NearestZ(float f) {
  return static_cast<int>(
      std::nearbyint(kMinWidth * std::asinh((f + 0.5f) / (kMinWidth * kMinStep))));
}

bool OnSteps(const float* x, std::uint32_t n, float lo, float step, float tolerance) {
  for (std::uint32_t i = 0; i < n; ++i) {
    const float j = std::nearbyint((x[i] - lo) / step);
    if (std::abs(x[i] - lo - j * step) > tolerance) return false;
  }
  return true;
}

// `lo` = min + j0 * step for some code j0 of some width that leaves room for `steps` above it.
bool FindMinimum(float lo, int exponent, float step, int steps, float tolerance,
                 KChannelGrid& grid) {
  for (int w = 1; w <= 8; ++w) {
    const int codes = 1 << w, k = exponent + static_cast<int>(kOctave) * (6 + w);
    if (steps >= codes || k < 0 || k > 255) continue;
    for (int j0 = 0; j0 + steps < codes; ++j0) {
      const float unit = step * static_cast<float>(codes);
      const int z = NearestZ(lo / unit - static_cast<float>(j0) / static_cast<float>(codes));
      if (z < -128 || z > 127) continue;
      const float there =
          KMinFactor(static_cast<std::int8_t>(z)) * unit + static_cast<float>(j0) * step;
      if (std::abs(there - lo) > tolerance) continue;
      grid = {static_cast<std::uint8_t>(w), static_cast<std::uint8_t>(k),
              static_cast<std::int8_t>(z), true};
      return true;
    }
  }
  return false;
}

// The coarsest steps all values lie on.
KChannelGrid RecogniseChannel(const float* x, std::uint32_t n, Range r, float tolerance) {
  KChannelGrid grid;
  if (r.hi - r.lo <= 2 * tolerance) {
    grid = ConstantGrid((r.hi + r.lo) / 2);
    const float there = KMinFactor(grid.z) * KScale(0, grid.k);
    grid.known = std::abs(there - (r.hi + r.lo) / 2) <= tolerance;
    return grid;
  }
  for (int steps = 1; steps < 256; ++steps) {
    const float step = (r.hi - r.lo) / static_cast<float>(steps);
    const float e = kOctave * std::log2(step);
    const float slack = kOctave * 1.4427f * 2 * tolerance / (r.hi - r.lo) + 1e-3f;
    const float exponent = std::nearbyint(e);
    if (std::abs(e - exponent) > slack) continue;
    const float exact = std::exp2(exponent / kOctave);
    if (exact < 2 * tolerance) break;  // anything would lie on so fine a grid
    if (!OnSteps(x, n, r.lo, exact, 2 * tolerance)) continue;
    if (FindMinimum(r.lo, static_cast<int>(exponent), exact, steps, 1.5f * tolerance, grid))
      return grid;
  }
  return {};
}

}  // namespace

KChannelGrid ConstantGrid(float value) {
  KChannelGrid best;
  float least = std::abs(value - KMinFactor(0) * KScale(0, 0));
  for (int k = 0; k < 256; ++k) {
    const float scale = KScale(0, static_cast<std::uint8_t>(k));
    const int z = NearestZ(value / scale);
    if (z < -128 || z > 127) continue;
    const float error = std::abs(value - KMinFactor(static_cast<std::int8_t>(z)) * scale);
    if (error >= least) continue;
    least = error;
    best.k = static_cast<std::uint8_t>(k);
    best.z = static_cast<std::int8_t>(z);
  }
  return best;
}

void ChooseWidths(const PageShape& shape, const KColumns& columns, const float* weight,
                  std::uint8_t* widths) {
  if (!shape.weighted || columns.n == 0) {
    for (std::uint32_t c = 0; c < shape.dim; ++c)
      widths[c] = static_cast<std::uint8_t>(shape.budget * (c + 1) / shape.dim -
                                            shape.budget * c / shape.dim);
    return;
  }
  std::vector<float> importance;
  Importance(shape, columns, weight, importance);
  std::fill_n(widths, shape.dim, std::uint8_t{0});
  Spend(importance, shape.budget, widths);
}

bool RecogniseGrids(const PageShape& shape, const KColumns& columns, const float* magnitude,
                    std::span<KChannelGrid> grids) {
  if (columns.n < 8) return false;
  // Values of a page with few levels come again and again: most pages end here.
  std::uint32_t suspicious = 0;
  for (std::uint32_t c = 0; c < shape.dim; ++c) {
    const float* x = columns.x + std::size_t{c} * columns.n;
    suspicious += std::count(x + 1, x + columns.n, x[0]) > 1;
  }
  if (suspicious * 3 < shape.dim) return false;
  std::uint32_t found = 0, bits = 0;
  for (std::uint32_t c = 0; c < shape.dim; ++c) {
    // Half a unit in the last place of f16, or of its subnormals.
    const float tolerance = std::max(magnitude[c] * 0x1p-11f, 0x1p-25f);
    grids[c] = RecogniseChannel(columns.x + std::size_t{c} * columns.n, columns.n,
                                RangeOf(columns, c), tolerance);
    found += grids[c].known;
    bits += grids[c].width;
  }
  if (found * 10 < shape.dim * 9 || bits > shape.budget) return false;
  if (!shape.weighted) {
    return found == shape.dim && std::all_of(grids.begin(), grids.end(), [&](const auto& g) {
             return g.width == shape.budget / shape.dim;
           });
  }
  // What is left goes to the channels without a grid, then to the widest: those lose least by
  // another.
  std::uint32_t left = shape.budget - bits;
  if (found < shape.dim) {
    std::vector<float> importance;
    Importance(shape, columns, nullptr, importance);
    std::vector<std::uint8_t> widths(shape.dim);
    for (std::uint32_t c = 0; c < shape.dim; ++c)
      if (grids[c].known) importance[c] = -1.0f;
    Spend(importance, left, widths.data());
    for (std::uint32_t c = 0; c < shape.dim; ++c) {
      if (!grids[c].known) grids[c].width = widths[c];
      left -= widths[c];
    }
  }
  for (; left > 0; --left) {
    KChannelGrid* widest = nullptr;
    for (KChannelGrid& g : grids)
      if (g.width < 8 && (widest == nullptr || g.width > widest->width)) widest = &g;
    if (widest == nullptr) break;
    widest->width++;
    widest->known = false;
  }
  return true;
}

}  // namespace kvtamp::codec
