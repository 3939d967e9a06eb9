// kvtamp eval: what a cache format costs in quality, against the host's own f16 cache, in one
// process.
#include <fmt/format.h>

#include <filesystem>
#include <functional>

#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/environment.h"
#include "tools/kvtamp/eval_options.h"
#include "tools/kvtamp/eval_report.h"
#include "tools/kvtamp/evaluate.h"
#include "tools/kvtamp/layout.h"
#include "tools/kvtamp/progress.h"
#include "tools/kvtamp/run_log.h"
#include "tools/kvtamp/tasks.h"

namespace kvtamp::tool {
namespace {

constexpr const char* kEvalFooter = R"(
Examples:
  kvtamp eval -m model.gguf -f wiki.test.raw -c 2048 --chunks 4
  kvtamp eval -m model.gguf -f text.txt -ub 64 --cache int8 -o json --fail-if 'kld_mean>0.01'
  kvtamp eval -m model.gguf -f text.txt --device host -ctk q4_0 -ctv q4_0
  kvtamp eval -m model.gguf -f text.txt --device host -fa off   (what arithmetic alone changes)
  kvtamp eval -m model.gguf -f text.txt -ub 64 --task needle --lengths 1024,2048 --needles 4
  kvtamp eval -m model.gguf -f text.txt --task ruler --ruler-tasks multikey,vt --resume run.jsonl
  kvtamp eval -m model.gguf -f text.txt --task generate --n-predict 128 --fail-if 'bleu<60'

The base is the host's f16 cache with flash attention. Scored by kl and ppl: the second half of each
chunk. needle and ruler ask for what the text hides, generate goes on from passages of it and
compares with the base's answers. docs/quality.md says what the figures mean.
Exit code: 0 done, 1 failed, 2 bad usage, 3 done but a --fail-if limit was passed.)";

// What a run needs beside its words.
struct Session {
  EvalOptions options;
  ModelLayout layout;
  RunLog log;
  ModelPair models;
};

// An exit code, when something is wrong.
std::optional<int> Prepare(Session& session) {
  EvalOptions& options = session.options;
  SilenceHost(options.talk.verbose);
  Result<ModelLayout> layout = ReadLayout(options.config.model);
  if (!layout.ok()) return Fail("eval", layout.status());
  session.layout = std::move(layout.value());
  if (session.layout.layers.empty()) {
    return Fail(
        "eval",
        fmt::format("{} has no attention (architecture {}): there is no K/V cache to evaluate",
                    options.config.model, session.layout.architecture),
        kFailed);
  }
  if (options.settings) {
    if (const Status fits = CheckFormats(session.layout, *options.settings); !fits.ok())
      return Fail("eval", fits, kBadUsage);
  }
  Result<std::string> text = ReadFile(options.text_file);
  if (!text.ok()) return Fail("eval", text.status());
  options.config.text = std::move(text.value());
  std::error_code ec;
  Result<RunLog> log = RunLog::Open(
      options.resume, options.Identity(std::filesystem::file_size(options.config.model, ec)));
  if (!log.ok()) return Fail("eval", log.status(), kBadUsage);
  session.log = std::move(log.value());
  NoteInterrupts();
  Result<ModelPair> models = LoadPair(options.config.model, !options.host());
  if (!models.ok()) return Fail("eval", models.status());
  session.models = std::move(models.value());
  return std::nullopt;
}

// `missing`: what an interrupt kept from being done; "" when all was.
int Report(const Session& session, const Json& report, const std::string& missing) {
  PrintReport(session.options, report);
  if (!missing.empty()) return Fail("eval", "interrupted: " + missing, kInterrupted);
  return CheckLimits("eval", session.options.limits, report);
}

// `floor`: nothing when it was not to be measured.
std::string Missing(std::size_t done, std::optional<std::size_t> floor, std::size_t asked,
                    const char* what) {
  if (done < asked) return fmt::format("{} of {} {}", done, asked, what);
  if (floor.value_or(asked) == asked) return "";
  return fmt::format("{} of {} {} of the noise floor", *floor, asked, what);
}

int RunChunks(Session& session) {
  std::vector<TestedCache> caches = {session.options.tested};
  if (session.options.noise_floor && !session.options.host()) caches.push_back(FloorCache());
  const Result<EvalResult> evaluated = [&] {
    Progress progress("eval", session.options.talk.quiet);
    return Evaluate(session.models, session.options.config, caches, session.layout,
                    {std::ref(progress), &session.log});
  }();
  if (!evaluated.ok()) {
    const bool words = evaluated.status().message().starts_with("the text has");
    return Fail("eval", evaluated.status(), words ? kBadUsage : kFailed);
  }
  const EvalResult& result = evaluated.value();
  for (const std::string& warning : result.warnings)
    fmt::print(stderr, "kvtamp eval: warning: {}\n", warning);
  const std::size_t done = result.tested.front().chunks.size();
  if (done == 0) return Fail("eval", "interrupted before the first chunk was done", kInterrupted);
  return Report(session, MakeReport(session.options, result),
                Missing(done, std::nullopt, result.n_chunks, "chunks"));
}

class Asking {
 public:
  explicit Asking(Session& session) : session_(session), models_(session.models) {}

