// kvtamp bench quality: a table of caches by size and loss.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <functional>

#include "tools/kvtamp/cache_list.h"
#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/evaluate.h"
#include "tools/kvtamp/layout.h"
#include "tools/kvtamp/needles.h"
#include "tools/kvtamp/progress.h"
#include "tools/kvtamp/quality_table.h"
#include "tools/kvtamp/stored_size.h"

namespace kvtamp::tool {
namespace {

constexpr const char* kQuality = "bench quality";
constexpr const char* kQualityFooter = R"(
Examples:
  kvtamp bench quality -m model.gguf -f wiki.test.raw
  kvtamp bench quality -m model.gguf -f text.txt --caches k4v4,k3v3 --host-types q8_0,q4_0 --svg out.svg
  kvtamp bench quality -m model.gguf -f text.txt --decode-only --scored 128 -o json)";

struct Options {
  EvalConfig config;
  std::string text_file, output = "md", svg;
  std::vector<std::string> caches{"f16", "k8v8", "k4v4", "k3.5v3", "k3v2.5", "k2.5v2", "k2v2"};
  std::vector<std::string> host_types{"q8_0", "q5_0", "q4_0"};
  std::vector<double> depths{10, 50, 90};
  std::uint32_t n_long = 8192;
  int n_chunks = 4;
  Talk talk;
};

void AddOptions(CLI::App& app, Options& o) {
  AddModel(app, o.config.model);
  AddText(app, o.text_file, "text to score");
  AddCacheLists(app, o.caches, o.host_types);
  AddNumber(app, "-c,--ctx-size", o.config.n_ctx, "tokens of a chunk", 64, 1 << 20);
  o.config.n_ubatch = 64;
  AddMicroBatch(app, o.config.n_ubatch);
  app.add_option("--chunks", o.n_chunks, "chunks to run, -1 for all")
      ->type_name("N")
      ->capture_default_str();
  app.add_flag("--decode-only", o.config.decode_only, "score token by token");
  app.add_option("--scored", o.config.n_scored, "score the last N of a chunk [its second half]")
      ->type_name("N")
      ->check(CLI::Range(2u, 1u << 20));
  app.add_option("--needle-depths", o.depths,
                 "percent of a prompt of -c tokens at which a needle lies; -1: ask for none")
      ->delimiter(',')
      ->type_name("N")
      ->check(CLI::Range(-1.0, 100.0))
      ->capture_default_str();
  AddNumber(app, "--size-at", o.n_long, "tokens at which sizes are stated", 64, 1 << 20);
  AddThreads(app, o.config.n_threads);
  AddOutput(app, o.output, {"md", "csv", "json"})->capture_default_str();
  app.add_option("--svg", o.svg, "write a plot of quality over size")->type_name("FILE");
  o.talk.AddTo(app);
}

Status CheckOptions(Options& o) {
  if (o.n_chunks == 0 || o.n_chunks < -1)
    return Status::Invalid("--chunks must be positive, or -1 for all");
  if (std::count(o.depths.begin(), o.depths.end(), -1) != 0 && o.depths.size() != 1)
    return Status::Invalid("--needle-depths: -1 stands alone");
  if (o.config.n_scored >= o.config.n_ctx)
    return Status::Invalid("--scored must be less than --ctx-size");
  o.config.max_chunks = o.n_chunks < 0 ? 0 : static_cast<std::uint32_t>(o.n_chunks);
  o.config.n_ubatch = o.config.n_ubatch_base = o.config.n_batch =
      std::min(o.config.n_ubatch, o.config.n_ctx);
  return Status::Ok();
}

Result<std::vector<CacheEntry>> Entries(const Options& o) {
  std::vector<CacheEntry> entries;
  if (Status s = AddCaches(o.caches, false, entries); !s.ok()) return s;
  if (Status s = AddCaches(o.host_types, true, entries); !s.ok()) return s;
  // The noise floor is f16 through us.
  if (std::none_of(entries.begin(), entries.end(),
                   [](const CacheEntry& e) { return !e.cache.host && e.name == "f16"; })) {
    auto f16 = OwnCache("f16");
    if (!f16.ok()) return f16.status();
    entries.insert(entries.begin(), std::move(f16.value()));
  }
  return entries;
}

struct Measured {
  EvalResult quality;
  NeedlesFound needles;
};

Result<Measured> Measure(const Options& o, const ModelLayout& layout,
                         const std::vector<CacheEntry>& entries) {
  const auto models = LoadModels(o.config.model, entries);
  if (!models.ok()) return models.status();
  const std::vector<TestedCache> tested = TestedCaches(entries);
  RunLog log;
  Progress progress(kQuality, o.talk.quiet);
  const EvalHooks hooks{std::ref(progress), &log};
  Measured measured;
  auto quality = Evaluate(models.value(), o.config, tested, layout, hooks);
  if (!quality.ok()) return quality.status();
  measured.quality = std::move(quality.value());
  for (const std::string& warning : measured.quality.warnings)
    fmt::print(stderr, "kvtamp {}: warning: {}\n", kQuality, warning);
  if (measured.quality.tested.front().chunks.empty() || o.depths == std::vector<double>{-1})
    return measured;
  auto needles = FindNeedles(models.value(), o.config, tested, o.depths, hooks);
  if (!needles.ok()) return needles.status();
  measured.needles = std::move(needles.value());
  return measured;
}

Result<QualityTable> TableOf(const Options& o, const ModelLayout& layout,
                             const std::vector<CacheEntry>& entries, const Measured& measured) {
  const auto& [result, needles] = measured;
  QualityTable t;
  t.n_needles = needles.asked;
  t.needles_base = needles.base;
  t.model = layout.name.empty() ? result.model.type : layout.name;
  t.text = o.text_file.substr(o.text_file.rfind('/') + 1);
  t.n_ctx = o.config.n_ctx;
  t.n_ubatch = o.config.n_ubatch;
  // What a policy keeps of rows that nobody attended cannot be reckoned: then all sizes are those
  // of the chunks, as measured.
  const bool prunes = std::any_of(entries.begin(), entries.end(), [](const CacheEntry& e) {
    return !e.cache.host && !e.settings.prune.policy.empty();
  });
  t.n_long = prunes ? o.config.n_ctx : o.n_long;
  t.decode_only = o.config.decode_only;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const CacheEntry& e = entries[i];
    const TestedResult& r = result.tested[i];
    t.n_chunks = static_cast<std::uint32_t>(r.chunks.size());
    t.n_scored = static_cast<std::uint32_t>(r.total.n);
    QualityRow row;
    row.name = e.name;
    row.device = e.cache.host ? "host" : "kvtamp";
    row.format_k = e.format_k;
    row.format_v = e.format_v;
    row.settings = e.settings_text;
    row.total = r.total;
    if (i < needles.tested.size()) row.needles = needles.tested[i];
    CacheSize now;
    for (const ChunkResult& c : r.chunks) {
      now += c.size;
      row.kld_worst_chunk = std::max(row.kld_worst_chunk, c.divergence.kld_mean);
    }
    row.bits = now.logical_bytes > 0 ? 16 * now.stored_bytes / now.logical_bytes : 0;
    CacheSize then;
    if (e.cache.host) {
      then = SizeOfHostCache(layout, e.cache.type_k, e.cache.type_v, t.n_long);
    } else if (prunes) {
      const auto n = static_cast<double>(std::max<std::size_t>(1, r.chunks.size()));
      then = {now.logical_bytes / n, now.stored_bytes / n, now.resident_bytes / n};
    } else {
      const auto size = StoredSize(layout, e.settings, o.n_long, o.config.n_ubatch);
      if (!size.ok()) return size.status();
      then = size.value();
    }
    row.bits_long = 16 * then.stored_bytes / then.logical_bytes;
    row.bytes_per_token_long = then.stored_bytes / t.n_long;
    if (!e.cache.host && e.name == "f16" && e.settings_text.empty())
      t.kld_floor = row.total.kld_mean;
    t.rows.push_back(std::move(row));
  }
  t.Finish();
  return t;
}

