#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "cpu/convert.h"
#include "cpu/cpu.h"
#include "cpu/every_isa.h"

namespace kvtamp::cpu {
namespace {

INSTANTIATE_TEST_SUITE_P(Isa, EveryIsa, testing::ValuesIn(AvailableIsas()),
                         [](const auto& info) { return info.param; });

TEST(Cpu, BestIsActiveUnlessForced) {
  const std::vector<std::string> isas = AvailableIsas();
  ASSERT_FALSE(isas.empty());
  EXPECT_EQ(ActiveIsa(), isas.front());
  // Set where it is known which processor this is: where qemu plays it.
  if (const char* known = std::getenv("KVTAMP_TEST_ISA")) {
    EXPECT_EQ(ActiveIsa(), known);
  }
  // Dispatch tables are initialised by now, and must still follow.
  ASSERT_TRUE(ForceIsa(isas.back()).ok());
  EXPECT_EQ(ActiveIsa(), isas.back());
  EXPECT_EQ(AvailableIsas(), isas);
  ASSERT_TRUE(ForceIsa("auto").ok());
  EXPECT_EQ(ActiveIsa(), isas.front());
}

TEST(Cpu, UnknownNameIsAnErrorThatListsTheOthers) {
  const Status status = ForceIsa("mmx");
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  for (const std::string& isa : AvailableIsas()) {
    EXPECT_NE(status.message().find(isa), std::string::npos) << status.message();
  }
  EXPECT_EQ(ActiveIsa(), AvailableIsas().front());
}

TEST_P(EveryIsa, IsTheOneThatRuns) { EXPECT_EQ(ActiveIsa(), GetParam()); }

TEST_P(EveryIsa, AllHalvesBecomeTheirFloats) {
  std::vector<half_t> in(65536);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<half_t>(i);
  std::vector<float> out(in.size());
  HalfToFloat(in.data(), out.data(), in.size());
  for (std::size_t i = 0; i < in.size(); ++i) {
    const float want = kvtamp::HalfToFloat(in[i]);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(out[i])) << i;  // hardware makes signalling NaNs quiet
    } else {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]), std::bit_cast<std::uint32_t>(want)) << i;
    }
  }
}

TEST_P(EveryIsa, FloatsRoundAsDefinedAndBadOnesAreCounted) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 rng(seed);
  std::vector<float> in;
  for (int i = 0; i < 400000; ++i)
    in.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(rng())));
  // Every boundary: each finite half, the midpoint above it, and the floats around both.
  for (std::uint32_t h = 0; h < 0x7C00u; ++h) {
    const float a = kvtamp::HalfToFloat(static_cast<half_t>(h));
    const float b = h == 0x7BFFu ? 65536.0f : kvtamp::HalfToFloat(static_cast<half_t>(h + 1));
    const float mid = 0.5f * (a + b);
    for (const float f : {a, mid}) {
      for (const float g : {f, std::nextafter(f, 0.0f), std::nextafter(f, 1e30f)}) {
        in.push_back(g);
        in.push_back(-g);
      }
    }
  }
  const float inf = std::numeric_limits<float>::infinity();
  for (const float f : {inf, -inf, std::nanf(""), 1e38f, -1e38f, 65519.99f, 65520.0f})
    in.push_back(f);
  std::size_t want_changed = 0;
  std::vector<half_t> want;
  for (const float f : in) {
    half_t h = kvtamp::FloatToHalf(f);
    if ((h & 0x7C00u) == 0x7C00u) {
      ++want_changed;
      h = std::isnan(f) ? half_t{0} : static_cast<half_t>((h & 0x8000u) | 0x7BFFu);
    }
    want.push_back(h);
  }
  std::vector<half_t> out(in.size());
  EXPECT_EQ(FloatToHalf(in.data(), out.data(), in.size()), want_changed);
  for (std::size_t i = 0; i < in.size(); ++i) ASSERT_EQ(out[i], want[i]) << in[i];
}

TEST_P(EveryIsa, ConvertsAnyLength) {
  for (std::size_t n = 0; n < 70; ++n) {
    std::vector<float> in(n), back(n + 1, 7.0f);
    std::vector<half_t> half(n + 1, 0x1234);
    for (std::size_t i = 0; i < n; ++i) in[i] = 0.25f * static_cast<float>(i);
    EXPECT_EQ(FloatToHalf(in.data(), half.data(), n), 0u);
    HalfToFloat(half.data(), back.data(), n);
    EXPECT_TRUE(std::equal(in.begin(), in.end(), back.begin()));
    EXPECT_EQ(half[n], 0x1234);
    EXPECT_EQ(back[n], 7.0f);
  }
}

}  // namespace
}  // namespace kvtamp::cpu
