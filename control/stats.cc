#include "control/stats.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace kvtamp::control {
namespace {

using nlohmann::ordered_json;

double Bits(std::uint64_t stored, std::uint64_t logical) {
  return logical == 0 || stored == 0
             ? 0.0
             : 16.0 * static_cast<double>(stored) / static_cast<double>(logical);
}

ordered_json LayerJson(const LayerStats& layer) {
  ordered_json j = {{"layer", layer.layer},
                    {"n_head_kv", layer.n_head_kv},
                    {"head_size_k", layer.head_size_k},
                    {"head_size_v", layer.head_size_v},
                    {"format_k", layer.format_k},
                    {"format_v", layer.format_v},
                    {"logical_bytes", layer.logical_bytes},
                    {"stored_bytes", layer.stored_bytes}};
  if (layer.heads.empty()) return j;
  ordered_json heads = ordered_json::array();
  for (const LayerStats::Entries& e : layer.heads)
    heads.push_back({{"kept", e.kept}, {"evicted", e.evicted}, {"demoted", e.demoted}});
  j["entries_by_head"] = std::move(heads);
  return j;
}

ordered_json CacheJson(const CacheStats& cache) {
  ordered_json layers = ordered_json::array();
  for (const LayerStats& layer : cache.layers) layers.push_back(LayerJson(layer));
  return {{"name", cache.name},
          {"cells_used", cache.cells_used},
          {"cells_capacity", cache.cells_capacity},
          {"n_streams", cache.n_streams},
          {"logical_bytes", cache.logical_bytes},
          {"stored_bytes", cache.stored_bytes},
          {"resident_bytes", cache.resident_bytes},
          {"layers", std::move(layers)}};
}

}  // namespace

double Snapshot::bits_per_element_k() const { return Bits(stored_bytes_k, logical_bytes_k); }
double Snapshot::bits_per_element_v() const { return Bits(stored_bytes_v, logical_bytes_v); }

double Snapshot::compression_factor() const {
  return stored_bytes() == 0
             ? 0.0
             : static_cast<double>(logical_bytes()) / static_cast<double>(stored_bytes());
}

std::string BytesText(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024.0;
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < std::size(kUnits)) {
    value /= 1024.0;
    ++unit;
  }
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string RangesText(const std::vector<std::uint32_t>& numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t j = i;
    while (j + 1 < numbers.size() && numbers[j + 1] == numbers[j] + 1) ++j;
    if (!text.empty()) text += ',';
    text += std::to_string(numbers[i]);
    if (j > i) text.append("-").append(std::to_string(numbers[j]));
    i = j + 1;
  }
  return text;
}

