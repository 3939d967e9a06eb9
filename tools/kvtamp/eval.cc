// kvtamp eval: what a cache format costs in quality, against the host's own f16 cache, in one
// process.
#include <fmt/format.h>
#include <ggml.h>
#include <llama.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>

#include "control/stats.h"
#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/evaluate.h"
#include "tools/kvtamp/host_types.h"
#include "tools/kvtamp/layout.h"
#include "tools/kvtamp/plugin.h"
#include "tools/kvtamp/progress.h"

namespace kvtamp::tool {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFooter = R"(
Examples:
  kvtamp eval -m model.gguf -f wiki.test.raw -c 2048 --chunks 4
  kvtamp eval -m model.gguf -f text.txt -ub 64 --cache int8 -o json --fail-if 'kld_mean>0.01'
  kvtamp eval -m model.gguf -f text.txt --device host -ctk q4_0 -ctv q4_0
  kvtamp eval -m model.gguf -f text.txt --device host -fa off   (what arithmetic alone changes)

The base is the host's f16 cache with flash attention. Scored: the second half of each chunk.
Exit code: 0 done, 1 failed, 2 bad usage, 3 done but a --fail-if limit was passed.)";

std::string CpuInfo() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "";
}

struct Limit {
  std::string text;
  std::string field;
  std::string op;
  double value = 0;
  bool Passed(double x) const {
    return std::isnan(x) || (op == ">" && x > value) || (op == ">=" && x >= value) ||
           (op == "<" && x < value) || (op == "<=" && x <= value);
  }
};

Result<Limit> ParseLimit(const std::string& text) {
  static const std::regex form(
      R"(\s*([a-z_0-9]+)\s*(>=|<=|>|<)\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*)");
  std::smatch match;
  if (!std::regex_match(text, match, form)) {
    return Status::Invalid("--fail-if " + text + ": must look like kld_mean>0.01");
  }
  return Limit{text, match[1], match[2], std::strtod(match[3].str().c_str(), nullptr)};
}

double Speed(const std::vector<ChunkResult>& chunks, std::uint32_t n_ctx, bool base) {
  double seconds = 0;
  for (const ChunkResult& chunk : chunks) seconds += base ? chunk.seconds_base : chunk.seconds;
  return seconds > 0 ? static_cast<double>(chunks.size()) * n_ctx / seconds : 0;
}

CacheSize MeanSize(const std::vector<ChunkResult>& chunks) {
  CacheSize mean;
  for (const ChunkResult& chunk : chunks) {
    const auto n = static_cast<double>(chunks.size());
    mean.logical_bytes += chunk.size.logical_bytes / n;
    mean.stored_bytes += chunk.size.stored_bytes / n;
    mean.resident_bytes += chunk.size.resident_bytes / n;
  }
  return mean;
}

void AddDivergence(Json& j, const Divergence& d) {
  j["ppl"] = d.ppl;
  j["ppl_se"] = d.ppl_se;
  j["ppl_base"] = d.ppl_base;
  j["ppl_base_se"] = d.ppl_base_se;
  j["ppl_ratio"] = d.ppl_ratio;
  j["ppl_ratio_se"] = d.ppl_ratio_se;
  j["kld_mean"] = d.kld_mean;
  j["kld_se"] = d.kld_se;
  j["kld_median"] = d.kld_median;
  j["kld_p99"] = d.kld_p99;
  j["kld_p999"] = d.kld_p999;
  j["kld_max"] = d.kld_max;
  j["rms_dp"] = d.rms_dp;
  j["rms_dp_se"] = d.rms_dp_se;
  j["same_top_p"] = d.same_top_p;
  j["same_top_p_se"] = d.same_top_p_se;
}

