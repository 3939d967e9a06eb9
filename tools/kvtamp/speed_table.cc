#include "tools/kvtamp/speed_table.h"

#include <fmt/format.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/csv.h"
#include "tools/kvtamp/divergence.h"

namespace kvtamp::tool {
namespace {

double Average(const std::vector<double>& x) {
  return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size());
}

// Of a sample, like llama-bench's.
double Deviation(const std::vector<double>& x) {
  if (x.size() < 2) return 0;
  const double mean = Average(x);
  double sum = 0;
  for (const double v : x) sum += (v - mean) * (v - mean);
  return std::sqrt(sum / static_cast<double>(x.size() - 1));
}

std::string TimeText(std::time_t time) {
  char text[32] = "";
  std::tm utc{};
  ::gmtime_r(&time, &utc);
  std::strftime(text, sizeof(text), "%FT%TZ", &utc);
  return text;
}

Json RowOf(const SpeedConfig& config, const std::string& cpu, const CacheEntry& e,
           const ModelFacts& model, const SpeedTest& test, const std::vector<double>& seconds) {
  std::vector<double> ns, ts;
  std::vector<std::int64_t> samples_ns;
  for (const double s : seconds) {
    ns.push_back(1e9 * s);
    samples_ns.push_back(std::llround(1e9 * s));
    ts.push_back(test.n_tokens() / s);
  }
  const auto [least, most] = std::minmax_element(ts.begin(), ts.end());
  return {{"build_commit", ggml_commit()},
          {"cpu_info", cpu},
          {"backends", e.cache.host ? "CPU" : kDeviceName},
          {"model_filename", config.model},
          {"model_type", model.type},
          {"model_size", model.size},
          {"model_n_params", model.n_params},
          {"n_batch", config.n_batch},
          {"n_ubatch", config.n_ubatch},
          {"n_threads", config.n_threads},
          {"type_k", e.format_k},
          {"type_v", e.format_v},
          {"flash_attn", 1},
          {"n_prompt", test.n_prompt},
          {"n_gen", test.n_gen},
          {"n_depth", test.n_depth},
          {"test_time", TimeText(test.time)},
          {"avg_ns", std::llround(Average(ns))},
          {"stddev_ns", std::llround(Deviation(ns))},
          {"avg_ts", Average(ts)},
          {"stddev_ts", Deviation(ts)},
          {"samples_ns", samples_ns},
          {"samples_ts", ts},
          {"device", e.cache.host ? "host" : "kvtamp"},
          {"cache_type", e.name},
          {"settings", e.settings_text},
          {"median_ts", Median(ts)},
          {"min_ts", *least},
          {"max_ts", *most}};
}

}  // namespace

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return Quantile(values, 0.5);
}

Json SpeedRows(const SpeedConfig& config, const std::vector<CacheEntry>& caches,
               const SpeedResult& result) {
  Json rows = Json::array();
  const std::string cpu = CpuInfo();
  const auto base =
      std::find_if(caches.begin(), caches.end(), [](const auto& e) { return e.cache.host; });
  for (const SpeedTest& test : result.tests) {
    for (std::size_t c = 0; c < caches.size(); ++c) {
      const std::vector<double>& seconds = test.seconds[c];
      if (seconds.empty()) continue;
      rows.push_back(RowOf(config, cpu, caches[c], result.model, test, seconds));
      if (base == caches.end()) continue;
      const auto& host = test.seconds[static_cast<std::size_t>(base - caches.begin())];
      std::vector<double> ratios;
      for (std::size_t r = 0; r < seconds.size(); ++r) ratios.push_back(host[r] / seconds[r]);
      const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
      rows.back()["ratio_to"] = base->name;
      rows.back()["ratio"] = Median(ratios);
      rows.back()["ratio_min"] = *least;
      rows.back()["ratio_max"] = *most;
    }
  }
  return rows;
}

std::string SpeedMarkdown(const Json& rows) {
  const bool ratio = !rows.empty() && rows.front().contains("ratio");
  const std::string to = ratio ? rows.front().at("ratio_to").get<std::string>() : "";
  std::string out =
      "| model | size | params | backend | threads | cache | test | t/s | min … max |";
  out += ratio ? fmt::format(" of host {} | min … max |\n", to) : "\n";
  out += "| --- | ---: | ---: | --- | ---: | --- | ---: | ---: | ---: |";
  out += ratio ? " ---: | ---: |\n" : "\n";
  for (const Json& r : rows) {
    const auto n_prompt = r.at("n_prompt").get<unsigned>(), n_gen = r.at("n_gen").get<unsigned>();
    std::string test = n_gen > 0 ? fmt::format("tg{}", n_gen) : fmt::format("pp{}", n_prompt);
    if (r.at("n_depth") != 0) test += fmt::format(" @ d{}", r.at("n_depth").get<unsigned>());
    const auto settings = r.at("settings").get<std::string>();
    out += fmt::format(
        "| {} | {:.2f} MiB | {:.2f} M | {} | {} | {}{} | {} | {:.2f} | {:.2f} … {:.2f} |",
        r.at("model_type").get<std::string>(), r.at("model_size").get<double>() / (1 << 20),
        r.at("model_n_params").get<double>() / 1e6, r.at("backends").get<std::string>(),
        r.at("n_threads").get<int>(), r.at("cache_type").get<std::string>(),
        settings.empty() ? "" : " " + settings, test, r.at("median_ts").get<double>(),
        r.at("min_ts").get<double>(), r.at("max_ts").get<double>());
    out += !ratio ? "\n"
                  : fmt::format(" {:.2f} | {:.2f} … {:.2f} |\n", r.at("ratio").get<double>(),
                                r.at("ratio_min").get<double>(), r.at("ratio_max").get<double>());
  }
  return out;
}

std::string SpeedCsv(const Json& rows) {
  Json flat = rows;
  for (Json& row : flat) {
    row.erase("samples_ns");
    row.erase("samples_ts");
  }
  return Csv(flat);
}

}  // namespace kvtamp::tool
