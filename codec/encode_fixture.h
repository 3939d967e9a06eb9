// Rows to encode, and what encoding loses of them. Shared by the tests of the encoders.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "codec/encode.h"
#include "cpu/every_isa.h"

namespace kvtamp::codec {

inline constexpr std::uint32_t kDims[] = {32, 40, 64, 72, 80, 96, 112, 128, 192, 256, 512, 576};
inline constexpr std::uint32_t kPageSizes[] = {16, 32, 64, 128};

inline bool IsK(Coding coding) {
  return coding == Coding::kKInt8 || coding == Coding::kKInt4 || coding == Coding::kKPlanes;
}

inline std::uint32_t GroupOf(std::uint32_t dim) { return dim % 64 == 0 ? 64 : dim; }

// Rows of f16 with gaps between them, and which of them are valid.
struct Rows {
  PageShape shape;
  std::size_t stride;
  std::vector<half_t> data;
  std::uint64_t valid[2] = {};
  std::vector<float> mean;    // empty: none
  std::vector<float> weight;  // empty: none

  Rows(std::uint32_t rows, std::uint32_t dim, std::uint32_t group = 0)
      : shape{rows, dim, group != 0 ? group : GroupOf(dim)}, stride(dim + 8), data(rows * stride) {
    for (std::uint32_t r = 0; r < rows; ++r) Set(r, true);
  }
  void Set(std::uint32_t r, bool on) {
    const std::uint64_t bit = std::uint64_t{1} << (r % 64);
    valid[r / 64] = on ? valid[r / 64] | bit : valid[r / 64] & ~bit;
  }
  half_t& at(std::uint32_t r, std::uint32_t c) { return data[r * stride + c]; }
  float value(std::uint32_t r, std::uint32_t c) const { return HalfToFloat(data[r * stride + c]); }
  const float* mean_or_null() const { return mean.empty() ? nullptr : mean.data(); }
  EncodeInput input() const {
    return {data.data(), stride, valid, weight.empty() ? nullptr : weight.data()};
  }
};

inline Rows Gaussian(std::uint32_t rows, std::uint32_t dim, std::uint32_t seed,
                     float sigma = 1.0f) {
  Rows x(rows, dim);
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  for (half_t& h : x.data) h = FloatToHalf(sigma * normal(rng));
  return x;
}

inline std::vector<std::uint8_t> Encode(Coding coding, const Rows& x, bool hadamard = true,
                                        bool plain = false) {
  std::vector<std::uint8_t> page(EncodedBytes(coding, x.shape).total + 64, 0xCD);
  if (IsK(coding)) {
    (plain ? plain::EncodeK : EncodeK)(coding, x.shape, x.input(), x.mean_or_null(), page.data());
  } else {
    (plain ? plain::EncodeV : EncodeV)(coding, x.shape, x.input(), hadamard, page.data());
  }
  for (std::size_t i = page.size() - 64; i < page.size(); ++i)
    EXPECT_EQ(page[i], 0xCD) << "wrote beyond";
  page.resize(page.size() - 64);
  return page;
}

inline std::vector<float> DecodeRow(Coding coding, const Rows& x,
                                    const std::vector<std::uint8_t>& page, std::uint32_t row,
                                    bool hadamard = true) {
  std::vector<float> out(x.shape.dim);
  if (IsK(coding)) {
    DecodeRowK(coding, x.shape, page.data(), x.mean_or_null(), row, out.data());
  } else {
    DecodeRowV(coding, x.shape, page.data(), hadamard, row, out.data());
  }
  return out;
}

// Over the valid rows.
inline double SquaredError(Coding coding, const Rows& x, const std::vector<std::uint8_t>& page,
                           bool hadamard = true) {
  double sum = 0;
  for (std::uint32_t r = 0; r < x.shape.rows; ++r) {
    if (!IsValid(x.input(), r)) continue;
    const std::vector<float> out = DecodeRow(coding, x, page, r, hadamard);
    for (std::uint32_t c = 0; c < x.shape.dim; ++c) {
      const double d = out[c] - x.value(r, c);
      sum += d * d;
    }
  }
  return sum;
}

}  // namespace kvtamp::codec
