// kKPlanes: a width for each channel, under an exact budget.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "codec/encode_fixture.h"
#include "codec/layout.h"
#include "codec/widths.h"
#include "cpu/cpu.h"

namespace kvtamp::codec {
namespace {

constexpr Coding kCoding = Coding::kKPlanes;

class PlanesTest : public cpu::EveryIsa {};

INSTANTIATE_TEST_SUITE_P(Isa, PlanesTest, testing::ValuesIn(cpu::AvailableIsas()),
                         [](const auto& info) { return info.param; });

void SetBits(Rows& x, double bits, bool weighted = true) {
  x.shape.budget = static_cast<std::uint32_t>(bits * x.shape.dim / 4 + 0.5) * 4;
  x.shape.weighted = weighted;
}

// Channels of sizes and weights as keys have them: three octaves of either, not together.
Rows Keys(std::uint32_t rows, std::uint32_t dim, std::uint32_t seed, double bits) {
  Rows x(rows, dim);
  SetBits(x, bits);
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> size(dim);
  x.weight.resize(dim);
  x.mean.resize(dim);
  for (std::uint32_t c = 0; c < dim; ++c) {
    size[c] = std::exp2(normal(rng));
    x.weight[c] = std::exp2(2 * normal(rng));
    x.mean[c] = HalfToFloat(FloatToHalf(3 * normal(rng)));
  }
  for (std::uint32_t r = 0; r < rows; ++r)
    for (std::uint32_t c = 0; c < dim; ++c)
      x.at(r, c) = FloatToHalf(x.mean[c] + size[c] * normal(rng));
  return x;
}

double WeightedError(const Rows& x, const std::vector<std::uint8_t>& page) {
  double sum = 0, power = 0;
  for (std::uint32_t r = 0; r < x.shape.rows; ++r) {
    const std::vector<float> out = DecodeRow(kCoding, x, page, r);
    for (std::uint32_t c = 0; c < x.shape.dim; ++c) {
      const double w = x.weight.empty() ? 1.0 : x.weight[c], d = out[c] - x.value(r, c);
      sum += w * d * d;
      power += w * (x.value(r, c) - x.mean[c]) * (x.value(r, c) - x.mean[c]);
    }
  }
  return sum / power;
}

std::vector<std::uint32_t> WidthsOf(const Rows& x, const std::vector<std::uint8_t>& page) {
  std::vector<std::uint32_t> widths(x.shape.dim);
  for (std::uint32_t c = 0; c < x.shape.dim; ++c) widths[c] = KWidth(page.data(), x.shape.dim, c);
  return widths;
}

std::uint32_t Sum(const std::vector<std::uint32_t>& v) {
  std::uint32_t sum = 0;
  for (std::uint32_t x : v) sum += x;
  return sum;
}

// Every bit of the codes belongs to one channel's plane of one token, whatever the widths.
TEST(Planes, CoverThePageExactly) {
  std::mt19937 rng(3);
  for (std::uint32_t dim : kDims) {
    for (std::uint32_t rows : kPageSizes) {
      for (int trial = 0; trial < 4; ++trial) {
        PageShape shape{rows, dim, 0};
        std::vector<std::uint8_t> page(2 * dim + dim / 2);
        std::uint32_t sum = 0;
        for (std::uint32_t c = 0; c < dim; ++c) {
          std::uint32_t w = static_cast<std::uint32_t>(rng() % 9);
          if (c + 1 == dim) w = (4 - sum % 4) % 4;
          sum += w;
          page[2 * dim + c / 2] |= static_cast<std::uint8_t>(w << (c % 2 * 4));
        }
        shape.budget = sum;
        Planes planes;
        PlanesOf(page.data(), shape, planes);
        std::vector<int> bits(dim);  // by channel, as a set
        for (std::uint32_t e = 0; e < planes.total(); ++e) {
          const std::uint32_t c = planes.channel[e];
          const int mask = ((1 << PlaneBits(planes, e)) - 1)
                           << PlaneShift(planes, e, KWidth(page.data(), dim, c));
          EXPECT_EQ(bits[c] & mask, 0);
          bits[c] |= mask;
        }
        for (std::uint32_t c = 0; c < dim; ++c)
          ASSERT_EQ(bits[c], (1 << KWidth(page.data(), dim, c)) - 1) << c;
        for (std::uint32_t n : planes.n) EXPECT_EQ(n % 4, 0u);
        std::vector<bool> seen(std::size_t{rows} * sum);
        for (std::uint32_t e = 0; e < planes.total(); ++e) {
          for (std::uint32_t t = 0; t < rows; ++t) {
            const Place at = PlanePlace(shape, planes, t, e);
            for (std::uint32_t i = 0; i < PlaneBits(planes, e); ++i) {
              const std::size_t bit = at.byte * 8 + at.shift + i;
              ASSERT_LT(bit, seen.size());
              ASSERT_FALSE(seen[bit]);
              seen[bit] = true;
            }
          }
        }
        EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](bool b) { return b; }));
      }
    }
  }
}

