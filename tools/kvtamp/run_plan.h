// What `kvtamp run` sets so that an unmodified llama.cpp program puts its cache on our device, and
// what in the user's own words defeats that. Pure: the environment comes in as a function.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace kvtamp::tool {

using GetEnv = std::function<std::optional<std::string>(const std::string&)>;

struct RunPlan {
  std::vector<std::pair<std::string, std::string>> set;  // environment, in the order to print
  std::vector<std::string> append;                       // to the program's arguments
  std::vector<std::string> warnings;                     // one line each
  std::string model;  // the file the program will load, "" if it does not say
};

// `program`: path or name and its arguments. What the user set, by flag or by variable, stays.
// An error when the user's own GGML_BACKEND_PATH keeps our plug-in from being loaded.
Result<RunPlan> PlanRun(const std::string& plugin, const std::vector<std::string>& program,
                        const GetEnv& getenv);

}  // namespace kvtamp::tool
