#include "policy/budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "policy/select.h"

namespace kvtamp::policy {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using Counts = std::vector<std::uint32_t>;

std::uint64_t Total(const Counts& x) {
  return std::accumulate(x.begin(), x.end(), std::uint64_t{0});
}

std::vector<HeadEntries> Heads(const Counts& sizes) {
  std::vector<HeadEntries> heads;
  for (std::uint32_t n : sizes) heads.push_back({n, {}, {}});
  return heads;
}

Budget Allocated(const BudgetOptions& options, std::uint32_t n_layers,
                 const std::vector<HeadEntries>& heads) {
  const Result<Budget> budget = Allocate(options, n_layers, heads);
  EXPECT_TRUE(budget.ok()) << budget.status().message();
  return budget.ok() ? budget.value() : Budget{};
}

TEST(Apportion, IsInProportionAndExact) {
  const std::vector<double> even = {1, 1, 1};
  EXPECT_THAT(Apportion(even, Counts{0, 0, 0}, Counts{9, 9, 9}, 10), ElementsAre(4, 3, 3));
  EXPECT_THAT(Apportion(even, Counts{0, 0, 0}, Counts{9, 9, 9}, 11), ElementsAre(4, 4, 3));
  EXPECT_THAT(Apportion(even, Counts{5, 0, 0}, Counts{9, 9, 9}, 8), ElementsAre(5, 2, 1));
  EXPECT_THAT(Apportion(even, Counts{0, 0, 0}, Counts{9, 2, 9}, 11), ElementsAre(5, 2, 4));
  EXPECT_THAT(Apportion(even, Counts{0, 0, 0}, Counts{9, 2, 9}, 20), ElementsAre(9, 2, 9));
  EXPECT_THAT(Apportion(even, Counts{1, 0, 2}, Counts{9, 2, 9}, 3), ElementsAre(1, 0, 2));
  const std::vector<double> slope = {3, 1};
  EXPECT_THAT(Apportion(slope, Counts{0, 0}, Counts{9, 9}, 8), ElementsAre(6, 2));
  EXPECT_THAT(Apportion(slope, Counts{0, 0}, Counts{4, 9}, 8), ElementsAre(4, 4));
  EXPECT_THAT(Apportion(slope, Counts{0, 0}, Counts{9, 9}, 7), ElementsAre(5, 2));  // 5.25, 1.75
  const std::vector<double> none = {2, 0};
  EXPECT_THAT(Apportion(none, Counts{0, 0}, Counts{9, 9}, 8), ElementsAre(8, 0));
  EXPECT_THAT(Apportion(none, Counts{0, 0}, Counts{5, 9}, 8), ElementsAre(5, 3));
  EXPECT_THAT(Apportion(none, Counts{1, 1}, Counts{5, 9}, 99), ElementsAre(5, 9));
  EXPECT_THAT(Apportion(none, Counts{1, 1}, Counts{5, 9}, 0), ElementsAre(1, 1));
  EXPECT_THAT(Apportion(std::vector<double>{}, Counts{}, Counts{}, 0), IsEmpty());
}

TEST(Apportion, RandomPartsKeepTheirLimits) {
  std::mt19937 rng(1);
  for (int round = 0; round < 300; ++round) {
    const std::size_t n = 1 + rng() % 40;
    std::vector<double> weights(n);
    Counts low(n), high(n);
    for (std::size_t i = 0; i < n; ++i) {
      weights[i] = rng() % 4 == 0 ? 0 : std::exp(static_cast<double>(rng() % 20));
      low[i] = rng() % 50;
      high[i] = low[i] + rng() % 1000;
    }
    const std::uint64_t total = Total(low) + rng() % (Total(high) - Total(low) + 1);
    const Counts parts = Apportion(weights, low, high, total);
    EXPECT_EQ(Total(parts), total);
    for (std::size_t i = 0; i < n; ++i) {
      EXPECT_GE(parts[i], low[i]);
      EXPECT_LE(parts[i], high[i]);
    }
  }
}

TEST(Budget, UniformByRatioOrByNumber) {
  Budget b = Allocated({.keep_ratio = 0.29}, 2, Heads({100, 100, 100, 100}));
  EXPECT_THAT(b.keep, ElementsAre(29, 29, 29, 29));
  EXPECT_EQ(b.total, 116u);
  EXPECT_EQ(b.raised, 0u);
  b = Allocated({.keep_ratio = 0.5}, 1, Heads({5, 5, 5}));  // 7.5 are asked for
  EXPECT_THAT(b.keep, ElementsAre(3, 2, 2));
  EXPECT_EQ(b.asked, 7.5);
  EXPECT_EQ(b.total, 7u);
  b = Allocated({.target_size = 40}, 2, Heads({100, 100, 10, 100}));
  EXPECT_THAT(b.keep, ElementsAre(50, 50, 10, 50));
  b = Allocated({.target_size = 1000}, 2, Heads({100, 100, 10, 100}));
  EXPECT_THAT(b.keep, ElementsAre(100, 100, 10, 100));
  EXPECT_EQ(b.total, 310u);
  b = Allocated({}, 1, Heads({7, 8}));
  EXPECT_THAT(b.keep, ElementsAre(7, 8));
}

TEST(Budget, NoHeadIsLeftWithNothing) {
  const Budget b = Allocated({.keep_ratio = 0.001}, 2, Heads({100, 100, 0, 100}));
  EXPECT_THAT(b.keep, ElementsAre(1, 1, 0, 1));
  EXPECT_EQ(b.total, 3u);
  EXPECT_EQ(b.raised, 3u);
  EXPECT_DOUBLE_EQ(b.asked, 0.3);
}

TEST(Budget, WhatIsProtectedStays) {
  const std::vector<std::uint8_t> ten = [] {
    std::vector<std::uint8_t> mask(20);
    std::fill_n(mask.begin(), 10, std::uint8_t{1});
    return mask;
  }();
  std::vector<HeadEntries> heads = Heads({20, 20});
  heads[0].is_protected = ten;
  EXPECT_THAT(Allocated({.keep_ratio = 0.4}, 1, heads).keep, ElementsAre(10, 6));
  const Budget b = Allocated({.keep_ratio = 0.1}, 1, heads);
  EXPECT_THAT(b.keep, ElementsAre(10, 1));
  EXPECT_EQ(b.raised, 7u);
}

TEST(Budget, PyramidFallsEvenlyFromTheFirstLayer) {
  // 300 entries, 1 protected in each of 3 layers: mean 99, last 99 / 20, first 2 * 99 less that.
  Budget b = Allocated({.keep_ratio = 0.1, .pyramid = true}, 3, Heads({1000, 1000, 1000}));
  EXPECT_THAT(b.keep, ElementsAre(194, 100, 6));
  // The first layer has room for 149 of the 232: the last gets 2 * 119 - 149.
  b = Allocated({.keep_ratio = 0.8, .pyramid = true}, 3, Heads({150, 150, 150}));
  EXPECT_THAT(b.keep, ElementsAre(150, 120, 90));
  b = Allocated({.keep_ratio = 1, .pyramid = true}, 3, Heads({150, 150, 150}));
  EXPECT_THAT(b.keep, ElementsAre(150, 150, 150));
  // Heads of a layer get the same.
  b = Allocated({.target_size = 21, .pyramid = true, .beta = 2}, 2, Heads({99, 99, 99, 99}));
  EXPECT_THAT(b.keep, ElementsAre(31, 31, 11, 11));
  b = Allocated({.keep_ratio = 0.5, .pyramid = true}, 1, Heads({10, 10}));
  EXPECT_THAT(b.keep, ElementsAre(5, 5));
  b = Allocated({.keep_ratio = 0.3, .pyramid = true, .beta = 1}, 3, Heads({90, 90, 90}));
  EXPECT_EQ(b.keep, Allocated({.keep_ratio = 0.3}, 3, Heads({90, 90, 90})).keep);
}

TEST(Budget, AdaKvGivesEntriesToTheHeadsThatHaveTheBest) {
  const std::vector<float> a = {0.9f, 0.8f, 0.7f, 0.6f}, b = {0.5f, 0.1f, 0.2f, 0.3f};
  std::vector<HeadEntries> heads = {{4, a, {}}, {4, b, {}}};
  const auto keep = [&](double ratio, double alpha) {
    return Allocated({.keep_ratio = ratio, .ada = true, .alpha_safeguard = alpha}, 1, heads).keep;
  };
  EXPECT_THAT(keep(0.5, 0), ElementsAre(3, 1));  // each head keeps one
  EXPECT_THAT(keep(0.5, 0.5), ElementsAre(3, 1));
  EXPECT_THAT(keep(0.5, 1), ElementsAre(2, 2));
  EXPECT_THAT(keep(0.75, 0), ElementsAre(4, 2));
  EXPECT_THAT(keep(0.75, 0.7), ElementsAre(4, 2));  // floor(0.7 * 3)
  EXPECT_THAT(keep(0.75, 1), ElementsAre(3, 3));
  EXPECT_THAT(keep(1, 0.2), ElementsAre(4, 4));
  const std::vector<std::uint8_t> last_two = {0, 0, 1, 1};
  heads[1].is_protected = last_two;
  EXPECT_THAT(keep(0.5, 0), ElementsAre(2, 2));
  EXPECT_THAT(keep(0.25, 1), ElementsAre(1, 2));  // 2 asked for, 3 needed
}

TEST(Budget, AdaKvTakesTheNewerOfEqualScoresAndWhatIsNotFiniteLast) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> a = {1, 1, 1}, b = {1, 1, 1, 1}, bad = {inf, nan, inf, inf};
  const BudgetOptions options{.target_size = 2, .ada = true, .alpha_safeguard = 0};
  const HeadEntries three{3, a, {}}, four{4, b, {}}, broken{4, bad, {}};
  EXPECT_THAT(Allocated(options, 1, {three, four}).keep, ElementsAre(2, 2));
  EXPECT_THAT(Allocated(options, 1, {four, three}).keep, ElementsAre(3, 1));  // the first head
  EXPECT_THAT(Allocated(options, 1, {three, broken}).keep, ElementsAre(3, 1));
}