std::string StatsJson(const Snapshot& s) {
  ordered_json j;
  j["version"] = s.version;
  j["device"] = s.device;
  j["ggml_version"] = s.ggml_version;
  j["cpu"] = s.cpu;
  j["type"] = s.type;
  j["format_k"] = s.format_k;
  j["format_v"] = s.format_v;
  j["page_size"] = s.page_size;
  j["n_sink"] = s.n_sink;
  j["residual_length"] = s.residual_length;
  if (!s.policy.empty()) j["policy"] = s.policy;

  j["logical_bytes"] = s.logical_bytes();
  j["logical_bytes_by_tensor"] = {{"k", s.logical_bytes_k}, {"v", s.logical_bytes_v}};
  j["stored_bytes"] = s.stored_bytes();
  j["stored_bytes_by_tensor"] = {{"k", s.stored_bytes_k}, {"v", s.stored_bytes_v}};
  j["resident_bytes"] = {{"coded", s.resident.coded}, {"scales", s.resident.scales},
                         {"index", s.resident.index}, {"open", s.resident.open},
                         {"slack", s.resident.slack}, {"scratch", s.resident.scratch}};
  j["resident_total_bytes"] = s.resident.total();
  j["resident_peak_bytes"] = s.resident_peak_bytes;
  j["uncompressed_bytes"] = s.uncompressed_bytes;
  j["bits_per_element"] = {{"k", s.bits_per_element_k()}, {"v", s.bits_per_element_v()}};
  j["compression_factor"] = s.compression_factor();
  j["pages"] = {{"open", s.pages.open}, {"settled", s.pages.settled}, {"sealed", s.pages.sealed}};
  if (s.pages.demoted > 0) j["pages"]["demoted"] = s.pages.demoted;
  if (s.entries_kept + s.entries_evicted > 0)
    j["entries"] = {
        {"kept", s.entries_kept}, {"evicted", s.entries_evicted}, {"demoted", s.entries_demoted}};
  j["cells_used"] = s.cells_used;
  j["cells_capacity"] = s.cells_capacity;
  j["rows_written_total"] = s.rows_written_total;
  j["rows_dead"] = s.rows_dead;
  j["values_clamped_total"] = s.values_clamped_total;
  if (s.pages_seen_total != 0) {
    j["pages_seen_total"] = s.pages_seen_total;
    j["pages_read_total"] = s.pages_read_total;
  }

  ordered_json caches = ordered_json::array();
  for (const CacheStats& cache : s.caches) caches.push_back(CacheJson(cache));
  j["caches"] = std::move(caches);
  ordered_json ops = ordered_json::array();
  for (const FallbackOp& op : s.fallback_ops) {
    ops.push_back({{"op", op.op}, {"reason", op.reason}, {"count", op.count}});
  }
  j["fallback_ops"] = std::move(ops);
  j["warnings"] = s.warnings;
  if (s.at_end) {
    j["at_end"] = {{"cells_used", s.at_end->cells_used},
                   {"logical_bytes", s.at_end->logical_bytes},
                   {"stored_bytes", s.at_end->stored_bytes},
                   {"resident_total_bytes", s.at_end->resident_total_bytes}};
  }
  return j.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

std::string StatsText(const Snapshot& s) {
  std::string text = fmt::format("kvtamp: {} ({})", s.device, s.type);
  if (s.logical_bytes() > 0) {
    text += fmt::format(
        ": {} tokens written, {} cells in use; {} as f16, {} as kept: {:.2f}x smaller (K {:.2f}, "
        "V {:.2f} bits per element, all overhead counted); resident {} (coded {}, scales {}, index "
        "{}, open {}, slack {}, scratch {}), peak {}; pages: {} open, {} settled, {} sealed",
        s.rows_written_total, s.cells_used, BytesText(s.logical_bytes()),
        BytesText(s.stored_bytes()), s.compression_factor(), s.bits_per_element_k(),
        s.bits_per_element_v(), BytesText(s.resident.total()), BytesText(s.resident.coded),
        BytesText(s.resident.scales), BytesText(s.resident.index), BytesText(s.resident.open),
        BytesText(s.resident.slack), BytesText(s.resident.scratch),
        BytesText(s.resident_peak_bytes), s.pages.open, s.pages.settled, s.pages.sealed);
    if (s.at_end && s.at_end->stored_bytes != s.stored_bytes()) {
      text += fmt::format("; that was the fullest, at the end {} cells in use, {} as kept",
                          s.at_end->cells_used, BytesText(s.at_end->stored_bytes));
    }
    if (s.entries_evicted + s.entries_demoted > 0) {
      text += fmt::format("; of the entries {} are evicted and {} have fewer bits ({})",
                          s.entries_evicted, s.entries_demoted, s.policy);
    }
    if (s.rows_dead > 0) text += fmt::format("; {} dead rows", s.rows_dead);
  } else {
    text += ": nothing compressed";
  }
  if (s.uncompressed_bytes > 0) {
    text += fmt::format("; NOT compressed: {}", BytesText(s.uncompressed_bytes));
  }
  for (const FallbackOp& op : s.fallback_ops) {
    text += fmt::format("; {} ({}x) by the host's own code: {}", op.op, op.count, op.reason);
  }
  for (const std::string& warning : s.warnings) text += "; warning: " + warning;
  return text;
}

}  // namespace kvtamp::control
