// kRows: every other format, against what its name says.
#include "codec/rows.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "codec/encode_fixture.h"

namespace kvtamp::codec {
namespace {

struct Coded {
  Rows rows;
  std::vector<std::uint8_t> page;
  double error = 0, bits = 0;  // mean squared, of unit Gaussian data
};

Coded Code(const char* name, Side side, std::uint32_t rows = 64, std::uint32_t dim = 64,
           double outlier = 0) {
  const Format format = Resolve(ParseFormat(name, side).value(), side, dim).value();
  EXPECT_EQ(CodingOf(format, side).value(), Coding::kRows) << name;
  Coded c{Gaussian(rows, dim, 5), {}, 0, 0};
  c.rows.shape = ShapeOf(format, side, dim, rows);
  for (std::uint32_t r = 0; r < rows && outlier != 0; ++r)
    c.rows.at(r, 7) = FloatToHalf(static_cast<float>(outlier) * c.rows.value(r, 7));
  const PageBytes bytes = EncodedBytes(Coding::kRows, c.rows.shape);
  c.page.assign(bytes.total + 16, 0xCD);
  if (side == Side::kK) {
    EncodeK(Coding::kRows, c.rows.shape, c.rows.input(), nullptr, c.page.data());
  } else {
    EncodeV(Coding::kRows, c.rows.shape, c.rows.input(), false, c.page.data());
  }
  EXPECT_TRUE(std::all_of(c.page.end() - 16, c.page.end(), [](auto b) { return b == 0xCD; }));
  std::vector<float> out(dim);
  for (std::uint32_t r = 0; r < rows; ++r) {
    if (side == Side::kK) {
      DecodeRowK(Coding::kRows, c.rows.shape, c.page.data(), nullptr, r, out.data());
    } else {
      DecodeRowV(Coding::kRows, c.rows.shape, c.page.data(), false, r, out.data());
    }
    for (std::uint32_t i = 0; i < dim; ++i) {
      const double d = out[i] - c.rows.value(r, i);
      c.error += d * d / (rows * dim);
    }
  }
  c.bits = 8.0 * static_cast<double>(bytes.total) / (rows * dim);
  return c;
}

// Both sides of each bracket: below is what theory allows a scalar code of so many levels with a
// scale fitted to 32 or 64 values.
TEST(RowsFormats, ErrorsAndSizesLieInTheirBrackets) {
  const struct {
    const char* name;
    double lo, hi, bits;
  } cases[] = {
      {"int8_pt", 2e-5, 6e-5, 8.5},         {"int4_pt", 0.006, 0.012, 4.5},
      {"int4_g32_pt+had", 0.004, 0.009, 5}, {"int4_pt_sym", 0.007, 0.014, 4.25},
      {"int3_pt", 0.025, 0.045, 3.5},       {"int2_pc_sym", 0.10, 0.45, 2.25},
      {"int6_g16_pc", 2e-4, 6e-4, 8},       {"lm2_pt+had", 0.09, 0.12, 2.25},
      {"lm3_pt+had", 0.024, 0.034, 3.25},   {"lm5_pc", 0.0015, 0.0027, 5.25},
      {"fp8_e4m3_pt", 4e-4, 9e-4, 8.25},    {"fp8_e5m2_pt+had", 1.5e-3, 3.5e-3, 8.25},
  };
  for (const auto& c : cases) {
    for (Side side : {Side::kK, Side::kV}) {
      const Coded coded = Code(c.name, side);
      EXPECT_GT(coded.error, c.lo) << c.name;
      EXPECT_LT(coded.error, c.hi) << c.name;
      EXPECT_DOUBLE_EQ(coded.bits, c.bits) << c.name;
    }
  }
}

TEST(RowsFormats, EverySizeOfHeadAndPage) {
  for (const char* name : {"int3_pt", "int5_pc_sym+out3", "lm3_pt+had", "fp8_e5m2_pc"}) {
    for (std::uint32_t dim : kDims)
      for (std::uint32_t rows : kPageSizes)
        EXPECT_LT(Code(name, Side::kV, rows, dim).error, 0.08) << name << " " << dim << " " << rows;
  }
}

TEST(RowsFormats, OutliersAreKeptApart) {
  const double with = Code("int4_pt+out1", Side::kK, 64, 64, 100).error;
  const double without = Code("int4_pt", Side::kK, 64, 64, 100).error;
  EXPECT_LT(with, 0.02);  // its own channel is off by f16's rounding of 100
  EXPECT_GT(without, 10 * with);
  EXPECT_EQ(Code("int4_pt+out1", Side::kK).bits, 4.5 + 8.0 * (2 + 128) / (64 * 64));
}

TEST(RowsFormats, DeadRowsAndNotANumber) {
  const Format format =
      Resolve(ParseFormat("int4_pc+out1", Side::kK).value(), Side::kK, 64).value();
  Rows x = Gaussian(64, 64, 2), y = x;
  x.shape = y.shape = ShapeOf(format, Side::kK, 64, 64);
  for (std::uint32_t r = 3; r < 64; r += 2) {
    x.Set(r, false);
    y.Set(r, false);
    for (std::uint32_t c = 0; c < 64; ++c) y.at(r, c) = 0x7E00;
  }
  x.at(4, 5) = y.at(4, 5) = 0x7C00;
  const auto coded = [](const Rows& rows) {
    std::vector<std::uint8_t> page(EncodedBytes(Coding::kRows, rows.shape).total);
    EncodeK(Coding::kRows, rows.shape, rows.input(), nullptr, page.data());
    return page;
  };
  EXPECT_EQ(coded(x), coded(y));
  std::vector<float> out(64);
  DecodeRowK(Coding::kRows, x.shape, coded(x).data(), nullptr, 4, out.data());
  for (float v : out) EXPECT_TRUE(std::isfinite(v));
}

}  // namespace
}  // namespace kvtamp::codec
