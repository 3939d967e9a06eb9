#include "tools/kvtamp/limit.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <regex>

#include "control/settings.h"
#include "tools/kvtamp/command.h"

namespace kvtamp::tool {
namespace {

Result<Limit> ParseLimit(const std::string& text) {
  static const std::regex form(
      R"(\s*([a-z_0-9]+)\s*(>=|<=|>|<)\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*)");
  std::smatch match;
  if (!std::regex_match(text, match, form)) {
    return Status::Invalid("--fail-if " + text + ": must look like kld_mean>0.01");
  }
  return Limit{text, match[1], match[2], std::strtod(match[3].str().c_str(), nullptr)};
}

}  // namespace

bool Limit::Passed(double x) const {
  return std::isnan(x) || (op == ">" && x > value) || (op == ">=" && x >= value) ||
         (op == "<" && x < value) || (op == "<=" && x <= value);
}

Result<std::vector<Limit>> ParseLimits(const std::vector<std::string>& texts, const Json& fields) {
  std::vector<std::string> names;
  for (const auto& [name, value] : fields.items()) names.push_back(name);
  std::vector<Limit> limits;
  for (const std::string& text : texts) {
    const Result<Limit> limit = ParseLimit(text);
    if (!limit.ok()) return limit.status();
    if (!fields.contains(limit.value().field)) {
      return Status::Invalid(fmt::format("--fail-if {}: no field {}{}", text, limit.value().field,
                                         control::Suggestion(limit.value().field, names)));
    }
    limits.push_back(limit.value());
  }
  return limits;
}

int CheckLimits(const char* command, const std::vector<Limit>& limits, const Json& report) {
  int code = kDone;
  for (const Limit& limit : limits) {
    const Json& found = report.at(limit.field);
    const double value =
        found.is_number() ? found.get<double>() : std::numeric_limits<double>::quiet_NaN();
    if (!limit.Passed(value)) continue;
    fmt::print(stderr, "kvtamp {}: --fail-if {}: {} is {:.6g}\n", command, limit.text, limit.field,
               value);
    code = kLimitPassed;
  }
  return code;
}

}  // namespace kvtamp::tool
