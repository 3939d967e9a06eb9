#include "tools/kvtamp/prompts.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>

#include "tools/kvtamp/ruler.h"

namespace kvtamp::tool {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr std::int32_t kBegin = 0;

// A vocabulary of letters, words with their space before, digits and marks, made up as it is used.
class ToyVocabulary {
 public:
  Vocabulary get() {
    return {[this](const std::string& text) { return Encode(text); },
            [this](std::int32_t token) { return pieces_.at(static_cast<std::size_t>(token)); },
            {kBegin}};
  }
  std::string Text(const Tokens& tokens) const {
    std::string text;
    for (const std::int32_t token : tokens) text += pieces_.at(static_cast<std::size_t>(token));
    return text;
  }

 private:
  Tokens Encode(const std::string& text) {
    Tokens tokens;
    for (std::size_t i = 0; i < text.size();) {
      std::size_t end = i + 1;
      if (std::isalpha(static_cast<unsigned char>(text[i])) || text[i] == ' ')
        while (end < text.size() && std::isalpha(static_cast<unsigned char>(text[end]))) ++end;
      const std::string piece = text.substr(i, end - i);
      const auto [at, fresh] = index_.emplace(piece, static_cast<std::int32_t>(pieces_.size()));
      if (fresh) pieces_.push_back(piece);
      tokens.push_back(at->second);
      i = end;
    }
    return tokens;
  }

  std::vector<std::string> pieces_ = {""};  // BOS has no text
  std::map<std::string, std::int32_t> index_;
};

std::string Words(std::size_t n) {
  std::string text = "It began.";
  for (std::size_t i = 0; i < n; ++i) {
    text += ' ';
    for (std::size_t k = i + 1000; k > 0; k /= 20) text += static_cast<char>('a' + k % 20);
    text += "word";
    if (i % 9 == 8) text += ".";
  }
  return text;
}

class Prompts : public ::testing::Test {
 protected:
  std::vector<Prompt> Make(const TaskOptions& options) {
    auto made = MakePrompts(haystack_, options);
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.ok() ? made.value() : std::vector<Prompt>();
  }
  std::string Error(const TaskOptions& options) {
    return MakePrompts(haystack_, options).status().message();
  }
  std::string Text(const Prompt& prompt) const { return toy_.Text(prompt.tokens); }

