// How alike two texts are, as the usual tools count it: corpus BLEU as sacrebleu does (13a words,
// order 4, exponential smoothing) and ROUGE-L as rouge-score does (F1 over lower-cased words of
// ASCII letters and digits, no stemming). Pure. Text is UTF-8.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace kvtamp::tool {

// Punctuation apart from words, but for points, commas and dashes within numbers.
std::vector<std::string> Words13a(std::string_view text);

// What BLEU is made of; that of a corpus is the sum of its segments'.
struct BleuCounts {
  static constexpr std::size_t kOrder = 4;
  std::array<double, kOrder> matched = {}, total = {};
  double length = 0, length_reference = 0;

  BleuCounts& operator+=(const BleuCounts& other) { return Add(other, 1); }
  BleuCounts& operator-=(const BleuCounts& other) { return Add(other, -1); }

 private:
  BleuCounts& Add(const BleuCounts& other, double sign);
};
BleuCounts CountBleu(std::string_view text, std::string_view reference);
double Bleu(const BleuCounts& counts);  // 0 … 100

double RougeL(std::string_view text, std::string_view reference);  // 0 … 1

}  // namespace kvtamp::tool
