#include "tools/kvtamp/eval_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "base/version.h"
#include "tools/kvtamp/eval_report.h"
#include "tools/kvtamp/host_types.h"
#include "tools/kvtamp/words.h"

namespace kvtamp::tool {
namespace {

template <class T>
Result<std::vector<T>> Numbers(const std::string& flag, const std::string& text, T least, T most) {
  std::vector<T> numbers;
  for (const std::string& part : Split(text, ",")) {
    T value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    // A NaN is in no range.
    if (error != std::errc() || end != part.data() + part.size() ||
        !(value >= least && value <= most)) {
      return Status::Invalid(fmt::format(
          "{} {}: must be numbers from {} to {}, with commas between", flag, text, least, most));
    }
    if (std::ranges::find(numbers, value) != numbers.end())
      return Status::Invalid(fmt::format("{} {}: {} is there twice", flag, text, value));
    numbers.push_back(value);
  }
  return numbers;
}

Status UnknownName(const std::string& flag, const std::string& text, const std::string& what,
                   const std::vector<std::string>& names) {
  return Status::Invalid(fmt::format("{} {}: {} {}{}", flag, text, what, fmt::join(names, ", "),
                                     control::Suggestion(text, names)));
}

}  // namespace

void EvalOptions::AddTo(CLI::App& app) {
  AddModel(app, config.model);
  AddText(app, text_file, "text to score, to cut prompts from, or to hide needles in");
  app.add_option("--task", task_, "kl, ppl, needle, ruler or generate")->capture_default_str();
  app.add_option("--device", device, "kvtamp, or host: the host's own cache types")
      ->capture_default_str()
      ->check(CLI::IsMember({"kvtamp", "host"}));
  app.add_flag("--noise-floor", noise_floor,
               "measure f16 through kvtamp too: what a change of rounding alone makes");
  AddOutput(app, output, {"md", "json", "jsonl", "csv"})->capture_default_str();
  app.add_option("--fail-if", limit_texts_,
                 "exit with 3 when a field passes a limit, e.g. 'kld_mean>0.01'")
      ->type_name("LIMIT");
  app.add_option("--resume", resume,
                 "keep what is finished in this file, and go on from what it has")
      ->type_name("FILE");
  talk.AddTo(app);
  AddRun(app);
  AddTasks(app);
  flags_.AddTo(app);
}

void EvalOptions::AddRun(CLI::App& app) {
  const CLI::Range batches(1u, 65536u);
  AddNumber(app, "-c,--ctx-size", config.n_ctx,
            "tokens of a chunk; the longest prompt there may be", 32, 1 << 20);
  app.add_option("-b,--batch-size", n_batch_, "tokens of one call [the micro-batch]")
      ->type_name("N")
      ->check(batches);
  AddMicroBatch(app, config.n_ubatch);
  app.add_option("--base-ub", n_ubatch_base_, "micro-batch of the base [as -ub]")
      ->type_name("N")
      ->check(batches);
  app.add_option("--flash-attn", flash_, "-fa: flash attention of the tested context, on or off")
      ->capture_default_str()
      ->check(CLI::IsMember({"on", "off"}));
  app.add_option("--scored", config.n_scored,
                 "kl and ppl: score the last N of a chunk [its second half]")
      ->type_name("N")
      ->check(CLI::Range(2u, 1u << 20));
  app.add_flag("--decode-only", config.decode_only,
               "token by token, as an answer is written: slow, and where coding costs most");
  AddThreads(app, config.n_threads);
}

void EvalOptions::AddTasks(CLI::App& app) {
  const auto add = [&](const char* name, auto& value, const char* help, const char* type,
                       std::vector<Task> tasks) {
    CLI::Option* option = app.add_option(name, value, help)->type_name(type)->group("Tasks");
    special_.push_back({option, std::move(tasks)});
    return option;
  };
  using enum Task;
  add("--chunks", n_chunks_, "kl, ppl: chunks to run, -1 for all", "N", {kKl, kPpl})
      ->capture_default_str();
  add("--lengths", lengths_,
      "needle, ruler: tokens of a prompt [those that -c allows of 512,1024,2048]", "LIST",
      {kNeedle, kRuler});
  add("--depths", depths_, "needle: where it is hidden, in percent", "LIST", {kNeedle})
      ->capture_default_str();
  add("--needles", task.n_needles, "needle: how many are in one text, each of them asked for", "N",
      {kNeedle})
      ->capture_default_str()
      ->check(CLI::Range(1u, 64u));
  add("--ruler-tasks", ruler_tasks_,
      "ruler: some of multikey, multivalue, vt (variable tracking), cwe (common words) [all]",
      "LIST", {kRuler});
  add("--samples", n_samples_,
      "passages of the text for each kind of prompt [needle 1, ruler 4, generate 8]", "N",
      {kNeedle, kRuler, kGenerate})
      ->check(CLI::Range(1u, 100000u));
  add("--seed", task.seed, "needle, ruler: of the keys, the numbers and their places", "N",
      {kNeedle, kRuler})
      ->capture_default_str();
  add("--prompt-tokens", task.n_prompt, "generate: tokens of a prompt", "N", {kGenerate})
      ->capture_default_str()
      ->check(CLI::Range(2u, 1u << 20));
  add("--n-predict", task.n_predict, "generate: tokens of an answer", "N", {kGenerate})
      ->capture_default_str()
      ->check(CLI::Range(1u, 65536u));
}

Status EvalOptions::Check() {
  if (Status s = CheckTask(); !s.ok()) return s;
  if (Status s = CheckLists(); !s.ok()) return s;
  if (Status s = CheckSizes(); !s.ok()) return s;
  Result<std::vector<Limit>> parsed = ParseLimits(limit_texts_, FieldsOf(task.task));
  if (!parsed.ok()) return parsed.status();
  limits = std::move(parsed.value());
  return host() ? CheckHostCache() : CheckCache();
}

Status EvalOptions::CheckTask() {
  const std::vector<std::string> names = TaskNames();
  const auto found = std::ranges::find(names, task_);
  if (found == names.end()) return UnknownName("--task", task_, "must be one of", names);
  task.task = static_cast<Task>(found - names.begin());
  for (const Special& special : special_) {
    if (special.option->count() == 0 ||
        std::ranges::find(special.tasks, task.task) != special.tasks.end())
      continue;
    std::vector<std::string> able;
    for (const Task t : special.tasks) able.emplace_back(TaskName(t));
    return Status::Invalid(fmt::format("{} means nothing to --task {}, only to {}",
                                       special.option->get_name(), task_, fmt::join(able, ", ")));
  }
  return Status::Ok();
}

Status EvalOptions::CheckLists() {
  const auto depths = Numbers<double>("--depths", depths_, 0, 100);
  if (!depths.ok()) return depths.status();
  task.depths = depths.value();
  const auto lengths = Numbers<std::uint32_t>("--lengths", lengths_, 1, 1u << 20);
  if (!lengths.ok()) return lengths.status();
  task.lengths = lengths.value();
  const bool given = std::ranges::any_of(special_, [](const Special& s) {
    return s.option->get_name() == "--lengths" && s.option->count() > 0;
  });
  if (!given) {
    std::erase_if(task.lengths, [&](std::uint32_t n) { return n > config.n_ctx; });
    if (task.lengths.empty()) task.lengths = {config.n_ctx};
  }
  for (const std::uint32_t length : task.lengths) {
    if (length > config.n_ctx) {
      return Status::Invalid(
          fmt::format("--lengths {}: more than --ctx-size {}", length, config.n_ctx));
    }
  }
  if (!ruler_tasks_.empty()) task.ruler_tasks = Split(ruler_tasks_, ",");
  const std::vector<std::string> names = RulerTasks();
  for (const std::string& name : task.ruler_tasks) {
    if (std::ranges::find(names, name) == names.end())
      return UnknownName("--ruler-tasks", name, "not one of", names);
    if (std::ranges::count(task.ruler_tasks, name) > 1)
      return Status::Invalid("--ruler-tasks: " + name + " is there twice");
  }
  return Status::Ok();
}

Status EvalOptions::CheckSizes() {
  if (config.n_scored >= config.n_ctx)
    return Status::Invalid("--scored must be less than --ctx-size");
  if (n_chunks_ == 0 || n_chunks_ < -1)
    return Status::Invalid("--chunks must be positive, or -1 for all");
  if (task.task == Task::kGenerate && task.n_prompt > config.n_ctx) {
    return Status::Invalid(
        fmt::format("--prompt-tokens {}: more than --ctx-size {}", task.n_prompt, config.n_ctx));
  }
  config.max_chunks = n_chunks_ < 0 ? 0 : static_cast<std::uint32_t>(n_chunks_);
  const std::uint32_t by_task = task.task == Task::kGenerate ? 8
                                : task.task == Task::kRuler  ? 4
                                                             : 1;
  task.n_samples = n_samples_ > 0 ? n_samples_ : by_task;
  tested.flash_attention = flash_ == "on";
  config.n_ubatch = std::min(config.n_ubatch, config.n_ctx);
  config.n_ubatch_base =
      n_ubatch_base_ == 0 ? config.n_ubatch : std::min(n_ubatch_base_, config.n_ctx);
  config.n_batch =
      std::min(config.n_ctx, std::max({n_batch_, config.n_ubatch, config.n_ubatch_base}));
  return Status::Ok();
}

Status EvalOptions::CheckHostCache() {
  tested.host = true;
  for (const control::Override& given : flags_.overrides()) {
    if (given.path != "cache.type" && given.path != "cache.type_k" &&
        given.path != "cache.type_v") {
      return Status::Invalid(given.flag +
                             " is a setting of kvtamp's cache: leave out --device host");
    }
    const Result<ggml_type> parsed = HostType(given.text, given.flag);
    if (!parsed.ok()) return parsed.status();
    if (given.path != "cache.type_v") tested.type_k = parsed.value();
    if (given.path != "cache.type_k") tested.type_v = parsed.value();
  }
  format_k = ggml_type_name(tested.type_k);
  format_v = ggml_type_name(tested.type_v);
  cache_type = format_k == format_v ? format_k : format_k + "/" + format_v;
  return Status::Ok();
}

Status EvalOptions::CheckCache() {
  const Result<control::Settings> loaded = flags_.Load();
  if (!loaded.ok()) {
    std::string message = loaded.status().message();
    for (const control::Override& given : flags_.overrides()) {
      if (given.path.starts_with("cache.type") && HostType(given.text, "").ok() &&
          given.text != "f16") {
        message += " (a type of the host's own: --device host)";
        break;
      }
    }
    return Status::Invalid(message);
  }
  settings = loaded.value();
  flags_.Export(*settings);
  format_k = codec::FormatName(settings->type.k);
  format_v = codec::FormatName(settings->type.v);
  cache_type = codec::PairName(settings->type);
  return Status::Ok();
}

Json EvalOptions::Identity(std::uint64_t model_size) const {
  Json j;
  // What kl and ppl print comes of the same run.
  j["task"] = TaskName(task.task == Task::kPpl ? Task::kKl : task.task);
  j["kvtamp_version"] = KVTAMP_VERSION;
  j["llama_version"] = llama_version();
  j["model"] = std::filesystem::path(config.model).filename().string();
  j["model_bytes"] = model_size;
  j["text"] = Fingerprint(config.text);
  j["device"] = device;
  j["format_k"] = format_k;
  j["format_v"] = format_v;
  if (settings) {
    for (const control::Value& value : settings->values) {
      const std::string path = value.option->path;
      if (path.starts_with("cache.") && !path.starts_with("cache.type")) j[path] = value.text;
    }
    if (!settings->profile.empty()) {
      const Result<std::string> profile = ReadFile(settings->profile);
      j["profile"] = Fingerprint(profile.ok() ? profile.value() : "");
    }
  }
  j["n_ubatch"] = config.n_ubatch;
  j["n_ubatch_base"] = config.n_ubatch_base;
  j["n_batch"] = config.n_batch;
  j["n_threads"] = config.n_threads;
  j["flash_attn"] = tested.flash_attention;
  j["decode_only"] = config.decode_only;
  // More chunks, lengths, depths or kinds than before only add to what is there.
  if (!asks()) {
    j["n_ctx"] = config.n_ctx;
    j["n_scored"] = config.n_scored;
    return j;
  }
  j["samples"] = task.n_samples;
  j["seed"] = task.seed;
  if (task.task == Task::kNeedle) j["needles"] = task.n_needles;
  if (task.task != Task::kGenerate) return j;
  j["prompt_tokens"] = task.n_prompt;
  j["n_predict"] = task.n_predict;
  return j;
}

}  // namespace kvtamp::tool
