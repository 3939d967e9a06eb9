#include "tools/kvtamp/ruler.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>
#include <sstream>

#include "tools/kvtamp/run_log.h"

namespace kvtamp::tool {
namespace {

constexpr std::size_t kKeys = 4;     // of multikey
constexpr std::size_t kValues = 4;   // of multivalue
constexpr std::size_t kNames = 5;    // of vt
constexpr std::size_t kCommon = 10;  // of cwe

constexpr std::array kFirst = {"amber", "brisk", "calm",  "dusty", "early", "faint",
                               "green", "hasty", "ivory", "jolly", "keen",  "lucky",
                               "misty", "noble", "olive", "plain", "quiet", "rapid",
                               "sharp", "tidy",  "upper", "vivid", "warm",  "young"};
constexpr std::array kSecond = {"anchor", "basket", "candle", "desert", "engine", "forest",
                                "garden", "hammer", "island", "jacket", "kettle", "ladder",
                                "market", "needle", "orange", "pillow", "quarry", "river",
                                "saddle", "temple", "umpire", "valley", "window", "yard"};

// n that `make` gives, each another.
template <class F>
std::vector<std::string> Different(std::size_t n, F&& make) {
  std::vector<std::string> all;
  while (all.size() < n) {
    std::string next = make();
    if (std::ranges::find(all, next) == all.end()) all.push_back(std::move(next));
  }
  return all;
}

Result<Prompt> Keyed(const Haystack& haystack, const RulerSpec& spec, Prompt prompt, Dice& dice) {
  const bool many = prompt.kind == "multivalue";
  const std::vector<std::string> keys = dice.Keys(many ? 1 : kKeys);
  const std::size_t asked = many ? 0 : dice.Below(kKeys);
  std::vector<Hidden> hidden;
  for (const double depth : dice.Depths(many ? kValues : kKeys)) {
    const std::size_t k = many ? 0 : hidden.size();
    const std::string number = dice.Number(7);
    hidden.push_back(
        {depth, fmt::format(" {} for {} is: {}.",
                            many ? "One of the special magic numbers" : "The special magic number",
                            keys[k], number)});
    if (k != asked) continue;
    prompt.expected.push_back(number);
    if (!many) prompt.depth = depth;
  }
  prompt.n_predict = static_cast<std::uint32_t>(prompt.expected.size()) * kNumberTokens;
  const std::string what =
      fmt::format("special magic number{} for {}", many ? "s" : "", keys[asked]);
  const auto tokens = haystack.Hide(
      spec.length, spec.sample, spec.n_samples,
      "Some special magic numbers are hidden within the following text. Make sure to memorize "
      "them. I will quiz you about the numbers afterwards.\n",
      hidden,
      many ? fmt::format("\nWhat are all the {0} mentioned in the provided text? The {0} mentioned "
                         "in the provided text are",
                         what)
           : fmt::format("\nWhat is the {0} mentioned in the provided text? The {0} is:", what));
  if (!tokens.ok()) return tokens.status();
  prompt.tokens = tokens.value();
  return prompt;
}

std::string AskForNames(const std::string& value) {
  return fmt::format(
      "\nQuestion: Find all variables that are assigned the value {0} in the text above. Answer: "
      "According to the chain(s) of variable assignment in the text above, {1} variables are "
      "assigned the value {0}, they are:",
      value, kNames);
}

Result<Prompt> Tracked(const Haystack& haystack, const RulerSpec& spec, Prompt prompt, Dice& dice) {
  prompt.expected = dice.Names(kNames);
  const std::string value = dice.Number(5);
  std::vector<Hidden> hidden;
  for (const double depth : dice.Depths(kNames)) {
    const std::size_t k = hidden.size();
    const std::string from = k == 0 ? value : "VAR " + prompt.expected[k - 1];
    hidden.push_back({depth, fmt::format(" VAR {} = {}.", prompt.expected[k], from)});
  }
  prompt.n_predict = 48;
  const std::string task =
      "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n";
  // RULER shows one, too: else a base model does not know what an answer looks like.
  const std::string example =
      "VAR QXBMA = 51034. VAR LTKEW = VAR QXBMA. VAR HUDRN = VAR LTKEW. VAR PJOVC = VAR HUDRN. VAR "
      "ZSYIG = VAR PJOVC." +
      AskForNames("51034") + " QXBMA LTKEW HUDRN PJOVC ZSYIG\n\n";
  const auto tokens = haystack.Hide(spec.length, spec.sample, spec.n_samples, task + example + task,
                                    hidden, AskForNames(value));
  if (!tokens.ok()) return tokens.status();
  prompt.tokens = tokens.value();
  return prompt;
}

// The different words of a text that are small letters alone, from four to ten of them, between
// spaces.
std::vector<std::string> PlainWords(const std::string& text) {
  std::set<std::string> words;
  std::istringstream in(text);
  for (std::string word; in >> word;) {
    const bool plain = std::ranges::all_of(word, [](char c) { return c >= 'a' && c <= 'z'; });
    if (plain && word.size() >= 4 && word.size() <= 10) words.insert(word);
  }
  return {words.begin(), words.end()};
}

// `words`, the first ten of them `often` times, the others `seldom` times, until n are listed.
std::vector<std::string> Mixed(const std::vector<std::string>& words, std::size_t n,
                               std::size_t often, std::size_t seldom, const RulerSpec& spec) {
  std::vector<std::string> list;
  for (std::size_t k = 0; k < words.size() && list.size() < n; ++k)
    list.insert(list.end(), k < kCommon ? often : seldom, words[k]);
  Dice(spec.seed, fmt::format("order {}/{}", spec.length, spec.sample)).Shuffle(list);
  return list;
}

std::string Numbered(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i)
    text += fmt::format("{}{}. {}", i == 0 ? "" : " ", i + 1, words[i]);
  return text;
}

Result<Prompt> Common(const Haystack& haystack, const RulerSpec& spec, Prompt prompt, Dice& dice) {
  std::vector<std::string> words = PlainWords(haystack.text());
  dice.Shuffle(words);
  const Vocabulary& v = haystack.vocabulary();
  Tokens out = v.begin;
  const auto add = [](Tokens& to, const Tokens& more) {
    to.insert(to.end(), more.begin(), more.end());
  };
  add(out,
      v.encode("Below is a numbered list of words. In these words, some appear more often than "
               "others. Memorize the ones that appear most often.\n"));
  const Tokens tail = v.encode(
      "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words "
      "that appear most often in the list are: 1.");
  const Tokens filler = {v.encode("\n").back()};
  // As many words as fit: tried with less and less, for each has another number of tokens.
  for (std::size_t n = spec.length / 3; n >= 3 * kCommon; n -= 1 + n / 50) {
    const std::size_t often = std::clamp<std::size_t>(n / (2 * kCommon), 2, 30);
    const std::size_t seldom = std::max<std::size_t>(1, often / 10);
    if (words.size() < kCommon + (n - kCommon * often + seldom - 1) / seldom) break;
    const Tokens list = v.encode(Numbered(Mixed(words, n, often, seldom, spec)));
    if (out.size() + list.size() + tail.size() > spec.length) continue;
    while (out.size() + list.size() + tail.size() < spec.length) add(out, filler);
    add(out, list);
    add(out, tail);
    prompt.tokens = std::move(out);
    prompt.expected.assign(words.begin(), words.begin() + kCommon);
    prompt.n_predict = 120;
    prompt.one_line = false;
    return prompt;
  }
  return Status::Invalid(
      fmt::format("no cwe prompt of {} tokens: it is too short, or the text's {} "
                  "plain words are too few",
                  spec.length, words.size()));
}

}  // namespace