struct RandomLayers {
  std::vector<std::vector<float>> scores;
  std::vector<std::vector<std::uint8_t>> masks;
  std::vector<HeadEntries> heads;

  RandomLayers(std::mt19937& rng, std::uint32_t n_heads) : scores(n_heads), masks(n_heads) {
    std::exponential_distribution<float> spread(1);
    for (std::uint32_t h = 0; h < n_heads; ++h) {
      const std::uint32_t n = rng() % 100;
      const float scale = static_cast<float>(1 + rng() % 5);
      for (std::uint32_t i = 0; i < n; ++i) {
        scores[h].push_back(scale * spread(rng));
        masks[h].push_back(rng() % 10 == 0 ? 1 : 0);
      }
      heads.push_back({n, scores[h], masks[h]});
    }
  }
};

TEST(Budget, AllKindsAreExactAndKeepWhatIsProtected) {
  std::mt19937 rng(3);
  for (int round = 0; round < 200; ++round) {
    const std::uint32_t n_layers = 1 + rng() % 6, n_heads = 1 + rng() % 4;
    const RandomLayers layers(rng, n_layers * n_heads);
    BudgetOptions options;
    options.keep_ratio = (1 + rng() % 100) / 100.0;
    options.alpha_safeguard = rng() % 11 / 10.0;
    for (const char* name : {"uniform", "pyramidkv", "adakv", "pyramidkv+adakv"}) {
      ASSERT_TRUE(ParseBudget(name, options).ok());
      EXPECT_EQ(BudgetName(options), name);
      const Budget b = Allocated(options, n_layers, layers.heads);
      EXPECT_EQ(Total(b.keep), b.total) << name;
      std::uint64_t floors = 0;
      for (std::size_t i = 0; i < b.keep.size(); ++i) {
        const auto n = static_cast<std::uint32_t>(layers.scores[i].size());
        const auto p = std::count(layers.masks[i].begin(), layers.masks[i].end(), 1);
        const auto least = std::max(static_cast<std::uint32_t>(p), std::min(n, 1u));
        EXPECT_GE(b.keep[i], least) << name;
        EXPECT_LE(b.keep[i], n) << name;
        floors += least;
        const auto kept = SelectKept(layers.scores[i], layers.masks[i], b.keep[i]);
        EXPECT_EQ(kept.size(), b.keep[i]);
      }
      const auto asked = static_cast<std::uint64_t>(b.asked + 1e-6);
      EXPECT_EQ(b.total, std::max(asked, floors)) << name;
      EXPECT_EQ(b.raised, b.total - asked) << name;
    }
  }
}

