// kvtamp bench speed: prefill and decode of several caches, beside the host's own in the same run.
#include <fmt/format.h>

#include "tools/kvtamp/cache_list.h"
#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/layout.h"
#include "tools/kvtamp/progress.h"
#include "tools/kvtamp/speed.h"
#include "tools/kvtamp/speed_table.h"

namespace kvtamp::tool {
namespace {

constexpr const char* kSpeed = "bench speed";
constexpr const char* kSpeedFooter = R"(
All caches are measured in turns, so a busy machine slows all of them; t/s is the median of the
repetitions, the ratio that of the same turns. What it needs is memory for all caches at once. One
cache is filled to a depth, the others get its saved state where theirs is of the same type.

Examples:
  kvtamp bench speed -m model.gguf
  kvtamp bench speed -m model.gguf --caches k4v4,k3v3 --host-types f16,q8_0 -d 0,4096 -p 512 -n 32
  kvtamp bench speed -m model.gguf -d 32768 -p 0 -o json)";

struct SpeedOptions {
  SpeedConfig config;
  std::vector<std::string> caches{"k4v4"}, host_types{"f16"};
  std::string output = "md";
  Talk talk;
};

void AddSpeedOptions(CLI::App& app, SpeedOptions& o) {
  SpeedConfig& c = o.config;
  const auto number = [&](const char* name, auto& to, const char* help, std::uint32_t least) {
    AddNumber(app, name, to, help, least, 1 << 20);
  };
  AddModel(app, c.model);
  AddCacheLists(app, o.caches, o.host_types);
  number("-p,--n-prompt", c.n_prompt, "tokens of the prefill test, 0: none", 0);
  number("-n,--n-gen", c.n_gen, "tokens of the decode test, 0: none", 0);
  app.add_option("-d,--n-depth", c.depths, "tokens in the cache before a test")
      ->delimiter(',')
      ->type_name("N")
      ->capture_default_str()
      ->check(CLI::Range(0u, 1u << 24));
  number("-r,--repetitions", c.repetitions, "how often each test runs", 1);
  number("-b,--batch-size", c.n_batch, "tokens of one call", 1);
  number("--ubatch-size", c.n_ubatch, "-ub: micro-batch", 1);
  AddThreads(app, c.n_threads);
  AddOutput(app, o.output, {"md", "csv", "json", "jsonl"})->capture_default_str();
  o.talk.AddTo(app);
}

// The host's first: ratios are to the first of them.
Result<std::vector<CacheEntry>> EntriesOf(const SpeedOptions& o, const ModelLayout& layout) {
  std::vector<CacheEntry> entries;
  if (Status s = AddCaches(o.host_types, true, entries); !s.ok()) return s;
  if (Status s = AddCaches(o.caches, false, entries); !s.ok()) return s;
  if (Status s = CheckCaches(layout, entries); !s.ok()) return s;
  return entries;
}

void PrintRows(const std::string& output, const Json& rows) {
  if (output == "md") fmt::print("{}", SpeedMarkdown(rows));
  if (output == "csv") fmt::print("{}", SpeedCsv(rows));
  if (output == "json") fmt::print("{}\n", Dump(rows, 2));
  if (output == "jsonl")
    for (const Json& row : rows) fmt::print("{}\n", Dump(row));
}

}  // namespace

int BenchSpeedMain(const Args& args) {
  CLI::App app("Prefill and decode of several caches, beside the host's own in the same run",
               std::string("kvtamp ") + kSpeed);
  app.footer(std::string(kCacheListHelp) + kSpeedFooter);
  SpeedOptions o;
  AddSpeedOptions(app, o);
  if (const auto code = Parse(app, args)) return *code;
  if (o.config.n_prompt + o.config.n_gen == 0)
    return Fail(kSpeed, "-p 0 and -n 0: nothing is left to measure", kBadUsage);
  SilenceHost(o.talk.verbose);
  const auto layout = ReadCacheLayout(o.config.model);
  if (!layout.ok()) return Fail(kSpeed, layout.status());
  const auto entries = EntriesOf(o, layout.value());
  if (!entries.ok()) return Fail(kSpeed, entries.status(), kBadUsage);
  NoteInterrupts();
  const auto models = LoadModels(o.config.model, entries.value());
  if (!models.ok()) return Fail(kSpeed, models.status());
  const std::vector<TestedCache> caches = TestedCaches(entries.value());
  Progress progress(kSpeed, o.talk.quiet);
  bool stopped = false;
  const auto result =
      MeasureSpeed(models.value(), o.config, caches, [&](double done, const std::string& what) {
        stopped = !progress(done, what);
        return !stopped;
      });
  if (!result.ok()) return Fail(kSpeed, result.status());
  const auto rows = SpeedRows(o.config, entries.value(), result.value());
  if (rows.empty()) return Fail(kSpeed, "interrupted before the first test was done", kInterrupted);
  PrintRows(o.output, rows);
  return stopped ? kInterrupted : kDone;
}

}  // namespace kvtamp::tool
