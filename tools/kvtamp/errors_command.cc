// kvtamp errors: relative error of attention output by layer and head, by K and by V.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/errors.h"
#include "tools/kvtamp/json.h"
#include "tools/kvtamp/progress.h"

namespace kvtamp::tool {
namespace {

double RootMeanSquare(const std::vector<HeadErrors>& heads, double HeadErrors::*side) {
  double sum = 0;
  for (const HeadErrors& h : heads) sum += h.*side * (h.*side);
  return heads.empty() ? 0 : std::sqrt(sum / static_cast<double>(heads.size()));
}

void PrintMarkdown(const ErrorsResult& result, const std::string& what) {
  fmt::print(
      "{}\nRelative error of attention output over the f16 cache's, by KV head (its query heads "
      "together)\n\n| layer | head | K coded | V coded | both |\n| ---: | ---: | ---: | ---: | "
      "---: "
      "|\n",
      what);
  for (const HeadErrors& h : result.heads)
    fmt::print("| {} | {} | {:.4f} | {:.4f} | {:.4f} |\n", h.layer, h.head, h.k, h.v, h.both);
  fmt::print("| root mean square | | {:.4f} | {:.4f} | {:.4f} |\n\n",
             RootMeanSquare(result.heads, &HeadErrors::k),
             RootMeanSquare(result.heads, &HeadErrors::v),
             RootMeanSquare(result.heads, &HeadErrors::both));
  std::vector<HeadErrors> worst = result.heads;
  std::stable_sort(worst.begin(), worst.end(),
                   [](const HeadErrors& a, const HeadErrors& b) { return a.both > b.both; });
  worst.resize(std::min<std::size_t>(worst.size(), 5));
  std::string list;
  for (const HeadErrors& h : worst)
    list += fmt::format("{}layer {} head {} ({:.3f}, more by {})", list.empty() ? "" : ", ",
                        h.layer, h.head, h.both, h.k > h.v ? "K" : "V");
  fmt::print("worst: {}\n", list);
}

}  // namespace

int ErrorsMain(const Args& args) {
  CLI::App app("Where a format's loss comes from: error of attention output by head, by K and by V",
               "kvtamp errors");
  app.footer(R"(
Examples:
  kvtamp errors -m model.gguf -f text.txt --cache k3v3
  kvtamp errors -m model.gguf -f text.txt --cache k2v2 --cache-profile model.toml -o json)");
  ErrorsConfig config;
  std::string text_file, output = "md";
  Talk talk;
  config.n_scored = 0;
  AddModel(app, config.model);
  AddText(app, text_file, "text to run");
  AddNumber(app, "-c,--ctx-size", config.n_ctx, "tokens", 64, 1 << 20);
  AddMicroBatch(app, config.n_ubatch);
  app.add_option("--scored", config.n_scored, "compare the last N positions [the second half]")
      ->check(CLI::Range(1u, 1u << 20))
      ->type_name("N");
  AddThreads(app, config.n_threads);
  AddOutput(app, output, {"md", "json"})->capture_default_str();
  talk.AddTo(app);
  SettingFlags flags;
  flags.AddTo(app);
  if (const auto code = Parse(app, args)) return *code;
  if (config.n_scored == 0) config.n_scored = config.n_ctx / 2;
  config.n_ubatch = std::min(config.n_ubatch, config.n_ctx);
  const auto settings = flags.Load();
  if (!settings.ok()) return Fail("errors", settings.status(), kBadUsage);
  SilenceHost(talk.verbose);
  const auto layout = ReadCacheLayout(config.model);
  if (!layout.ok()) return Fail("errors", layout.status());
  if (const Status fits = CheckFormats(layout.value(), settings.value()); !fits.ok())
    return Fail("errors", fits, kBadUsage);
  auto text = ReadText(text_file, config.n_ctx);
  if (!text.ok()) return Fail("errors", text.status());
  config.text = std::move(text.value());
  NoteInterrupts();
  const auto models = LoadPair(config.model, false);
  if (!models.ok()) return Fail("errors", models.status());
  const auto measured = [&] {
    Progress progress("errors", talk.quiet);
    return MeasureErrors(models.value().base.get(), config, layout.value(), settings.value(),
                         std::ref(progress));
  }();
  if (!measured.ok()) return Fail("errors", measured.status());
  const ErrorsResult& result = measured.value();
  for (const std::string& s : result.skipped)
    fmt::print(stderr, "kvtamp errors: not measured: {}\n", s);
  if (result.heads.empty()) return Fail("errors", "no layer could be measured", kFailed);
  const std::string type = codec::PairName(settings.value().type);
  if (output == "md") {
    PrintMarkdown(result, fmt::format("{}, {} of {} tokens, micro-batch {}", type, config.n_scored,
                                      config.n_ctx, config.n_ubatch));
    return kDone;
  }
  Json heads = Json::array();
  for (const HeadErrors& h : result.heads)
    heads.push_back({{"layer", h.layer},
                     {"head", h.head},
                     {"error_k", h.k},
                     {"error_v", h.v},
                     {"error", h.both}});
  const Json j = {{"model_filename", config.model},
                  {"cache_type", type},
                  {"profile", settings.value().profile},
                  {"n_ctx", config.n_ctx},
                  {"n_ubatch", config.n_ubatch},
                  {"n_scored", config.n_scored},
                  {"error_k", RootMeanSquare(result.heads, &HeadErrors::k)},
                  {"error_v", RootMeanSquare(result.heads, &HeadErrors::v)},
                  {"error", RootMeanSquare(result.heads, &HeadErrors::both)},
                  {"not_measured", result.skipped},
                  {"heads", std::move(heads)}};
  fmt::print("{}\n", Dump(j, 2));
  return kDone;
}

}  // namespace kvtamp::tool
