// kvtamp run [flags] -- PROGRAM ARGS…: starts an unmodified llama.cpp program with its cache on our
// device. Exit code: 125 own failure, 126 not runnable, 127 not found, 2 bad usage, else the
// program's.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/environment.h"
#include "tools/kvtamp/layout.h"
#include "tools/kvtamp/plugin.h"
#include "tools/kvtamp/run_plan.h"
#include "tools/kvtamp/words.h"

namespace kvtamp::tool {
namespace {

constexpr int kOwnFailure = 125;
constexpr int kNotRunnable = 126;
constexpr int kNotFound = 127;

constexpr const char* kRunFooter = R"(
Examples:
  kvtamp run -- llama-server -m model.gguf -c 32768
  kvtamp run --cache int8 -- llama-cli -m model.gguf
  kvtamp run --cache k4v4 --print-env

Sets, where you did not: GGML_BACKEND_PATH, LLAMA_ARG_DEVICE, LLAMA_ARG_N_GPU_LAYERS,
LLAMA_ARG_FLASH_ATTN, LLAMA_ARG_MMPROJ_OFFLOAD, LLAMA_ARG_CACHE_RAM; for llama-bench, which reads
no variables, it appends flags. The exit code is the program's; 125, 126, 127 as of env(1).)";

// Flags of ours that take no value: with them the program's start can be told without "--".
bool TakesNoValue(const std::string& flag) {
  return flag == "--print-env" || flag == "-h" || flag == "--help" || flag == "-q" ||
         flag == "--quiet";
}

void SplitAtProgram(const Args& args, Args& own, Args& program) {
  std::size_t i = 0;
  while (i < args.size() && args[i] != "--" && args[i].starts_with("-")) {
    own.push_back(args[i]);
    if (!TakesNoValue(args[i]) && args[i].find('=') == std::string::npos && i + 1 < args.size()) {
      own.push_back(args[++i]);
    }
    ++i;
  }
  if (i < args.size() && args[i] == "--") ++i;
  program.assign(args.begin() + static_cast<std::ptrdiff_t>(i), args.end());
}

// "k4v4 (K int4_pc+qw, V lm4_g64_pt+had)"
std::string TypeText(const codec::Pair& type) {
  const std::string name = codec::PairName(type);
  const std::string k = codec::FormatName(type.k);
  const std::string v = codec::FormatName(type.v);
  return name == k && name == v ? name : fmt::format("{} (K {}, V {})", name, k, v);
}

}  // namespace

int RunMain(const Args& args) {
  Args own, program;
  SplitAtProgram(args, own, program);

  CLI::App app(
      "kvtamp run [flags] -- PROGRAM ARGS...\nstarts a llama.cpp program with its KV cache kept by "
      "kvtamp",
      "kvtamp run");
  app.footer(kRunFooter);
  bool print_env = false, quiet = false;
  app.add_flag("--print-env", print_env, "print what would be set, for copying, and exit");
  app.add_flag("-q,--quiet", quiet, "no line about what was set (warnings stay)");
  SettingFlags settings_flags;
  settings_flags.AddTo(app);
  if (const auto code = Parse(app, own)) return *code;
  if (program.empty() && !print_env) {
    return Fail("run", "no PROGRAM given: kvtamp run [flags] -- PROGRAM ARGS...", kBadUsage);
  }

  const Result<control::Settings> settings = settings_flags.Load();
  if (!settings.ok()) return Fail("run", settings.status(), kBadUsage);
  const Result<std::string> plugin = FindPlugin();
  if (!plugin.ok()) return Fail("run", plugin.status(), kOwnFailure);
  const Result<RunPlan> planned = PlanRun(plugin.value(), program, GetVariable);
  if (!planned.ok()) return Fail("run", planned.status(), kOwnFailure);
  const RunPlan& plan = planned.value();
  std::vector<std::string> warnings = plan.warnings;
  if (!plan.model.empty()) {
    SilenceHost(false);
    // A file that cannot be read is for the program to complain about.
    if (const auto layout = ReadLayout(plan.model); layout.ok()) {
      if (const Status fits = CheckFormats(layout.value(), settings.value()); !fits.ok()) {
        return Fail("run", fits, kBadUsage);
      }
      if (layout.value().layers.empty() || !layout.value().causal) {
        warnings.push_back(plan.model + " has no K/V cache (architecture " +
                           layout.value().architecture + "): nothing will be compressed");
      }
    }
  }

  const control::Environment before = control::ProcessEnvironment();
  settings_flags.Export(settings.value());
  control::Environment set;
  for (const auto& entry : control::ProcessEnvironment()) {
    if (std::find(before.begin(), before.end(), entry) == before.end()) set.push_back(entry);
  }
  for (const auto& [name, value] : plan.set) {
    ::setenv(name.c_str(), value.c_str(), 1);
    set.emplace_back(name, value);
  }

  for (const std::string& warning : warnings)
    fmt::print(stderr, "kvtamp run: warning: {}\n", warning);
  if (print_env) {
    for (const auto& [name, value] : before) {
      if (::getenv(name.c_str()) == nullptr) fmt::print("unset {}\n", name);
    }
    for (const auto& [name, value] : set) fmt::print("export {}={}\n", name, ShellQuoted(value));
    if (!plan.append.empty()) fmt::print("# and append: {}\n", fmt::join(plan.append, " "));
    return kDone;
  }
  if (!quiet) {
    const control::Settings& s = settings.value();
    std::string line =
        fmt::format("kvtamp run: device {}, cache {}, page {}, {} sinks, window {}", kDeviceName,
                    TypeText(s.type), s.page_size, s.n_sink, s.residual_length);
    const char* before_value = " [";
    for (const control::Value& value : s.values) {
      if (value.source == control::Source::kDefault) continue;
      line +=
          fmt::format("{}{} = {} ({})", before_value, value.option->path, value.text, value.where);
      before_value = ", ";
    }
    line += *before_value == ',' ? "]; set" : "; set";
    for (const auto& [name, value] : set) line += fmt::format(" {}={}", name, ShellQuoted(value));
    if (set.empty()) line += " nothing";
    if (!plan.append.empty()) line += fmt::format("; appended {}", fmt::join(plan.append, " "));
    fmt::print(stderr, "{}\n", line);
  }

  program.insert(program.end(), plan.append.begin(), plan.append.end());
  std::vector<char*> argv;
  for (std::string& arg : program) argv.push_back(arg.data());
  argv.push_back(nullptr);
  ::execvp(argv[0], argv.data());
  const int error = errno;
  return Fail("run", fmt::format("{}: {}", program.front(), std::strerror(error)),
              error == ENOENT ? kNotFound : kNotRunnable);
}

}  // namespace kvtamp::tool
