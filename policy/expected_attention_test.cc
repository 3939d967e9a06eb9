#include "policy/scores/expected_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "policy/policy_fixture.h"

namespace kvtamp::policy {
namespace {

using testing::ElementsAre;
using testing::FloatNear;

TEST(ExpectedAttention, IsTheMeanExponentialOfAGaussian) {
  OwnedHead own;
  own.k = {1, 0, 0, 1, 0, 0};
  own.v = {3, 4, 1, 0, 0, 2};
  own.mean = {1, 0};
  own.variance = {0, 2};
  Layer layer;
  layer.scale = 1;
  ExpectedAttentionOptions options;
  options.n_sink = 0;
  std::vector<float> score(3);
  ExpectedAttention(layer, own.View(2, 2), options, score);
  const double e = std::exp(1.0), total = 2 * e + 1;  // exponents 1, 1, 0
  EXPECT_THAT(score, ElementsAre(Near(e / total * 5), Near(e / total), Near(1 / total * 2)));
  options.use_vnorm = false;
  ExpectedAttention(layer, own.head, options, score);
  EXPECT_THAT(score, ElementsAre(Near(e / total), Near(e / total), Near(1 / total)));
  options.use_vnorm = true;
  options.epsilon = 1;
  ExpectedAttention(layer, own.head, options, score);
  EXPECT_THAT(score[0], FloatNear(static_cast<float>((e / total + 1) * 5), 1e-5f));
  layer.scale = 0;  // 1 / sqrt(2)
  options = {.n_sink = 0, .use_vnorm = false};
  ExpectedAttention(layer, own.head, options, score);
  const double a = std::exp(std::sqrt(0.5)), b = std::exp(0.5);
  EXPECT_THAT(score,
              ElementsAre(Near(a / (a + b + 1)), Near(b / (a + b + 1)), Near(1 / (a + b + 1))));
}

TEST(ExpectedAttention, AveragesQueryHeadsAndKeepsSinks) {
  OwnedHead own;
  own.k = {1, 0, 0, 1, 0, 0};
  own.v = {1, 0, 1, 0, 1, 0};
  own.mean = {1, 0, 0, 0};
  own.variance = {0, 2, 0, 0};
  Layer layer;
  layer.scale = 1;
  ExpectedAttentionOptions options;
  options.n_sink = 0;
  std::vector<float> score(3);
  ExpectedAttention(layer, own.View(2, 2, 2), options, score);
  const double e = std::exp(1.0), total = 2 * e + 1, third = 1.0 / 3;
  EXPECT_THAT(score, ElementsAre(Near((e / total + third) / 2), Near((e / total + third) / 2),
                                 Near((1 / total + third) / 2)));
  options.n_sink = 1;  // the other two share 1
  ExpectedAttention(layer, own.head, options, score);
  const double best = (e / (e + 1) + 0.5) / 2;
  EXPECT_THAT(score, ElementsAre(Near(best), Near(best), Near(1 - best)));
  options.n_sink = 5;
  ExpectedAttention(layer, own.head, options, score);
  EXPECT_THAT(score, ElementsAre(0, 0, 0));
}

TEST(ExpectedAttention, MeanTurnIsTheMeanOfTheTurns) {
  for (float angle : {1.0f, 0.37f, 0.01f, 1e-6f, 0.0f, -0.5f, 3.1f}) {
    for (std::uint32_t n : {1u, 2u, 7u, 512u}) {
      double cosine = 0, sine = 0;
      for (std::uint32_t t = 0; t < n; ++t) {
        cosine += std::cos(double{angle} * (1000 + t)) / n;
        sine += std::sin(double{angle} * (1000 + t)) / n;
      }
      const Turn turn = MeanTurn(angle, 1000, n);
      EXPECT_NEAR(turn.cos, cosine, 1e-9) << angle << " " << n;
      EXPECT_NEAR(turn.sin, sine, 1e-9) << angle << " " << n;
    }
  }
}

// Turns pair (a, b) of x forward.
void TurnPair(std::vector<float>& x, std::size_t a, std::size_t b, double angle) {
  const double p = x[a], q = x[b];
  x[a] = static_cast<float>(p * std::cos(angle) - q * std::sin(angle));
  x[b] = static_cast<float>(p * std::sin(angle) + q * std::cos(angle));
}

TEST(ExpectedAttention, TurnsQueriesToTheirFuturePositions) {
  const std::vector<float> angle = {0.3f, 0.02f};
  for (const bool interleaved : {false, true}) {
    OwnedHead own;
    own.k = {0.5f, -1, 2, 1, 0.3f, 1, -1, 0.5f, 1, 1, 0, 0.2f};  // 3 keys of 4
    own.mean = {1, -0.5f, 0.7f, 2};
    own.variance = {0, 0, 0, 0};
    Layer layer;
    layer.scale = 0.5f;
    layer.next_position = 11;
    layer.rope = {angle, interleaved};
    std::vector<float> score(3);
    ExpectedAttention(layer, own.View(4), {.n_future = 1, .n_sink = 0, .use_vnorm = false}, score);
    std::vector<float> query = own.mean;
    for (std::size_t i = 0; i < 2; ++i) {
      TurnPair(query, interleaved ? 2 * i : i, interleaved ? 2 * i + 1 : i + 2, 11.0 * angle[i]);
    }
    std::vector<double> p(3);
    for (std::size_t i = 0; i < 12; ++i) p[i / 4] += 0.5 * query[i % 4] * own.k[i];
    const double total = std::exp(p[0]) + std::exp(p[1]) + std::exp(p[2]);
    EXPECT_THAT(score, ElementsAre(Near(std::exp(p[0]) / total), Near(std::exp(p[1]) / total),
                                   Near(std::exp(p[2]) / total)));
  }
}

TEST(ExpectedAttention, OnlyDistancesOfPositionsMatter) {
  const std::vector<float> angle = {0.9f, 0.3f, 0.1f};  // the last 2 elements do not turn
  OwnedHead own = FullHead(12, 3);
  Layer layer;
  layer.next_position = 40;
  layer.rope = {angle, false};
  std::vector<float> before(12), after(12);
  ExpectedAttention(layer, own.head, {.n_future = 16}, before);
  layer.next_position = 140;
  ExpectedAttention(layer, own.head, {.n_future = 16}, after);
  EXPECT_GT(std::abs(after[5] - before[5]), 1e-4f);
  for (std::uint32_t i = 0; i < 12; ++i) {
    std::vector<float> k(own.k.begin() + i * kDimK, own.k.begin() + (i + 1) * kDimK);
    for (std::size_t c = 0; c < 3; ++c) TurnPair(k, c, c + 3, 100.0 * angle[c]);
    std::copy(k.begin(), k.end(), own.k.begin() + i * kDimK);
  }
  ExpectedAttention(layer, own.head, {.n_future = 16}, after);
  for (std::uint32_t i = 0; i < 12; ++i) EXPECT_NEAR(after[i], before[i], 1e-5) << i;
}

}  // namespace
}  // namespace kvtamp::policy
