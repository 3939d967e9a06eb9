#include "tools/kvtamp/prompts.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <numeric>

#include "tools/kvtamp/ruler.h"
#include "tools/kvtamp/words.h"

namespace kvtamp::tool {
namespace {

constexpr const char* kTaskNames[] = {"kl", "ppl", "needle", "ruler", "generate"};

std::string FirstNumber(const std::string& text) {
  const char* digits = "0123456789";
  const std::size_t start = std::min(text.find_first_of(digits), text.size());
  const std::size_t end = std::min(text.find_first_not_of(digits, start), text.size());
  return text.substr(start, end - start);
}

// The needles of one text: the first at `depth`, the others the same distance apart, from the end
// on to the start again.
std::vector<double> Depths(double depth, std::uint32_t n) {
  std::vector<double> depths;
  for (std::uint32_t k = 0; k < n; ++k) {
    const double at = depth + 100.0 * k / n;
    depths.push_back(at > 100 ? at - 100 : at);
  }
  return depths;
}

Status AddNeedles(const Haystack& haystack, const TaskOptions& options, std::uint32_t length,
                  double depth, std::uint32_t sample, std::vector<Prompt>& prompts) {
  const std::string text = fmt::format("needle {}/{:g}/{}", length, depth, sample);
  Dice dice(options.seed, text);
  const std::vector<double> depths = Depths(depth, options.n_needles);
  const std::vector<std::string> keys = dice.Keys(options.n_needles);
  std::vector<std::string> numbers;
  std::vector<Hidden> hidden;
  for (std::uint32_t k = 0; k < options.n_needles; ++k) {
    numbers.push_back(dice.Number(7));
    hidden.push_back(
        {depths[k], fmt::format(" The special magic number for {} is: {}.", keys[k], numbers[k])});
  }
  for (std::uint32_t k = 0; k < options.n_needles; ++k) {
    const auto tokens = haystack.Hide(
        length, sample, options.n_samples,
        options.n_needles == 1
            ? "A special magic number is hidden within the following text. Make sure to memorize "
              "it. I will quiz you about the number afterwards.\n"
            : "Some special magic numbers are hidden within the following text. Make sure to "
              "memorize them. I will quiz you about the numbers afterwards.\n",
        hidden,
        fmt::format("\nWhat is the special magic number for {0} mentioned in the provided text? "
                    "The special magic number for {0} is:",
                    keys[k]));
    if (!tokens.ok()) return tokens.status();
    Prompt prompt{fmt::format("{}/{}", text, k),
                  "needle",
                  tokens.value(),
                  depths[k],
                  kNumberTokens,
                  true,
                  {numbers[k]}};
    prompts.push_back(std::move(prompt));
  }
  return Status::Ok();
}

Status AddPassages(const Haystack& haystack, const TaskOptions& options,
                   std::vector<Prompt>& prompts) {
  const Tokens& begin = haystack.vocabulary().begin;
  for (std::uint32_t i = 0; i < options.n_samples; ++i) {
    const auto passage = haystack.Passage(options.n_prompt - begin.size(), i, options.n_samples);
    if (!passage.ok()) return passage.status();
    Prompt prompt{
        fmt::format("generate {}", i), "generate", begin, -1, options.n_predict, false, {}};
    std::ranges::copy(passage.value(), std::back_inserter(prompt.tokens));
    prompts.push_back(std::move(prompt));
  }
  return Status::Ok();
}

}  // namespace

const char* TaskName(Task task) { return kTaskNames[static_cast<std::size_t>(task)]; }

std::vector<std::string> TaskNames() { return {std::begin(kTaskNames), std::end(kTaskNames)}; }

Result<std::vector<Prompt>> MakePrompts(const Haystack& haystack, const TaskOptions& options) {
  std::vector<Prompt> prompts;
  if (options.task == Task::kGenerate) {
    if (Status s = AddPassages(haystack, options, prompts); !s.ok()) return s;
    return prompts;
  }
  for (const std::uint32_t length : options.lengths) {
    for (std::uint32_t sample = 0; sample < options.n_samples; ++sample) {
      for (const double depth : options.depths) {
        if (options.task != Task::kNeedle) break;
        if (Status s = AddNeedles(haystack, options, length, depth, sample, prompts); !s.ok())
          return s;
      }
      for (const std::string& name : options.ruler_tasks) {
        if (options.task != Task::kRuler) break;
        Result<Prompt> prompt =
            MakeRulerPrompt(haystack, {name, length, sample, options.n_samples, options.seed});
        if (!prompt.ok()) return prompt.status();
        prompts.push_back(std::move(prompt.value()));
      }
    }
  }
  return prompts;
}

double ScoreAnswer(const Prompt& prompt, const std::string& answer) {
  if (prompt.expected.empty()) return 0;
  if (prompt.kind == "needle") return FirstNumber(answer) == prompt.expected.front() ? 1 : 0;
  const std::string lower = Lower(answer);
  const auto found = std::ranges::count_if(prompt.expected, [&](const std::string& word) {
    return lower.find(Lower(word)) != std::string::npos;
  });
  return static_cast<double>(found) / static_cast<double>(prompt.expected.size());
}

}  // namespace kvtamp::tool
