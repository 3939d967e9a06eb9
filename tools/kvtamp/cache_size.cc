#include "tools/kvtamp/cache_size.h"

#include <algorithm>

namespace kvtamp::tool {

CacheSize& CacheSize::operator+=(const CacheSize& other) {
  logical_bytes += other.logical_bytes;
  stored_bytes += other.stored_bytes;
  resident_bytes += other.resident_bytes;
  return *this;
}

Json StatsOf(const Plugin& plugin) {
  Json stats = Json::parse(plugin.stats_json(), nullptr, false);
  return stats.is_object() ? stats : Json::object();
}

CacheSize SizeOfStats(const Json& stats) {
  return {stats.value("logical_bytes", 0.0), stats.value("stored_bytes", 0.0),
          stats.value("resident_total_bytes", 0.0)};
}

CacheSize SizeOfCache(const Json& cache) {
  return {cache.value("logical_bytes", 0.0), cache.value("stored_bytes", 0.0),
          cache.value("resident_bytes", 0.0)};
}

std::vector<std::string> CacheWarnings(const Json& stats, const CacheSize& full) {
  std::vector<std::string> warnings;
  if (stats.is_object()) warnings = stats.value("warnings", warnings);  // null: nothing was run
  if (full.logical_bytes == 0)
    warnings.push_back("the plug-in holds nothing: this measures an uncompressed cache");
  return warnings;
}

CacheSize SizeOfHostCache(const ModelLayout& layout, ggml_type k, ggml_type v,
                          std::uint32_t n_tokens) {
  const auto bytes = [](ggml_type t) {
    return static_cast<double>(ggml_type_size(t)) / static_cast<double>(ggml_blck_size(t));
  };
  CacheSize size;
  for (const LayerLayout& layer : layout.layers) {
    const double kept = layer.swa ? std::min(n_tokens, layout.n_swa) : n_tokens;
    const double n_k = static_cast<double>(layer.elements_k()) * kept;
    const double n_v = static_cast<double>(layer.elements_v()) * kept;
    size.logical_bytes += 2 * (n_k + n_v);
    size.stored_bytes += n_k * bytes(k) + n_v * bytes(v);
  }
  size.resident_bytes = size.stored_bytes;
  return size;
}

Json ToJson(const CacheSize& size) {
  return {size.logical_bytes, size.stored_bytes, size.resident_bytes};
}

CacheSize SizeOfJson(const Json& j) { return {j.at(0), j.at(1), j.at(2)}; }

}  // namespace kvtamp::tool
