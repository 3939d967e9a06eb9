// What `kvtamp eval` prints: a report is a JSON object whose members have the names of
// docs/quality.md, and the other forms are made of it.
#pragma once

#include "tools/kvtamp/eval_options.h"
#include "tools/kvtamp/evaluate.h"
#include "tools/kvtamp/tasks.h"

namespace kvtamp::tool {

// An object with the names --fail-if may use.
Json FieldsOf(Task task);

// A second tested cache is the noise floor.
Json MakeReport(const EvalOptions& options, const EvalResult& result);

// Prompts and the answers there are: of those that are done all.
struct TaskRun {
  ModelFacts model;
  std::vector<Prompt> prompts;  // all that were to be asked
  std::vector<Answer> base, tested;
  std::vector<Answer> floor;  // of f16 through kvtamp, empty when not asked for
};
Json MakeTaskReport(const EvalOptions& options, const TaskRun& run);

void PrintReport(const EvalOptions& options, const Json& report);

// The parts.
void AddRunFields(Json& j, const EvalOptions& options, const ModelFacts& model);
void AddSizeFields(Json& j, const CacheSize& size, double n_tokens);
void AddTaskFields(Json& j, Task task, const TaskScore& tested, const TaskScore& base);
void PrintTaskMarkdown(const Json& j);

}  // namespace kvtamp::tool
