// The result of `kvtamp bench speed`: llama-bench's columns, a row for each cache and test, with
// the ratio to the host in the same turns. As markdown, CSV or JSON (an array, as llama-bench's).
#pragma once

#include <string>
#include <vector>

#include "tools/kvtamp/cache_list.h"
#include "tools/kvtamp/json.h"
#include "tools/kvtamp/speed.h"

namespace kvtamp::tool {

// Of the middle two the mean; of nothing 0.
double Median(std::vector<double> values);

// Rows as JSON. Ratios are to the first of the host's own caches, of the same repetition; left out
// if there is none. Tests without a repetition are left out.
Json SpeedRows(const SpeedConfig& config, const std::vector<CacheEntry>& caches,
               const SpeedResult& result);
std::string SpeedMarkdown(const Json& rows);
// Without the single samples.
std::string SpeedCsv(const Json& rows);

}  // namespace kvtamp::tool
