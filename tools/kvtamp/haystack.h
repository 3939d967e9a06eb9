// A text as tokens, cut into passages with sentences hidden in them. Pure: the model's vocabulary
// comes in as two functions.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"

namespace kvtamp::tool {

using Tokens = std::vector<std::int32_t>;

struct Vocabulary {
  std::function<Tokens(const std::string&)> encode;  // the text alone
  std::function<std::string(std::int32_t)> piece;
  Tokens begin;  // what a prompt starts with: BOS or nothing
};

// Hidden at so much of the passage, 0 … 100.
struct Hidden {
  double depth = 0;
  std::string sentence;
};

class Haystack {
 public:
  Haystack(Vocabulary vocabulary, const std::string& text);

  const Vocabulary& vocabulary() const { return vocabulary_; }
  const std::string& text() const { return text_; }

  // n tokens, the i-th of so many passages evenly spread over the text; from the start of a
  // sentence where one is near.
  Result<Tokens> Passage(std::size_t n, std::size_t i, std::size_t n_passages) const;

  // Exactly `length` tokens: begin, head, a passage with the sentences hidden between its own (at
  // its end: 100), tail.
  Result<Tokens> Hide(std::size_t length, std::size_t i, std::size_t n_passages,
                      const std::string& head, const std::vector<Hidden>& hidden,
                      const std::string& tail) const;

 private:
  // Of `tokens`, the start of a sentence nearest to `at` in [first, last]; `at` where none is near.
  std::size_t NearestStart(const Tokens& tokens, std::size_t at, std::size_t first,
                           std::size_t last, std::size_t reach) const;
  bool StartsSentence(const Tokens& tokens, std::size_t i) const;

  Vocabulary vocabulary_;
  std::string text_;
  Tokens tokens_;
};

}  // namespace kvtamp::tool
