// kvtamp doctor: will it work here, with what, and what will become of a model's cache. Changes
// nothing. Exit code: 0 all well, 1 warnings, 2 something failed.
#include <fmt/color.h>
#include <fmt/format.h>
#include <ggml.h>
#include <llama.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/version.h"
#include "control/stats.h"
#include "cpu/cpu.h"
#include "tools/kvtamp/amx.h"
#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/environment.h"
#include "tools/kvtamp/json.h"
#include "tools/kvtamp/layout.h"
#include "tools/kvtamp/plugin.h"
#include "tools/kvtamp/run_plan.h"
#include "tools/kvtamp/stored_size.h"

namespace kvtamp::tool {
namespace {

enum class Verdict { kOk, kWarn, kFail };

struct Check {
  std::string id;  // fixed: scripts rely on it
  Verdict verdict;
  std::string text;
  std::string hint;
};

constexpr const char* kVerdictNames[] = {"ok", "warn", "fail"};

class Report {
 public:
  void Add(const std::string& id, Verdict verdict, const std::string& text,
           const std::string& hint = "") {
    checks_.push_back({id, verdict, text, hint});
  }
  const std::vector<Check>& checks() const { return checks_; }
  int exit_code() const {
    int code = 0;
    for (const Check& check : checks_) code = std::max(code, static_cast<int>(check.verdict));
    return code;
  }

