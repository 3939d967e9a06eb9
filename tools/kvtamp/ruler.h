// Prompts of the kinds RULER (arXiv 2404.06654) asks, of an exact length in tokens:
//   multikey    four keys with a number each, one of them asked
//   multivalue  one key with four numbers, all of them asked
//   vt          a variable handed on four times; all names of its value asked
//   cwe         a list of words, ten of them far more often than the others; the ten asked
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "tools/kvtamp/haystack.h"
#include "tools/kvtamp/prompts.h"

namespace kvtamp::tool {

inline constexpr std::uint32_t kNumberTokens = 24;  // seven digits, however a model cuts them

// Chance that depends on the seed and on what it is for, and on no library's distributions.
class Dice {
 public:
  Dice(std::uint64_t seed, std::string_view what);
  std::size_t Below(std::size_t n) { return static_cast<std::size_t>(random_() % n); }
  std::string Number(int n_digits);
  std::vector<std::string> Keys(std::size_t n);   // "amber-anchor", each another
  std::vector<std::string> Names(std::size_t n);  // five capital letters, each another
  std::vector<double> Depths(std::size_t n);      // 0 … 100, ascending
  template <class T>
  void Shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[Below(i)]);
  }

 private:
  std::mt19937_64 random_;
};

struct RulerSpec {
  std::string name;
  std::uint32_t length = 0;
  std::uint32_t sample = 0, n_samples = 1;
  std::uint64_t seed = 1;
};
Result<Prompt> MakeRulerPrompt(const Haystack& haystack, const RulerSpec& spec);

}  // namespace kvtamp::tool
