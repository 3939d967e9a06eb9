#include "tools/kvtamp/tasks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvtamp::tool {
namespace {

using ::testing::ElementsAre;

Answer Said(const std::string& text, const Tokens& tokens) { return {text, tokens, 0, 0, {}}; }

TEST(MeanOf, StandardErrorOfTheMean) {
  const std::vector<double> values = {1, 2, 3, 4};
  EXPECT_EQ(MeanOf(values).value, 2.5);
  EXPECT_NEAR(MeanOf(values).se, std::sqrt(5.0 / 3 / 4), 1e-12);
  EXPECT_EQ(MeanOf(std::span(values).first(1)).se, 0);
  EXPECT_EQ(MeanOf({}).value, 0);
}

TEST(ScoreAnswers, AgainstTheBase) {
  const std::vector<Prompt> prompts(3, Prompt{"", "generate", {}, -1, 4, false, {}});
  const std::vector<Answer> base = {Said("a b c d e", {1, 2, 3, 4, 5}),
                                    Said("a b c d", {1, 2, 3, 4}), Said("a b", {1, 2})};
  const std::vector<Answer> tested = {Said("a b c d e", {1, 2, 3, 4, 5}), Said("a b x", {1, 2, 9}),
                                      Said("a b c", {1, 2, 3})};
  const TaskScore score = ScoreAnswers(prompts, tested, base);
  EXPECT_THAT(score.first_diff, ElementsAre(-1, 2, 2));
  EXPECT_NEAR(score.same.value, 1.0 / 3, 1e-12);
  EXPECT_NEAR(score.first_diff_mean, 3, 1e-12);
  EXPECT_NEAR(score.rouge_l.value, (1 + 4.0 / 7 + 4.0 / 5) / 3, 1e-12);
  EXPECT_EQ(score.scores, std::vector<double>({1, 4.0 / 7, 4.0 / 5}));
  EXPECT_GT(score.bleu.value, 0);
  EXPECT_LT(score.bleu.value, 100);
  EXPECT_GT(score.bleu.se, 0);
  const TaskScore same = ScoreAnswers(prompts, base, base);
  EXPECT_NEAR(same.bleu.value, 100, 1e-9);
  EXPECT_EQ(same.same.value, 1);
}

TEST(ScoreAnswers, AgainstWhatIsRight) {
  const std::vector<Prompt> prompts = {{"", "needle", {}, 0, 4, true, {"12"}},
                                       {"", "needle", {}, 0, 4, true, {"34"}}};
  const std::vector<Answer> base = {Said(" 12", {1}), Said(" 34", {2})};
  const std::vector<Answer> tested = {Said(" 12.", {1, 7}), Said(" 35", {3})};
  const TaskScore score = ScoreAnswers(prompts, tested, base);
  EXPECT_THAT(score.scores, ElementsAre(1, 0));
  EXPECT_EQ(score.mean.value, 0.5);
  EXPECT_EQ(ScoreAnswers(prompts, base, base).mean.value, 1);
}

TEST(ContextOf, TheLongestPromptWithItsAnswer) {
  const std::vector<Prompt> prompts = {{"", "needle", Tokens(100), 0, 5, true, {}},
                                       {"", "needle", Tokens(90), 0, 30, true, {}}};
  EXPECT_EQ(ContextOf(prompts), 120u);
}

}  // namespace
}  // namespace kvtamp::tool