TEST(Planes, DamagedWidthsStayInsideThePage) {
  std::mt19937 rng(4);
  for (int trial = 0; trial < 200; ++trial) {
    PageShape shape{64, 64, 0, static_cast<std::uint32_t>(4 + rng() % 128 * 4)};
    std::vector<std::uint8_t> page(EncodedBytes(kCoding, shape).total);
    for (auto& byte : page) byte = static_cast<std::uint8_t>(rng());
    Planes planes;
    PlanesOf(page.data(), shape, planes);
    for (std::uint32_t e = 0; e < planes.total(); ++e)
      EXPECT_LT(PlanePlace(shape, planes, 63, e).byte, std::size_t{shape.rows} * shape.budget / 8);
    std::vector<float> out(64);
    DecodeRowK(kCoding, shape, page.data(), nullptr, 63, out.data());
  }
}

TEST_P(PlanesTest, SpendsItsBudgetAtEverySize) {
  for (std::uint32_t dim : kDims) {
    for (std::uint32_t rows : kPageSizes) {
      for (double bits : {1.0, 2.25, 3.5, 6.0, 8.0}) {
        const Rows x = Keys(rows, dim, dim + rows, bits);
        const auto page = Encode(kCoding, x);
        EXPECT_EQ(Sum(WidthsOf(x, page)), x.shape.budget) << dim << " " << rows << " " << bits;
        EXPECT_LT(WeightedError(x, page), 0.4);
      }
    }
  }
}

// Both sides. Rate-distortion theory has 4^-bits for one channel; where three octaves of channels
// share the bits, the gain of sharing comes on top.
TEST_P(PlanesTest, GaussianErrorsLieInTheirBrackets) {
  const auto error = [](double bits, bool weighted) {
    double sum = 0;
    for (std::uint32_t seed = 0; seed < 8; ++seed) {
      Rows x = Keys(64, 64, seed, bits);
      x.shape.weighted = weighted;
      sum += WeightedError(x, Encode(kCoding, x));
    }
    return sum / 8;
  };
  const struct {
    double bits, lo, hi;
  } brackets[] = {
      {1, 0.05, 0.12}, {2, 0.015, 0.035}, {3, 0.004, 0.010}, {4, 0.001, 0.003}, {6, 6e-5, 2e-4}};
  double before = 1;
  for (const auto& b : brackets) {
    const double e = error(b.bits, true);
    EXPECT_GT(e, b.lo) << b.bits;
    EXPECT_LT(e, b.hi) << b.bits;
    EXPECT_LT(e, before / 2);
    before = e;
    const double uniform = error(b.bits, false);
    EXPECT_LT(e, uniform / 2) << b.bits << " bits: weighting brings nothing";
  }
}

TEST_P(PlanesTest, EqualWidthsAreAsGoodAsThePlainCoding) {
  double planes = 0, plain = 0;
  for (std::uint32_t seed = 0; seed < 8; ++seed) {
    Rows x = Gaussian(64, 64, seed);
    SetBits(x, 4, false);
    const auto page = Encode(kCoding, x);
    for (std::uint32_t w : WidthsOf(x, page)) EXPECT_EQ(w, 4u);
    planes += SquaredError(kCoding, x, page);
    plain += SquaredError(Coding::kKInt4, x, Encode(Coding::kKInt4, x));
  }
  EXPECT_NEAR(planes / plain, 1.0, 1e-6);
}

TEST_P(PlanesTest, NoWorseThanThePlainEncoder) {
  double fast = 0, plain = 0;
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    for (double bits : {1.5, 2.5, 3.5, 5.5}) {
      const Rows x = Keys(64, 80, seed, bits);
      fast += WeightedError(x, Encode(kCoding, x)) * std::exp2(2 * bits);
      plain += WeightedError(x, Encode(kCoding, x, true, true)) * std::exp2(2 * bits);
    }
  }
  EXPECT_NEAR(fast / plain, 1.0, 0.02);
}

