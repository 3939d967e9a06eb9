// Differential fuzzer: the same random calls on the host's own cache and on kvtamp's
// (docs/fuzzing.md).
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "fuzz/case.h"
#include "fuzz/compare.h"
#include "fuzz/run.h"
#include "ggml-backend.h"
#include "llama.h"

namespace {

using namespace kvtamp::fuzz;
using Clock = std::chrono::steady_clock;

constexpr int kOpsPerCase = 300;
constexpr const char* kTypes[] = {"f16", "k8v8", "k4v4", "k2.5v2.5"};

struct Flags {
  std::uint64_t seed = 0;
  std::uint64_t ops = 20000;
  double seconds = 0;
  std::string type = "all";
  std::string plugin = KVTAMP_FUZZ_PLUGIN;
  std::string replay;
  int case_ops = kOpsPerCase;
  std::uint32_t max_threads = 2;
  bool verbose = false;
};

bool g_verbose = false;
volatile std::sig_atomic_t g_stop = 0;

void HostLog(ggml_log_level level, const char* text, void*) {
  if (g_verbose && level >= GGML_LOG_LEVEL_WARN) std::fputs(text, stderr);
}

ggml_backend_dev_t LoadDevice(const std::string& path) {
  llama_log_set(HostLog, nullptr);
  llama_backend_init();
  ggml_backend_load_all();
  ggml_backend_reg_t reg = ggml_backend_load(path.c_str());
  return reg == nullptr ? nullptr : ggml_backend_reg_dev_get(reg, 0);
}

int Report(const Case& c, const Outcome& o, const Flags& flags, ggml_backend_dev_t device) {
  std::printf("\nDIFFERENCE at operation %zu: %s\n", o.at_op, o.what.c_str());
  std::fflush(stdout);
  const Case small = Shrink(c, o.at_op, device);
  const Outcome again = RunCase(small, device, true);
  const std::string file = "kv_fuzz-" + std::to_string(flags.seed) + ".case";
  std::ofstream(file) << ToText(small);
  std::printf("shrunk from %zu to %zu operations: %s\n\n%s\n%s\n", c.ops.size(), small.ops.size(),
              again.ok ? "(it does not fail every time)" : again.what.c_str(),
              ToText(small.setup).c_str(),
              again.trace.empty() ? ToText(small).c_str() : again.trace.c_str());
  std::printf("again: kv_fuzz --replay %s -v\n", file.c_str());
  return 1;
}

int Replay(const Flags& flags, ggml_backend_dev_t device) {
  std::ifstream in(flags.replay);
  if (!in) {
    std::fprintf(stderr, "kv_fuzz: cannot read %s\n", flags.replay.c_str());
    return 2;
  }
  const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  std::string why;
  const auto c = ParseCase(text, why);
  if (!c || BoundsOf(c->setup.type) == nullptr) {
    std::fprintf(stderr, "kv_fuzz: %s: %s\n", flags.replay.c_str(),
                 c ? "a type without bounds" : why.c_str());
    return 2;
  }
  const Outcome o = RunCase(*c, device, true);
  std::printf("%s\n%s", ToText(c->setup).c_str(), o.trace.c_str());
  std::printf("%s; error: mean %.3g, max %.3g over %llu rows\n", o.ok ? "ok" : o.what.c_str(),
              o.totals.error.mean(), o.totals.error.max,
              static_cast<unsigned long long>(o.totals.error.rows));
  return o.ok ? 0 : 1;
}

void PrintTotals(const std::map<std::string, Totals>& by_type, double seconds) {
  Totals sum;
  for (const auto& [type, t] : by_type) sum.Add(t);
  for (std::size_t k = 0; k < kKinds; ++k)
    std::printf("  %-16s %10llu\n", InfoOf(static_cast<Kind>(k)).name,
                static_cast<unsigned long long>(sum.done[k]));
  std::printf(
      "  %-16s %10llu  (tokens %llu, decodes refused by both %llu, skipped %llu)\n", "all",
      static_cast<unsigned long long>(sum.ops()), static_cast<unsigned long long>(sum.tokens),
      static_cast<unsigned long long>(sum.refused), static_cast<unsigned long long>(sum.skipped));
  for (const auto& [type, t] : by_type)
    std::printf("  %-5s %9llu ops, error of %llu rows of logits: mean %.3g, max %.3g\n",
                type.c_str(), static_cast<unsigned long long>(t.ops()),
                static_cast<unsigned long long>(t.error.rows), t.error.mean(), t.error.max);
  std::printf("  %.1f s, %.0f ops/s\n", seconds, static_cast<double>(sum.ops()) / seconds);
}

int Fuzz(const Flags& flags, ggml_backend_dev_t device) {
  std::vector<std::string> types(std::begin(kTypes), std::end(kTypes));
  if (flags.type != "all") types = {flags.type};
  std::printf("kv_fuzz --seed %llu --ops %llu --type %s\n",
              static_cast<unsigned long long>(flags.seed),
              static_cast<unsigned long long>(flags.ops), flags.type.c_str());
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  std::map<std::string, Totals> by_type;
  std::uint64_t done = 0;
  // Asked to stop, it ends with the case at hand and says what was done.
  for (int signal : {SIGINT, SIGTERM}) std::signal(signal, [](int) { g_stop = 1; });
  for (std::uint64_t n = 0; done < flags.ops && !g_stop; ++n) {
    if (flags.seconds > 0 && elapsed() >= flags.seconds) break;
    const std::string& type = types[n % types.size()];
    Case c = MakeCase(flags.seed * 1000003u + n, type, flags.case_ops);
    c.setup.threads = std::min(c.setup.threads, flags.max_threads);
    if (flags.verbose)
      std::printf("%llu %s\n", static_cast<unsigned long long>(n), ToText(c.setup).c_str());
    std::fflush(stdout);
    const Outcome o = RunCase(c, device);
    by_type[type].Add(o.totals);
    done += o.totals.ops();
    if (flags.verbose)
      std::printf("  %llu ops, error: mean %.3g, max %.3g\n",
                  static_cast<unsigned long long>(o.totals.ops()), o.totals.error.mean(),
                  o.totals.error.max);
    if (!o.ok && g_stop) break;  // the case was stopped with us
    if (!o.ok) return Report(c, o, flags, device);
  }
  PrintTotals(by_type, elapsed());
  for (const auto& [type, t] : by_type) {
    if (BoundsOf(type)->coded && t.error.rows > 1000 && t.error.mean() == 0) {
      std::printf("%s: no error at all, so nothing was coded\n", type.c_str());
      return 1;
    }
  }
  return 0;
}

// Threads that spin starve each other where there are more of them than cores. OpenMP's run-time
// library reads this when it is loaded, so the program starts once more.
void WaitAsleep(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  setenv("OMP_WAIT_POLICY", "passive", 1);
  execv("/proc/self/exe", argv);
}

}  // namespace

