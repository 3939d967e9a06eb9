// The process's environment, and that changed for a while: the plug-in reads its settings there
// whenever a context is made.
#pragma once

#include <stdlib.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvtamp::tool {

inline std::optional<std::string> GetVariable(const std::string& name) {
  const char* value = ::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

// "" takes a variable away.
class Environment {
 public:
  explicit Environment(const std::vector<std::pair<std::string, std::string>>& values) {
    for (const auto& [name, value] : values) {
      before_.emplace_back(name, GetVariable(name).value_or(""));
      Set(name, value);
    }
  }
  ~Environment() {
    for (const auto& [name, value] : before_) Set(name, value);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  static void Set(const std::string& name, const std::string& value) {
    if (value.empty()) {
      ::unsetenv(name.c_str());
    } else {
      ::setenv(name.c_str(), value.c_str(), 1);
    }
  }
  std::vector<std::pair<std::string, std::string>> before_;
};

}  // namespace kvtamp::tool
