#include "tools/kvtamp/divergence.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace kvtamp::tool {
namespace {

TEST(ScoreLogits, EqualLogitsAreExactlyZero) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0, 5);
  std::vector<float> logits(1000);
  for (float& x : logits) x = normal(rng);
  const Score s = ScoreLogits(logits, logits, 17);
  EXPECT_EQ(s.kld, 0);
  EXPECT_EQ(s.dp, 0);
  EXPECT_EQ(s.nll, s.nll_base);
  EXPECT_TRUE(s.same_top);
}

TEST(ScoreLogits, KnownDistributions) {
  // p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): KL = log 2 / 2 - log 2 / 4. Any offset of the logits.
  const std::vector<float> p = {std::log(2.0f) + 100, 100, 100};
  const std::vector<float> q = {-50, std::log(2.0f) - 50, -50};
  const Score s = ScoreLogits(p, q, 0);
  EXPECT_NEAR(s.kld, std::log(2.0) / 4, 1e-5);
  EXPECT_NEAR(s.nll_base, std::log(2.0), 1e-5);
  EXPECT_NEAR(s.nll, std::log(4.0), 1e-5);
  EXPECT_NEAR(s.dp, -0.25, 1e-5);
  EXPECT_FALSE(s.same_top);
}

TEST(ScoreLogits, NotANumberShows) {
  const std::vector<float> p = {0, 1};
  const std::vector<float> q = {0, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_TRUE(std::isnan(ScoreLogits(p, q, 0).kld));
}

TEST(Summarize, MatchesDirectComputation) {
  std::mt19937 rng(2);
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<Score> scores(1001);
  for (Score& s : scores) {
    s = {2 + uniform(rng), 2 + uniform(rng), uniform(rng), uniform(rng) - 0.5, uniform(rng) < 0.75};
  }
  const Divergence d = Summarize(scores);
  EXPECT_EQ(d.n, 1001u);
  double nll = 0, base = 0, kld = 0, same = 0, dp2 = 0, max = 0;
  for (const Score& s : scores) {
    nll += s.nll;
    base += s.nll_base;
    kld += s.kld;
    same += s.same_top;
    dp2 += s.dp * s.dp;
    max = std::max(max, s.kld);
  }
  EXPECT_NEAR(d.ppl, std::exp(nll / 1001), 1e-9);
  EXPECT_NEAR(d.ppl_base, std::exp(base / 1001), 1e-9);
  EXPECT_NEAR(d.ppl_ratio, d.ppl / d.ppl_base, 1e-9);
  EXPECT_NEAR(d.kld_mean, kld / 1001, 1e-12);
  EXPECT_NEAR(d.rms_dp, std::sqrt(dp2 / 1001), 1e-12);
  EXPECT_NEAR(d.same_top_p, same / 1001, 1e-12);
  EXPECT_EQ(d.kld_max, max);
  // Uniform on [0,1]: standard deviation 0.2887, so the standard error of 1001 is 0.0091.
  EXPECT_NEAR(d.kld_se, 0.0091, 0.0005);
  EXPECT_NEAR(d.kld_median, 0.5, 0.05);
  EXPECT_GT(d.kld_p999, d.kld_p99);
  EXPECT_GE(d.kld_max, d.kld_p999);
}

TEST(Summarize, NoneAndOne) {
  EXPECT_EQ(Summarize({}).n, 0u);
  const std::vector<Score> one = {{1, 1, 0.5, 0, true}};
  const Divergence d = Summarize(one);
  EXPECT_EQ(d.kld_median, 0.5);
  EXPECT_EQ(d.kld_se, 0);
  EXPECT_EQ(d.same_top_p, 1);
}

}  // namespace
}  // namespace kvtamp::tool