TEST(Planes, EveryVectorInstructionSetWritesTheSameBytes) {
  std::vector<std::vector<std::uint8_t>> first;
  for (const std::string& isa : cpu::AvailableIsas()) {
    if (isa == "scalar") continue;
    ASSERT_TRUE(cpu::ForceIsa(isa).ok());
    std::vector<std::vector<std::uint8_t>> pages;
    for (std::uint32_t dim : {32u, 64u, 80u, 128u})
      for (std::uint32_t rows : kPageSizes)
        for (double bits : {1.5, 3.0, 4.5})
          pages.push_back(Encode(kCoding, Keys(rows, dim, 7, bits)));
    if (first.empty()) first = pages;
    EXPECT_EQ(pages, first) << isa;
  }
  ASSERT_TRUE(cpu::ForceIsa("auto").ok());
}

TEST_P(PlanesTest, DeadRowsInfluenceNothing) {
  Rows x = Keys(64, 64, 1, 3), y = x;
  for (std::uint32_t r = 5; r < 64; r += 3) {
    x.Set(r, false);
    y.Set(r, false);
    for (std::uint32_t c = 0; c < 64; ++c) y.at(r, c) = 0x7C00;
  }
  EXPECT_EQ(Encode(kCoding, x), Encode(kCoding, y));
  for (std::uint32_t r = 0; r < 64; ++r) x.Set(r, false);
  const auto page = Encode(kCoding, x);
  EXPECT_EQ(Sum(WidthsOf(x, page)), x.shape.budget);
}

// Five times: decoded to f16 rows, coded again with other weights than before.
TEST_P(PlanesTest, EncodingAgainChangesNearlyNothing) {
  std::size_t same = 0, all = 0;
  double first = 0, last = 0;
  for (double bits : {2.0, 3.0, 4.0}) {
    for (std::uint32_t seed = 0; seed < 4; ++seed) {
      const Rows original = Keys(64, 64, seed, bits);
      Rows x = original;
      auto page = Encode(kCoding, x);
      first += WeightedError(original, page);
      for (int round = 0; round < 5; ++round) {
        std::vector<half_t> before = x.data;
        for (std::uint32_t r = 0; r < 64; ++r) {
          const auto out = DecodeRow(kCoding, x, page, r);
          for (std::uint32_t c = 0; c < 64; ++c) {
            const half_t h = FloatToHalf(out[c]);
            if (round > 0) {
              same += std::abs(HalfToFloat(h) - x.value(r, c)) <= 0.002f * std::abs(out[c]);
              all++;
            }
            x.at(r, c) = h;
          }
        }
        std::reverse(x.weight.begin(), x.weight.end());
        page = Encode(kCoding, x);
      }
      Rows check = original;
      last += WeightedError(check, page);
    }
  }
  EXPECT_GE(static_cast<double>(same), 0.99 * static_cast<double>(all));
  EXPECT_LT(last, 1.02 * first);
}

// Keys far from zero, as Qwen2.5 has them: f16 itself is coarse there.
TEST_P(PlanesTest, FarOffsetsSurviveEncodingAgain) {
  Rows x = Keys(64, 64, 2, 3);
  for (std::uint32_t c = 0; c < 64; c += 9) {
    for (std::uint32_t r = 0; r < 64; ++r)
      x.at(r, c) = FloatToHalf(x.value(r, c) - x.mean[c] + 110.0f);
    x.mean[c] = c % 2 == 0 ? 110.25f : 100.0f;  // the second a mean of other text
  }
  const auto page = Encode(kCoding, x);
  Rows y = x;
  for (std::uint32_t r = 0; r < 64; ++r) {
    const auto out = DecodeRow(kCoding, x, page, r);
    for (std::uint32_t c = 0; c < 64; ++c) y.at(r, c) = FloatToHalf(out[c]);
  }
  const auto again = Encode(kCoding, y);
  std::size_t same = 0;
  for (std::uint32_t r = 0; r < 64; ++r) {
    const auto out = DecodeRow(kCoding, y, again, r);
    for (std::uint32_t c = 0; c < 64; ++c) same += FloatToHalf(out[c]) == y.at(r, c);
  }
  EXPECT_GE(same, 64u * 64 * 97 / 100);
}

TEST(Planes, AConstantIsFoundToWithinAThousandth) {
  for (float value : {0.0f, 1e-3f, -0.37f, 1.0f, -12.5f, 300.0f}) {
    const KChannelGrid grid = ConstantGrid(value);
    const float there = KMinFactor(grid.z) * KScale(0, grid.k);
    EXPECT_NEAR(there, value, 0.003f * std::abs(value) + 1e-3f);
  }
}

}  // namespace
}  // namespace kvtamp::codec
