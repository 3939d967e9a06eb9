// The result of `kvtamp bench quality`: a table of caches by size and loss, as markdown, CSV, JSON
// and a plot. Pure.
#pragma once

#include <string>
#include <vector>

#include "tools/kvtamp/divergence.h"
#include "tools/kvtamp/json.h"

namespace kvtamp::tool {

struct QualityRow {
  std::string name;    // as given: "k4v4", "q4_0"
  std::string device;  // "kvtamp" or "host"
  std::string format_k, format_v;
  std::string settings;  // of its own, "" without
  double bits = 0;       // stored bits per element at the run's length, all overhead counted
  double bits_long = 0;  // the same at QualityTable::n_long tokens
  double bytes_per_token_long = 0;
  Divergence total;
  double kld_worst_chunk = 0;
  std::size_t needles = 0;  // found, of QualityTable::n_needles
  bool pareto = false;      // no other row has both fewer bits_long and less loss
};

struct QualityTable {
  std::string model, text;
  std::uint32_t n_ctx = 0, n_ubatch = 0, n_chunks = 0, n_scored = 0, n_long = 0;
  bool decode_only = false;
  std::size_t n_needles = 0, needles_base = 0;  // asked; found by the host's f16
  double kld_floor = 0;  // f16 through kvtamp: what a change of rounding makes
  std::vector<QualityRow> rows;

  // Sorts by size, largest first, and marks the Pareto front.
  void Finish();
  const QualityRow* Find(const std::string& name, const std::string& device) const;
};

std::string QualityMarkdown(const QualityTable& table);
std::string QualityCsv(const QualityTable& table);
Json QualityJson(const QualityTable& table);
// Loss over bits, both axes labelled, the front drawn through; stands alone, no script.
std::string QualitySvg(const QualityTable& table);

}  // namespace kvtamp::tool
