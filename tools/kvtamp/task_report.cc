// The reports of the tasks that ask.
#include <fmt/format.h>

#include <map>
#include <span>

#include "tools/kvtamp/eval_report.h"

namespace kvtamp::tool {
namespace {

// The figure a task is about; the others of its kind begin with the same word.
const char* MainField(Task task) {
  return task == Task::kNeedle ? "needle_accuracy" : "ruler_score";
}

void AddFigure(Json& j, const std::string& name, const Figure& figure) {
  j[name] = figure.value;
  j[name + "_se"] = figure.se;
}

// The mean of what each prompt's score gained, so that what both find easy does not blur it.
Figure Change(const TaskScore& tested, const TaskScore& base) {
  std::vector<double> gained;
  for (std::size_t i = 0; i < tested.scores.size(); ++i)
    gained.push_back(tested.scores[i] - base.scores[i]);
  return MeanOf(gained);
}

Json MakeItem(const Prompt& prompt, std::size_t i, const TaskRun& run, const TaskScore& tested,
              const TaskScore& base, const TaskScore& floor) {
  Json item = {{"prompt", prompt.id}, {"kind", prompt.kind}, {"length", prompt.tokens.size()}};
  item["depth"] = prompt.depth < 0 ? Json() : Json(prompt.depth);
  if (!prompt.expected.empty()) item["expected"] = prompt.expected;
  item["answer_base"] = run.base[i].text;
  item["answer"] = run.tested[i].text;
  if (!run.floor.empty()) item["answer_floor"] = run.floor[i].text;
  const bool right = !prompt.expected.empty();  // else the base has no score
  if (right) item["score_base"] = base.scores[i];
  item[right ? "score" : "rouge_l"] = tested.scores[i];
  if (!run.floor.empty()) item[right ? "score_floor" : "rouge_l_floor"] = floor.scores[i];
  item["first_diff"] = tested.first_diff[i] < 0 ? Json() : Json(tested.first_diff[i]);
  return item;
}

// Means over the items of a kind and length, and depth where there is one.
Json Groups(const Json& items) {
  struct Group {
    Json names;
    std::vector<double> base, tested, floor;
  };
  std::vector<Group> groups;
  std::map<std::string, std::size_t> index;
  for (const Json& item : items) {
    const Json names = {
        {"kind", item.at("kind")}, {"length", item.at("length")}, {"depth", item.at("depth")}};
    // Of RULER's, depths are all different.
    const bool by_depth = item.at("kind") == "needle";
    const std::string key =
        fmt::format("{}/{}/{}", item.at("kind").dump(), item.at("length").dump(),
                    by_depth ? item.at("depth").dump() : "");
    const auto [at, fresh] = index.emplace(key, groups.size());
    if (fresh) groups.push_back({names, {}, {}, {}});
    Group& group = groups[at->second];
    if (!by_depth) group.names.erase("depth");
    group.base.push_back(item.at("score_base"));
    group.tested.push_back(item.at("score"));
    if (item.contains("score_floor")) group.floor.push_back(item.at("score_floor"));
  }
  Json out = Json::array();
  for (const Group& group : groups) {
    Json j = group.names;
    j["n"] = group.base.size();
    j["score"] = MeanOf(group.tested).value;
    j["score_base"] = MeanOf(group.base).value;
    if (!group.floor.empty()) j["score_floor"] = MeanOf(group.floor).value;
    out.push_back(std::move(j));
  }
  return out;
}

void AddSpeeds(Json& j, std::span<const Prompt> prompts, std::span<const Answer> answers,
               const std::string& suffix) {
  double n_prompt = 0, n_answer = 0, prompt = 0, answer = 0;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    n_prompt += static_cast<double>(prompts[i].tokens.size());
    n_answer += answers[i].seconds > 0 ? static_cast<double>(answers[i].tokens.size()) - 1 : 0;
    prompt += answers[i].seconds_prompt;
    answer += answers[i].seconds;
  }
  j["pp_ts" + suffix] = prompt > 0 ? n_prompt / prompt : 0.0;
  j["tg_ts" + suffix] = answer > 0 ? n_answer / answer : 0.0;
}

std::string PlusMinus(const Json& j, const std::string& name, double factor, const char* unit) {
  return fmt::format("{:.2f} +/- {:.2f}{}", factor * j.at(name).get<double>(),
                     factor * j.at(name + "_se").get<double>(), unit);
}

// | name | base | f16 through kvtamp, if there | tested |
void PrintFigures(const Json& j) {
  const bool floor = j.contains("same_answers_floor");
  fmt::print("| {:16} | {:>18} |{} {:>18} |\n", "", "base",
             floor ? fmt::format(" {:>18} |", "f16 via kvtamp") : "", "tested");
  fmt::print("| ---------------- | -----------------: |{} -----------------: |\n",
             floor ? " -----------------: |" : "");
  const auto row = [&](const char* title, const std::string& name, double factor,
                       const char* unit) {
    if (!j.contains(name)) return;
    fmt::print("| {:16} | {:>18} |{} {:>18} |\n", title,
               j.contains(name + "_base") ? PlusMinus(j, name + "_base", factor, unit) : "",
               floor ? fmt::format(" {:>18} |", PlusMinus(j, name + "_floor", factor, unit)) : "",
               PlusMinus(j, name, factor, unit));
  };
  row("Needle accuracy", "needle_accuracy", 100, " %");
  row("RULER score", "ruler_score", 100, " %");
  row("BLEU", "bleu", 1, "");
  row("ROUGE-L", "rouge_l", 100, "");
  row("Same answers", "same_answers", 100, " %");
}

}  // namespace

