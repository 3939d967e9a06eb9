#include "codec/codec.h"

#include <array>
#include <cmath>

#include "codec/layout.h"

namespace kvtamp::codec {
namespace {

using Table = std::array<float, 256>;

template <class F>
Table MakeTable(F&& f) {
  Table table;
  for (int i = 0; i < 256; ++i) table[static_cast<std::size_t>(i)] = static_cast<float>(f(i));
  return table;
}

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
  }
  return {};
}

const float* KScaleTable(Coding coding) {
  static const Table int8 = MakeKScales(8), int4 = MakeKScales(4);
  return coding == Coding::kKInt8 ? int8.data() : int4.data();
}

const float* KMinFactorTable() {
  static const Table table = MakeKMinFactors();
  return table.data();
}

const float* VScaleTable() {
  static const Table table = MakeVScales();
  return table.data();
}

float KScale(Coding coding, std::uint8_t k) { return KScaleTable(coding)[k]; }
float KMinFactor(std::int8_t z) { return KMinFactorTable()[static_cast<std::uint8_t>(z)]; }
float VScale(std::uint8_t k) { return VScaleTable()[k]; }

void DecodeRowK(Coding coding, const PageShape& shape, const std::uint8_t* page, const float* mean,
                std::uint32_t row, float* out) {
  const std::uint8_t* codes = page + EncodedBytes(coding, shape).scales;
  const float steps = coding == Coding::kKInt8 ? 256.0f : 16.0f;
  for (std::uint32_t c = 0; c < shape.dim; ++c) {
    const float scale = KScale(coding, page[c]);
    const float min = KMinFactor(static_cast<std::int8_t>(page[shape.dim + c])) * scale * steps;
    const std::uint32_t code =
        CodeAt(codes, KPlace(coding, shape, row, c), coding == Coding::kKInt4);
    const float x = min + scale * static_cast<float>(code);
    out[c] = mean == nullptr ? x : mean[c] + x;
  }
}

void DecodeRowV(Coding coding, const PageShape& shape, const std::uint8_t* page, bool hadamard,
                std::uint32_t row, float* out) {
  const std::uint8_t* codes = page + EncodedBytes(coding, shape).scales;
  for (std::uint32_t c = 0; c < shape.dim; ++c) {
    const float scale = VScale(page[c / shape.group * shape.rows + row]);
    const std::uint32_t code =
        CodeAt(codes, VPlace(coding, shape, row, c), coding == Coding::kVLm4);
    const std::int8_t level =
        coding == Coding::kVLm4 ? kLm4Levels[code] : static_cast<std::int8_t>(code);
    out[c] = scale * static_cast<float>(level);
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
