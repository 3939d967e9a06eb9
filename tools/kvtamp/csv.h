// Rows of figures as comma-separated values (RFC 4180).
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace kvtamp::tool {

// An array of objects, of which the first names the columns. null is an empty cell.
std::string Csv(const nlohmann::ordered_json& rows);

}  // namespace kvtamp::tool
