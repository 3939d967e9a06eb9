// The engine of `kvtamp eval`'s tasks: prompts answered greedily by one cache after another, and
// how the answers of a tested cache compare with what is right or with those of the base.
//
// An answer depends on its prompt and its cache alone: each prompt starts from an empty cache. So
// the base's answers can be made once and serve for any number of tested caches, and a RunLog can
// give back what an earlier run has answered.
//
// For a list of formats in one process: LoadPair(), MakePrompts() and AnswerAll() with the base
// once; then for each format the environment, an Answerer of its own, AnswerAll() with that one
// alone, and ScoreAnswers().
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "tools/kvtamp/cache_size.h"
#include "tools/kvtamp/host_model.h"
#include "tools/kvtamp/progress.h"
#include "tools/kvtamp/prompts.h"
#include "tools/kvtamp/run_log.h"

namespace kvtamp::tool {

// Functions of the model's own; it must outlive them.
Vocabulary VocabularyOf(const llama_model* model);

struct Answer {
  std::string text;
  Tokens tokens;  // without the one that ends it
  double seconds_prompt = 0, seconds = 0;
  CacheSize size;  // with the prompt and the answer in it
};

// A cache that answers. Settings of the plug-in's are those of the environment when it is made.
class Answerer {
 public:
  struct Config {
    std::string name;  // "base", "tested", …: by which a RunLog knows its answers
    ContextShape shape;
    bool token_by_token = false;  // the prompt too
    // How large the cache is with n tokens; none: not asked.
    std::function<CacheSize(std::uint32_t)> size;
  };
  static Result<std::unique_ptr<Answerer>> Make(llama_model* model, Config config);

  const std::string& name() const { return config_.name; }
  // `go_on(fraction)` false: no answer.
  Result<std::optional<Answer>> Ask(const Prompt& prompt, const std::function<bool(double)>& go_on);
  std::string Text(const Tokens& tokens) const;

 private:
  Answerer(llama_model* model, Config config, Context context);
  Result<std::optional<Answer>> Write(const Prompt& prompt, Answer answer,
                                      const std::function<bool(double)>& go_on);
  Result<std::int32_t> BestToken() const;

  Config config_;
  const llama_vocab* vocab_;
  Context context_;
  Batch batch_;
};

// Tokens a context must hold for all of them.
std::uint32_t ContextOf(std::span<const Prompt> prompts);

// [cache][prompt]: each prompt by all caches before the next one. Fewer prompts than asked when
// `progress(done, what)` said false; all caches have answered those.
Result<std::vector<std::vector<Answer>>> AnswerAll(std::span<Answerer* const> caches,
                                                   std::span<const Prompt> prompts, RunLog& log,
                                                   const ProgressCall& progress);

struct Figure {
  double value = 0, se = 0;  // se: standard error, prompts taken as independent
};
Figure MeanOf(std::span<const double> values);

// Answers of a cache against what is expected, or against the base's where nothing is.
struct TaskScore {
  std::vector<double> scores;   // ScoreAnswer() of each; ROUGE-L where nothing is expected
  std::vector<int> first_diff;  // the first token that is not the base's; -1: none
  Figure mean;                  // of scores
  Figure bleu;                  // against the base's answers; se by the jackknife
  Figure rouge_l;
  Figure same;                 // share of answers equal to the base's, token for token
  double first_diff_mean = 0;  // an equal answer counts with its length
};
TaskScore ScoreAnswers(std::span<const Prompt> prompts, std::span<const Answer> answers,
                       std::span<const Answer> base);

}  // namespace kvtamp::tool
