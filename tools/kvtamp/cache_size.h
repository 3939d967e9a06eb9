// What a cache holds and takes.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tools/kvtamp/json.h"
#include "tools/kvtamp/layout.h"
#include "tools/kvtamp/plugin.h"

namespace kvtamp::tool {

// All zero where nobody tells.
struct CacheSize {
  double logical_bytes = 0;  // of the same in f16
  double stored_bytes = 0;
  double resident_bytes = 0;
  CacheSize& operator+=(const CacheSize& other);
};

// The plug-in's snapshot: an object, empty if it gives none.
Json StatsOf(const Plugin& plugin);
// Of a snapshot, taken while there is something in the cache.
CacheSize SizeOfStats(const Json& stats);
// Of one of its caches alone.
CacheSize SizeOfCache(const Json& cache);
// What the user must know of a tested cache that was of this size with something in it.
std::vector<std::string> CacheWarnings(const Json& stats, const CacheSize& full);

CacheSize SizeOfHostCache(const ModelLayout& layout, ggml_type k, ggml_type v,
                          std::uint32_t n_tokens);
// As kept in a RunLog.
Json ToJson(const CacheSize& size);
CacheSize SizeOfJson(const Json& j);

}  // namespace kvtamp::tool