int WriteTable(const Options& o, const QualityTable& table) {
  if (o.output == "md") fmt::print("{}", QualityMarkdown(table));
  if (o.output == "csv") fmt::print("{}", QualityCsv(table));
  if (o.output == "json") fmt::print("{}\n", Dump(QualityJson(table), 2));
  if (o.svg.empty()) return kDone;
  std::ofstream out(o.svg);
  out << QualitySvg(table);
  return out.flush() ? kDone : Fail(kQuality, "cannot write " + o.svg, kFailed);
}

}  // namespace

int BenchQualityMain(const Args& args) {
  CLI::App app("Caches by size and by what they cost in quality, the host's own beside ours",
               std::string("kvtamp ") + kQuality);
  app.footer(std::string(kCacheListHelp) + kQualityFooter);
  Options o;
  AddOptions(app, o);
  if (const auto code = Parse(app, args)) return *code;
  if (const Status s = CheckOptions(o); !s.ok()) return Fail(kQuality, s, kBadUsage);
  const auto entries = Entries(o);
  if (!entries.ok()) return Fail(kQuality, entries.status(), kBadUsage);
  SilenceHost(o.talk.verbose);
  const auto layout = ReadCacheLayout(o.config.model);
  if (!layout.ok()) return Fail(kQuality, layout.status());
  if (const Status fits = CheckCaches(layout.value(), entries.value()); !fits.ok())
    return Fail(kQuality, fits, kBadUsage);
  auto text = ReadFile(o.text_file);
  if (!text.ok()) return Fail(kQuality, text.status());
  o.config.text = std::move(text.value());
  NoteInterrupts();
  const auto measured = Measure(o, layout.value(), entries.value());
  if (!measured.ok()) return Fail(kQuality, measured.status());
  if (measured.value().quality.tested.front().chunks.empty())
    return Fail(kQuality, "interrupted before the first chunk was done", kInterrupted);
  const auto table = TableOf(o, layout.value(), entries.value(), measured.value());
  if (!table.ok()) return Fail(kQuality, table.status());
  return WriteTable(o, table.value());
}

}  // namespace kvtamp::tool
