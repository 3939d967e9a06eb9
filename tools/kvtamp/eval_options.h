// The words of `kvtamp eval`: its flags, and what they mean together.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "control/settings.h"
#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/evaluate.h"
#include "tools/kvtamp/limit.h"
#include "tools/kvtamp/prompts.h"
#include "tools/kvtamp/run_log.h"

namespace kvtamp::tool {

class EvalOptions {
 public:
  void AddTo(CLI::App& app);
  // After parsing: everything that can be wrong with the words, before anything is loaded. From
  // then on the environment says what the plug-in is to use.
  Status Check();

  // As given.
  std::string text_file, device = "kvtamp", output = "md", resume;
  Talk talk;
  bool noise_floor = false;
  EvalConfig config;  // all but the text
  TestedCache tested{.name = "tested"};

  // As Check() found.
  TaskOptions task;
  std::vector<Limit> limits;
  std::string format_k, format_v, cache_type;
  std::optional<control::Settings> settings;  // of kvtamp's cache

  bool host() const { return device == "host"; }
  bool asks() const { return task.task != Task::kKl && task.task != Task::kPpl; }
  // What two runs must have in common for one to go on with the other's work; with the text.
  Json Identity(std::uint64_t model_size) const;

 private:
  void AddRun(CLI::App& app);
  void AddTasks(CLI::App& app);
  Status CheckSizes();
  Status CheckTask();
  Status CheckLists();
  Status CheckHostCache();
  Status CheckCache();

  std::string flash_ = "on", task_ = "kl", depths_ = "0,25,50,75,100", lengths_ = "512,1024,2048",
              ruler_tasks_;
  std::uint32_t n_batch_ = 0, n_ubatch_base_ = 0, n_samples_ = 0;
  int n_chunks_ = 4;
  std::vector<std::string> limit_texts_;
  // Flags that mean something to some tasks only.
  struct Special {
    const CLI::Option* option;
    std::vector<Task> tasks;
  };
  std::vector<Special> special_;
  SettingFlags flags_;
};

}  // namespace kvtamp::tool
