// Layouts and decoding, against pages written by hand: no encoder here.
#include "codec/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace kvtamp::codec {
namespace {

// What a page file holds must not change.
static_assert(sizeof(half_t) == 2 && sizeof(kLm4Levels) == 16);
static_assert(static_cast<int>(Coding::kF16) == 0 && static_cast<int>(Coding::kKInt8) == 1 &&
              static_cast<int>(Coding::kKInt4) == 2 && static_cast<int>(Coding::kVInt8) == 3 &&
              static_cast<int>(Coding::kVLm4) == 4);
static_assert(kMaxPageSize == 128 && kMaxDim == 576);

constexpr std::uint32_t kDims[] = {32, 40, 64, 72, 80, 96, 112, 128, 192, 256, 512, 576};
constexpr std::uint32_t kPageSizes[] = {16, 32, 64, 128};

TEST(Tables, Scales) {
  EXPECT_EQ(KScale(4, 0), 0x1p-10f);
  EXPECT_EQ(KScale(4, 160), 1.0f);
  EXPECT_EQ(KScale(8, 0), 0x1p-14f);
  EXPECT_EQ(KScale(8, 16 * 14), 1.0f);
  EXPECT_FLOAT_EQ(KScale(4, 161), 1.0442737824f);
  EXPECT_EQ(VScale(0), 0.0f);
  EXPECT_FLOAT_EQ(VScale(1), 0x1p-17f * 1.0594630944f);
  EXPECT_EQ(VScale(12 * 17), 1.0f);
  for (int k = 0; k < 256; ++k) {
    EXPECT_EQ(VScaleTable()[k], VScale(static_cast<std::uint8_t>(k)));
    EXPECT_EQ(KScaleTable(8)[k], KScale(8, static_cast<std::uint8_t>(k)));
  }
}

TEST(Tables, MinFactorsGrowAndAreOddAroundTheMiddle) {
  EXPECT_EQ(KMinFactor(0), -0.5f);
  EXPECT_FLOAT_EQ(KMinFactor(1), 24.5f / 64 * std::sinh(1 / 24.5f) - 0.5f);
  EXPECT_NEAR(KMinFactor(127), 33.6f, 0.1f);
  EXPECT_EQ(KMinFactorTable()[255], KMinFactor(-1));
  for (int z = -127; z <= 127; ++z) {
    const float here = KMinFactor(static_cast<std::int8_t>(z));
    EXPECT_GT(here, KMinFactor(static_cast<std::int8_t>(z - 1))) << z;
    EXPECT_NEAR(here + 0.5f, -0.5f - KMinFactor(static_cast<std::int8_t>(-z)), 1e-5f) << z;
  }
}

TEST(Tables, Lm4LevelsAreMaxsInSixteenths) {
  // J. Max 1960, table I, N = 16.
  const double max_levels[8] = {0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733};
  for (int i = 0; i < 8; ++i) {
    EXPECT_NEAR(kLm4Levels[8 + i], max_levels[i] * 127 / 2.733, 0.51) << i;
    EXPECT_EQ(kLm4Levels[7 - i], -kLm4Levels[8 + i]);
  }
}

TEST(Layout, Sizes) {
  const auto total = [](Coding coding, PageShape shape) {
    return EncodedBytes(coding, shape).total;
  };
  EXPECT_EQ(total(Coding::kF16, {64, 64, 64}), 8192u);
  EXPECT_EQ(total(Coding::kKInt8, {64, 64, 0}), 128u + 4096u);
  EXPECT_EQ(total(Coding::kKInt4, {64, 64, 0}), 128u + 2048u);
  EXPECT_EQ(total(Coding::kVInt8, {64, 128, 64}), 2 * 64u + 8192u);
  EXPECT_EQ(total(Coding::kVLm4, {64, 128, 64}), 2 * 64u + 4096u);
  EXPECT_EQ(total(Coding::kVLm4, {16, 40, 40}), 16u + 3 * 128u);  // padded to 48 channels
  EXPECT_EQ(EncodedBytes(Coding::kKInt4, {64, 64, 0}).scales, 128u);
  EXPECT_EQ(EncodedBytes(Coding::kVLm4, {32, 128, 32}).scales, 128u);
}

// The drawing of docs/formats.md walked from left to right, as a reader would:
// code[token][channel].
class Reader {
 public:
  explicit Reader(const std::uint8_t* codes) : next_(codes) {}
  std::uint8_t Byte() { return *next_++; }

