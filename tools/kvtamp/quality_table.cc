#include "tools/kvtamp/quality_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "tools/kvtamp/csv.h"

namespace kvtamp::tool {
namespace {

std::string Ratio(double kld, const QualityRow* to) {
  return to == nullptr || to->total.kld_mean <= 0 ? "-"
                                                  : fmt::format("{:.2f}", kld / to->total.kld_mean);
}

Json RowJson(const QualityRow& r, const QualityTable& t) {
  Json j = {{"name", r.name},
            {"device", r.device},
            {"format_k", r.format_k},
            {"format_v", r.format_v},
            {"settings", r.settings},
            {"kv_bpw", r.bits},
            {"kv_bpw_long", r.bits_long},
            {"kv_bytes_per_token_long", r.bytes_per_token_long},
            {"kld_mean", r.total.kld_mean},
            {"kld_se", r.total.kld_se},
            {"kld_floor", t.kld_floor},
            {"kld_median", r.total.kld_median},
            {"kld_p999", r.total.kld_p999},
            {"kld_max", r.total.kld_max},
            {"kld_worst_chunk", r.kld_worst_chunk},
            {"ppl", r.total.ppl},
            {"ppl_se", r.total.ppl_se},
            {"ppl_base", r.total.ppl_base},
            {"ppl_ratio", r.total.ppl_ratio},
            {"ppl_ratio_se", r.total.ppl_ratio_se},
            {"same_top_p", r.total.same_top_p},
            {"same_top_p_se", r.total.same_top_p_se},
            {"needles_found", r.needles},
            {"needles", t.n_needles},
            {"pareto", r.pareto}};
  return j;
}

}  // namespace

void QualityTable::Finish() {
  std::stable_sort(rows.begin(), rows.end(), [](const QualityRow& a, const QualityRow& b) {
    return a.bits_long > b.bits_long;
  });
  for (QualityRow& r : rows) {
    r.pareto = std::none_of(rows.begin(), rows.end(), [&](const QualityRow& o) {
      return o.bits_long <= r.bits_long && o.total.kld_mean <= r.total.kld_mean &&
             (o.bits_long < r.bits_long || o.total.kld_mean < r.total.kld_mean);
    });
  }
}

const QualityRow* QualityTable::Find(const std::string& name, const std::string& device) const {
  for (const QualityRow& r : rows)
    if (r.name == name && r.device == device) return &r;
  return nullptr;
}

std::string QualityMarkdown(const QualityTable& t) {
  std::string out = fmt::format(
      "{}, {}: {} chunks of {} tokens, micro-batch {}{}, {} positions scored. Bits per element and "
      "bytes per token hold all overhead, at {} tokens. Noise floor of KLD: {:.6f}. `*` is the "
      "Pareto front; the host's f16 finds {} of {} needles.\n\n",
      t.model, t.text, t.n_chunks, t.n_ctx, t.n_ubatch,
      t.decode_only ? ", scored token by token" : "", t.n_scored, t.n_long, t.kld_floor,
      t.needles_base, t.n_needles);
  out +=
      "| cache | bits | B/token | KLD mean | worst chunk | 99.9% | / q8_0 | / q4_0 | PPL | same "
      "top "
      "| needles |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: "
      "|\n";
  const QualityRow *q8 = t.Find("q8_0", "host"), *q4 = t.Find("q4_0", "host");
  for (const QualityRow& r : t.rows) {
    out += fmt::format(
        "| {}{}{}{} | {:.2f} | {:.0f} | {:.5f} ± {:.5f} | {:.5f} | {:.4f} | {} | {} | {:+.2f} ± "
        "{:.2f} % | {:.1f} % | {} |\n",
        r.device == "host" ? "host " : "", r.name, r.settings.empty() ? "" : " " + r.settings,
        r.pareto ? " *" : "", r.bits_long, r.bytes_per_token_long, r.total.kld_mean, r.total.kld_se,
        r.kld_worst_chunk, r.total.kld_p999, Ratio(r.total.kld_mean, q8),
        Ratio(r.total.kld_mean, q4), 100 * (r.total.ppl_ratio - 1), 100 * r.total.ppl_ratio_se,
        100 * r.total.same_top_p,
        t.n_needles == 0 ? "-" : fmt::format("{}/{}", r.needles, t.n_needles));
  }
  return out;
}

std::string QualityCsv(const QualityTable& t) {
  Json rows = Json::array();
  for (const QualityRow& r : t.rows) rows.push_back(RowJson(r, t));
  return Csv(rows);
}

Json QualityJson(const QualityTable& t) {
  Json j = {{"model_type", t.model},
            {"text_filename", t.text},
            {"n_ctx", t.n_ctx},
            {"n_ubatch", t.n_ubatch},
            {"chunks", t.n_chunks},
            {"n_scored", t.n_scored},
            {"n_long", t.n_long},
            {"decode_only", t.decode_only},
            {"kld_floor", t.kld_floor},
            {"needles", t.n_needles},
            {"needles_found_base", t.needles_base}};
  Json rows = Json::array();
  for (const QualityRow& r : t.rows) rows.push_back(RowJson(r, t));
  j["rows"] = std::move(rows);
  return j;
}

}  // namespace kvtamp::tool