  ToyVocabulary toy_;
  Haystack haystack_{toy_.get(), Words(5000)};
};

TEST_F(Prompts, NeedlesAreWhereTheyShouldBeInExactlySoManyTokens) {
  TaskOptions options;
  options.lengths = {300, 777, 2048};
  options.n_samples = 2;
  const std::vector<Prompt> prompts = Make(options);
  ASSERT_THAT(prompts, SizeIs(3 * 2 * 5));
  std::set<std::string> ids;
  std::size_t i = 0;
  for (const std::uint32_t length : options.lengths) {
    for (std::uint32_t sample = 0; sample < 2; ++sample) {
      for (const double depth : options.depths) {
        const Prompt& prompt = prompts[i++];
        ids.insert(prompt.id);
        EXPECT_THAT(prompt.tokens, SizeIs(length)) << prompt.id;
        EXPECT_EQ(prompt.tokens.front(), kBegin);
        EXPECT_EQ(prompt.depth, depth);
        const std::string text = Text(prompt);
        const std::string needle = " is: " + prompt.expected.front() + ".";
        const std::size_t at = text.find(needle);
        ASSERT_NE(at, std::string::npos) << text;
        EXPECT_EQ(text.find(needle, at + 1), std::string::npos);
        // Of the text between the line that says what to do and the question.
        const std::size_t start = text.find('\n'), end = text.rfind('\n');
        const auto place =
            100.0 * static_cast<double>(at - start) / static_cast<double>(end - start);
        // A needle of 60 letters and the way to the next end of a sentence, in the shortest.
        EXPECT_NEAR(place, depth, length == 300 ? 12 : 6) << prompt.id;
        EXPECT_EQ(text.substr(text.size() - 4), " is:");
      }
    }
  }
  EXPECT_THAT(ids, SizeIs(prompts.size()));
}

TEST_F(Prompts, NeedlesStandBetweenSentences) {
  TaskOptions options;
  options.lengths = {1024};
  options.depths = {10, 37, 50, 83};
  for (const Prompt& prompt : Make(options)) {
    const std::string text = Text(prompt);
    const std::size_t at = text.find(" The special magic number");
    ASSERT_NE(at, std::string::npos);
    EXPECT_EQ(text[at - 1], '.') << text.substr(at - 20, 60);
  }
}

TEST_F(Prompts, OfSeveralNeedlesEachIsAskedOfTheSameText) {
  TaskOptions options;
  options.lengths = {600};
  options.depths = {20};
  options.n_needles = 4;
  const std::vector<Prompt> prompts = Make(options);
  ASSERT_THAT(prompts, SizeIs(4));
  EXPECT_EQ(prompts[0].depth, 20);
  EXPECT_EQ(prompts[3].depth, 95);
  std::set<std::string> numbers;
  for (const Prompt& prompt : prompts) {
    EXPECT_THAT(prompt.tokens, SizeIs(600));
    numbers.insert(prompt.expected.front());
    for (const Prompt& other : prompts)
      EXPECT_THAT(Text(prompt), HasSubstr(" is: " + other.expected.front() + "."));
  }
  EXPECT_THAT(numbers, SizeIs(4));
}

TEST_F(Prompts, SameSeedSamePrompts) {
  TaskOptions options;
  options.lengths = {400};
  options.task = Task::kRuler;
  const auto tokens = [&] {
    std::vector<Tokens> all;
    for (const Prompt& prompt : Make(options)) all.push_back(prompt.tokens);
    return all;
  };
  const auto first = tokens();
  EXPECT_EQ(tokens(), first);
  options.seed = 2;
  EXPECT_NE(tokens(), first);
  // What else is asked changes nothing.
  options.seed = 1;
  options.ruler_tasks = {"vt"};
  EXPECT_EQ(tokens().front(), first[2]);
}

TEST_F(Prompts, RulerHidesWhatItExpects) {
  TaskOptions options;
  options.task = Task::kRuler;
  options.lengths = {512, 1024};
  options.n_samples = 2;
  const std::vector<Prompt> prompts = Make(options);
  ASSERT_THAT(prompts, SizeIs(2 * 2 * 4));
  const std::map<std::string, std::size_t> expected = {
      {"multikey", 1}, {"multivalue", 4}, {"vt", 5}, {"cwe", 10}};
  for (const Prompt& prompt : prompts) {
    EXPECT_TRUE(prompt.tokens.size() == 512 || prompt.tokens.size() == 1024) << prompt.id;
    EXPECT_THAT(prompt.expected, SizeIs(expected.at(prompt.kind)));
    const std::string text = Text(prompt);
    for (const std::string& word : prompt.expected) EXPECT_THAT(text, HasSubstr(word)) << prompt.id;
    EXPECT_GT(prompt.n_predict, 0u);
  }
}

TEST_F(Prompts, ChainsAreInOrder) {
  TaskOptions options;
  options.task = Task::kRuler;
  options.lengths = {512};
  options.ruler_tasks = {"vt"};
  const Prompt prompt = Make(options).front();
  const std::string text = Text(prompt);
  std::size_t at = 0;
  for (std::size_t k = 0; k < prompt.expected.size(); ++k) {
    const std::size_t next = text.find("VAR " + prompt.expected[k] + " = ");
    ASSERT_NE(next, std::string::npos);
    EXPECT_GT(next, at);
    at = next;
    if (k == 0) continue;
    EXPECT_THAT(text.substr(at), StartsWith(fmt::format("VAR {} = VAR {}.", prompt.expected[k],
                                                        prompt.expected[k - 1])));
  }
}

TEST_F(Prompts, CommonWordsAreCommon) {
  TaskOptions options;
  options.task = Task::kRuler;
  options.lengths = {1024};
  options.ruler_tasks = {"cwe"};
  const Prompt prompt = Make(options).front();
  std::map<std::string, int> counts;
  std::string word;
  for (const char c : Text(prompt)) {
    if (std::isalpha(static_cast<unsigned char>(c))) {
      word += c;
    } else {
      if (!word.empty()) ++counts[word];
      word.clear();
    }
  }
  int least = 1000, most = 0;
  for (const auto& [w, n] : counts) {
    const bool common = std::ranges::find(prompt.expected, w) != prompt.expected.end();
    if (common) least = std::min(least, n);
    if (!common && w.ends_with("word")) most = std::max(most, n);
  }
  EXPECT_GE(least, 2 * most);
  EXPECT_GE(least, 2);
}

TEST_F(Prompts, PassagesAreSpreadOverTheText) {
  TaskOptions options;
  options.task = Task::kGenerate;
  options.n_samples = 3;
  options.n_prompt = 100;
  const std::vector<Prompt> prompts = Make(options);
  ASSERT_THAT(prompts, SizeIs(3));
  std::set<Tokens> different;
  for (const Prompt& prompt : prompts) {
    EXPECT_THAT(prompt.tokens, SizeIs(100));
    EXPECT_TRUE(prompt.expected.empty());
    EXPECT_THAT(haystack_.text(), HasSubstr(Text(prompt)));
    different.insert(prompt.tokens);
  }
  EXPECT_THAT(different, SizeIs(3));
  EXPECT_THAT(haystack_.text(), StartsWith(Text(prompts.front())));
}

TEST_F(Prompts, WhatCannotBeIsSaid) {
  TaskOptions options;
  options.lengths = {60};
  EXPECT_THAT(Error(options), HasSubstr("too short"));
  options.lengths = {100000};
  EXPECT_THAT(Error(options), HasSubstr("the text has"));
  options.task = Task::kRuler;
  options.ruler_tasks = {"cwe"};
  options.lengths = {64};
  EXPECT_THAT(Error(options), HasSubstr("cwe"));
}

TEST(ScoreAnswer, ANeedleIsTheFirstNumber) {
  const Prompt prompt{"", "needle", {}, 0, 0, true, {"1234567"}};
  EXPECT_EQ(ScoreAnswer(prompt, " 1234567."), 1);
  EXPECT_EQ(ScoreAnswer(prompt, " the number 1234567, not 2"), 1);
  EXPECT_EQ(ScoreAnswer(prompt, " 12345678"), 0);
  EXPECT_EQ(ScoreAnswer(prompt, " 123456"), 0);
  EXPECT_EQ(ScoreAnswer(prompt, " 2 or 1234567"), 0);
  EXPECT_EQ(ScoreAnswer(prompt, ""), 0);
}

TEST(ScoreAnswer, OfRulerTheShareFound) {
  const Prompt prompt{"", "vt", {}, -1, 0, true, {"ABCDE", "FGHIJ", "KLMNO", "PQRST"}};
  EXPECT_EQ(ScoreAnswer(prompt, " abcde, FGHIJ"), 0.5);
  EXPECT_EQ(ScoreAnswer(prompt, "PQRST KLMNO FGHIJ ABCDE"), 1);
  EXPECT_EQ(ScoreAnswer(prompt, ""), 0);
}

}  // namespace
}  // namespace kvtamp::tool
