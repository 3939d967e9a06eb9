// kvtamp sensitivity: writes the profile by which bits are shared out over KV heads.
#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/progress.h"
#include "tools/kvtamp/sensitivity.h"

namespace kvtamp::tool {
int SensitivityMain(const Args& args) {
  CLI::App app("What the precision of each KV head is worth; writes a profile for --cache-profile",
               "kvtamp sensitivity");
  app.footer(R"(
Examples:
  kvtamp sensitivity -m model.gguf -f text.txt -o model.profile.toml
  kvtamp run --cache k2.5v2.5 --cache-profile model.profile.toml -- llama-server -m model.gguf)");
  SensitivityConfig config;
  std::string text_file, output;
  Talk talk;
  AddModel(app, config.model);
  AddText(app, text_file, "text, some thousand words of the kind the model will read");
  app.add_option("-o,--output", output, "profile to write")->required()->type_name("FILE");
  AddNumber(app, "-c,--ctx-size", config.n_tokens, "tokens of a run", 256, 65536);
  AddNumber(app, "--scored", config.n_scored, "of which the last so many are compared", 16, 65536);
  AddNumber(app, "--split-above", config.split_above,
            "layers worth more than this KL divergence are measured head by head", 0, 1e9)
      ->type_name("KL");
  AddThreads(app, config.n_threads);
  talk.AddTo(app);
  if (const auto code = Parse(app, args)) return *code;
  if (config.n_scored + 128 > config.n_tokens)
    return Fail("sensitivity", "--scored must leave 128 tokens of --ctx-size to be coded",
                kBadUsage);
  SilenceHost(talk.verbose);
  const Result<ModelLayout> layout = ReadCacheLayout(config.model);
  if (!layout.ok()) return Fail("sensitivity", layout.status());
  Result<std::string> text = ReadText(text_file, config.n_tokens);
  if (!text.ok()) return Fail("sensitivity", text.status());
  config.text = std::move(text.value());
  NoteInterrupts();
  Result<ModelPair> models = LoadPair(config.model, true);
  if (!models.ok()) return Fail("sensitivity", models.status());
  const auto measured = [&] {
    Progress progress("sensitivity", talk.quiet);
    return MeasureSensitivity(std::move(models.value()), config, layout.value(),
                              std::ref(progress));
  }();
  if (!measured.ok()) return Fail("sensitivity", measured.status());
  const SensitivityResult& result = measured.value();
  if (const Status s = control::WriteProfile(output, result.profile); !s.ok())
    return Fail("sensitivity", s);

  // The heads worth most, so that one sees whether sharing out pays.
  struct Head {
    double worth;
    std::string name;
  };
  std::vector<Head> heads;
  double all = 0;
  for (const control::ProfileLayer& layer : result.profile.layers) {
    for (const auto& [side, list] : {std::pair("K", &layer.k), std::pair("V", &layer.v)}) {
      for (std::size_t h = 0; h < list->size(); ++h) {
        heads.push_back({(*list)[h], fmt::format("layer {} head {} {}", layer.index, h, side)});
        all += (*list)[h];
      }
    }
  }
  std::stable_sort(heads.begin(), heads.end(),
                   [](const Head& a, const Head& b) { return a.worth > b.worth; });
  fmt::print("{}: {} runs of {} tokens, noise floor {:.5f}; {} heads, both sides\n", output,
             result.n_runs, config.n_tokens, result.floor, heads.size());
  for (std::size_t i = 0; i < std::min<std::size_t>(5, heads.size()); ++i)
    fmt::print("  {:22} {:.5f}  {:4.1f} % of all\n", heads[i].name, heads[i].worth,
               all > 0 ? 100 * heads[i].worth / all : 0);
  return kDone;
}

}  // namespace kvtamp::tool