TEST(Budget, AdaKvLosesNoScoreAgainstUniformAndMovesNothingBetweenLayers) {
  std::mt19937 rng(4);
  int better = 0;
  for (int round = 0; round < 100; ++round) {
    const RandomLayers layers(rng, 8);
    BudgetOptions options{.keep_ratio = 0.3};
    const Budget uniform = Allocated(options, 2, layers.heads);
    options.ada = true;
    const Budget ada = Allocated(options, 2, layers.heads);
    double with = 0, without = 0;
    for (std::size_t i = 0; i < 8; ++i) {
      for (std::uint32_t j : SelectKept(layers.scores[i], layers.masks[i], ada.keep[i])) {
        with += layers.scores[i][j];
      }
      for (std::uint32_t j : SelectKept(layers.scores[i], layers.masks[i], uniform.keep[i])) {
        without += layers.scores[i][j];
      }
    }
    EXPECT_GE(with, without - 1e-4);
    better += with > without + 1 ? 1 : 0;
    for (int layer : {0, 4}) {
      EXPECT_EQ(
          std::accumulate(ada.keep.begin() + layer, ada.keep.begin() + layer + 4, 0u),
          std::accumulate(uniform.keep.begin() + layer, uniform.keep.begin() + layer + 4, 0u));
    }
  }
  EXPECT_GT(better, 50);
}

