// Command lines: CLI11 plus what it lacks (llama.cpp's "-ctk" style, one-line errors with the
// nearest name, the settings table as flags).
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "control/settings.h"
#include "tools/kvtamp/command.h"

namespace kvtamp::tool {

// Adds `-h`/`--help` and parses. Returns an exit code when the command is to end here (help was
// printed, or one line of error), nothing when it may go on.
std::optional<int> Parse(CLI::App& app, const Args& args);

// Flags that several commands have. A number: N, with its default in the help.
template <class T>
CLI::Option* AddNumber(CLI::App& app, const char* name, T& to, const char* help,
                       std::type_identity_t<T> least, std::type_identity_t<T> most) {
  return app.add_option(name, to, help)
      ->type_name("N")
      ->capture_default_str()
      ->check(CLI::Range(least, most));
}
void AddModel(CLI::App& app, std::string& file);
void AddText(CLI::App& app, std::string& file, const char* help);
void AddMicroBatch(CLI::App& app, std::uint32_t& n);
// As many as there are cores this process may run on, if not given; of two hardware threads of one
// core, one counts.
void AddThreads(CLI::App& app, int& n);
// `forms`: all there are, "md" and so on.
CLI::Option* AddOutput(CLI::App& app, std::string& form, const std::vector<std::string>& forms);
// How much is said on stderr.
struct Talk {
  bool quiet = false, verbose = false;
  void AddTo(CLI::App& app);
};

// One flag for each setting (all, or those whose path starts with `prefix`), and --config-file.
class SettingFlags {
 public:
  // --cache-type can also be called --cache.
  void AddTo(CLI::App& app, std::string_view prefix = "");
  control::Overrides overrides() const;

  // Merges flags, environment and file; `more` are flags that nobody gave.
  Result<control::Settings> Load(const control::Overrides& more = {}) const;
  const std::string& config_file() const { return config_; }
  // Writes what the flags say into this process's environment, so that a plug-in loaded here or in
  // a program started from here reads the same settings. `settings` is what Load() gave.
  void Export(const control::Settings& settings) const;

 private:
  struct Slot {
    const control::Option* option;
    CLI::Option* flag;
    std::string text;
  };
  std::vector<std::unique_ptr<Slot>> slots_;
  std::string config_;
};

// The processor by its name, "" where it cannot be told.
std::string CpuInfo();

// A file whole; of a text, what n tokens need.
Result<std::string> ReadFile(const std::string& path);
Result<std::string> ReadText(const std::string& path, std::uint32_t n_tokens);

// Prints "kvtamp COMMAND: message" to stderr and returns `code`.
int Fail(const char* command, const std::string& message, int code);
int Fail(const char* command, const Status& status, int code = kFailed);

}  // namespace kvtamp::tool
