// kVTrellis: levels by a trellis code.
#include "codec/trellis.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "codec/encode_fixture.h"
#include "codec/layout.h"
#include "cpu/cpu.h"

namespace kvtamp::codec {
namespace {

constexpr Coding kCoding = Coding::kVTrellis;

class TrellisTest : public cpu::EveryIsa {};

INSTANTIATE_TEST_SUITE_P(Isa, TrellisTest, testing::ValuesIn(cpu::AvailableIsas()),
                         [](const auto& info) { return info.param; });

Rows Values(std::uint32_t rows, std::uint32_t dim, std::uint32_t seed, std::uint32_t centibits,
            float sigma = 1.0f) {
  Rows x = Gaussian(rows, dim, seed, sigma);
  x.shape.rate8 = TrellisRate8(rows, dim, centibits);
  return x;
}

TEST(Trellis, RatesGiveWholeBytesAndAreNear) {
  for (std::uint32_t dim : kDims) {
    for (std::uint32_t rows : kPageSizes) {
      for (std::uint32_t centibits : {100u, 150u, 200u, 225u, 300u, 400u, 500u}) {
        const PageShape shape{rows, dim, GroupOf(dim), 0, TrellisRate8(rows, dim, centibits)};
        EXPECT_EQ(TrellisSteps(shape) * shape.rate8 % 64, 0u);
        EXPECT_GE(shape.rate8, 4u);
        EXPECT_LE(shape.rate8, 40u);
        if (rows == 64 && dim == 64) {
          EXPECT_EQ(shape.rate8 * 100, centibits * 8);
        }
        EXPECT_EQ(TrellisEnd(shape.rate8, TrellisSteps(shape) - 1) % 8, 0u);
      }
    }
  }
}

// A window that is read must be the last eight bits that were written.
TEST_P(TrellisTest, TheStringIsThatOfThePath) {
  const Rows x = Values(64, 80, 5, 250);
  TrellisScratch s;
  std::vector<std::uint8_t> page(EncodedBytes(kCoding, x.shape).total);
  EncodeTrellis(x.shape, x.input(), true, s, page.data(), SearchTrellisPlain);
  const std::uint8_t* codes = page.data() + EncodedBytes(kCoding, x.shape).scales;
  const std::uint32_t steps = TrellisSteps(x.shape);
  for (std::uint32_t lane = 0; lane < kTrellisLanes; ++lane)
    for (std::uint32_t step = 0; step < steps; ++step)
      ASSERT_EQ(TrellisWindow(x.shape, codes, lane, step), s.window[lane * steps + step])
          << lane << " " << step;
  EXPECT_EQ(page, Encode(kCoding, x)) << "vector code and plain code must agree";
}

// Both sides. Below are rate-distortion theory's 4^-bits; a scale fitted to each 64 values makes up
// for a part of the table's distance from it.
TEST_P(TrellisTest, GaussianErrorsLieInTheirBrackets) {
  const struct {
    std::uint32_t centibits;
    double lo, hi;
  } brackets[] = {{100, 0.25, 0.325},  {150, 0.125, 0.17},    {200, 0.0625, 0.082},
                  {250, 0.031, 0.044}, {300, 0.0156, 0.0228}, {400, 0.0039, 0.0070}};
  for (const auto& b : brackets) {
    double sum = 0;
    for (std::uint32_t seed = 0; seed < 4; ++seed) {
      const Rows x = Values(64, 64, 50 + seed, b.centibits);
      sum += SquaredError(kCoding, x, Encode(kCoding, x)) / (4 * 64 * 64);
    }
    EXPECT_GT(sum, b.lo) << b.centibits;
    EXPECT_LT(sum, b.hi) << b.centibits;
  }
}

TEST_P(TrellisTest, EverySizeAndRate) {
  for (std::uint32_t dim : {32u, 40u, 96u, 112u, 128u, 256u}) {
    for (std::uint32_t rows : kPageSizes) {
      for (std::uint32_t centibits : {100u, 200u, 300u, 500u}) {
        const Rows x = Values(rows, dim, dim + rows, centibits, 0.1f);
        const auto page = Encode(kCoding, x);
        const double bits = x.shape.rate8 / 8.0;
        EXPECT_LT(SquaredError(kCoding, x, page) / (0.01 * rows * dim), 3 * std::exp2(-2 * bits))
            << dim << " " << rows << " " << bits;
        EXPECT_EQ(page, Encode(kCoding, x, true, true));
      }
    }
  }
}

TEST_P(TrellisTest, DeadRowsInfluenceNothing) {
  Rows x = Values(64, 64, 1, 200), y = x;
  for (std::uint32_t r = 5; r < 64; r += 3) {
    x.Set(r, false);
    y.Set(r, false);
    for (std::uint32_t c = 0; c < 64; ++c) y.at(r, c) = 0x7C00;
  }
  EXPECT_EQ(Encode(kCoding, x), Encode(kCoding, y));
}

TEST_P(TrellisTest, ZerosAndExtremes) {
  Rows x = Values(64, 64, 3, 200);
  for (std::uint32_t c = 0; c < 64; ++c) {
    x.at(7, c) = 0;
    x.at(9, c) = FloatToHalf(c % 2 == 0 ? 65504.0f : -60000.0f);
    x.at(11, c) = 0x7E00;  // NaN counts as zero
    x.at(13, c) = 0x0001;
  }
  x.at(15, 3) = FloatToHalf(1000.0f);  // far outside of what its row's scale would reach
  const auto page = Encode(kCoding, x);
  for (std::uint32_t r : {7u, 11u, 13u})
    for (float v : DecodeRow(kCoding, x, page, r)) EXPECT_NEAR(v, 0, 1e-6);
  for (std::uint32_t r = 0; r < 64; ++r)
    for (float v : DecodeRow(kCoding, x, page, r)) EXPECT_TRUE(std::isfinite(v));
}

TEST_P(TrellisTest, EncodingAgainChangesNearlyNothing) {
  std::size_t same = 0, all = 0;
  for (std::uint32_t centibits : {200u, 250u, 300u, 400u}) {
    for (float sigma : {0.01f, 1.0f, 40.0f}) {
      const Rows original = Values(64, 64, centibits, centibits, sigma);
      Rows x = original;
      auto page = Encode(kCoding, x);
      const double first = SquaredError(kCoding, original, page);
      for (int round = 0; round < 5; ++round) {
        for (std::uint32_t r = 0; r < 64; ++r) {
          const auto out = DecodeRow(kCoding, x, page, r);
          for (std::uint32_t c = 0; c < 64; ++c) {
            const half_t h = FloatToHalf(out[c]);
            if (round > 0) {
              same += std::abs(HalfToFloat(h) - x.value(r, c)) <=
                      0.002f * std::max(std::abs(out[c]), 0.1f * sigma);
              all++;
            }
            x.at(r, c) = h;
          }
        }
        page = Encode(kCoding, x);
      }
      EXPECT_LT(SquaredError(kCoding, original, page), 1.02 * first) << centibits << " " << sigma;
    }
  }
  EXPECT_GE(static_cast<double>(same), 0.99 * static_cast<double>(all));
}

}  // namespace
}  // namespace kvtamp::codec
