// A snapshot of the cache: what it holds, in which form, at what cost. The plug-in fills one on
// demand and at exit; the printers here turn it into JSON and into words. Names are those of the
// metrics without `kvtamp_` and `cache_`. A plain value: no locks, no ownership, no host types.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvtamp::control {

// Memory held by the cache now; the tags add up to all of it.
struct ResidentBytes {
  std::uint64_t coded = 0;    // codes of sealed pages
  std::uint64_t scales = 0;   // their scales, minima and means
  std::uint64_t index = 0;    // page tables, row -> cell indices, liveness
  std::uint64_t open = 0;     // f16 rows: sinks, pages being filled, recent window
  std::uint64_t slack = 0;    // held by the allocator, used by nobody
  std::uint64_t scratch = 0;  // work space of kernels and codecs
  std::uint64_t total() const { return coded + scales + index + open + slack + scratch; }
};

struct PageCounts {
  std::uint64_t open = 0;
  std::uint64_t settled = 0;
  std::uint64_t sealed = 0;
  std::uint64_t demoted = 0;
  std::uint64_t total() const { return open + settled + sealed + demoted; }
};

struct LayerStats {
  std::uint32_t layer = 0;  // the host's number N in cache_k_lN
  std::uint32_t n_head_kv = 0;
  std::uint32_t head_size_k = 0;
  std::uint32_t head_size_v = 0;
  std::string format_k;  // full descriptor
  std::string format_v;
  std::uint64_t logical_bytes = 0;
  std::uint64_t stored_bytes = 0;
  // Of each KV head, with a policy of [evict] or after a state that was pruned: entries that are
  // attended, those that are gone, and of the former those with fewer bits than the format says.
  struct Entries {
    std::uint64_t kept = 0, evicted = 0, demoted = 0;
  };
  std::vector<Entries> heads = {};
};

// One cache of the host (a model with sliding windows has two).
struct CacheStats {
  std::string name;  // e.g. "kv", "swa"
  std::uint64_t cells_used = 0;
  std::uint64_t cells_capacity = 0;  // of one stream
  std::uint32_t n_streams = 0;
  std::uint64_t logical_bytes = 0;   // what f16 would need for the cells in use
  std::uint64_t stored_bytes = 0;    // bytes kept for them, all overhead counted
  std::uint64_t resident_bytes = 0;  // those and work space
  std::vector<LayerStats> layers;
};

// Work that went back to the host's own code: correct, but not what the user asked for.
struct FallbackOp {
  std::string op;      // ggml's name
  std::string reason;  // a few words
  std::uint64_t count = 0;
};

// What was left when the work was over.
struct AtEnd {
  std::uint64_t cells_used = 0;
  std::uint64_t logical_bytes = 0;
  std::uint64_t stored_bytes = 0;
  std::uint64_t resident_total_bytes = 0;
};

struct Snapshot {
  // Who.
  std::string version;       // kvtamp's
  std::string device;        // "KVTAMP"
  std::string ggml_version;  // met at run time
  std::string cpu;           // instruction set of the kernels
  // How. `type` is the short name ("k4v4"), format_* the full descriptors.
  std::string type;
  std::string format_k;
  std::string format_v;
  std::uint32_t page_size = 0;
  std::uint32_t n_sink = 0;
  std::uint32_t residual_length = 0;
  std::string policy;  // of [evict]; empty: none

  // How much. Sums over all caches, layers, heads and streams.
  std::uint64_t logical_bytes_k = 0;  // what f16 would need for the same cells
  std::uint64_t logical_bytes_v = 0;
  std::uint64_t stored_bytes_k = 0;  // bytes kept for them, all overhead counted
  std::uint64_t stored_bytes_v = 0;
  ResidentBytes resident;
  std::uint64_t resident_peak_bytes = 0;
  std::uint64_t uncompressed_bytes = 0;  // plain regions: tensors kept as the host wrote them
  PageCounts pages;
  std::uint64_t cells_used = 0;  // over all streams of the largest cache
  std::uint64_t cells_capacity = 0;
  std::uint64_t rows_written_total =
      0;                        // token rows taken from the host: once per cell, not per layer
  std::uint64_t rows_dead = 0;  // of those, overwritten or cleared and still taking room
  std::uint64_t pages_seen_total = 0;  // by decoding, KV heads added up; with cache.top_pages only
  std::uint64_t pages_read_total = 0;  // of those
  // Entries of all caches, layers and heads, as in LayerStats.
  std::uint64_t entries_kept = 0, entries_evicted = 0, entries_demoted = 0;
  std::uint64_t values_clamped_total = 0;  // elements f16 cannot hold: clamped, NaN made 0

  std::vector<CacheStats> caches;  // may be empty
  std::vector<FallbackOp> fallback_ops;
  std::vector<std::string> warnings;
  std::optional<AtEnd>
      at_end;  // of the report at exit, whose other figures are of the fullest moment

  std::uint64_t logical_bytes() const { return logical_bytes_k + logical_bytes_v; }
  std::uint64_t stored_bytes() const { return stored_bytes_k + stored_bytes_v; }
  // Stored bits over elements, overhead counted; 0 when nothing is stored. An f16 element is 16
  // bits.
  double bits_per_element_k() const;
  double bits_per_element_v() const;
  // logical over stored; 0 when nothing is stored.
  double compression_factor() const;
};

// One object, indented, newline at the end.
std::string StatsJson(const Snapshot& snapshot);
// A short paragraph for people (no trailing newline).
std::string StatsText(const Snapshot& snapshot);

// "123.4 MiB", "97.7 KiB", "12 B".
std::string BytesText(std::uint64_t bytes);
// "0-3,7" of ascending numbers.
std::string RangesText(const std::vector<std::uint32_t>& numbers);

}  // namespace kvtamp::control
