#include "tools/kvtamp/csv.h"

namespace kvtamp::tool {
namespace {

std::string Cell(const Json& value) {
  if (value.is_null()) return "";
  std::string text = value.is_string() ? value.get<std::string>() : Dump(value);
  if (value.is_number() || value.is_boolean()) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

}  // namespace

std::string Csv(const Json& rows) {
  std::string out;
  const auto add = [&](const Json& row, bool names) {
    bool first = true;
    for (const auto& [key, value] : row.items()) {
      if (!first) out += ',';
      out += names ? key : Cell(value);
      first = false;
    }
    out += '\n';
  };
  if (!rows.empty()) add(rows.front(), true);
  for (const Json& row : rows) add(row, false);
  return out;
}

}  // namespace kvtamp::tool