  int Run() {
    const EvalOptions& options = session_.options;
    run_.model = FactsOf(models_.tested());
    Result<std::vector<Prompt>> prompts =
        MakePrompts(Haystack(VocabularyOf(models_.tested()), options.config.text), options.task);
    if (!prompts.ok()) return Fail("eval", prompts.status(), kBadUsage);
    run_.prompts = std::move(prompts.value());
    if (Status s = AskBoth(); !s.ok()) return Fail("eval", s);
    const std::size_t asked = run_.prompts.size(), done = run_.tested.size();
    std::optional<std::size_t> floor;
    if (options.noise_floor && !options.host() && done == asked) {
      if (Status s = AskFloor(); !s.ok()) return Fail("eval", s);
      floor = run_.floor.size();
      if (*floor < asked) run_.floor.clear();
    }
    if (done == 0)
      return Fail("eval", "interrupted before the first prompt was answered", kInterrupted);
    return Report(session_, MakeTaskReport(options, run_), Missing(done, floor, asked, "prompts"));
  }

 private:
  Answerer::Config Tested(const char* name) const;
  Status AskBoth();
  Status AskFloor();
  Result<std::vector<std::vector<Answer>>> Ask(std::span<Answerer* const> caches) {
    Progress progress("eval", session_.options.talk.quiet);
    return AnswerAll(caches, run_.prompts, session_.log, std::ref(progress));
  }

  Session& session_;
  const ModelPair& models_;
  TaskRun run_;
};

Answerer::Config Asking::Tested(const char* name) const {
  const EvalConfig& config = session_.options.config;
  const TestedCache& tested = session_.options.tested;
  Answerer::Config out{name,
                       {config.n_ctx, config.n_batch, config.n_ubatch, config.n_threads,
                        tested.flash_attention, tested.type_k, tested.type_v},
                       config.decode_only,
                       nullptr};
  if (models_.plugin) {
    out.size = [this](std::uint32_t) { return SizeOfStats(StatsOf(*models_.plugin)); };
  } else {
    out.size = [this, &tested](std::uint32_t n) {
      return SizeOfHostCache(session_.layout, tested.type_k, tested.type_v, n);
    };
  }
  return out;
}

Status Asking::AskBoth() {
  EvalConfig& config = session_.options.config;
  config.n_ctx = ContextOf(run_.prompts);
  const ContextShape shape{config.n_ctx, config.n_batch, config.n_ubatch_base, config.n_threads};
  const auto base =
      Answerer::Make(models_.base.get(), {"base", shape, config.decode_only, nullptr});
  if (!base.ok()) return base.status();
  const auto tested = Answerer::Make(models_.tested(), Tested("tested"));
  if (!tested.ok()) return tested.status();
  Answerer* const both[] = {base.value().get(), tested.value().get()};
  auto answers = Ask(both);
  if (!answers.ok()) return answers.status();
  run_.base = std::move(answers.value()[0]);
  run_.tested = std::move(answers.value()[1]);
  if (!models_.plugin || run_.tested.empty()) return Status::Ok();
  for (const std::string& warning :
       CacheWarnings(StatsOf(*models_.plugin), run_.tested.back().size))
    fmt::print(stderr, "kvtamp eval: warning: {}\n", warning);
  return Status::Ok();
}

Status Asking::AskFloor() {
  const Environment environment(FloorCache().environment);
  const auto f16 = Answerer::Make(models_.tested(), Tested("floor"));
  if (!f16.ok()) return f16.status();
  Answerer* const one[] = {f16.value().get()};
  auto answers = Ask(one);
  if (!answers.ok()) return answers.status();
  run_.floor = std::move(answers.value()[0]);
  return Status::Ok();
}

}  // namespace

int EvalMain(const Args& args) {
  CLI::App app(
      "What a cache format costs in quality, against the host's f16 cache: perplexity and KL "
      "divergence, needles, RULER's tasks, written answers",
      "kvtamp eval");
  app.footer(kEvalFooter);
  Session session;
  session.options.AddTo(app);
  if (const auto code = Parse(app, args)) return *code;
  if (const Status s = session.options.Check(); !s.ok()) return Fail("eval", s, kBadUsage);
  if (const auto code = Prepare(session)) return *code;
  return session.options.asks() ? Asking(session).Run() : RunChunks(session);
}

}  // namespace kvtamp::tool