int main(int argc, char** argv) {
  WaitAsleep(argv);
  Flags flags;
  flags.seed = static_cast<std::uint64_t>(std::time(nullptr));
  CLI::App app("Random calls on the host's cache and on kvtamp's; both must agree.", "kv_fuzz");
  app.add_option("--seed", flags.seed, "where to begin (default: the clock)");
  app.add_option("--ops", flags.ops, "operations in all")->capture_default_str();
  app.add_option("--seconds", flags.seconds, "stop after this long, if not done before");
  app.add_option("--type", flags.type, "cache type")
      ->check(CLI::IsMember({"f16", "k8v8", "k4v4", "k2.5v2.5", "all"}))
      ->capture_default_str();
  app.add_option("--plugin", flags.plugin, "libggml-kvtamp.so")->check(CLI::ExistingFile);
  app.add_option("--replay", flags.replay, "run the case in this file");
  app.add_option("--case-ops", flags.case_ops, "operations of one case")
      ->check(CLI::Range(1, 100000));
  app.add_option("--max-threads", flags.max_threads, "threads of a context, 1 or 2")
      ->check(CLI::Range(1, 2));
  app.add_flag("-v", flags.verbose, "every case; the host's warnings");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  g_verbose = flags.verbose;
  ggml_backend_dev_t device = LoadDevice(flags.plugin);
  if (device == nullptr) {
    std::fprintf(stderr, "kv_fuzz: cannot load %s\n", flags.plugin.c_str());
    return 2;
  }
  return flags.replay.empty() ? Fuzz(flags, device) : Replay(flags, device);
}
