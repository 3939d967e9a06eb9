#include "policy/select.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "policy/policy_fixture.h"

namespace kvtamp::policy {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

using Mask = std::vector<std::uint8_t>;
using Scores = std::vector<float>;

TEST(SelectKept, TheBestByScoreOfEqualOnesTheNewer) {
  EXPECT_THAT(SelectKept(Scores{0.1f, 0.9f, 0.5f, 0.7f}, {}, 2), ElementsAre(1, 3));
  EXPECT_THAT(SelectKept(Scores{1, 1, 1, 1, 1}, {}, 2), ElementsAre(3, 4));
  EXPECT_THAT(SelectKept(Scores{2, 1, 1, 0}, {}, 2), ElementsAre(0, 2));
  EXPECT_THAT(SelectKept(Scores{0.0f, -0.0f, -1}, {}, 1), ElementsAre(1));
}

TEST(SelectKept, ProtectedEntriesStayAndCount) {
  const Scores scores = {0, 9, 8, 7, 0};
  EXPECT_THAT(SelectKept(scores, Mask{1, 0, 0, 0, 1}, 3), ElementsAre(0, 1, 4));
  EXPECT_THAT(SelectKept(scores, Mask{1, 0, 0, 0, 1}, 1), ElementsAre(0, 4));  // raised
  EXPECT_THAT(SelectKept(scores, Mask{1, 1, 1, 1, 1}, 0), ElementsAre(0, 1, 2, 3, 4));
}

TEST(SelectKept, NeverNothingAndNeverMoreThanThereIs) {
  EXPECT_THAT(SelectKept(Scores{1, 3, 2}, {}, 0), ElementsAre(1));
  EXPECT_THAT(SelectKept(Scores{1, 3, 2}, {}, 100), ElementsAre(0, 1, 2));
  EXPECT_THAT(SelectKept({}, {}, 5), IsEmpty());
}

TEST(SelectKept, WhatIsNotFiniteComesLast) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const float least = std::numeric_limits<float>::lowest();
  EXPECT_THAT(SelectKept(Scores{nan, least, inf, least, -inf}, {}, 2), ElementsAre(1, 3));
  EXPECT_THAT(SelectKept(Scores{nan, least, inf, least, -inf}, {}, 4), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(SelectKept(Scores{nan, nan, nan}, {}, 2), ElementsAre(1, 2));
  EXPECT_THAT(SelectKept(Scores{nan, 1, 2}, Mask{1, 0, 0}, 2), ElementsAre(0, 2));
}

TEST(SelectKept, IsThatOfAFullSort) {
  std::mt19937 rng(5);
  for (int round = 0; round < 300; ++round) {
    const std::uint32_t n = rng() % 60;
    Scores scores(n);
    Mask mask(n);
    for (float& s : scores) s = static_cast<float>(rng() % 8);  // many are equal
    for (auto& m : mask) m = rng() % 5 == 0;
    const std::uint32_t keep = rng() % 70;
    std::vector<std::uint32_t> order(n);
    std::iota(order.begin(), order.end(), 0u);
    std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
      if (mask[a] != mask[b]) return mask[a] > mask[b];
      return scores[a] != scores[b] ? scores[a] > scores[b] : a > b;
    });
    const auto n_protected = static_cast<std::uint32_t>(std::count(mask.begin(), mask.end(), 1));
    order.resize(std::min(n, std::max({keep, n_protected, 1u})));
    std::sort(order.begin(), order.end());
    EXPECT_EQ(SelectKept(scores, mask, keep), order) << "round " << round;
  }
}

TEST(Protect, SinksRecentWindowAndTheTailOfThePrompt) {
  const std::vector<std::int32_t> positions = {0, 1, 4, 5, 9, 10, 11, 12, 19, 20};
  Protection p{.n_sink = 2, .n_recent = 2, .n_prompt = 12, .n_tail = 2};
  EXPECT_THAT(Protect(positions, p), ElementsAre(1, 1, 0, 0, 0, 1, 1, 0, 1, 1));
  p = {.n_sink = 0, .n_recent = 0};
  EXPECT_THAT(Protect(positions, p), ElementsAre(0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  p = {.n_sink = 5, .n_recent = 0};  // positions, not entries
  EXPECT_THAT(Protect(positions, p), ElementsAre(1, 1, 1, 0, 0, 0, 0, 0, 0, 0));
  p = {.n_sink = 0, .n_recent = 5};
  EXPECT_THAT(Protect(positions, p), ElementsAre(0, 0, 0, 0, 0, 0, 0, 0, 1, 1));
  p = {.n_sink = 4, .n_recent = 128};
  EXPECT_THAT(Protect(positions, p), ElementsAre(1, 1, 1, 1, 1, 1, 1, 1, 1, 1));
  p = {.n_sink = 0, .n_recent = 0, .n_prompt = 3, .n_tail = 100};
  EXPECT_THAT(Protect(positions, p), ElementsAre(1, 1, 0, 0, 0, 0, 0, 0, 0, 0));
  EXPECT_THAT(Protect({}, p), IsEmpty());
}

TEST(Protect, HeadAndTailOfSegments) {
  const std::vector<std::int32_t> positions = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  const Protection none{.n_sink = 0, .n_recent = 0};
  const Segment segments[] = {{2, 7, 1, 2}, {6, 9, 2, 0}};
  EXPECT_THAT(Protect(positions, none, segments), ElementsAre(0, 0, 1, 0, 0, 1, 1, 1, 0, 0));
  const Segment all[] = {{3, 6, 2, 2}};
  EXPECT_THAT(Protect(positions, none, all), ElementsAre(0, 0, 0, 1, 1, 1, 0, 0, 0, 0));
  const Segment odd[] = {{5, 5, 3, 3}, {9, 2, 3, 3}, {-4, 1, 0, 9}, {8, 2000000000, 1, 4000000000}};
  EXPECT_THAT(Protect(positions, none, odd), ElementsAre(1, 0, 0, 0, 0, 0, 0, 0, 1, 1));
}

}  // namespace
}  // namespace kvtamp::policy