void PrintMarkdown(const Json& j) {
  const auto number = [&](const char* key) { return j.at(key).get<double>(); };
  fmt::print("{}, {}, {} chunks of {} tokens, micro-batch {}, {} threads\n",
             j.at("model_type").get<std::string>(), j.at("text_filename").get<std::string>(),
             j.at("chunks").get<int>(), j.at("n_ctx").get<int>(), j.at("n_ubatch").get<int>(),
             j.at("n_threads").get<int>());
  fmt::print(
      "tested: device {}, K {}, V {}{}; base: the host's f16 cache{}; scored: the {}, {} "
      "positions\n\n",
      j.at("device").get<std::string>(), j.at("format_k").get<std::string>(),
      j.at("format_v").get<std::string>(),
      j.at("flash_attn").get<bool>() ? "" : ", no flash attention",
      j.at("n_ubatch_base") == j.at("n_ubatch")
          ? std::string()
          : fmt::format(" at micro-batch {}", j.at("n_ubatch_base").get<int>()),
      j.at("scored").get<std::string>(), j.at("n_scored").get<int>());
  fmt::print("| {:19} | {:>22} |\n| ------------------- | ---------------------: |\n", "", "value");
  const auto row = [](const char* name, const std::string& value) {
    fmt::print("| {:19} | {:>22} |\n", name, value);
  };
  row("PPL", fmt::format("{:.4f} +/- {:.4f}", number("ppl"), number("ppl_se")));
  row("PPL base", fmt::format("{:.4f} +/- {:.4f}", number("ppl_base"), number("ppl_base_se")));
  row("PPL ratio", fmt::format("{:.5f} +/- {:.5f}", number("ppl_ratio"), number("ppl_ratio_se")));
  row("Mean KLD", fmt::format("{:.6f} +/- {:.6f}", number("kld_mean"), number("kld_se")));
  if (j.contains("kld_floor")) row("  noise floor", fmt::format("{:.6f}", number("kld_floor")));
  row("Median KLD", fmt::format("{:.6f}", number("kld_median")));
  row("99.9% KLD", fmt::format("{:.6f}", number("kld_p999")));
  row("Maximum KLD", fmt::format("{:.6f}", number("kld_max")));
  row("RMS dp",
      fmt::format("{:.3f} +/- {:.3f} %", 100 * number("rms_dp"), 100 * number("rms_dp_se")));
  row("Same top p", fmt::format("{:.3f} +/- {:.3f} %", 100 * number("same_top_p"),
                                100 * number("same_top_p_se")));
  row("KV bits per element", fmt::format("{:.3f}", number("kv_bpw")));
  row("KV bytes per token", fmt::format("{:.1f}", number("kv_bytes_per_token")));
  row("  resident", fmt::format("{:.1f}", number("kv_resident_bytes_per_token")));
  row("  f16", fmt::format("{:.1f}", number("kv_bytes_logical_per_token")));
  row("Prefill t/s", fmt::format("{:.1f}", number("pp_ts")));
  row("Prefill t/s base", fmt::format("{:.1f}", number("pp_ts_base")));
  fmt::print(
      "\n| chunk |       PPL |  PPL base |  Mean KLD |  99.9% KLD | Same top p |\n"
      "| ----: | --------: | --------: | --------: | ---------: | ---------: |\n");
  for (const Json& c : j.at("chunk_results")) {
    fmt::print("| {:5} | {:9.4f} | {:9.4f} | {:9.6f} | {:10.6f} | {:8.2f} % |{}\n",
               c.at("chunk").get<int>(), c.at("ppl").get<double>(), c.at("ppl_base").get<double>(),
               c.at("kld_mean").get<double>(), c.at("kld_p999").get<double>(),
               100 * c.at("same_top_p").get<double>(),
               c.at("chunk") == j.at("worst_chunk") ? " worst" : "");
  }
}

void PrintCsv(const Json& j) {
  std::string names, values;
  for (const auto& [key, value] : j.items()) {
    if (value.is_structured()) continue;
    names += (names.empty() ? "" : ",") + key;
    std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    if (value.is_string()) {
      text = "\"" + std::regex_replace(text, std::regex("\""), "\"\"") + "\"";
    }
    values += (values.empty() ? "" : ",") + text;
  }
  fmt::print("{}\n{}\n", names, values);
}

}  // namespace

