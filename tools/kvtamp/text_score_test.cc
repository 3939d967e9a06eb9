#include "tools/kvtamp/text_score.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvtamp::tool {
namespace {

using ::testing::ElementsAre;

double BleuOf(const std::string& text, const std::string& reference) {
  return Bleu(CountBleu(text, reference));
}

// The figures here are sacrebleu 2.0.0's; tests/host compares with the program itself.
TEST(Words13a, MarksStandAlone) {
  EXPECT_THAT(Words13a("Hello, world (again)!"),
              ElementsAre("Hello", ",", "world", "(", "again", ")", "!"));
  EXPECT_THAT(Words13a("1,000.5 and .5 or 3-4, x-y"),
              ElementsAre("1,000.5", "and", ".", "5", "or", "3", "-", "4", ",", "x-y"));
  EXPECT_THAT(Words13a("a-\nb &quot;c&amp;d&quot;"), ElementsAre("ab", "\"", "c", "&", "d", "\""));
  EXPECT_THAT(Words13a("don't\u00a0stop\u3000now"), ElementsAre("don't", "stop", "now"));
  EXPECT_THAT(Words13a("end-\n"), ElementsAre("end-"));
  EXPECT_THAT(Words13a(" \n "), ElementsAre());
}

TEST(Bleu, OfTheSameIsAHundred) {
  EXPECT_DOUBLE_EQ(BleuOf("the cat sat on the mat", "the cat sat on the mat"), 100);
}

TEST(Bleu, KnownValues) {
  EXPECT_NEAR(BleuOf("a b c d e", "a b c d f"), 66.8740, 1e-4);
  EXPECT_NEAR(BleuOf("the the the the", "the cat is on the mat"), 11.5216, 1e-4);
  EXPECT_EQ(BleuOf("", "a b"), 0);
  EXPECT_EQ(BleuOf("a b", ""), 0);
  EXPECT_EQ(BleuOf("x y z w", "a b c d"), 0);
  EXPECT_EQ(BleuOf("a b", "a b"), 0);  // no word of order 3 or 4 at all
}

TEST(Bleu, OfACorpusIsNotTheMean) {
  BleuCounts all = CountBleu("a b c d e", "a b c d f");
  all += CountBleu("x", "y z");
  EXPECT_NEAR(Bleu(all), 54.0854, 1e-4);
  all -= CountBleu("x", "y z");
  EXPECT_NEAR(Bleu(all), 66.8740, 1e-4);
}

TEST(RougeL, LongestCommonSubsequence) {
  EXPECT_DOUBLE_EQ(RougeL("The Cat, sat!", "the cat sat"), 1);
  EXPECT_DOUBLE_EQ(RougeL("police kill the gunman", "police killed the gunman"), 0.75);
  EXPECT_DOUBLE_EQ(RougeL("a b c d", "a x c"), 2.0 * 2 / 7);
  EXPECT_DOUBLE_EQ(RougeL("b a", "a b"), 0.5);
  EXPECT_EQ(RougeL("", "a"), 0);
  EXPECT_EQ(RougeL("...", "..."), 0);
}

}  // namespace
}  // namespace kvtamp::tool