 private:
  std::vector<Check> checks_;
};

Result<control::Settings> CheckSettings(const SettingFlags& flags, Report& report) {
  Result<control::Settings> settings = flags.Load();
  if (!settings.ok()) {
    report.Add("settings.valid", Verdict::kFail, settings.status().message(),
               "correct it; `kvtamp formats` lists the types");
    return settings;
  }
  const control::Settings& s = settings.value();
  const std::size_t given = static_cast<std::size_t>(
      std::count_if(s.values.begin(), s.values.end(),
                    [](const control::Value& v) { return v.source != control::Source::kDefault; }));
  report.Add(
      "settings.valid", Verdict::kOk,
      fmt::format(
          "cache {}: K {}, V {}; page {}, {} sinks, window {} ({} settings given, the others at "
          "their defaults)",
          codec::PairName(s.type), codec::FormatName(s.type.k), codec::FormatName(s.type.v),
          s.page_size, s.n_sink, s.residual_length, given));
  return settings;
}

void CheckCpu(const control::Settings* settings, Report& report) {
  if (settings != nullptr) {
    if (Status status = cpu::ForceIsa(settings->cpu); !status.ok()) {
      report.Add("cpu.kernels", Verdict::kFail, status.message());
      return;
    }
  }
  const std::string active = cpu::ActiveIsa();
  std::string others;
  for (const std::string& isa : cpu::AvailableIsas()) {
    if (isa != active) others += (others.empty() ? "" : ", ") + isa;
  }
  const std::string text = fmt::format(
      "{} in use{}", active, others.empty() ? "" : "; this processor could also run " + others);
  const auto isas = cpu::AvailableIsas();
  if (!isas.empty() && isas.front() != active) {
    report.Add("cpu.kernels", Verdict::kWarn, text, "KVTAMP_CPU forces it; unset it for speed");
  } else if (active == "scalar") {
    report.Add("cpu.kernels", Verdict::kWarn, text,
               "no vector instructions found: it will be slow");
  } else {
    report.Add("cpu.kernels", Verdict::kOk, text);
  }
}

void CheckPlugin(Report& report) {
  const Result<std::string> path = FindPlugin();
  if (!path.ok()) {
    report.Add("plugin.found", Verdict::kFail, path.status().message(),
               "build it: cmake --build --preset release");
    return;
  }
  report.Add("plugin.found", Verdict::kOk, path.value());
  const Result<Plugin> plugin = LoadPlugin(path.value());
  if (!plugin.ok()) {
    report.Add("plugin.loads", Verdict::kFail, plugin.status().message(),
               "build the plug-in against this ggml (KVTAMP_LLAMA_DIR)");
    return;
  }
  const std::string said = TakeHostErrors();
  if (said.empty()) {
    report.Add("plugin.loads", Verdict::kOk,
               "registered with ggml as " + std::string(ggml_backend_reg_name(plugin.value().reg)));
  } else {
    report.Add("plugin.loads", Verdict::kWarn, said);
  }
  report.Add("ggml.version", Verdict::kOk,
             fmt::format("ggml {} ({}), llama.cpp {}: the one this command runs with",
                         ggml_version(), ggml_commit(), llama_version()));
  std::size_t free = 0, total = 0;
  ggml_backend_dev_memory(plugin.value().device, &free, &total);
  const std::string device =
      fmt::format("{}: {}, {} free of {} as the host counts (uncompressed bytes)",
                  ggml_backend_dev_name(plugin.value().device),
                  ggml_backend_dev_description(plugin.value().device), control::BytesText(free),
                  control::BytesText(total));
  report.Add("device.listed", free > 0 ? Verdict::kOk : Verdict::kWarn, device,
             free > 0 ? "" : "with no free memory reported, the host will not use the device");
}

void CheckHost(Report& report) {
  const auto plan = PlanRun("", {"llama-server"}, GetVariable);
  if (!plan.ok()) {
    report.Add("host.environment", Verdict::kFail, plan.status().message());
  } else if (!plan.value().warnings.empty()) {
    for (const std::string& warning : plan.value().warnings) {
      report.Add("host.environment", Verdict::kWarn, warning,
                 "set by an LLAMA_ARG_ variable: unset it");
    }
  } else {
    report.Add("host.environment", Verdict::kOk, "no variable keeps the cache from the device");
  }
  const AmxTrial amx = TryAmx();
  if (const auto problem = ProblemOf(amx)) {
    report.Add("host.amx", Verdict::kWarn, problem->text, problem->hint);
  } else if (amx.outcome == AmxTrial::Outcome::kRight) {
    report.Add("host.amx", Verdict::kOk, "the host's CPU backend uses AMX, and it computes right");
  }
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    report.Add("host.address_space", Verdict::kWarn,
               fmt::format("limited to {}", control::BytesText(limit.rlim_cur)),
               "a long context reserves address space it never uses: ulimit -v unlimited");
  } else {
    report.Add("host.address_space", Verdict::kOk, "not limited");
  }
}

// Coded and f16 bytes of one token of a layer, for full pages.
Result<double> CodedBytes(const LayerLayout& layer, const codec::Pair& type,
                          std::uint32_t page_size) {
  double bits = 0;
  for (const bool is_k : {true, false}) {
    const std::uint32_t dim = is_k ? layer.head_size_k : layer.head_size_v;
    if (dim == 0) continue;
    const codec::Side side = is_k ? codec::Side::kK : codec::Side::kV;
    const codec::Format& format = is_k ? type.k : type.v;
    const Result<codec::Format> resolved = codec::Resolve(format, side, dim);
    if (!resolved.ok()) return resolved.status();
    const double per_element =
        format.coded() ? codec::BitsPerElement(resolved.value(), side, dim, page_size) : 16.0;
    bits += per_element * static_cast<double>(is_k ? layer.elements_k() : layer.elements_v());
  }
  return bits / 8;
}

Json CheckModel(const std::string& file, const control::Settings* settings, Report& report) {
  const Result<ModelLayout> read = ReadLayout(file);
  if (!read.ok()) {
    report.Add("model.readable", Verdict::kFail, read.status().message());
    return nullptr;
  }
  const ModelLayout& model = read.value();
  report.Add(
      "model.readable", Verdict::kOk,
      fmt::format("{} (architecture {}, {} layers, {} query heads, trained for {} tokens)",
                  model.name, model.architecture, model.n_layer, model.n_head, model.n_ctx_train));
  Json j = {
      {"filename", file},          {"name", model.name},     {"architecture", model.architecture},
      {"n_layer", model.n_layer},  {"n_head", model.n_head}, {"n_ctx_train", model.n_ctx_train},
      {"n_swa", model.n_swa},      {"mla", model.mla},       {"n_recurrent", model.n_recurrent},
      {"n_shared", model.n_shared}};
  if (model.layers.empty() || !model.causal) {
    report.Add("model.cache", Verdict::kWarn,
               model.causal
                   ? "no layer has attention: there is no K/V cache, nothing will be compressed"
                   : "an encoder, or the like: it keeps no K/V cache, nothing will be compressed");
    return j;
  }

  // Layers of one shape and one format are one line.
  struct Group {
    LayerLayout shape;
    codec::Pair type;
    std::string why;  // it stays uncompressed
    std::vector<std::uint32_t> layers;
    double logical = 0, coded = 0;  // bytes per token, all its layers
  };
  std::vector<Group> groups;
  double logical = 0, coded = 0;
  Json layers = Json::array();
  for (const LayerLayout& layer : model.layers) {
    const codec::Pair type =
        settings == nullptr ? codec::Pair{} : settings->TypeOfLayer(layer.layer);
    const double f16 = 2.0 * static_cast<double>(layer.elements_k() + layer.elements_v());
    std::string why = layer.why_plain;
    if (why.empty() && settings != nullptr) why = WhyNotStored(layer, *settings);
    const bool stored = why.empty();
    const Result<double> bytes =
        stored ? CodedBytes(layer, type, settings == nullptr ? 64 : settings->page_size) : f16;
    // A group that does not divide the heads was the user's choice.
    if (!bytes.ok() || (!stored && layer.why_plain.empty() && (type.k.group | type.v.group) != 0)) {
      report.Add(
          "model.cache", Verdict::kFail,
          fmt::format("layer {}: {}", layer.layer, bytes.ok() ? why : bytes.status().message()),
          "choose another cache.type; `kvtamp formats` lists them");
      return j;
    }
    auto it = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
      return g.shape.n_head_kv == layer.n_head_kv && g.shape.head_size_k == layer.head_size_k &&
             g.shape.head_size_v == layer.head_size_v && g.shape.swa == layer.swa &&
             g.type == type && g.why == why;
    });
    if (it == groups.end()) it = groups.insert(groups.end(), Group{layer, type, why, {}});
    it->layers.push_back(layer.layer);
    it->logical += f16;
    it->coded += bytes.value();
    logical += f16;
    coded += bytes.value();
    layers.push_back({{"layer", layer.layer},
                      {"n_head_kv", layer.n_head_kv},
                      {"head_size_k", layer.head_size_k},
                      {"head_size_v", layer.head_size_v},
                      {"swa", layer.swa},
                      {"stored", stored},
                      {"why_not_stored", why},
                      {"format_k", codec::FormatName(type.k)},
                      {"format_v", codec::FormatName(type.v)},
                      {"logical_bytes_per_token", f16},
                      {"coded_bytes_per_token", bytes.value()}});
  }
  j["layers"] = std::move(layers);
  j["logical_bytes_per_token"] = logical;
  j["coded_bytes_per_token"] = coded;

  for (const Group& g : groups) {
    const std::string shape =
        fmt::format("layers {}: {} KV heads, K {}{}{}", control::RangesText(g.layers),
                    g.shape.n_head_kv, g.shape.head_size_k,
                    g.shape.head_size_v == 0 ? " (MLA, V is part of K)"
                                             : fmt::format(", V {}", g.shape.head_size_v),
                    g.shape.swa ? fmt::format(", sliding window of {}", model.n_swa) : "");
    if (g.why.empty()) {
      report.Add("model.layers", Verdict::kOk,
                 fmt::format("{}; K {}, V {}: {:.0f} B a token in f16, {:.0f} B coded", shape,
                             codec::FormatName(g.type.k), codec::FormatName(g.type.v), g.logical,
                             g.coded));
    } else {
      report.Add("model.not_compressed", Verdict::kWarn,
                 fmt::format("{}: {:.0f} B a token stay as they are: {}", shape, g.logical, g.why));
    }
  }
  std::string text =
      fmt::format("{:.1f} KiB a token in f16, {:.1f} KiB in full coded pages: {:.2f}x smaller",
                  logical / 1024, coded / 1024, coded > 0 ? logical / coded : 0.0);
  if (settings != nullptr) {
    // Per head and stream, sinks, window and on average half a page are f16.
    for (const std::uint32_t n : {2048u, 8192u, 32768u}) {
      if (model.n_ctx_train > 0 && n > model.n_ctx_train) break;
      const double f16_rows = std::min<double>(
          n, settings->n_sink + settings->residual_length + settings->page_size / 2.0);
      const double stored = f16_rows * logical + (n - f16_rows) * coded;
      text += fmt::format(", about {:.2f}x at {} tokens", n * logical / stored, n);
    }
  }
  report.Add("model.cache", Verdict::kOk, text + " (sinks, window and open page in f16)",
             "this holds with flash attention on and -ctk, -ctv at f16; the log says at load what "
             "is so, in the "
             "lines \"kvtamp: KV cache of ...\"");
  if (model.architecture == "t5") {
    report.Add(
        "model.not_compressed", Verdict::kWarn,
        "the encoder attends without the cache, for which the host turns flash attention, and "
        "so compression, off unless -fa on is given");
  }

  if (model.n_recurrent > 0) {
    report.Add(
        "model.not_compressed", Verdict::kWarn,
        fmt::format("{} layers have recurrent state: as the host keeps it", model.n_recurrent));
  }
  if (model.n_shared > 0) {
    report.Add("model.layers", Verdict::kOk,
               fmt::format("{} layers keep no K/V of their own: they read that of earlier layers, "
                           "from the same pages",
                           model.n_shared));
  }
  if (!model.swa_known) {
    report.Add("model.not_compressed", Verdict::kWarn,
               fmt::format("some layers slide over {} tokens, the file does not say which: figures "
                           "above count all "
                           "layers whole",
                           model.n_swa));
  }
  return j;
}

