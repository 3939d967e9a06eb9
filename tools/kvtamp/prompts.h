// The prompts of `kvtamp eval`'s tasks: what is asked, and what must be in the answer. Made from a
// text and a seed alone. All are for base models: each ends with the beginning of its answer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "tools/kvtamp/haystack.h"

namespace kvtamp::tool {

enum class Task : std::uint8_t { kKl, kPpl, kNeedle, kRuler, kGenerate };
const char* TaskName(Task task);
std::vector<std::string> TaskNames();
// Those of RULER that are here: multikey, multivalue, vt, cwe.
std::vector<std::string> RulerTasks();

struct TaskOptions {
  Task task = Task::kNeedle;
  std::vector<std::uint32_t> lengths = {512, 1024, 2048};  // of the whole prompt, in tokens
  std::uint32_t n_samples = 1;                             // passages of each length
  std::uint64_t seed = 1;
  // needle
  std::uint32_t n_needles = 1;  // in one text, each asked for
  std::vector<double> depths = {0, 25, 50, 75, 100};
  // ruler
  std::vector<std::string> ruler_tasks = RulerTasks();
  // generate
  std::uint32_t n_prompt = 256, n_predict = 64;
};

struct Prompt {
  std::string id;    // one of a kind within a run
  std::string kind;  // "needle", "multikey", …, "generate"
  Tokens tokens;
  double depth = -1;  // of what is asked, in percent; -1: that is nowhere in particular
  std::uint32_t n_predict = 0;
  bool one_line = false;              // the answer ends with its line
  std::vector<std::string> expected;  // empty: what the base answers
};

Result<std::vector<Prompt>> MakePrompts(const Haystack& haystack, const TaskOptions& options);

// 0 … 1. A needle must be the first number of the answer; of RULER's, the share of the expected
// that is in it anywhere, upper and lower case alike.
double ScoreAnswer(const Prompt& prompt, const std::string& answer);

}  // namespace kvtamp::tool