TEST(Budget, WhatMakesNoSenseIsRefused) {
  const std::vector<HeadEntries> two = Heads({5, 5});
  const auto refused = [&](const BudgetOptions& options, std::uint32_t n_layers = 1) {
    return !Allocate(options, n_layers, two).ok();
  };
  EXPECT_FALSE(refused({}));
  EXPECT_TRUE(refused({.keep_ratio = 0}));
  EXPECT_TRUE(refused({.keep_ratio = 1.1}));
  EXPECT_TRUE(refused({.keep_ratio = std::numeric_limits<double>::quiet_NaN()}));
  EXPECT_TRUE(refused({.beta = 0.5}));
  EXPECT_TRUE(refused({.alpha_safeguard = 1.5}));
  EXPECT_TRUE(refused({.ada = true}));  // no scores
  EXPECT_TRUE(refused({}, 0));
  EXPECT_TRUE(refused({}, 3));
  std::vector<HeadEntries> short_mask = two;
  const std::vector<std::uint8_t> mask = {1, 0};
  short_mask[0].is_protected = mask;
  EXPECT_FALSE(Allocate({}, 1, short_mask).ok());
  BudgetOptions options;
  EXPECT_EQ(ParseBudget("pyramid", options).code(), Code::kInvalidArgument);
  EXPECT_TRUE(Allocate({}, 1, {}).ok());
}

}  // namespace
}  // namespace kvtamp::policy
