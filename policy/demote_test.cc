#include "policy/demote.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

namespace kvtamp::policy {
namespace {

using testing::ElementsAre;

const std::vector<Precision> kLadder = {{16, 0}, {8, 0.001f}, {4, 0.01f}, {2, 0.1f}, {0, 1}};

Plan Planned(const std::vector<PrecisionTable>& tables, const std::vector<Unit>& units,
             std::uint64_t budget) {
  const Result<Plan> plan = PlanPrecisions(tables, units, budget);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return plan.ok() ? plan.value() : Plan{};
}

std::vector<Unit> Units(const std::vector<float>& masses) {
  std::vector<Unit> units;
  for (float mass : masses) units.push_back({mass, 0, 0, 4});
  return units;
}

TEST(Demote, GoesDownTheLadderByScoreAndBudget) {
  const auto units = Units({100, 1});
  const auto at = [&](std::uint64_t budget) { return Planned({kLadder}, units, budget); };
  EXPECT_THAT(at(32).precision, ElementsAre(0, 0));
  EXPECT_THAT(at(24).precision, ElementsAre(0, 1));
  // Gains per byte: 45 and 4.5 and 0.225 for the first; 0.45 and 0.045 for the second, then 0.0125.
  EXPECT_THAT(at(2).precision, ElementsAre(3, 4));
  EXPECT_THAT(at(4).precision, ElementsAre(2, 4));
  EXPECT_THAT(at(6).precision, ElementsAre(2, 3));
  EXPECT_THAT(at(10).precision, ElementsAre(1, 3));
  EXPECT_THAT(at(12).precision, ElementsAre(1, 2));
  EXPECT_THAT(at(20).precision, ElementsAre(0, 2));
  EXPECT_THAT(at(0).precision, ElementsAre(4, 4));
  EXPECT_EQ(at(0).distortion, 101);
  EXPECT_NEAR(at(12).distortion, 0.1 + 0.01, 1e-6);
  EXPECT_EQ(at(12).bytes, 12u);
  EXPECT_EQ(at(13).bytes, 12u);  // a byte that buys nothing
  EXPECT_NEAR(at(12).bound, at(12).distortion, 1e-12);
  EXPECT_LT(at(13).bound, at(13).distortion);
}

TEST(Demote, PrecisionsOffTheHullAreOnlyForWhatIsLeft) {
  // 6 bytes at error 0.9 lie above the line from 10 to 0.
  const std::vector<Precision> table = {{10, 0.1f}, {6, 0.9f}, {0, 1}};
  const std::vector<Unit> units = {{2, 0, 0, 2}, {1, 0, 0, 2}};
  EXPECT_THAT(Planned({table}, units, 10).precision, ElementsAre(0, 2));
  EXPECT_THAT(Planned({table}, units, 16).precision, ElementsAre(0, 1));
  EXPECT_THAT(Planned({table}, units, 9).precision, ElementsAre(1, 2));
}

TEST(Demote, TablesDifferFromHeadToHead) {
  const std::vector<Precision> small = {{4, 0}, {0, 1}};
  const std::vector<Precision> large = {{8, 0}, {0, 1}};
  const std::vector<Unit> units = {{1, 1, 0, 1}, {0.6f, 0, 0, 1}, {0.6f, 0, 0, 1}};
  EXPECT_THAT(Planned({small, large}, units, 8).precision, ElementsAre(1, 0, 0));
  EXPECT_THAT(Planned({small, large}, units, 4).precision, ElementsAre(1, 0, 1));
}

TEST(Demote, PagesKeepWithinWhatIsAllowed) {
  std::vector<Unit> units = Units({1, 50, 50});
  units[0].first = units[0].last = 0;  // pinned, a sink
  units[1].first = 2;                  // was demoted before
  units[2].last = 3;                   // may not go
  const Plan all = Planned({kLadder}, units, 1000);
  EXPECT_THAT(all.precision, ElementsAre(0, 2, 0));
  EXPECT_NEAR(all.distortion, 50 * 0.01, 1e-6);
  EXPECT_EQ(all.bound, all.distortion);
  EXPECT_THAT(Planned({kLadder}, units, 18).precision, ElementsAre(0, 4, 3));
  const Result<Plan> plan = PlanPrecisions(std::vector<PrecisionTable>{kLadder}, units, 17);
  EXPECT_EQ(plan.status().code(), Code::kOutOfMemory);
  EXPECT_NE(plan.status().message().find("18"), std::string::npos);
}

TEST(Demote, WhatIsWorthNothingGoesFirstAndOnlyForLackOfRoom) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  for (float nothing : {0.0f, nan, inf, -inf, -3.0f}) {
    const auto units = Units({nothing, 1e-6f});
    EXPECT_THAT(Planned({kLadder}, units, 16).precision, ElementsAre(4, 0)) << nothing;
    EXPECT_THAT(Planned({kLadder}, units, 24).precision, ElementsAre(1, 0)) << nothing;
    EXPECT_THAT(Planned({kLadder}, units, 32).precision, ElementsAre(0, 0)) << nothing;
  }
}

TEST(Demote, EqualPagesAreServedInTheirOrder) {
  EXPECT_THAT(Planned({kLadder}, Units({1, 1, 1}), 4).precision, ElementsAre(3, 3, 4));
}

TEST(Demote, WhatMakesNoSenseIsRefused) {
  const auto refused = [](const std::vector<Precision>& table, const Unit& unit) {
    return PlanPrecisions(std::vector<PrecisionTable>{table}, std::vector<Unit>{unit}, 100)
               .status()
               .code() == Code::kInvalidArgument;
  };
  EXPECT_FALSE(refused(kLadder, {1, 0, 0, 4}));
  EXPECT_TRUE(refused(kLadder, {1, 1, 0, 4}));
  EXPECT_TRUE(refused(kLadder, {1, 0, 0, 5}));
  EXPECT_TRUE(refused(kLadder, {1, 0, 3, 2}));
  EXPECT_TRUE(refused({}, {1, 0, 0, 0}));
  EXPECT_TRUE(refused({{8, 0}, {8, 0.5f}}, {1, 0, 0, 1}));
  EXPECT_TRUE(refused({{8, 0.5f}, {4, 0.1f}}, {1, 0, 0, 1}));
  EXPECT_TRUE(refused({{8, std::numeric_limits<float>::quiet_NaN()}}, {1, 0, 0, 0}));
  EXPECT_TRUE(refused({{8, -1}}, {1, 0, 0, 0}));
  EXPECT_TRUE(PlanPrecisions({}, {}, 0).ok());
}

// The least distortion of all plans within the budget.
double BruteForce(PrecisionTable table, const std::vector<Unit>& units, std::size_t i,
                  std::int64_t budget) {
  if (budget < 0) return std::numeric_limits<double>::infinity();
  if (i == units.size()) return 0;
  double best = std::numeric_limits<double>::infinity();
  for (std::uint8_t p = units[i].first; p <= units[i].last; ++p) {
    const double own = double{units[i].mass} * table[p].error;
    best = std::min(best, own + BruteForce(table, units, i + 1, budget - table[p].bytes));
  }
  return best;
}

TEST(Demote, IsWithinOneStepOfBruteForce) {
  std::mt19937 rng(6);
  std::uniform_real_distribution<float> spread(0, 1);
  int optimal = 0;
  const int rounds = 400;
  for (int round = 0; round < rounds; ++round) {
    // Any table, most of them not convex.
    std::vector<Precision> table(5);
    float error = 0;
    std::uint32_t bytes = 60;
    for (Precision& p : table) {
      p = {bytes, error};
      bytes -= 1 + rng() % 12;
      error += spread(rng);
    }
    std::vector<Unit> units;
    std::uint64_t least = 0, most = 0;
    for (std::uint32_t i = 0; i < 1 + rng() % 6; ++i) {
      const auto first = static_cast<std::uint8_t>(rng() % 3);
      units.push_back({spread(rng), 0, first, static_cast<std::uint8_t>(first + rng() % 3)});
      least += table[units.back().last].bytes;
      most += table[first].bytes;
    }
    const std::uint64_t budget = least + rng() % (most - least + 2);
    const Plan plan = Planned({table}, units, budget);
    const double best = BruteForce(table, units, 0, static_cast<std::int64_t>(budget));
    double own = 0, step = 0;
    std::uint64_t used = 0;
    for (std::size_t i = 0; i < units.size(); ++i) {
      ASSERT_GE(plan.precision[i], units[i].first);
      ASSERT_LE(plan.precision[i], units[i].last);
      own += double{units[i].mass} * table[plan.precision[i]].error;
      used += table[plan.precision[i]].bytes;
      step = std::max(step, double{units[i].mass} *
                                (double{table[units[i].last].error} - table[units[i].first].error));
    }
    EXPECT_EQ(plan.bytes, used);
    EXPECT_LE(used, budget);
    EXPECT_NEAR(plan.distortion, own, 1e-9);
    EXPECT_LE(plan.bound, best + 1e-9);
    EXPECT_GE(plan.distortion, best - 1e-9);
    EXPECT_LE(plan.distortion, best + step + 1e-9);
    optimal += plan.distortion <= best + 1e-9 ? 1 : 0;
  }
  EXPECT_GT(optimal, rounds / 2);
}

TEST(Demote, IsOptimalWhereAStepEndsAtTheBudget) {
  std::mt19937 rng(7);
  std::uniform_real_distribution<float> spread(0.1f, 10);
  for (int round = 0; round < 50; ++round) {
    const auto units = Units({spread(rng), spread(rng), spread(rng), spread(rng)});
    int exact = 0;
    for (std::uint64_t budget = 0; budget <= 64; ++budget) {
      const Plan plan = Planned({kLadder}, units, budget);
      if (plan.bound < plan.distortion - 1e-9) continue;
      ++exact;
      const double best = BruteForce(kLadder, units, 0, static_cast<std::int64_t>(budget));
      EXPECT_NEAR(plan.distortion, best, 1e-9) << budget;
    }
    EXPECT_GE(exact, 17) << "4 steps of 4 pages, and none";
  }
}

TEST(Demote, MassesOfPages) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> attention = {1, 2, 3, 0.5f, nan, inf, 4};
  EXPECT_THAT(PageMasses(attention, 2), ElementsAre(3, 3.5f, 0, 4));
  EXPECT_THAT(PageMasses(attention, 100), ElementsAre(10.5f));
  const std::vector<float> norms = {-1, -5, -2, -inf, -3};
  EXPECT_THAT(PageMasses(norms, 2), ElementsAre(4, 3, 2));
  EXPECT_TRUE(PageMasses({}, 64).empty());
}

}  // namespace
}  // namespace kvtamp::policy