void AddTaskFields(Json& j, Task task, const TaskScore& tested, const TaskScore& base) {
  if (task == Task::kGenerate) {
    AddFigure(j, "bleu", tested.bleu);
    AddFigure(j, "rouge_l", tested.rouge_l);
  } else {
    const std::string name = MainField(task);
    AddFigure(j, name, tested.mean);
    AddFigure(j, name + "_base", base.mean);
    AddFigure(j, name + "_change", Change(tested, base));
  }
  AddFigure(j, "same_answers", tested.same);
  j["first_diff_mean"] = tested.first_diff_mean;
}

Json MakeTaskReport(const EvalOptions& options, const TaskRun& run) {
  const Task task = options.task.task;
  const TaskScore tested = ScoreAnswers(run.prompts, run.tested, run.base);
  const TaskScore base = ScoreAnswers(run.prompts, run.base, run.base);
  const TaskScore floor = ScoreAnswers(run.prompts, run.floor, run.base);
  Json j;
  AddRunFields(j, options, run.model);
  j["seed"] = options.task.seed;
  j["samples"] = options.task.n_samples;
  if (task == Task::kNeedle) j["needles"] = options.task.n_needles;
  if (task == Task::kGenerate) {
    j["prompt_tokens"] = options.task.n_prompt;
    j["n_predict"] = options.task.n_predict;
  }
  j["n_prompts"] = run.tested.size();
  AddTaskFields(j, task, tested, base);
  if (!run.floor.empty()) {
    if (task == Task::kGenerate) {
      AddFigure(j, "bleu_floor", floor.bleu);
      AddFigure(j, "rouge_l_floor", floor.rouge_l);
    } else {
      AddFigure(j, std::string(MainField(task)) + "_floor", floor.mean);
    }
    AddFigure(j, "same_answers_floor", floor.same);
  }
  CacheSize size;
  double n_tokens = 0;
  Json items = Json::array();
  for (std::size_t i = 0; i < run.tested.size(); ++i) {
    const Prompt& prompt = run.prompts[i];
    size += run.tested[i].size;
    n_tokens += static_cast<double>(prompt.tokens.size() + run.tested[i].tokens.size());
    items.push_back(MakeItem(prompt, i, run, tested, base, floor));
  }
  AddSizeFields(j, size, n_tokens);
  AddSpeeds(j, run.prompts, run.tested, "");
  AddSpeeds(j, run.prompts, run.base, "_base");
  if (task != Task::kGenerate) j["groups"] = Groups(items);
  j["items"] = std::move(items);
  return j;
}

void PrintTaskMarkdown(const Json& j) {
  fmt::print("{}, {}, {} prompts, micro-batch {}{}, {} threads\n",
             j.at("model_type").get<std::string>(), j.at("text_filename").get<std::string>(),
             j.at("n_prompts").get<int>(), j.at("n_ubatch").get<int>(),
             j.at("decode_only").get<bool>() ? ", token by token" : "",
             j.at("n_threads").get<int>());
  fmt::print("tested: device {}, K {}, V {}, {:.2f} bits; base: the host's f16 cache\n\n",
             j.at("device").get<std::string>(), j.at("format_k").get<std::string>(),
             j.at("format_v").get<std::string>(), j.at("kv_bpw").get<double>());
  PrintFigures(j);
  fmt::print("\nTokens before the first that differs: {:.1f} in the mean\n",
             j.at("first_diff_mean").get<double>());
  if (!j.contains("groups")) return;
  fmt::print(
      "\n| kind       | length | depth |   n |    base |  tested |\n"
      "| ---------- | -----: | ----: | --: | ------: | ------: |\n");
  for (const Json& group : j.at("groups")) {
    fmt::print("| {:10} | {:6} | {:>5} | {:3} | {:5.1f} % | {:5.1f} % |\n",
               group.at("kind").get<std::string>(), group.at("length").get<int>(),
               group.contains("depth") ? fmt::format("{:g}", group.at("depth").get<double>()) : "",
               group.at("n").get<int>(), 100 * group.at("score_base").get<double>(),
               100 * group.at("score").get<double>());
  }
}

}  // namespace kvtamp::tool
