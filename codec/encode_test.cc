// What encoding loses, what it must not depend on, and that every instruction set agrees.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codec/encode_fixture.h"
#include "codec/layout.h"
#include "cpu/cpu.h"

namespace kvtamp::codec {
namespace {

constexpr Coding kCodings[] = {Coding::kKInt8, Coding::kKInt4, Coding::kVInt8, Coding::kVLm4};

class EncodeTest : public cpu::EveryIsa {};

INSTANTIATE_TEST_SUITE_P(Isa, EncodeTest, testing::ValuesIn(cpu::AvailableIsas()),
                         [](const auto& info) { return info.param; });

// Squared error of unit Gaussian data, per element.
double GaussianError(Coding coding, std::uint32_t rows, std::uint32_t dim, bool hadamard = true) {
  double sum = 0;
  constexpr int kPages = 8;
  for (std::uint32_t seed = 0; seed < kPages; ++seed) {
    const Rows x = Gaussian(rows, dim, 100 + seed);
    sum += SquaredError(coding, x, Encode(coding, x, hadamard), hadamard);
  }
  return sum / (kPages * rows * dim);
}

// Both sides: an error below what theory allows means that the test does not test.
TEST_P(EncodeTest, GaussianErrorsLieInTheirBrackets) {
  const auto between = [](double error, double lo, double hi, const char* what) {
    EXPECT_GT(error, lo) << what;
    EXPECT_LT(error, hi) << what;
  };
  // 64 samples span 4.7 sigma, so 15 steps of 0.31: 0.0082 before the search.
  between(GaussianError(Coding::kKInt4, 64, 128), 0.0064, 0.0073, "int4, 64 rows");
  between(GaussianError(Coding::kKInt4, 16, 128), 0.0028, 0.0040, "int4, 16 rows");
  between(GaussianError(Coding::kKInt4, 128, 128), 0.0076, 0.0088, "int4, 128 rows");
  between(GaussianError(Coding::kKInt8, 64, 128), 2.0e-5, 3.5e-5, "K int8");
  between(GaussianError(Coding::kVInt8, 64, 128), 2.5e-5, 4.5e-5, "V int8");
  // Sixteen Lloyd-Max levels of a known deviation: 0.0095. A scale fitted to 64 values does better.
  between(GaussianError(Coding::kVLm4, 64, 128), 0.0066, 0.0075, "lm4");
  between(GaussianError(Coding::kVLm4, 64, 128, false), 0.0066, 0.0075, "lm4 unrotated");
  between(GaussianError(Coding::kVLm4, 16, 112), 0.0075, 0.0085, "lm4 in groups of 112");
}

TEST_P(EncodeTest, NoWorseThanThePlainEncoderAndInRange) {
  const bool scalar = GetParam() == "scalar";
  for (Coding coding : kCodings) {
    double fast = 0, plain = 0;
    for (std::uint32_t dim : kDims) {
      for (std::uint32_t rows : kPageSizes) {
        if (scalar && dim * rows > 8192) continue;  // slow, and the same code
        Rows x = Gaussian(rows, dim, dim + rows, 0.5f);
        x.mean.assign(dim, 0.25f);
        const auto page = Encode(coding, x);
        const double error = SquaredError(coding, x, page);
        const double reference = SquaredError(coding, x, Encode(coding, x, true, true));
        EXPECT_LT(error, 1.05 * reference) << rows << " x " << dim;  // one page scatters
        EXPECT_GT(error, 0.95 * reference) << rows << " x " << dim;
        fast += error;
        plain += reference;
        for (float v : DecodeRow(coding, x, page, rows - 1)) ASSERT_LT(std::abs(v), 3.5f);
      }
    }
    EXPECT_LT(fast, 1.01 * plain) << static_cast<int>(coding);
    EXPECT_GT(fast, 0.99 * plain) << static_cast<int>(coding);
  }
}

TEST(Encode, EveryVectorInstructionSetWritesTheSameBytes) {
  std::vector<std::string> isas = cpu::AvailableIsas();
  std::erase(isas, "scalar");
  for (Coding coding : kCodings) {
    for (std::uint32_t dim : kDims) {
      for (std::uint32_t rows : kPageSizes) {
        Rows x = Gaussian(rows, dim, 7 * dim + rows);
        std::mt19937 rng(dim);
        x.mean.resize(dim);
        for (std::uint32_t c = 0; c < dim; ++c) {  // from far off to nearly constant
          x.mean[c] = static_cast<float>(rng() % 64) - 32;
          if (c % 5 == 0) x.at(rows / 2, c) = FloatToHalf(1000);
        }
        for (std::uint32_t r = 0; r < rows; r += 3) x.Set(r, rng() % 2 == 0);
        std::vector<std::uint8_t> first;
        for (const std::string& isa : isas) {
          ASSERT_TRUE(cpu::ForceIsa(isa).ok());
          const auto page = Encode(coding, x);
          if (first.empty()) first = page;
          EXPECT_EQ(page, first) << isa << ": " << rows << " x " << dim;
        }
      }
    }
  }
  ASSERT_TRUE(cpu::ForceIsa("auto").ok());
}

TEST_P(EncodeTest, DeadRowsInfluenceNothing) {
  const half_t garbage[] = {
      FloatToHalf(65504.0f), FloatToHalf(-3.0e4f), 0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0};
  for (Coding coding : kCodings) {
    for (std::uint32_t rows : kPageSizes) {
      Rows x = Gaussian(rows, 72, rows);
      std::mt19937 rng(rows);
      for (std::uint32_t r = 0; r < rows; ++r) x.Set(r, rng() % 4 != 0);
      const auto clean = Encode(coding, x);
      for (std::uint32_t r = 0; r < rows; ++r) {
        if (IsValid(x.input(), r)) continue;
        for (std::uint32_t c = 0; c < 72; ++c) x.at(r, c) = garbage[rng() % std::size(garbage)];
      }
      EXPECT_EQ(Encode(coding, x), clean) << static_cast<int>(coding) << ", " << rows;
    }
  }
}

TEST_P(EncodeTest, ValidRowsAloneDecideAndAreKept) {
  // Three rows of a page: 4 bits can hold three values of a channel nearly exactly, but only if the
  // other rows do not widen the range.
  Rows x = Gaussian(64, 64, 5, 1000.0f);
  for (std::uint32_t r = 0; r < 64; ++r) x.Set(r, r == 3 || r == 40 || r == 63);
  Rows small = Gaussian(64, 64, 6);
  for (std::uint32_t r : {3u, 40u, 63u}) {
    for (std::uint32_t c = 0; c < 64; ++c) x.at(r, c) = small.at(r, c);
  }
  EXPECT_LT(SquaredError(Coding::kKInt4, x, Encode(Coding::kKInt4, x)) / (3 * 64), 0.004);
  const auto lm4 = Encode(Coding::kVLm4, x);
  EXPECT_LT(SquaredError(Coding::kVLm4, x, lm4) / (3 * 64), 0.009);
}

TEST_P(EncodeTest, NoValidRowsIsAPageOfNothing) {
  for (Coding coding : kCodings) {
    Rows x = Gaussian(32, 40, 9);
    for (std::uint32_t r = 0; r < 32; ++r) x.Set(r, false);
    const auto page = Encode(coding, x);
    for (float v : DecodeRow(coding, x, page, 7)) EXPECT_LT(std::abs(v), 0.01f);
  }
}

TEST_P(EncodeTest, ConstantChannelsAtTheMeanAndRowsOfZerosAreExact) {
  for (Coding coding : kCodings) {
    for (bool hadamard : {false, true}) {
      Rows x = Gaussian(64, 80, 11);
      x.mean.resize(80);
      for (std::uint32_t c = 0; c < 80; ++c) {
        x.mean[c] = HalfToFloat(FloatToHalf(static_cast<float>(c) * 1.37f - 50));
        for (std::uint32_t r = 0; r < 64; ++r) {
          if (IsK(coding) && c % 2 == 0) x.at(r, c) = FloatToHalf(x.mean[c]);
          if (!IsK(coding) && r % 3 == 0) x.at(r, c) = r % 2 == 0 ? 0 : 0x8000;
        }
      }
      const auto page = Encode(coding, x, hadamard);
      for (std::uint32_t r = 0; r < 64; ++r) {
        const auto out = DecodeRow(coding, x, page, r, hadamard);
        for (std::uint32_t c = 0; c < 80; ++c) {
          if (IsK(coding) ? c % 2 != 0 : r % 3 != 0) continue;
          ASSERT_EQ(out[c], x.value(r, c)) << r << ", " << c;
        }
      }
    }
  }
}

TEST_P(EncodeTest, NonFiniteCountsAsZero) {
  for (Coding coding : kCodings) {
    Rows bad = Gaussian(32, 64, 13), zero = bad;
    std::mt19937 rng(13);
    for (int i = 0; i < 100; ++i) {
      const std::uint32_t r = rng() % 32, c = rng() % 64;
      bad.at(r, c) = i % 3 == 0 ? 0x7C00 : i % 3 == 1 ? 0xFC01 : 0xFC00;
      zero.at(r, c) = 0;
    }
    EXPECT_EQ(Encode(coding, bad), Encode(coding, zero)) << static_cast<int>(coding);
  }
}

// A channel far from the mean loses precision by its range, not by its distance.
TEST_P(EncodeTest, OffsetsUpToThirtyRanges) {
  const std::uint32_t dim = 64;
  for (Coding coding : {Coding::kKInt4, Coding::kKInt8}) {
    for (float offset : {0.0f, 0.5f, 1.0f, 3.0f, 10.0f, 30.0f}) {
      Rows x(64, dim);
      std::mt19937 rng(17);
      std::uniform_real_distribution<float> uniform(-0.5f, 0.5f);
      for (std::uint32_t c = 0; c < dim; ++c) {
        const float range = std::exp2(static_cast<float>(c % 8) - 4),
                    sign = c % 2 == 0 ? 1.0f : -1.0f;
        const float at = sign * offset * range * (1 - static_cast<float>(c) / 400);
        for (std::uint32_t r = 0; r < 64; ++r) x.at(r, c) = FloatToHalf(at + range * uniform(rng));
      }
      const auto page = Encode(coding, x);
      const float steps = coding == Coding::kKInt4 ? 15 : 255;
      float worst = 0, sum = 0;  // in ranges
      for (std::uint32_t r = 0; r < 64; ++r) {
        const auto out = DecodeRow(coding, x, page, r);
        for (std::uint32_t c = 0; c < dim; ++c) {
          const float range = std::exp2(static_cast<float>(c % 8) - 4);
          const float error = std::abs(out[c] - x.value(r, c)) / range;
          worst = std::max(worst, error);
          sum += error * error;
        }
      }
      // A scale that covers the range wherever the minima fall, hence this error at most; least
      // squares may spend all of a channel's on one value.
      const float gap = std::max(coding == Coding::kKInt4 ? 0.25f : 0.02f, offset / 24.5f);
      const float rms = std::sqrt(sum / (64 * dim)), most = (1 + gap) / steps / std::sqrt(12.0f);
      EXPECT_LT(rms, 1.1f * most) << "offset " << offset;
      EXPECT_LT(worst, 1.1f * 8 * most) << "offset " << offset;
      EXPECT_GT(rms, 0.7f / steps / std::sqrt(12.0f)) << "offset " << offset;
    }
  }
}

// Ten ranges off, unit Gaussian data has 1.4 times the error that it has at the mean.
TEST_P(EncodeTest, FarOffGaussianErrorLiesInItsBracket) {
  double sum = 0;
  for (std::uint32_t seed = 0; seed < 8; ++seed) {
    Rows x = Gaussian(64, 64, 500 + seed);
    x.mean.resize(64);
    std::mt19937 rng(seed);
    for (float& m : x.mean) m = (rng() % 2 == 0 ? 47.0f : -47.0f) * (0.8f + 1e-3f * (rng() % 400));
    sum += SquaredError(Coding::kKInt4, x, Encode(Coding::kKInt4, x));
  }
  EXPECT_GT(sum / (8 * 64 * 64), 0.0085);
  EXPECT_LT(sum / (8 * 64 * 64), 0.0107);
}

TEST_P(EncodeTest, TheMeanTakesAConstantBiasAway) {
  Rows with = Gaussian(64, 64, 19), without = with;
  with.mean.assign(64, 200.0f);
  for (std::uint32_t r = 0; r < 64; ++r) {
    for (std::uint32_t c = 0; c < 64; ++c) {
      with.at(r, c) = FloatToHalf(with.value(r, c) + 200.0f);
      without.at(r, c) = with.at(r, c);
    }
  }
  const double e_with = SquaredError(Coding::kKInt4, with, Encode(Coding::kKInt4, with)) / 4096;
  const double e_without =
      SquaredError(Coding::kKInt4, without, Encode(Coding::kKInt4, without)) / 4096;
  EXPECT_LT(e_with, 0.0090);  // f16 at 200 has steps of 1/8 already
  EXPECT_GT(e_without, 2 * e_with);
  EXPECT_LT(e_without, 0.5);
}

TEST_P(EncodeTest, ExtremesStayFiniteAndInOrder) {
  for (Coding coding : kCodings) {
    for (float size : {65504.0f, 3000.0f, 1e-3f, 6e-8f}) {
      Rows x = Gaussian(16, 64, 23);
      for (std::uint32_t r = 0; r < 16; ++r) {
        for (std::uint32_t c = 0; c < 64; ++c)
          x.at(r, c) = FloatToHalf((r + c) % 2 == 0 ? size : -size);
      }
      const auto page = Encode(coding, x, false);
      for (std::uint32_t r = 0; r < 16; ++r) {
        const auto out = DecodeRow(coding, x, page, r, false);
        for (std::uint32_t c = 0; c < 64; ++c) {
          ASSERT_TRUE(std::isfinite(out[c]));
          ASSERT_LE(std::abs(out[c]), 1.1f * size + 0.001f);
          if (size > 0.1f) {
            ASSERT_EQ(out[c] > 0, (r + c) % 2 == 0) << size;
          }
        }
      }
    }
  }
}

TEST_P(EncodeTest, GroupsHaveTheirOwnScales) {
  for (Coding coding : {Coding::kVInt8, Coding::kVLm4}) {
    for (std::uint32_t group : {8u, 24u, 48u, 96u, 192u}) {
      Rows x(16, 192, group);
      std::mt19937 rng(group);
      std::normal_distribution<float> normal;
      for (std::uint32_t r = 0; r < 16; ++r) {
        for (std::uint32_t c = 0; c < 192; ++c) {
          x.at(r, c) = FloatToHalf(normal(rng) * (c / group % 2 == 0 ? 1.0f : 64.0f));
        }
      }
      const auto page = Encode(coding, x, false);
      double error = 0;  // of the quiet groups
      int n = 0;
      for (std::uint32_t r = 0; r < 16; ++r) {
        const auto out = DecodeRow(coding, x, page, r, false);
        for (std::uint32_t c = 0; c < 192; ++c) {
          if (c / group % 2 != 0) continue;
          error += (out[c] - x.value(r, c)) * (out[c] - x.value(r, c));
          ++n;
        }
      }
      EXPECT_LT(error / n, 0.010) << group;
    }
  }
}

TEST_P(EncodeTest, PaddingIsCodeZero) {
  for (Coding coding : {Coding::kVInt8, Coding::kVLm4}) {
    const Rows x = Gaussian(16, 40, 29);
    const auto page = Encode(coding, x);
    const std::size_t scales = EncodedBytes(coding, x.shape).scales;
    for (std::uint32_t t = 0; t < 16; ++t) {
      for (std::uint32_t c = 40; c < 48; ++c) {
        EXPECT_EQ(page[scales + VPlace(coding, x.shape, t, c).byte], 0) << t << ", " << c;
      }
    }
  }
}

// Saving and restoring goes through f16 rows: pages must come back as they were.
TEST_P(EncodeTest, EncodingAgainChangesNearlyNothing) {
  for (Coding coding : kCodings) {
    std::size_t same = 0, total = 0;
    double error = 0, error_again = 0;
    for (std::uint32_t seed = 0; seed < 8; ++seed) {
      Rows x = Gaussian(64, 128, 300 + seed), again = x;
      x.mean.resize(128);
      std::mt19937 rng(seed);
      for (float& m : x.mean) m = static_cast<float>(rng() % 200) / 100 - 1;
      again.mean = x.mean;
      const auto page = Encode(coding, x);
      for (std::uint32_t r = 0; r < 64; ++r) {
        const auto out = DecodeRow(coding, x, page, r);
        for (std::uint32_t c = 0; c < 128; ++c) again.at(r, c) = FloatToHalf(out[c]);
      }
      const auto second = Encode(coding, again);
      for (std::uint32_t r = 0; r < 64; ++r) {
        const auto out = DecodeRow(coding, again, second, r);
        for (std::uint32_t c = 0; c < 128; ++c, ++total) {
          same += std::abs(out[c] - again.value(r, c)) < 0.003f;
          error_again += (out[c] - x.value(r, c)) * (out[c] - x.value(r, c));
        }
      }
      error += SquaredError(coding, x, page);
    }
    EXPECT_GT(static_cast<double>(same) / static_cast<double>(total), 0.99)
        << static_cast<int>(coding);
    EXPECT_LT(error_again, 1.03 * error) << static_cast<int>(coding);
  }
}

}  // namespace
}  // namespace kvtamp::codec