Dice::Dice(std::uint64_t seed, std::string_view what) : random_(seed ^ Fingerprint(what)) {}

std::string Dice::Number(int n_digits) {
  std::string number(1, static_cast<char>('1' + Below(9)));
  while (static_cast<int>(number.size()) < n_digits) number += static_cast<char>('0' + Below(10));
  return number;
}

std::vector<std::string> Dice::Keys(std::size_t n) {
  return Different(n, [this] {
    return fmt::format("{}-{}", kFirst[Below(kFirst.size())], kSecond[Below(kSecond.size())]);
  });
}

std::vector<std::string> Dice::Names(std::size_t n) {
  return Different(n, [this] {
    std::string name;
    for (int i = 0; i < 5; ++i) name += static_cast<char>('A' + Below(26));
    return name;
  });
}

std::vector<double> Dice::Depths(std::size_t n) {
  std::vector<double> depths;
  for (std::size_t i = 0; i < n; ++i) depths.push_back(static_cast<double>(Below(101)));
  std::ranges::sort(depths);
  return depths;
}

std::vector<std::string> RulerTasks() { return {"multikey", "multivalue", "vt", "cwe"}; }

Result<Prompt> MakeRulerPrompt(const Haystack& haystack, const RulerSpec& spec) {
  Prompt prompt;
  prompt.id = fmt::format("{} {}/{}", spec.name, spec.length, spec.sample);
  prompt.kind = spec.name;
  prompt.one_line = true;
  Dice dice(spec.seed, prompt.id);
  if (spec.name == "vt") return Tracked(haystack, spec, std::move(prompt), dice);
  if (spec.name == "cwe") return Common(haystack, spec, std::move(prompt), dice);
  return Keyed(haystack, spec, std::move(prompt), dice);
}

}  // namespace kvtamp::tool
