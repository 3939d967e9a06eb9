// Rows of figures as comma-separated values (RFC 4180).
#pragma once

#include <string>

#include "tools/kvtamp/json.h"

namespace kvtamp::tool {

// An array of objects, of which the first names the columns. null is an empty cell.
std::string Csv(const Json& rows);

}  // namespace kvtamp::tool
