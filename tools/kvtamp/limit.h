// --fail-if: a limit on one of a report's figures.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "tools/kvtamp/json.h"

namespace kvtamp::tool {

struct Limit {
  std::string text;  // as given
  std::string field;
  std::string op;
  double value = 0;
  bool Passed(double x) const;  // what is not a number passes every limit
};

// `fields`: an object whose members may be named.
Result<std::vector<Limit>> ParseLimits(const std::vector<std::string>& texts, const Json& fields);

// Says which limits the report passes; the exit code.
int CheckLimits(const char* command, const std::vector<Limit>& limits, const Json& report);

}  // namespace kvtamp::tool
