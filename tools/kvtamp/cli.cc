#include "tools/kvtamp/cli.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

namespace kvtamp::tool {
namespace {

// llama.cpp's short flags of more than one letter; CLI11 knows one letter only.
constexpr std::pair<const char*, const char*> kShort[] = {
    {"-ctk", "--cache-type-k"},  {"--ctk", "--cache-type-k"}, {"-ctv", "--cache-type-v"},
    {"--ctv", "--cache-type-v"}, {"-ub", "--ubatch-size"},    {"-fa", "--flash-attn"}};

// "-ctk X" -> "--cache-type-k X" and so on.
Args LongFlags(const Args& args) {
  Args out;
  for (const std::string& arg : args) {
    std::string name = arg;
    for (const auto& [from, to] : kShort) {
      if (arg == from) name = to;
    }
    out.push_back(std::move(name));
  }
  return out;
}

std::vector<std::string> FlagNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

std::string OneLine(std::string text) {
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

int DefaultThreads() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  std::set<std::string> cores;
  int n = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    ++n;
    std::ifstream in(
        fmt::format("/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", cpu));
    std::string siblings = fmt::format("cpu{}", cpu);
    std::getline(in, siblings);
    cores.insert(siblings);
  }
  return std::max(1, std::min(n, static_cast<int>(cores.size())));
}

}  // namespace

std::optional<int> Parse(CLI::App& app, const Args& args) {
  const std::string command = app.get_name().substr(std::string_view("kvtamp ").size());
  app.set_help_flag("-h,--help", "print this and exit");
  Args reversed = LongFlags(args);
  std::reverse(reversed.begin(), reversed.end());  // what CLI11 wants
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return kDone;
  } catch (const CLI::ExtrasError&) {
    const std::string extra = app.remaining().empty() ? "" : app.remaining().front();
    const char* what = extra.starts_with("-") ? "unknown option" : "unexpected argument";
    return Fail(command.c_str(),
                fmt::format("{} {}{}", what, extra,
                            control::Suggestion(extra.substr(0, extra.find('=')), FlagNames(app))),
                kBadUsage);
  } catch (const CLI::ParseError& error) {
    return Fail(command.c_str(), OneLine(error.what()), kBadUsage);
  }
  return std::nullopt;
}

void AddModel(CLI::App& app, std::string& file) {
  app.add_option("-m,--model", file, "GGUF file")->type_name("FILE")->required();
}

void AddText(CLI::App& app, std::string& file, const char* help) {
  app.add_option("-f,--file", file, help)->type_name("FILE")->required();
}

void AddMicroBatch(CLI::App& app, std::uint32_t& n) {
  AddNumber(app, "--ubatch-size", n, "-ub: micro-batch", 1, 65536);
}

void AddThreads(CLI::App& app, int& n) {
  n = DefaultThreads();
  AddNumber(app, "-t,--threads", n, "threads", 1, 1024);
}

CLI::Option* AddOutput(CLI::App& app, std::string& form, const std::vector<std::string>& forms) {
  const std::string most = fmt::format("{}", fmt::join(forms.begin(), forms.end() - 1, ", "));
  return app.add_option("-o,--output", form, most + " or " + forms.back())
      ->check(CLI::IsMember(forms));
}

void Talk::AddTo(CLI::App& app) {
  app.add_flag("-q,--quiet", quiet, "no progress");
  app.add_flag("-v,--verbose", verbose, "let the host's log through");
}

void SettingFlags::AddTo(CLI::App& app, std::string_view prefix) {
  for (const control::Option& option : control::Options()) {
    const std::string_view path = option.path;
    if (!path.starts_with(prefix)) continue;
    auto slot = std::make_unique<Slot>(Slot{&option, nullptr, ""});
    std::string name = control::FlagName(path);
    if (path == "cache.type") name = "--cache," + name;
    const std::string spelled =
        *option.short_flag == 0 ? "" : fmt::format("{}: ", option.short_flag);
    const std::string fallback =
        *option.fallback == 0 ? "" : fmt::format(", default {}", option.fallback);
    const std::string env = *option.short_env == 0 ? control::EnvName(path) : option.short_env;
    slot->flag = app.add_option(name, slot->text,
                                fmt::format("{}{} [{}{}]", spelled, option.help, env, fallback))
                     ->type_name(option.value_name)
                     ->group("Settings");
    slots_.push_back(std::move(slot));
  }
  app.add_option("--config-file", config_, "read settings from this TOML file [KVTAMP_CONFIG]")
      ->type_name("FILE")
      ->group("Settings");
}

control::Overrides SettingFlags::overrides() const {
  control::Overrides overrides;
  for (const auto& slot : slots_) {
    if (slot->flag->count() == 0) continue;
    const std::string path = slot->option->path;
    const std::string flag = path == "cache.type"             ? "--cache"
                             : *slot->option->short_flag != 0 ? slot->option->short_flag
                                                              : control::FlagName(path);
    overrides.push_back({path, slot->text, flag});
  }
  return overrides;
}

Result<control::Settings> SettingFlags::Load(const control::Overrides& more) const {
  control::Overrides all = overrides();
  all.insert(all.end(), more.begin(), more.end());
  return control::LoadSettings(all, control::ProcessEnvironment(), config_);
}

void SettingFlags::Export(const control::Settings& settings) const {
  if (!config_.empty()) {
    ::setenv("KVTAMP_CONFIG", std::filesystem::absolute(config_).c_str(), 1);
  }
  bool types = false;
  for (const control::Value& value : settings.values) {
    if (value.source != control::Source::kFlag) continue;
    const std::string_view path = value.option->path;
    if (path == "cache.type" || path == "cache.type_k" || path == "cache.type_v") {
      types = true;
      continue;
    }
    if (*value.option->short_env != 0) ::unsetenv(value.option->short_env);
    ::setenv(control::EnvName(path).c_str(), value.text.c_str(), 1);
  }
  if (types) {
    // As resolved: which of the three wins depends on where each was given, and an environment
    // cannot tell that on.
    ::unsetenv(control::EnvName("cache.type").c_str());
    ::setenv(control::EnvName("cache.type_k").c_str(), codec::FormatName(settings.type.k).c_str(),
             1);
    ::setenv(control::EnvName("cache.type_v").c_str(), codec::FormatName(settings.type.v).c_str(),
             1);
  }
}

std::string CpuInfo() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "";
}

Result<std::string> ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return Status::Invalid("cannot read " + path + ": " + std::strerror(errno));
  std::ostringstream text;
  text << in.rdbuf();
  if (!in.good() && !in.eof()) return Status::Invalid("cannot read " + path);
  return text.str();
}

Result<std::string> ReadText(const std::string& path, std::uint32_t n_tokens) {
  Result<std::string> text = ReadFile(path);
  // Tokens have about four letters: no need to cut a book into them.
  if (text.ok() && text.value().size() / 32 > n_tokens)
    text.value().resize(std::size_t{n_tokens} * 32);
  return text;
}

int Fail(const char* command, const std::string& message, int code) {
  fmt::print(stderr, "kvtamp {}: {}\n", command, message);
  return code;
}

int Fail(const char* command, const Status& status, int code) {
  return Fail(command, status.message(), code);
}

}  // namespace kvtamp::tool
