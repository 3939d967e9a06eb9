// The caches of a table: what --caches and --host-types name.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "control/settings.h"
#include "tools/kvtamp/evaluate.h"
#include "tools/kvtamp/layout.h"

namespace kvtamp::tool {

struct CacheEntry {
  std::string name, settings_text, format_k, format_v;
  TestedCache cache;
  control::Settings settings;  // of ours
};

void AddCacheLists(CLI::App& app, std::vector<std::string>& caches,
                   std::vector<std::string>& host_types);

// An entry of --caches: TYPE, or TYPE@SETTING=VALUE@….
Result<CacheEntry> OwnCache(const std::string& text);
// All of a list, behind what `to` holds.
Status AddCaches(const std::vector<std::string>& texts, bool host, std::vector<CacheEntry>& to);

std::vector<TestedCache> TestedCaches(const std::vector<CacheEntry>& caches);
// The model for all of them; the plug-in's line on what they held together stays away.
Result<ModelPair> LoadModels(const std::string& model, const std::vector<CacheEntry>& caches);

// Whether the model can have them; the error names the one that does not fit.
Status CheckCaches(const ModelLayout& model, const std::vector<CacheEntry>& caches);

inline constexpr const char* kCacheListHelp = R"(
A cache is a type, with settings of its own behind it if need be:
  --caches k4v4,k3.5v3,k3.5v3@profile=model.toml,k3.5v3@n_sink=0@residual_length=0
Names of settings are those of the section [cache] of the settings file; those of [evict] are written
with it: k4v4@evict.policy=snapkv@evict.keep_ratio=0.5@evict.then=drop
)";

}  // namespace kvtamp::tool
