// The command `kvtamp`: chooses the sub-command.
#include <fmt/format.h>
#include <ggml-backend-impl.h>
#include <ggml.h>
#include <llama.h>

#include <algorithm>
#include <exception>

#include "base/version.h"
#include "control/settings.h"
#include "tools/kvtamp/command.h"

namespace kvtamp::tool {
namespace {

struct Command {
  const char* name;
  int (*main)(const Args&);
  const char* help;
};
constexpr Command kCommands[] = {
    {"run", RunMain, "start a llama.cpp program with its cache kept by kvtamp"},
    {"plan", PlanMain, "what a model's cache takes, what fits a budget, and how to run it"},
    {"doctor", DoctorMain, "check this machine, the host, the settings and a model"},
    {"eval", EvalMain, "what a format costs in quality, against the host's f16 cache"},
    {"errors", ErrorsMain, "where a format's loss comes from: by layer, head, K and V"},
    {"bench", BenchMain, "tables of caches side by side: bench quality, bench speed"},
    {"sensitivity", SensitivityMain, "what each KV head's precision is worth; writes a profile"},
    {"formats", FormatsMain, "the formats of the cache and their true size"},
};

void PrintHelp() {
  fmt::print(
      "kvtamp {}: a compressed KV cache for unmodified llama.cpp\n\n"
      "Usage: kvtamp COMMAND [flags], kvtamp help COMMAND, kvtamp --version\n\nCommands:\n",
      KVTAMP_VERSION);
  for (const Command& command : kCommands) fmt::print("  {:11} {}\n", command.name, command.help);
  fmt::print(
      "\nExamples:\n"
      "  kvtamp run -- llama-server -m model.gguf\n"
      "  kvtamp plan model.gguf --ctx 32768 --budget 1GiB\n"
      "  kvtamp doctor -m model.gguf\n"
      "  kvtamp eval -m model.gguf -f text.txt --cache k4v4\n");
}

void PrintVersion() {
  fmt::print("kvtamp {}\nllama.cpp {} (ggml {}, commit {}, backend API {})\n", KVTAMP_VERSION,
             llama_version(), ggml_version(), ggml_commit(), GGML_BACKEND_API_VERSION);
}

int Main(Args args) {
  if (args.empty()) {
    PrintHelp();
    return kBadUsage;
  }
  std::string name = args.front();
  args.erase(args.begin());
  if (name == "--version" || name == "version") {
    PrintVersion();
    return kDone;
  }
  if (name == "-h" || name == "--help" || (name == "help" && args.empty())) {
    PrintHelp();
    return kDone;
  }
  if (name == "help") {
    name = args.front();
    args = {"--help"};
  }
  for (const Command& command : kCommands) {
    if (name == command.name) return command.main(args);
  }
  std::vector<std::string> names;
  for (const Command& command : kCommands) names.emplace_back(command.name);
  fmt::print(stderr, "kvtamp: unknown command {}{}; `kvtamp help` lists them\n", name,
             control::Suggestion(name, names));
  return kBadUsage;
}

}  // namespace
}  // namespace kvtamp::tool

int main(int argc, char** argv) {
  try {
    return kvtamp::tool::Main({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    fmt::print(stderr, "kvtamp: {}\n", error.what());
    return kvtamp::tool::kFailed;
  }
}
