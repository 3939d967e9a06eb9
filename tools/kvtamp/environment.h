// The process's environment changed for a while: the plug-in reads its settings there whenever a
// context is made.
#pragma once

#include <stdlib.h>

#include <string>
#include <utility>
#include <vector>

namespace kvtamp::tool {

// "" takes a variable away.
class Environment {
 public:
  explicit Environment(const std::vector<std::pair<std::string, std::string>>& values) {
    for (const auto& [name, value] : values) {
      const char* old = ::getenv(name.c_str());
      before_.emplace_back(name, old == nullptr ? "" : old);
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
