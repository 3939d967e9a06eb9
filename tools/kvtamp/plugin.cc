#include "tools/kvtamp/plugin.h"

#include <ggml.h>
#include <llama.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <deque>
#include <filesystem>
#include <mutex>

namespace kvtamp::tool {
namespace {

constexpr std::size_t kKeptLines = 8;

struct HostLog {
  std::mutex mutex;
  std::deque<std::string> lines;
  std::string partial;
  bool verbose = false;
};

HostLog& Log() {
  static HostLog log;
  return log;
}

void OnHostLog(ggml_log_level level, const char* text, void*) {
  HostLog& log = Log();
  const std::lock_guard<std::mutex> lock(log.mutex);
  if (log.verbose) std::fputs(text, stderr);
  if (level != GGML_LOG_LEVEL_ERROR && level != GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT)
    return;
  if (level == GGML_LOG_LEVEL_CONT && log.partial.empty()) return;
  log.partial += text;
  if (log.partial.empty() || log.partial.back() != '\n') return;
  while (!log.partial.empty() && log.partial.back() == '\n') log.partial.pop_back();
  if (!log.partial.empty()) log.lines.push_back(log.partial);
  if (log.lines.size() > kKeptLines) log.lines.pop_front();
  log.partial.clear();
}

const char* NoStats() { return "{}"; }

}  // namespace

Result<std::string> FindPlugin() {
  namespace fs = std::filesystem;
  std::error_code ec;
  if (const char* named = std::getenv("KVTAMP_PLUGIN"); named != nullptr && *named != 0) {
    if (!fs::is_regular_file(named, ec)) {
      return Status::Invalid(std::string("KVTAMP_PLUGIN names ") + named + ", which is not a file");
    }
    return fs::absolute(named).string();
  }
  const fs::path self = fs::read_symlink("/proc/self/exe", ec);
  const fs::path folder = self.parent_path();
  for (const fs::path& place : {folder / ".." / "lib", folder}) {
    const fs::path file = place / "libggml-kvtamp.so";
    if (fs::is_regular_file(file, ec)) return fs::canonical(file, ec).string();
  }
  return Status::Invalid("libggml-kvtamp.so is neither in " +
                         (folder.parent_path() / "lib").string() + " nor in " + folder.string() +
                         "; set KVTAMP_PLUGIN to its path");
}

void SilenceHost(bool verbose) {
  Log().verbose = verbose;
  llama_log_set(OnHostLog, nullptr);  // ggml's too
}

std::string TakeHostErrors() {
  HostLog& log = Log();
  const std::lock_guard<std::mutex> lock(log.mutex);
  std::string text;
  for (const std::string& line : log.lines) text += (text.empty() ? "" : "; ") + line;
  log.lines.clear();
  log.partial.clear();
  return text;
}

void LoadHost() {
  ggml_backend_load_all();
  llama_backend_init();
}

Result<Plugin> LoadPlugin(const std::string& path) {
  LoadHost();
  TakeHostErrors();
  Plugin plugin;
  plugin.reg = ggml_backend_load(path.c_str());
  if (plugin.reg == nullptr) {
    const std::string said = TakeHostErrors();
    return Status::Unsupported(said.empty() ? path + " did not load" : said);
  }
  plugin.device = ggml_backend_dev_by_name(kDeviceName);
  if (plugin.device == nullptr)
    return Status::Internal(path + " registers no device " + kDeviceName);
  plugin.stats_json = reinterpret_cast<const char* (*)()>(
      ggml_backend_reg_get_proc_address(plugin.reg, "kvtamp_stats_json"));
  if (plugin.stats_json == nullptr) plugin.stats_json = NoStats;
  return plugin;
}

}  // namespace kvtamp::tool
