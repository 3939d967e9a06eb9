// JSON as this command writes it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace kvtamp::tool {

using Json = nlohmann::ordered_json;

// On one line without an indent. What is no UTF-8 is replaced.
inline std::string Dump(const Json& j, int indent = -1) {
  return j.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace kvtamp::tool