 private:
  const std::uint8_t* next_;
};

using Codes = std::vector<std::vector<float>>;

Codes ReadK(Coding coding, const PageShape& shape, const std::uint8_t* codes) {
  Codes out(shape.rows, std::vector<float>(shape.dim));
  Reader in(codes);
  for (std::uint32_t c = 0; c < shape.dim; c += 4) {
    if (coding == Coding::kKInt8) {
      for (std::uint32_t t = 0; t < shape.rows; ++t) {
        for (std::uint32_t j = 0; j < 4; ++j) out[t][c + j] = in.Byte();
      }
      continue;
    }
    const std::uint32_t half = shape.rows == 16 ? 8 : 16;
    for (std::uint32_t t0 = 0; t0 < shape.rows; t0 += 2 * half) {
      for (std::uint32_t t = t0; t < t0 + half; ++t) {
        for (std::uint32_t j = 0; j < 4; ++j) {
          const std::uint8_t byte = in.Byte();
          out[t][c + j] = byte % 16;
          out[t + half][c + j] = byte / 16;
        }
      }
    }
  }
  return out;
}

Codes ReadV(Coding coding, const PageShape& shape, const std::uint8_t* codes) {
  const std::uint32_t padded = (shape.dim + 15) / 16 * 16;
  Codes out(shape.rows, std::vector<float>(padded));
  Reader in(codes);
  const std::uint32_t step = coding == Coding::kVInt8 ? 4 : 8;
  for (std::uint32_t c0 = 0; c0 < padded; c0 += 16) {
    for (std::uint32_t t0 = 0; t0 < shape.rows; t0 += step) {
      for (std::uint32_t c = c0; c < c0 + 16; ++c) {
        for (std::uint32_t t = t0; t < t0 + 4; ++t) {
          const std::uint8_t byte = in.Byte();
          if (coding == Coding::kVInt8) {
            out[t][c] = static_cast<float>(static_cast<std::int8_t>(byte));
          } else {
            out[t][c] = kLm4Levels[byte % 16];
            out[t + 4][c] = kLm4Levels[byte / 16];
          }
        }
      }
    }
  }
  return out;
}

std::vector<std::uint8_t> RandomPage(Coding coding, const PageShape& shape, std::mt19937& rng) {
  std::vector<std::uint8_t> page(EncodedBytes(coding, shape).total);
  for (auto& byte : page) byte = static_cast<std::uint8_t>(rng());
  return page;
}

TEST(DecodeK, FollowsTheDrawingAtEverySize) {
  std::mt19937 rng(1);
  for (Coding coding : {Coding::kKInt8, Coding::kKInt4}) {
    for (std::uint32_t dim : kDims) {
      for (std::uint32_t rows : kPageSizes) {
        const PageShape shape{rows, dim, 0};
        const auto page = RandomPage(coding, shape, rng);
        const Codes codes = ReadK(coding, shape, page.data() + 2 * dim);
        std::vector<float> out(dim), mean(dim);
        for (float& m : mean) m = static_cast<float>(rng() % 1000) / 64;
        for (std::uint32_t t = 0; t < rows; ++t) {
          DecodeRowK(coding, shape, page.data(), mean.data(), t, out.data());
          for (std::uint32_t c = 0; c < dim; ++c) {
            const float scale = KScale(coding == Coding::kKInt8 ? 8 : 4, page[c]);
            const float min = KMinFactor(static_cast<std::int8_t>(page[dim + c])) * scale *
                              (coding == Coding::kKInt8 ? 256.0f : 16.0f);
            ASSERT_EQ(out[c], mean[c] + (min + scale * codes[t][c]))
                << rows << " x " << dim << ", token " << t << ", channel " << c;
          }
        }
      }
    }
  }
}

TEST(DecodeV, FollowsTheDrawingAtEverySize) {
  std::mt19937 rng(2);
  for (Coding coding : {Coding::kVInt8, Coding::kVLm4}) {
    for (std::uint32_t dim : kDims) {
      for (std::uint32_t rows : kPageSizes) {
        const PageShape shape{rows, dim, dim % 64 == 0 ? 64 : dim / 2};
        const auto page = RandomPage(coding, shape, rng);
        const std::size_t scales = std::size_t{dim} / shape.group * rows;
        const Codes levels = ReadV(coding, shape, page.data() + scales);
        std::vector<float> out(dim), rotated(dim);
        for (std::uint32_t t = 0; t < rows; ++t) {
          DecodeRowV(coding, shape, page.data(), false, t, out.data());
          for (std::uint32_t c = 0; c < dim; ++c) {
            const float scale = VScale(page[c / shape.group * rows + t]);
            ASSERT_EQ(out[c], scale * levels[t][c])
                << rows << " x " << dim << ", token " << t << ", channel " << c;
          }
          DecodeRowV(coding, shape, page.data(), true, t, rotated.data());
          Hadamard(out.data(), dim);
          ASSERT_EQ(rotated, out);
        }
      }
    }
  }
}

// A page small enough to check by eye.
TEST(DecodeK, Int4GoldenPage) {
  const PageShape shape{16, 8, 0};
  std::vector<std::uint8_t> page(EncodedBytes(Coding::kKInt4, shape).total);
  ASSERT_EQ(page.size(), 16u + 64u);
  for (int c = 0; c < 8; ++c) page[c] = 160;  // scale 1, and with z = 0: x = code - 8
  page[3] = 176;                              // channel 3: scale 2, x = 2 * code - 16
  page[16 + 0] = 0xA1;               // group 0, token 0 | token 8, channel 0: codes 1 and 10
  page[16 + 3] = 0x5F;               //          token 0 | token 8, channel 3: codes 15 and 5
  page[16 + 7 * 4 + 2] = 0x70;       // token 7 | token 15, channel 2: codes 0 and 7
  page[16 + 32 + 1 * 4 + 1] = 0xC9;  // group 1, token 1 | token 9, channel 5: codes 9 and 12
  const auto at = [&](std::uint32_t token, std::uint32_t channel) {
    float row[8];
    DecodeRowK(Coding::kKInt4, shape, page.data(), nullptr, token, row);
    return row[channel];
  };
  EXPECT_EQ(at(0, 0), -7.0f);
  EXPECT_EQ(at(8, 0), 2.0f);
  EXPECT_EQ(at(0, 3), 14.0f);
  EXPECT_EQ(at(8, 3), -6.0f);
  EXPECT_EQ(at(7, 2), -8.0f);
  EXPECT_EQ(at(15, 2), -1.0f);
  EXPECT_EQ(at(1, 5), 1.0f);
  EXPECT_EQ(at(9, 5), 4.0f);
  EXPECT_EQ(at(3, 6), -8.0f);
}

TEST(DecodeV, Lm4GoldenPage) {
  const PageShape shape{16, 16, 8};
  std::vector<std::uint8_t> page(EncodedBytes(Coding::kVLm4, shape).total);
  ASSERT_EQ(page.size(), 2 * 16u + 128u);
  for (int i = 0; i < 32; ++i) page[i] = 204;  // scale 1
  page[0] = 204 - 12;                          // group 0 (channels 0…7), token 0: scale 1/2
  page[16 + 5] = 0;                            // group 1, token 5: scale 0
  std::uint8_t* codes = page.data() + 32;
  codes[0] = 0xF8;                // channel 0, token 0 | token 4: levels 6 and 127
  codes[9 * 4 + 1] = 0x37;        // channel 9, token 1 | token 5: levels -6 and -58
  codes[64 + 15 * 4 + 3] = 0xE1;  // channel 15, token 11 | token 15: levels -96 and 96
  const auto at = [&](std::uint32_t token, std::uint32_t channel) {
    float row[16];
    DecodeRowV(Coding::kVLm4, shape, page.data(), false, token, row);
    return row[channel];
  };
  EXPECT_EQ(at(0, 0), 3.0f);
  EXPECT_EQ(at(4, 0), 127.0f);
  EXPECT_EQ(at(1, 9), -6.0f);
  EXPECT_EQ(at(5, 9), 0.0f);
  EXPECT_EQ(at(11, 15), -96.0f);
  EXPECT_EQ(at(15, 15), 96.0f);
  EXPECT_EQ(at(15, 14), -127.0f);  // code 0
}

TEST(Hadamard, IsItsOwnInverseAndKeepsLengthsInBlocks) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (std::uint32_t dim : kDims) {
    std::uint32_t block = 1;
    while (dim % (2 * block) == 0) block *= 2;
    std::vector<float> x(dim);
    for (float& v : x) v = normal(rng);
    std::vector<float> y = x;
    Hadamard(y.data(), dim);
    for (std::uint32_t b = 0; b < dim; b += block) {
      float before = 0, after = 0, sum = 0;
      for (std::uint32_t i = b; i < b + block; ++i) {
        before += x[i] * x[i];
        after += y[i] * y[i];
        sum += x[i];
      }
      EXPECT_NEAR(after / before, 1.0f, 1e-4f) << dim;
      EXPECT_NEAR(y[b], sum / std::sqrt(static_cast<float>(block)), 1e-4f) << dim;
    }
    Hadamard(y.data(), dim);
    for (std::uint32_t i = 0; i < dim; ++i) EXPECT_NEAR(y[i], x[i], 1e-5f) << dim;
  }
}

}  // namespace
}  // namespace kvtamp::codec
