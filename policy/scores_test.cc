// Each score against its formula, worked out by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include "policy/policy_fixture.h"
#include "policy/scores/h2o.h"
#include "policy/scores/keydiff.h"
#include "policy/scores/knorm.h"
#include "policy/scores/kvzip.h"
#include "policy/scores/pool.h"
#include "policy/scores/r_kv.h"
#include "policy/scores/random.h"
#include "policy/scores/snapkv.h"
#include "policy/scores/streaming_llm.h"
#include "policy/scores/tova.h"
#include "policy/scores/value_norm.h"

namespace kvtamp::policy {
namespace {

using testing::ElementsAre;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinite = std::numeric_limits<float>::infinity();

TEST(StreamingLlm, SinksThenTheNewest) {
  std::vector<float> score(6);
  StreamingLlm(2, score);
  EXPECT_THAT(score, ElementsAre(6, 6, 2, 3, 4, 5));
  StreamingLlm(0, score);
  EXPECT_THAT(score, ElementsAre(0, 1, 2, 3, 4, 5));
  StreamingLlm(9, score);  // more sinks than entries
  EXPECT_THAT(score, ElementsAre(6, 6, 6, 6, 6, 6));
}

TEST(H2o, SumsAndMeansOfColumns) {
  // p of three causal queries: 1; .4 .6; .2 .3 .5
  OwnedHead own;
  own.sum = {1.6f, 0.9f, 0.5f};
  own.rows = {3, 2, 1};
  std::vector<float> score(3);
  H2o(own.View(), score);
  EXPECT_THAT(score, ElementsAre(1.6f, 0.9f, 0.5f));
  ObservedAttention(own.View(), score);
  EXPECT_THAT(score, ElementsAre(Near(1.6 / 3), Near(0.45), Near(0.5)));
  own.rows[2] = 0;  // no query has seen it
  ObservedAttention(own.View(), score);
  EXPECT_EQ(score[2], 0);
}

TEST(Tova, OneChoiceForAllHeads) {
  OwnedHead a, b;
  a.positions = b.positions = {0, 1, 2};
  a.last = {0.1f, 0.6f, 0.3f};
  b.last = {0.5f, 0.1f, 0.4f};
  std::vector<float> x(3), y(3);
  std::vector<Head> heads = {a.View(), b.View()};
  const std::span<float> scores[] = {x, y};
  Tova(heads, scores);
  EXPECT_THAT(x, ElementsAre(Near(0.3), Near(0.35), Near(0.35)));
  EXPECT_EQ(x, y);
}

TEST(Tova, MatchesTokensByPositionWhereHeadsHoldDifferentOnes) {
  OwnedHead a, b;
  a.positions = {0, 5, 9};
  a.last = {0.1f, 0.6f, kNan};
  b.positions = {5, 9};
  b.last = {0.2f, 0.8f};
  std::vector<float> x(3), y(2);
  std::vector<Head> heads = {a.View(), b.View()};
  const std::span<float> scores[] = {x, y};
  Tova(heads, scores);
  EXPECT_THAT(x, ElementsAre(Near(0.1), Near(0.4), Near(0.8)));
  EXPECT_THAT(y, ElementsAre(Near(0.4), Near(0.8)));
}

TEST(Pool, MeanCountsZerosBeyondTheEndsAndMaxTakesTheLargest) {
  std::vector<float> x = {3, 0, 0, 6, 0};
  Smooth(Pool::kMean, 3, x);
  EXPECT_THAT(x, ElementsAre(1, 1, 2, 2, 2));
  x = {3, 0, 1, 6, 0};
  Smooth(Pool::kMax, 3, x);
  EXPECT_THAT(x, ElementsAre(3, 3, 6, 6, 6));
  x = {3, 0, 1};
  Smooth(Pool::kMean, 1, x);
  EXPECT_THAT(x, ElementsAre(3, 0, 1));
  x = {3, kNan, 3};
  Smooth(Pool::kMean, 3, x);
  EXPECT_THAT(x, ElementsAre(1, kWorst, 1));
}

TEST(SnapKv, SmoothsWhatIsBeforeTheWindowAndKeepsTheWindow) {
  OwnedHead own;
  own.window = {3, 0, 0, 6, 9, 8};
  std::vector<float> score(6);
  SnapKv(own.View(), 2, 3, score);
  EXPECT_THAT(score, ElementsAre(1, 1, 2, 2, 2, 2));  // of the 9 beside it nothing
  SnapKv(own.View(), 6, 3, score);
  EXPECT_THAT(score, ElementsAre(0, 0, 0, 0, 0, 0));
  SnapKv(own.View(), 100, 3, score);
  EXPECT_THAT(score, ElementsAre(0, 0, 0, 0, 0, 0));
  own.window[5] = kNan;
  SnapKv(own.View(), 2, 3, score);
  EXPECT_THAT(score, ElementsAre(1, 1, 2, 2, 2, kWorst));
}

TEST(KvZip, TheLargestAttentionOfTheReplay) {
  OwnedHead own;
  own.max = {0.25f, 0.5f, kNan};
  std::vector<float> score(3);
  KvZip(own.View(), score);
  EXPECT_THAT(score, ElementsAre(0.25f, 0.5f, kWorst));
}

TEST(Knorm, MinusTheLengthOfTheKey) {
  OwnedHead own;
  own.k = {3, 4, 0, 0, -1, 0, kInfinite, 0};
  std::vector<float> score(4);
  Knorm(own.View(2), score);
  EXPECT_THAT(score, ElementsAre(-5, 0, -1, kWorst));
}

TEST(KeyDiff, MinusTheCosineWithTheMeanOfDirections) {
  OwnedHead own;
  own.k = {1, 0, 2, 0, 0, 3};  // directions add up to (2, 1)
  std::vector<float> score(3);
  KeyDiff(own.View(2), score);
  const double root = std::sqrt(5.0);
  EXPECT_THAT(score, ElementsAre(Near(-2 / root), Near(-2 / root), Near(-1 / root)));
}

TEST(KeyDiff, LengthsOfKeysDoNotMatter) {
  OwnedHead own = FullHead(20, 1);
  std::vector<float> before(20), after(20);
  KeyDiff(own.head, before);
  for (std::size_t i = 0; i < own.k.size(); ++i)
    own.k[i] *= std::exp2(static_cast<float>(i / kDimK));
  KeyDiff(own.head, after);
  EXPECT_EQ(before, after);
  own.k[0] = -own.k[0];  // a direction does
  KeyDiff(own.head, after);
  EXPECT_NE(before[0], after[0]);
}

TEST(KeyDiff, ZerosAndNaNTakeNoPartInTheMean) {
  OwnedHead own;
  own.k = {1, 0, 0, 0, kNan, 1, 0, 1};
  std::vector<float> score(4);
  KeyDiff(own.View(2), score);
  const double root = std::sqrt(2.0);
  EXPECT_THAT(score, ElementsAre(Near(-1 / root), 0, kWorst, Near(-1 / root)));
}

TEST(ValueNorm, TheSumOfMagnitudes) {
  OwnedHead own;
  own.v = {1, -2, 0, 0, 0.5f, 0, kNan, 0};
  own.sum = {2, 3, 4, 5};
  std::vector<float> score(4);
  ValueNorm(own.View(0, 2), score);
  EXPECT_THAT(score, ElementsAre(3, 0, 0.5f, kWorst));
  H2o(own.View(0, 2), score);
  WeightByValueNorm(own.head, score);
  EXPECT_THAT(score, ElementsAre(6, 0, 2, kWorst));
  score = {kWorst, kWorst, 1, 1};  // also times 0
  WeightByValueNorm(own.head, score);
  EXPECT_THAT(score, ElementsAre(kWorst, kWorst, 0.5f, kWorst));
}

TEST(RKv, RedundancyCountsLookAlikesButForTheNewest) {
  OwnedHead own;
  own.k = {1, 0, 0, 1, 2, 0, 3, 0};  // the first, third and fourth say the same
  std::vector<float> redundancy(4);
  RKvOptions options;
  Redundancy(own.View(2), options, redundancy);
  // Means of cosines: (1 + 1) / 4; 0; 1 / 4, its term of the fourth left out; 0, both left out.
  const double total = std::exp(0.5) + 1 + std::exp(0.25) + 1;
  EXPECT_THAT(redundancy, ElementsAre(Near(std::exp(0.5) / total), Near(1 / total),
                                      Near(std::exp(0.25) / total), Near(1 / total)));
  options.n_retain = 0;
  Redundancy(own.View(2), options, redundancy);
  const double all = 3 * std::exp(0.5) + 1;
  EXPECT_THAT(redundancy, ElementsAre(Near(std::exp(0.5) / all), Near(1 / all),
                                      Near(std::exp(0.5) / all), Near(std::exp(0.5) / all)));
  options.n_retain = 1;
  options.threshold = 1;  // nothing is more alike
  Redundancy(own.View(2), options, redundancy);
  EXPECT_THAT(redundancy[3], Near(std::exp(0.5) / all));
}

TEST(RKv, KeysOfLengthZeroAreLikeNoOther) {
  OwnedHead own;
  own.k = {1, 0, 0, 0};
  std::vector<float> redundancy(2);
  Redundancy(own.View(2), {}, redundancy);
  EXPECT_THAT(redundancy, ElementsAre(Near(0.5), Near(0.5)));
}

TEST(RKv, MixesImportanceAndRedundancy) {
  OwnedHead own;
  own.k = {1, 0, 0, 1, 2, 0, 3, 0};
  own.window = {0.4f, 0.8f, 0, 0};
  std::vector<float> score(4);
  RKvOptions options;
  options.window = 1;
  options.kernel = 1;
  RKv(own.View(2), 2, options, score);
  const double total = std::exp(0.5) + 1 + std::exp(0.25) + 1;
  const double best = 0.1 * 0.4 - 0.9 / total;
  EXPECT_THAT(score, ElementsAre(Near(0.1 * 0.2 - 0.9 * std::exp(0.5) / total), Near(best),
                                 Near(-0.9 * std::exp(0.25) / total), Near(best)));
  options.kernel = 3;  // the third has the second's attention
  RKv(own.View(2), 2, options, score);
  EXPECT_THAT(score[0], Near(0.1 * 0.4 - 0.9 * std::exp(0.5) / total));
  EXPECT_THAT(score[2], Near(0.1 * 0.4 - 0.9 * std::exp(0.25) / total));
}

TEST(RKv, RedundancyIsThatOfTheWholeMatrix) {
  const std::uint32_t n = 40;
  OwnedHead own = FullHead(n, 2);
  own.k[7] = kNan;
  RKvOptions options;
  options.n_retain = 2;
  options.threshold = 0.3f;
  std::vector<float> redundancy(n);
  Redundancy(own.head, options, redundancy);
  const UnitRows unit = Normalise(own.head.k);
  std::vector<double> mean(n);
  for (std::uint32_t i = 0; i < n; ++i) {
    std::vector<double> row(n);
    for (std::uint32_t j = 0; j < n; ++j) {
      for (std::uint32_t c = 0; c < kDimK && j != i; ++c) {
        row[j] += double{unit.x[i * kDimK + c]} * unit.x[j * kDimK + c];
      }
    }
    std::uint32_t spared = 0;
    for (std::uint32_t j = n; j-- > 0 && spared < 2;) {
      if (row[j] <= 0.3) continue;
      row[j] = 0;
      ++spared;
    }
    for (std::uint32_t j = 0; j < n; ++j) mean[j] += row[j] / n;
  }
  double total = 0;
  for (std::uint32_t i = 1; i < n; ++i) total += std::exp(mean[i]);
  EXPECT_EQ(redundancy[0], 0);
  for (std::uint32_t i = 1; i < n; ++i) EXPECT_THAT(redundancy[i], Near(std::exp(mean[i]) / total));
}

TEST(Random, IsSpreadEvenlyAndFollowsTheToken) {
  OwnedHead own;
  for (std::int32_t i = 0; i < 4000; ++i) own.positions.push_back(i);
  std::vector<float> score(4000);
  Random(own.View(), 7, 3, 1, score);
  const double mean = std::accumulate(score.begin(), score.end(), 0.0) / 4000;
  EXPECT_NEAR(mean, 0.5, 0.02);  // 4 standard errors
  EXPECT_LT(*std::max_element(score.begin(), score.end()), 1);
  EXPECT_GE(*std::min_element(score.begin(), score.end()), 0);
  EXPECT_GT(std::set<float>(score.begin(), score.end()).size(), 3990u);
  std::vector<float> again(4000);
  Random(own.head, 7, 3, 1, again);
  EXPECT_EQ(score, again);
  for (const auto [seed, layer, head] : {std::array{8, 3, 1}, {7, 4, 1}, {7, 3, 0}, {7, 1, 3}}) {
    Random(own.head, static_cast<std::uint64_t>(seed), static_cast<std::uint32_t>(layer),
           static_cast<std::uint32_t>(head), again);
    EXPECT_NE(score, again);
  }
  OwnedHead left;
  left.positions = {17, 2000, 3999};
  std::vector<float> theirs(3);
  Random(left.View(), 7, 3, 1, theirs);
  EXPECT_THAT(theirs, ElementsAre(score[17], score[2000], score[3999]));
}

TEST(Rows, HalfFloatsAndStridesGiveTheSameScores) {
  OwnedHead own = FullHead(9, 4);
  for (float& x : own.k) x = HalfToFloat(FloatToHalf(x));
  std::vector<float> plain(9), half(9), apart(9);
  KeyDiff(own.head, plain);
  std::vector<half_t> f16(9 * (kDimK + 3), FloatToHalf(99));
  std::vector<float> f32(9 * (kDimK + 3), 99);
  for (std::size_t i = 0; i < own.k.size(); ++i) {
    const std::size_t at = i / kDimK * (kDimK + 3) + i % kDimK;
    f16[at] = FloatToHalf(own.k[i]);
    f32[at] = own.k[i];
  }
  own.head.k = {nullptr, f16.data(), 9, kDimK, kDimK + 3};
  KeyDiff(own.head, half);
  own.head.k = {f32.data(), nullptr, 9, kDimK, kDimK + 3};
  KeyDiff(own.head, apart);
  EXPECT_EQ(plain, half);
  EXPECT_EQ(plain, apart);
}

}  // namespace
}  // namespace kvtamp::policy
