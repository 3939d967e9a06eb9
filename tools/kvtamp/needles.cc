#include "tools/kvtamp/needles.h"

#include "tools/kvtamp/environment.h"
#include "tools/kvtamp/tasks.h"

namespace kvtamp::tool {

Result<NeedlesFound> FindNeedles(const ModelPair& models, const EvalConfig& config,
                                 std::span<const TestedCache> tested,
                                 const std::vector<double>& depths, const EvalHooks& hooks) {
  llama_model* base = models.base.get();
  TaskOptions options;
  options.lengths = {config.n_ctx};
  options.depths = depths;
  const auto prompts = MakePrompts(Haystack(VocabularyOf(base), config.text), options);
  if (!prompts.ok()) return prompts.status();
  ContextShape shape{ContextOf(prompts.value()), config.n_batch, config.n_ubatch, config.n_threads};
  std::vector<std::unique_ptr<Answerer>> caches;
  const auto add = [&](llama_model* model, const std::string& name) {
    auto made = Answerer::Make(model, {name, shape, config.decode_only, nullptr});
    if (made.ok()) caches.push_back(std::move(made.value()));
    return made.status();
  };
  if (Status s = add(base, "base"); !s.ok()) return s;
  for (const TestedCache& t : tested) {
    const Environment environment(t.environment);
    shape.type_k = t.type_k;
    shape.type_v = t.type_v;
    if (Status s = add(t.host ? base : models.own.get(), t.name); !s.ok()) return s;
  }
  std::vector<Answerer*> all;
  for (const auto& cache : caches) all.push_back(cache.get());
  const auto answers = AnswerAll(all, prompts.value(), *hooks.log, hooks.progress);
  if (!answers.ok()) return answers.status();
  NeedlesFound found;
  found.asked = answers.value().front().size();
  for (std::size_t i = 0; i < caches.size(); ++i) {
    std::size_t n = 0;
    for (std::size_t p = 0; p < found.asked; ++p)
      n += ScoreAnswer(prompts.value()[p], answers.value()[i][p].text) == 1 ? 1 : 0;
    if (i == 0) {
      found.base = n;
    } else {
      found.tested.push_back(n);
    }
  }
  return found;
}

}  // namespace kvtamp::tool