int EvalMain(const Args& args) {
  CLI::App app(
      "Perplexity, KL divergence and same top token of a cache format, against the host's f16 "
      "cache",
      "kvtamp eval");
  app.footer(kFooter);
  EvalConfig config;
  std::string text_file, device = "kvtamp", output = "md", flash = "on";
  std::uint32_t n_batch = 0, n_ubatch_base = 0;
  int n_chunks = 4;
  bool quiet = false, verbose = false, noise_floor = false;
  std::vector<std::string> limit_texts;
  app.add_option("-m,--model", config.model, "GGUF file")->type_name("FILE")->required();
  app.add_option("-f,--file", text_file, "text to score")->type_name("FILE")->required();
  app.add_option("-c,--ctx-size", config.n_ctx, "tokens of a chunk, and of the context")
      ->type_name("N")
      ->capture_default_str()
      ->check(CLI::Range(32u, 1u << 20));
  app.add_option("-b,--batch-size", n_batch, "tokens of one call [the micro-batch]")
      ->type_name("N")
      ->check(CLI::Range(1u, 65536u));
  app.add_option("--ubatch-size", config.n_ubatch, "-ub: micro-batch")
      ->type_name("N")
      ->capture_default_str()
      ->check(CLI::Range(1u, 65536u));
  app.add_option("--base-ub", n_ubatch_base, "micro-batch of the base [as -ub]")
      ->type_name("N")
      ->check(CLI::Range(1u, 65536u));
  app.add_option("--flash-attn", flash, "-fa: flash attention of the tested context, on or off")
      ->capture_default_str()
      ->check(CLI::IsMember({"on", "off"}));
  app.add_flag("--decode-only", config.decode_only,
               "score token by token, as an answer is written: slow, and where coding costs most");
  app.add_option("--scored", config.n_scored, "score the last N of a chunk [its second half]")
      ->type_name("N")
      ->check(CLI::Range(2u, 1u << 20));
  app.add_flag("--noise-floor", noise_floor,
               "measure f16 through kvtamp too: what a change of rounding alone makes");
  app.add_option("--chunks", n_chunks, "chunks to run, -1 for all")
      ->type_name("N")
      ->capture_default_str();
  config.n_threads = DefaultThreads();
  app.add_option("-t,--threads", config.n_threads, "threads")
      ->type_name("N")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_option("-o,--output", output, "md, json, jsonl or csv")
      ->capture_default_str()
      ->check(CLI::IsMember({"md", "json", "jsonl", "csv"}));
  app.add_option("--device", device, "kvtamp, or host: the host's own cache types")
      ->capture_default_str()
      ->check(CLI::IsMember({"kvtamp", "host"}));
  app.add_option("--fail-if", limit_texts,
                 "exit with 3 when a field passes a limit, e.g. 'kld_mean>0.01'")
      ->type_name("LIMIT");
  app.add_flag("-q,--quiet", quiet, "no progress");
  app.add_flag("-v,--verbose", verbose, "let the host's log through");
  SettingFlags flags;
  flags.AddTo(app);
  if (const auto code = Parse(app, args)) return *code;

  // Everything that can be wrong with the words, before anything is loaded.
  std::vector<Limit> limits;
  for (const std::string& text : limit_texts) {
    const Result<Limit> limit = ParseLimit(text);
    if (!limit.ok()) return Fail("eval", limit.status().message(), kBadUsage);
    limits.push_back(limit.value());
  }
  Json fields;  // the names --fail-if may use
  AddDivergence(fields, {});
  for (const char* name :
       {"kv_bpw", "kv_bytes_per_token", "kv_bytes_logical_per_token", "kv_resident_bytes_per_token",
        "kv_factor", "pp_ts", "pp_ts_base", "worst_kld_mean"}) {
    fields[name] = 0;
  }
  for (const Limit& limit : limits) {
    if (fields.contains(limit.field)) continue;
    std::vector<std::string> names;
    for (const auto& [name, value] : fields.items()) names.push_back(name);
    const std::string near = control::NearestName(limit.field, names);
    return Fail("eval",
                fmt::format("--fail-if {}: no field {}{}", limit.text, limit.field,
                            near.empty() ? "" : "; did you mean " + near + "?"),
                kBadUsage);
  }
  const bool host = device == "host";
  TestedCache tested;
  tested.host = host;
  tested.flash_attention = flash == "on";
  if (n_chunks == 0 || n_chunks < -1)
    return Fail("eval", "--chunks must be positive, or -1 for all", kBadUsage);
  if (config.n_scored >= config.n_ctx)
    return Fail("eval", "--scored must be less than --ctx-size", kBadUsage);
  config.max_chunks = n_chunks < 0 ? 0 : static_cast<std::uint32_t>(n_chunks);
  config.n_ubatch = std::min(config.n_ubatch, config.n_ctx);
  config.n_ubatch_base =
      n_ubatch_base == 0 ? config.n_ubatch : std::min(n_ubatch_base, config.n_ctx);
  config.n_batch =
      std::min(config.n_ctx, std::max({n_batch, config.n_ubatch, config.n_ubatch_base}));
  std::string format_k, format_v;
  std::optional<control::Settings> settings;  // of kvtamp's cache
  codec::Pair type;
  if (host) {
    for (const control::Override& given : flags.overrides()) {
      if (given.path != "cache.type" && given.path != "cache.type_k" &&
          given.path != "cache.type_v") {
        return Fail("eval", given.flag + " is a setting of kvtamp's cache: leave out --device host",
                    kBadUsage);
      }
      const Result<ggml_type> parsed = HostType(given.text, given.flag);
      if (!parsed.ok()) return Fail("eval", parsed.status().message(), kBadUsage);
      if (given.path != "cache.type_v") tested.type_k = parsed.value();
      if (given.path != "cache.type_k") tested.type_v = parsed.value();
    }
    format_k = ggml_type_name(tested.type_k);
    format_v = ggml_type_name(tested.type_v);
  } else {
    const Result<control::Settings> loaded = flags.Load();
    if (!loaded.ok()) {
      std::string message = loaded.status().message();
      for (const control::Override& given : flags.overrides()) {
        if (given.path.starts_with("cache.type") && HostType(given.text, "").ok() &&
            given.text != "f16") {
          message += " (a type of the host's own: --device host)";
          break;
        }
      }
      return Fail("eval", message, kBadUsage);
    }
    settings = loaded.value();
    type = settings->type;
    flags.Export(*settings);
    format_k = codec::FormatName(type.k);
    format_v = codec::FormatName(type.v);
  }

  SilenceHost(verbose);
  const Result<ModelLayout> layout = ReadLayout(config.model);
  if (!layout.ok()) return Fail("eval", layout.status().message(), kFailed);
  if (layout.value().layers.empty()) {
    return Fail(
        "eval",
        fmt::format("{} has no attention (architecture {}): there is no K/V cache to evaluate",
                    config.model, layout.value().architecture),
        kFailed);
  }
  if (settings) {
    if (const Status fits = CheckFormats(layout.value(), *settings); !fits.ok()) {
      return Fail("eval", fits.message(), kBadUsage);
    }
  }
  Result<std::string> text = ReadFile(text_file);
  if (!text.ok()) return Fail("eval", text.status().message(), kFailed);
  config.text = std::move(text.value());

  Plugin plugin;
  if (!host) {
    const Result<std::string> path = FindPlugin();
    if (!path.ok()) return Fail("eval", path.status().message(), kFailed);
    const Result<Plugin> loaded = LoadPlugin(path.value());
    if (!loaded.ok()) return Fail("eval", loaded.status().message(), kFailed);
    plugin = loaded.value();
    config.plugin = &plugin;
  }
  llama_backend_init();

  std::vector<TestedCache> caches = {tested};
  if (noise_floor && !host) caches.push_back(kF16Cache);
  const Result<EvalResult> evaluated = [&] {
    Progress progress("eval", quiet);
    return Evaluate(config, caches, layout.value(), [&](std::uint32_t chunk, double done) {
      return progress.Show(done, fmt::format("chunk {}", chunk + 1));
    });
  }();
  if (!evaluated.ok()) {
    const bool words = evaluated.status().message().starts_with("the text has");
    return Fail("eval", evaluated.status().message(), words ? kBadUsage : kFailed);
  }
  const EvalResult& result = evaluated.value();
  const TestedResult& of = result.tested.front();
  for (const std::string& warning : result.warnings)
    fmt::print(stderr, "kvtamp eval: warning: {}\n", warning);
  if (of.chunks.empty())
    return Fail("eval", "interrupted before the first chunk was done", 128 + SIGINT);

  Json j;
  j["device"] = device;
  j["model_filename"] = config.model;
  j["model_type"] = result.model_type;
  j["model_size"] = result.model_size;
  j["model_n_params"] = result.n_params;
  j["text_filename"] = text_file;
  j["ggml_version"] = ggml_version();
  j["llama_version"] = llama_version();
  j["cpu_info"] = CpuInfo();
  j["type_k"] = ggml_type_name(tested.type_k);
  j["type_v"] = ggml_type_name(tested.type_v);
  j["cache_type"] =
      host ? format_k == format_v ? format_k : format_k + "/" + format_v : codec::PairName(type);
  j["format_k"] = format_k;
  j["format_v"] = format_v;
  j["n_ctx"] = config.n_ctx;
  j["n_batch"] = config.n_batch;
  j["n_ubatch"] = config.n_ubatch;
  j["n_ubatch_base"] = config.n_ubatch_base;
  j["flash_attn"] = tested.flash_attention;
  j["n_threads"] = config.n_threads;
  j["chunks"] = of.chunks.size();
  j["scored"] = config.n_scored == 0 ? "second half of each chunk"
                                     : fmt::format("last {} of each chunk", config.n_scored);
  j["decode_only"] = config.decode_only;
  j["n_scored"] = of.total.n;
  AddDivergence(j, of.total);
  if (caches.size() > 1) j["kld_floor"] = result.tested[1].total.kld_mean;
  const CacheSize size = MeanSize(of.chunks);
  const double n_ctx = config.n_ctx;
  j["kv_bpw"] = size.logical_bytes > 0 ? 16 * size.stored_bytes / size.logical_bytes : 0.0;
  j["kv_bytes_per_token"] = size.stored_bytes / n_ctx;
  j["kv_bytes_logical_per_token"] = size.logical_bytes / n_ctx;
  j["kv_resident_bytes_per_token"] = size.resident_bytes / n_ctx;
  j["kv_factor"] = size.stored_bytes > 0 ? size.logical_bytes / size.stored_bytes : 0.0;
  j["pp_ts"] = Speed(of.chunks, config.n_ctx, false);
  j["pp_ts_base"] = Speed(of.chunks, config.n_ctx, true);
  Json chunk_results = Json::array();
  std::size_t worst = 0;
  for (std::size_t i = 0; i < of.chunks.size(); ++i) {
    Json c = {{"chunk", i + 1}};
    AddDivergence(c, of.chunks[i].divergence);
    chunk_results.push_back(std::move(c));
    if (of.chunks[i].divergence.kld_mean > of.chunks[worst].divergence.kld_mean) worst = i;
  }
  j["worst_chunk"] = worst + 1;
  j["worst_kld_mean"] = of.chunks[worst].divergence.kld_mean;
  j["chunk_results"] = std::move(chunk_results);
  if (caches.size() == 1 && !result.stats_json.empty()) {  // else it adds up two caches
    Json stats = Json::parse(result.stats_json, nullptr, false);
    if (stats.is_object()) j["stats"] = std::move(stats);
  }

  if (output == "json") fmt::print("{}\n", j.dump(2));
  if (output == "jsonl") fmt::print("{}\n", j.dump());
  if (output == "csv") PrintCsv(j);
  if (output == "md") PrintMarkdown(j);
  std::fflush(stdout);

  if (of.chunks.size() < result.n_chunks) {
    return Fail("eval",
                fmt::format("interrupted: {} of {} chunks", of.chunks.size(), result.n_chunks),
                128 + SIGINT);
  }
  int code = kDone;
  for (const Limit& limit : limits) {
    const double value = j.at(limit.field).get<double>();
    if (!limit.Passed(value)) continue;
    fmt::print(stderr, "kvtamp eval: --fail-if {}: {} is {:.6g}\n", limit.text, limit.field, value);
    code = kLimitPassed;
  }
  return code;
}

}  // namespace kvtamp::tool
