#include "codec/codec.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "codec/layout.h"
#include "codec/rows.h"

namespace kvtamp::codec {
namespace {

using Table = std::array<float, 256>;

template <class F>
Table MakeTable(F&& f) {
  Table table;
  for (int i = 0; i < 256; ++i) table[static_cast<std::size_t>(i)] = static_cast<float>(f(i));
  return table;
}

// clang-format off
alignas(64) constexpr std::int8_t kTrellisLevels2[256] = {
    67, 6, -24, 25, 68, -1, -22, 25, -37, -54, 89, -5, 16, -77, -46, -10,
    7, 61, 47, -42, -11, 34, -18, 11, 28, -34, -42, 65, -1, -45, -86, 31,
    17, 71, 112, 44, -38, -81, 44, -11, -42, -12, -71, -4, -127, 35, -15, 3,
    1, -28, 23, -70, -67, -25, 17, -16, 2, 75, 40, -5, 11, 47, -38, -77,
    35, -43, 40, -19, -29, 27, 20, 62, 11, 37, -56, 72, -52, 4, -18, 93,
    15, -104, 65, -41, -26, -37, 14, 21, -2, 45, -77, 4, -80, -1, -40, 63,
    -41, -90, -11, 21, 11, -28, -5, 49, -85, -45, 72, 10, 89, -17, 13, 46,
    -22, 10, 53, -31, 20, -6, 41, 69, -32, 19, 127, 40, -64, -3, 34, -39,
    20, -17, 84, 41, 54, -49, -69, -8, 22, -17, 11, 48, 56, -22, 7, 24,
    56, 1, 28, -2, -113, 68, 12, -42, 74, 0, -37, 121, -28, 36, -5, -63,
    -7, -18, -57, 91, 53, 16, 92, -54, 16, 8, 28, 48, -18, 14, 46, -47,
    -38, -42, 34, 3, -11, -53, -23, 27, -60, -82, -16, -51, 56, -34, 9, -110,
    -6, -69, 7, -113, 30, -13, 97, -47, -78, -11, 40, -44, -84, -41, 38, -10,
    -22, -52, 4, 42, 19, 51, 52, -21, -17, 39, 10, -91, -54, 87, 25, -9,
    -27, 19, -13, 18, 15, -65, -24, 6, -15, 32, -29, -81, 23, 69, -52, -22,
    31, 55, -35, 97, -40, 27, 78, 21, 47, -7, 10, -33, 24, -16, -11, -62,
};
alignas(64) constexpr std::int8_t kTrellisLevels3[256] = {
    104, -2, -126, -65, -39, -36, -18, 16, -38, -22, -4, 7, 30, -65, -83, -39,
    9, -14, -21, 35, 44, -69, -38, 11, -51, 31, 74, 42, 21, 53, 9, -8,
    37, 18, -21, 55, 35, -2, -35, -62, 63, 41, 14, 28, 16, -48, -2, 85,
    57, -51, -35, 10, -3, -20, 36, 21, 1, -35, 9, 62, 38, -13, 27, -36,
    -22, 29, -38, -18, 56, -43, -1, 4, -67, -8, -87, -4, 49, 9, 28, -49,
    72, 104, -41, 51, -15, -3, -54, -73, 46, -6, -42, 23, -60, 91, -26, -20,
    73, 47, 16, -44, 25, -23, -1, -22, 49, 10, -31, 30, -20, 20, -10, -68,
    -28, 59, -100, 1, -48, 8, -12, 26, -83, -46, -26, 15, 69, -61, 101, -8,
    22, -24, 39, 12, -10, 84, -50, 60, 7, 54, -21, -52, 25, 41, 82, 62,
    -107, 66, -26, -53, 18, 89, -3, 46, -9, -104, -80, -11, -28, 127, -53, 41,
    7, 10, -10, 27, 2, 17, -68, 40, -23, -14, -7, 50, -1, -35, 34, 15,
    33, 31, 9, -19, -26, 22, -30, -4, 15, 1, 21, 36, -44, 4, -11, 22,
    59, -7, 6, 1, -75, -21, 44, 23, -7, -38, -32, -17, 9, 32, -48, -85,
    43, 13, -7, 23, 30, -44, 4, -28, -34, -20, -7, 9, 16, 71, 56, 4,
    -2, -41, -15, -3, -28, -59, 19, 36, 30, 71, -60, 11, -33, -12, 12, 41,
    -8, 43, -59, -13, 10, -92, -23, -34, -62, 12, -14, -26, 51, 25, -38, 76,
};
// clang-format on

Table MakeKScales(int bits) {
  return MakeTable([bits](int k) { return std::exp2(k / 16.0 - 6 - bits); });
}

Table MakeKMinFactors() {
  return MakeTable([](int byte) {
    const auto z = static_cast<std::int8_t>(byte);
    return 24.5 / 64 * std::sinh(z / 24.5) - 0.5;
  });
}

Table MakeVScales() {
  return MakeTable([](int k) { return k == 0 ? 0.0 : std::exp2(k / 12.0 - 17); });
}

std::uint32_t CodeAt(const std::uint8_t* codes, const Place& place, bool nibble) {
  return nibble ? (codes[place.byte] >> place.shift) & 15u : codes[place.byte];
}

std::int8_t LevelAt(Coding coding, const PageShape& shape, const std::uint8_t* codes,
                    std::uint32_t row, std::uint32_t channel) {
  if (coding == Coding::kVTrellis) {
    const std::uint32_t window =
        TrellisWindow(shape, codes, TrellisLane(row, channel), TrellisStep(shape, row, channel));
    return TrellisLevels(shape.rate8)[window];
  }
  const std::uint32_t code =
      CodeAt(codes, VPlace(coding, shape, row, channel), coding == Coding::kVLm4);
  return coding == Coding::kVLm4 ? kLm4Levels[code] : static_cast<std::int8_t>(code);
}

}  // namespace

PageBytes EncodedBytes(Coding coding, const PageShape& shape) {
  const std::size_t rows = shape.rows, dim = shape.dim;
  const std::size_t blocks = (dim + 15) / 16;
  switch (coding) {
    case Coding::kF16:
      return {rows * dim * sizeof(half_t), 0};
    case Coding::kKInt8:
      return {2 * dim + rows * dim, 2 * dim};
    case Coding::kKInt4:
      return {2 * dim + rows * dim / 2, 2 * dim};
    case Coding::kVInt8:
      return {dim / shape.group * rows + blocks * rows * 16, dim / shape.group * rows};
    case Coding::kVLm4:
      return {dim / shape.group * rows + blocks * rows * 8, dim / shape.group * rows};
    case Coding::kKPlanes:
      return {2 * dim + dim / 2 + rows * shape.budget / 8, 2 * dim + dim / 2};
    case Coding::kRows:
      return RowsBytes(shape);
    case Coding::kVTrellis:
      return {dim / shape.group * rows + std::size_t{TrellisSteps(shape)} * shape.rate8,
              dim / shape.group * rows};
  }
  return {};
}

PageShape ShapeOf(const Format& resolved, Side side, std::uint32_t dim, std::uint32_t rows) {
  PageShape shape{rows, dim, resolved.group};
  const Result<Coding> coding = CodingOf(resolved, side);
  if (!coding.ok()) return shape;
  if (coding.value() == Coding::kKPlanes) {
    shape.budget = std::max(4u, (resolved.centibits * dim + 200) / 400 * 4);
    shape.weighted = resolved.weighted || resolved.by_range;
  }
  if (coding.value() == Coding::kRows) {
    const bool fp8 = resolved.levels == Levels::kFp8E4m3 || resolved.levels == Levels::kFp8E5m2;
    shape.format = {
        resolved.levels,
        static_cast<std::uint8_t>(resolved.centibits / 100),
        resolved.axis,
        resolved.sym || fp8 || resolved.levels == Levels::kLm,
        resolved.hadamard,
        static_cast<std::uint16_t>(std::min<std::uint32_t>(resolved.outliers, dim / 2))};
    if (resolved.axis == Axis::kChannel && (shape.group == 0 || rows % shape.group != 0))
      shape.group = rows;
  }
  if (coding.value() == Coding::kVTrellis)
    shape.rate8 = TrellisRate8(rows, dim, resolved.centibits);
  return shape;
}

void SideLayout::Add(Coding coding, const PageShape& shape) {
  const PageBytes size = EncodedBytes(coding, shape);
  heads.push_back({coding, shape, bytes, static_cast<std::uint32_t>(size.scales),
                   static_cast<std::uint32_t>(size.total)});
  scales += static_cast<std::uint32_t>(size.scales);
  bytes += static_cast<std::uint32_t>(size.total);
}

const float* KScaleTable(std::uint32_t bits) {
  static const std::array<Table, 9> tables = [] {
    std::array<Table, 9> all;
    for (int b = 0; b <= 8; ++b) all[static_cast<std::size_t>(b)] = MakeKScales(b);
    return all;
  }();
  return tables[std::min(8u, bits)].data();
}

const float* KMinFactorTable() {
  static const Table table = MakeKMinFactors();
  return table.data();
}

const float* VScaleTable() {
  static const Table table = MakeVScales();
  return table.data();
}

const std::int8_t* TrellisLevels(std::uint32_t rate8) {
  return rate8 <= 20 ? kTrellisLevels2 : kTrellisLevels3;
}

float KScale(std::uint32_t bits, std::uint8_t k) { return KScaleTable(bits)[k]; }
float KMinFactor(std::int8_t z) { return KMinFactorTable()[static_cast<std::uint8_t>(z)]; }
float VScale(std::uint8_t k) { return VScaleTable()[k]; }

void DecodeRowK(Coding coding, const PageShape& shape, const std::uint8_t* page, const float* mean,
                std::uint32_t row, float* out) {
  if (coding == Coding::kRows)
    return DecodeRowsRow(shape, page, mean, shape.format.hadamard, row, out);
  const std::uint8_t* codes = page + EncodedBytes(coding, shape).scales;
  std::uint32_t planes_code[kMaxDim] = {};
  if (coding == Coding::kKPlanes) {
    Planes planes;
    PlanesOf(page, shape, planes);
    for (std::uint32_t e = 0; e < planes.total(); ++e) {
      const Place at = PlanePlace(shape, planes, row, e);
      const std::uint32_t bits = (codes[at.byte] >> at.shift) & ((1u << PlaneBits(planes, e)) - 1);
      const std::uint32_t c = planes.channel[e];
      planes_code[c] += bits << PlaneShift(planes, e, std::min(8u, KWidth(page, shape.dim, c)));
    }
  }
  for (std::uint32_t c = 0; c < shape.dim; ++c) {
    const std::uint32_t bits = coding == Coding::kKPlanes ? std::min(8u, KWidth(page, shape.dim, c))
                               : coding == Coding::kKInt8 ? 8
                                                          : 4;
    const float scale = KScale(bits, page[c]);
    const float steps = static_cast<float>(1u << bits);
    const float min = KMinFactor(static_cast<std::int8_t>(page[shape.dim + c])) * scale * steps;
    const std::uint32_t code =
        coding == Coding::kKPlanes
            ? planes_code[c]
            : CodeAt(codes, KPlace(coding, shape, row, c), coding == Coding::kKInt4);
    const float x = min + scale * static_cast<float>(code);
    out[c] = mean == nullptr ? x : mean[c] + x;
  }
}

void DecodeRowV(Coding coding, const PageShape& shape, const std::uint8_t* page, bool hadamard,
                std::uint32_t row, float* out) {
  if (coding == Coding::kRows)
    return DecodeRowsRow(shape, page, nullptr, shape.format.hadamard, row, out);
  const std::uint8_t* codes = page + EncodedBytes(coding, shape).scales;
  for (std::uint32_t c = 0; c < shape.dim; ++c) {
    const float scale = VScale(page[c / shape.group * shape.rows + row]);
    out[c] = scale * static_cast<float>(LevelAt(coding, shape, codes, row, c));
  }
  if (hadamard) Hadamard(out, shape.dim);
}

void Hadamard(float* x, std::uint32_t dim) {
  const std::uint32_t block = dim & (0u - dim);
  for (std::uint32_t h = 1; h < block; h *= 2) {
    for (std::uint32_t i = 0; i < dim; i += 2 * h) {
      for (std::uint32_t j = i; j < i + h; ++j) {
        const float a = x[j], b = x[j + h];
        x[j] = a + b;
        x[j + h] = a - b;
      }
    }
  }
  const float norm = 1.0f / std::sqrt(static_cast<float>(block));
  for (std::uint32_t i = 0; i < dim; ++i) x[i] *= norm;
}

}  // namespace kvtamp::codec
