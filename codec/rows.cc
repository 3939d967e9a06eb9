#include "codec/rows.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "codec/encode.h"
#include "cpu/convert.h"

namespace kvtamp::codec {
namespace {

// What codes of a symmetric format stand for, and those in ascending order.
struct LevelTable {
  std::array<float, 256> level{};
  std::vector<std::uint8_t> ascending;
  float most = 0;
};

// Lloyd's iteration on the density of N(0,1).
void LloydMax(int n, std::array<float, 256>& level) {
  constexpr double kTop = 6;
  constexpr int kGrid = 24000;
  std::vector<double> levels(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) levels[static_cast<std::size_t>(i)] = 3.0 * (2 * i + 1 - n) / n;
  for (int round = 0; round < 300; ++round) {
    std::vector<double> sum(levels.size()), weight(levels.size());
    std::size_t at = 0;
    for (int i = 0; i < kGrid; ++i) {
      const double x = -kTop + 2 * kTop * (i + 0.5) / kGrid, p = std::exp(-x * x / 2);
      while (at + 1 < levels.size() && x > (levels[at] + levels[at + 1]) / 2) ++at;
      sum[at] += p * x;
      weight[at] += p;
    }
    for (std::size_t i = 0; i < levels.size(); ++i)
      if (weight[i] > 0) levels[i] = sum[i] / weight[i];
  }
  for (std::size_t i = 0; i < levels.size(); ++i) level[i] = static_cast<float>(levels[i]);
}

float Fp8(int code, int mantissa_bits, int bias, bool has_infinity) {
  const int mantissa = code & ((1 << mantissa_bits) - 1), exponent = (code & 127) >> mantissa_bits;
  const int top = 127 >> mantissa_bits;
  if (has_infinity ? exponent == top : (code & 127) == 127) return 0;  // never written
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                    : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  return static_cast<float>(code < 128 ? magnitude : -magnitude);
}

LevelTable MakeTable(Levels levels, int bits) {
  LevelTable t;
  const int n = 1 << bits;
  if (levels == Levels::kInt)
    for (int i = 0; i < n; ++i)
      t.level[static_cast<std::size_t>(i)] = static_cast<float>(i - n / 2);
  if (levels == Levels::kLm) LloydMax(n, t.level);
  for (int i = 0; i < n && levels == Levels::kFp8E4m3; ++i)
    t.level[static_cast<std::size_t>(i)] = Fp8(i, 3, 7, false);
  for (int i = 0; i < n && levels == Levels::kFp8E5m2; ++i)
    t.level[static_cast<std::size_t>(i)] = Fp8(i, 2, 15, true);
  t.ascending.resize(static_cast<std::size_t>(n));
  std::iota(t.ascending.begin(), t.ascending.end(), std::uint8_t{0});
  std::stable_sort(t.ascending.begin(), t.ascending.end(),
                   [&](std::uint8_t a, std::uint8_t b) { return t.level[a] < t.level[b]; });
  // The larger side of an even number of levels would be clipped on the other.
  t.most = std::min(t.level[t.ascending.back()], -t.level[t.ascending.front()]);
  if (levels == Levels::kInt && bits == 1) t.most = 0.5f;
  return t;
}

const LevelTable& TableOf(const RowsFormat& f) {
  static const auto tables = [] {
    std::array<std::array<LevelTable, 9>, 4> all;
    for (int bits = 1; bits <= 8; ++bits) {
      all[0][static_cast<std::size_t>(bits)] = MakeTable(Levels::kInt, bits);
      if (bits <= 6) all[1][static_cast<std::size_t>(bits)] = MakeTable(Levels::kLm, bits);
    }
    all[2][8] = MakeTable(Levels::kFp8E4m3, 8);
    all[3][8] = MakeTable(Levels::kFp8E5m2, 8);
    return all;
  }();
  const std::size_t kind = f.levels == Levels::kInt       ? 0
                           : f.levels == Levels::kLm      ? 1
                           : f.levels == Levels::kFp8E4m3 ? 2
                                                          : 3;
  return tables[kind][f.bits];
}

struct Grid {
  float scale = 0, min = 0;
};

std::uint8_t NearestCode(const PageShape& shape, const LevelTable& table, const Grid& grid,
                         float x) {
  if (grid.scale == 0) return shape.format.sym ? table.ascending[table.ascending.size() / 2] : 0;
  const float t = (x - grid.min) / grid.scale;
  if (!shape.format.sym) {
    return static_cast<std::uint8_t>(
        std::clamp(std::nearbyint(t), 0.0f, static_cast<float>((1 << shape.format.bits) - 1)));
  }
  const auto above =
      std::lower_bound(table.ascending.begin(), table.ascending.end(), t,
                       [&](std::uint8_t code, float value) { return table.level[code] < value; });
  if (above == table.ascending.begin()) return *above;
  if (above == table.ascending.end()) return table.ascending.back();
  return table.level[*above] - t < t - table.level[*(above - 1)] ? *above : *(above - 1);
}

float Value(const PageShape& shape, const LevelTable& table, const Grid& grid, std::uint8_t code) {
  return shape.format.sym ? grid.scale * table.level[code]
                          : grid.min + grid.scale * static_cast<float>(code);
}

float AsHalf(float x) { return HalfToFloat(FloatToHalf(x)); }

// Least squared error among a few ranges; with many levels clipping never pays.
Grid BestGrid(const PageShape& shape, const LevelTable& table, const std::vector<float>& x) {
  constexpr float kShrinks[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.72f, 0.64f, 0.56f};
  if (x.empty()) return {};
  const auto [lo, hi] = std::minmax_element(x.begin(), x.end());
  const float most = std::max(std::abs(*lo), std::abs(*hi));
  Grid best;
  double least = -1;
  for (float shrink : kShrinks) {
    Grid grid;
    if (shape.format.sym) {
      grid.scale = AsHalf(most * shrink / table.most);
    } else {
      const auto steps = static_cast<float>((1 << shape.format.bits) - 1);
      grid.scale = AsHalf((*hi - *lo) * shrink / steps);
      grid.min = AsHalf((*hi + *lo - grid.scale * steps) / 2);
    }
    double error = 0;
    for (float v : x) {
      const double d = v - Value(shape, table, grid, NearestCode(shape, table, grid, v));
      error += d * d;
    }
    if (least < 0 || error < least) {
      least = error;
      best = grid;
    }
    if (shape.format.bits > 5) break;
  }
  return best;
}

// Where the unit of an element lies among the scales, and its elements.
struct Units {
  std::uint32_t n = 0, per_line = 0;
  explicit Units(const PageShape& s)
      : n(s.rows * s.dim / s.group),
        per_line((s.format.axis == Axis::kChannel ? s.rows : s.dim) / s.group) {}
  std::uint32_t of(const PageShape& s, std::uint32_t row, std::uint32_t channel) const {
    return s.format.axis == Axis::kChannel ? channel * per_line + row / s.group
                                           : row * per_line + channel / s.group;
  }
};

std::size_t OutlierBytes(const PageShape& s) {
  return std::size_t{s.format.outliers} * (2 + 2 * s.rows);
}
std::size_t RowBytes(const PageShape& s) { return (std::size_t{s.dim} * s.format.bits + 7) / 8; }

std::uint16_t Load16(const std::uint8_t* p) {
  std::uint16_t x;
  std::memcpy(&x, p, 2);
  return x;
}
void Store16(std::uint8_t* p, std::uint16_t x) { std::memcpy(p, &x, 2); }

Grid LoadGrid(const PageShape& s, const std::uint8_t* page, std::uint32_t unit) {
  const std::uint8_t* p = page + OutlierBytes(s) + std::size_t{unit} * (s.format.sym ? 2 : 4);
  return {HalfToFloat(Load16(p)), s.format.sym ? 0.0f : HalfToFloat(Load16(p + 2))};
}

}  // namespace

PageBytes RowsBytes(const PageShape& s) {
  const std::size_t scales = OutlierBytes(s) + std::size_t{Units(s).n} * (s.format.sym ? 2 : 4);
  return {scales + s.rows * RowBytes(s), scales};
}

void EncodeRowsPage(const PageShape& shape, const EncodeInput& in, const float* mean, bool hadamard,
                    std::uint8_t* out) {
  const LevelTable& table = TableOf(shape.format);
  const PageBytes bytes = RowsBytes(shape);
  std::memset(out, 0, bytes.total);
  const std::uint32_t dim = shape.dim;
  std::vector<float> x(std::size_t{shape.rows} * dim);
  for (std::uint32_t r = 0; r < shape.rows; ++r) {
    if (!IsValid(in, r)) continue;
    float* row = x.data() + std::size_t{r} * dim;
    cpu::HalfToFloat(in.rows + r * in.stride, row, dim);
    for (std::uint32_t c = 0; c < dim; ++c) {
      if (!(std::abs(row[c]) <= 65504.0f)) row[c] = 0;
      if (mean != nullptr) row[c] -= mean[c];
    }
    if (hadamard) Hadamard(row, dim);
  }
  std::vector<bool> apart(dim);
  if (shape.format.outliers != 0) {
    std::vector<std::pair<float, std::uint16_t>> ranges;
    for (std::uint32_t c = 0; c < dim; ++c) {
      float lo = 0, hi = 0;
      bool any = false;
      for (std::uint32_t r = 0; r < shape.rows; ++r) {
        if (!IsValid(in, r)) continue;
        const float v = x[std::size_t{r} * dim + c];
        lo = any ? std::min(lo, v) : v;
        hi = any ? std::max(hi, v) : v;
        any = true;
      }
      ranges.emplace_back(lo - hi, static_cast<std::uint16_t>(c));
    }
    std::sort(ranges.begin(), ranges.end());
    for (std::uint32_t i = 0; i < shape.format.outliers; ++i) {
      const std::uint16_t c = ranges[i].second;
      apart[c] = true;
      Store16(out + 2 * i, c);
      std::uint8_t* values = out + 2 * shape.format.outliers + std::size_t{2} * i * shape.rows;
      for (std::uint32_t r = 0; r < shape.rows; ++r)
        Store16(values + 2 * r, FloatToHalf(x[std::size_t{r} * dim + c]));
    }
  }
  const Units units(shape);
  std::vector<std::vector<float>> members(units.n);
  for (std::uint32_t r = 0; r < shape.rows; ++r) {
    if (!IsValid(in, r)) continue;
    for (std::uint32_t c = 0; c < dim; ++c)
      if (!apart[c]) members[units.of(shape, r, c)].push_back(x[std::size_t{r} * dim + c]);
  }
  for (std::uint32_t u = 0; u < units.n; ++u) {
    const Grid grid = BestGrid(shape, table, members[u]);
    std::uint8_t* p = out + OutlierBytes(shape) + std::size_t{u} * (shape.format.sym ? 2 : 4);
    Store16(p, FloatToHalf(grid.scale));
    if (!shape.format.sym) Store16(p + 2, FloatToHalf(grid.min));
  }
  for (std::uint32_t r = 0; r < shape.rows; ++r) {
    if (!IsValid(in, r)) continue;
    std::uint8_t* codes = out + bytes.scales + r * RowBytes(shape);
    for (std::uint32_t c = 0; c < dim; ++c) {
      if (apart[c]) continue;
      const Grid grid = LoadGrid(shape, out, units.of(shape, r, c));
      const std::uint32_t code = NearestCode(shape, table, grid, x[std::size_t{r} * dim + c]);
      const std::uint32_t bit = c * shape.format.bits;
      codes[bit / 8] |= static_cast<std::uint8_t>(code << (bit % 8));
      if (bit % 8 + shape.format.bits > 8)
        codes[bit / 8 + 1] |= static_cast<std::uint8_t>(code >> (8 - bit % 8));
    }
  }
}

void DecodeRowsRow(const PageShape& shape, const std::uint8_t* page, const float* mean,
                   bool hadamard, std::uint32_t row, float* out) {
  const LevelTable& table = TableOf(shape.format);
  const Units units(shape);
  const std::uint8_t* codes = page + RowsBytes(shape).scales + row * RowBytes(shape);
  const std::uint32_t mask = (1u << shape.format.bits) - 1;
  for (std::uint32_t c = 0; c < shape.dim; ++c) {
    const std::uint32_t bit = c * shape.format.bits;
    std::uint32_t code = codes[bit / 8] >> (bit % 8);
    if (bit % 8 + shape.format.bits > 8) code |= std::uint32_t{codes[bit / 8 + 1]} << (8 - bit % 8);
    out[c] = Value(shape, table, LoadGrid(shape, page, units.of(shape, row, c)),
                   static_cast<std::uint8_t>(code & mask));
  }
  for (std::uint32_t i = 0; i < shape.format.outliers; ++i) {
    const std::uint32_t c = Load16(page + 2 * i);
    if (c < shape.dim)
      out[c] = HalfToFloat(
          Load16(page + 2 * shape.format.outliers + 2 * (std::size_t{i} * shape.rows + row)));
  }
  if (hadamard) Hadamard(out, shape.dim);
  for (std::uint32_t c = 0; c < shape.dim && mean != nullptr; ++c) out[c] += mean[c];
}

}  // namespace kvtamp::codec