void Print(const Report& report, const control::Settings* settings, bool config, bool color) {
  fmt::print("kvtamp {} doctor\n", KVTAMP_VERSION);
  for (const Check& check : report.checks()) {
    constexpr const char* kTags[] = {"[ok]  ", "[warn]", "[FAIL]"};
    constexpr fmt::terminal_color kColors[] = {
        fmt::terminal_color::green, fmt::terminal_color::yellow, fmt::terminal_color::red};
    const auto i = static_cast<std::size_t>(check.verdict);
    const std::string tag = color ? fmt::format(fmt::fg(kColors[i]), "{}", kTags[i]) : kTags[i];
    fmt::print("{} {:20} {}\n", tag, check.id, check.text);
    if (!check.hint.empty()) fmt::print("       {:20} hint: {}\n", "", check.hint);
  }
  if (!config || settings == nullptr) return;
  fmt::print("\n| setting | value | from |\n| ------- | ----- | ---- |\n");
  for (const control::Value& value : settings->values) {
    fmt::print("| {} | {} | {} |\n", value.option->path, value.text.empty() ? "-" : value.text,
               value.where.empty()
                   ? control::SourceName(value.source)
                   : fmt::format("{} {}", control::SourceName(value.source), value.where));
  }
}

}  // namespace

int DoctorMain(const Args& args) {
  CLI::App app("Checks this machine, the host, the settings and (with -m) a model; changes nothing",
               "kvtamp doctor");
  app.footer(R"(
Examples:
  kvtamp doctor
  kvtamp doctor -m model.gguf --cache int8
  kvtamp doctor --config -o json

Exit code: 0 all well, 1 warnings, 2 something failed.)");
  std::string model, output = "text";
  bool show_config = false;
  app.add_option("-m,--model", model, "GGUF file: what will become of its cache")
      ->type_name("FILE");
  AddOutput(app, output, {"text", "json"});
  SettingFlags flags;
  flags.AddTo(app);
  app.add_flag("--config", show_config, "print every setting in force and where it came from");
  if (const auto code = Parse(app, args)) return *code;

  SilenceHost(false);
  Report report;
  const Result<control::Settings> loaded = CheckSettings(flags, report);
  const control::Settings* settings = loaded.ok() ? &loaded.value() : nullptr;
  if (settings != nullptr) flags.Export(*settings);
  CheckCpu(settings, report);
  CheckPlugin(report);
  CheckHost(report);
  Json model_json = nullptr;
  if (!model.empty()) model_json = CheckModel(model, settings, report);

  if (output == "text") {
    const char* no_color = std::getenv("NO_COLOR");
    const bool color = ::isatty(STDOUT_FILENO) == 1 && (no_color == nullptr || *no_color == 0);
    Print(report, settings, show_config, color);
    return report.exit_code();
  }
  Json j = {{"version", KVTAMP_VERSION},
            {"ggml_version", ggml_version()},
            {"llama_version", llama_version()}};
  j["checks"] = Json::array();
  for (const Check& check : report.checks()) {
    j["checks"].push_back({{"id", check.id},
                           {"status", kVerdictNames[static_cast<std::size_t>(check.verdict)]},
                           {"text", check.text},
                           {"hint", check.hint}});
  }
  if (settings != nullptr) {
    j["settings"] = Json::array();
    for (const control::Value& value : settings->values) {
      j["settings"].push_back({{"path", value.option->path},
                               {"value", value.text},
                               {"source", control::SourceName(value.source)},
                               {"where", value.where}});
    }
  }
  if (!model_json.is_null()) j["model"] = std::move(model_json);
  fmt::print("{}\n", Dump(j, 2));
  return report.exit_code();
}

}  // namespace kvtamp::tool
