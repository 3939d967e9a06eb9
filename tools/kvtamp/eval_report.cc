#include "tools/kvtamp/eval_report.h"

#include <fmt/format.h>
#include <ggml.h>
#include <llama.h>

#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/csv.h"

namespace kvtamp::tool {
namespace {

double Speed(const std::vector<ChunkResult>& chunks, std::uint32_t n_ctx, bool base) {
  double seconds = 0;
  for (const ChunkResult& chunk : chunks) seconds += base ? chunk.seconds_base : chunk.seconds;
  return seconds > 0 ? static_cast<double>(chunks.size()) * n_ctx / seconds : 0;
}

void AddPerplexity(Json& j, const Divergence& d) {
  j["ppl"] = d.ppl;
  j["ppl_se"] = d.ppl_se;
  j["ppl_base"] = d.ppl_base;
  j["ppl_base_se"] = d.ppl_base_se;
  j["ppl_ratio"] = d.ppl_ratio;
  j["ppl_ratio_se"] = d.ppl_ratio_se;
}

void AddDivergence(Json& j, Task task, const Divergence& d) {
  AddPerplexity(j, d);
  if (task == Task::kPpl) return;
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

void AddChunks(Json& j, Task task, const std::vector<ChunkResult>& chunks) {
  Json list = Json::array();
  std::size_t worst = 0;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    Json c = {{"chunk", i + 1}};
    AddDivergence(c, task, chunks[i].divergence);
    list.push_back(std::move(c));
    if (chunks[i].divergence.kld_mean > chunks[worst].divergence.kld_mean) worst = i;
  }
  if (task == Task::kKl) {
    j["worst_chunk"] = worst + 1;
    j["worst_kld_mean"] = chunks[worst].divergence.kld_mean;
  }
  j["chunk_results"] = std::move(list);
}

void PrintRow(const char* name, const std::string& value) {
  fmt::print("| {:19} | {:>22} |\n", name, value);
}

void PrintHead(const Json& j) {
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
}

void PrintPerplexity(const Json& j) {
  const auto number = [&](const char* key) { return j.at(key).get<double>(); };
  PrintRow("PPL", fmt::format("{:.4f} +/- {:.4f}", number("ppl"), number("ppl_se")));
  PrintRow("PPL base", fmt::format("{:.4f} +/- {:.4f}", number("ppl_base"), number("ppl_base_se")));
  PrintRow("PPL ratio",
           fmt::format("{:.5f} +/- {:.5f}", number("ppl_ratio"), number("ppl_ratio_se")));
  if (j.contains("ppl_ratio_floor"))
    PrintRow("  noise floor", fmt::format("{:.5f}", number("ppl_ratio_floor")));
}

void PrintMarkdown(const Json& j) {
  const auto number = [&](const char* key) { return j.at(key).get<double>(); };
  PrintHead(j);
  PrintPerplexity(j);
  if (!j.contains("kld_mean")) {
    PrintRow("KV bits per element", fmt::format("{:.3f}", number("kv_bpw")));
    return;
  }
  PrintRow("Mean KLD", fmt::format("{:.6f} +/- {:.6f}", number("kld_mean"), number("kld_se")));
  if (j.contains("kld_floor"))
    PrintRow("  noise floor", fmt::format("{:.6f}", number("kld_floor")));
  PrintRow("Median KLD", fmt::format("{:.6f}", number("kld_median")));
  PrintRow("99.9% KLD", fmt::format("{:.6f}", number("kld_p999")));
  PrintRow("Maximum KLD", fmt::format("{:.6f}", number("kld_max")));
  PrintRow("RMS dp",
           fmt::format("{:.3f} +/- {:.3f} %", 100 * number("rms_dp"), 100 * number("rms_dp_se")));
  PrintRow("Same top p", fmt::format("{:.3f} +/- {:.3f} %", 100 * number("same_top_p"),
                                     100 * number("same_top_p_se")));
  PrintRow("KV bits per element", fmt::format("{:.3f}", number("kv_bpw")));
  PrintRow("KV bytes per token", fmt::format("{:.1f}", number("kv_bytes_per_token")));
  PrintRow("  resident", fmt::format("{:.1f}", number("kv_resident_bytes_per_token")));
  PrintRow("  f16", fmt::format("{:.1f}", number("kv_bytes_logical_per_token")));
  PrintRow("Prefill t/s", fmt::format("{:.1f}", number("pp_ts")));
  PrintRow("Prefill t/s base", fmt::format("{:.1f}", number("pp_ts_base")));
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

// The figures as one row; of a task, each prompt as a row.
void PrintCsv(const Json& j) {
  Json rows = j.value("items", Json::array());
  if (rows.empty()) {
    rows.push_back(Json::object());
    for (const auto& [key, value] : j.items()) {
      if (!value.is_structured()) rows.back()[key] = value;
    }
  }
  fmt::print("{}", Csv(rows));
}

}  // namespace

void AddRunFields(Json& j, const EvalOptions& options, const ModelFacts& model) {
  const EvalConfig& config = options.config;
  j["task"] = TaskName(options.task.task);
  j["device"] = options.device;
  j["model_filename"] = config.model;
  j["model_type"] = model.type;
  j["model_size"] = model.size;
  j["model_n_params"] = model.n_params;
  j["text_filename"] = options.text_file;
  j["ggml_version"] = ggml_version();
  j["llama_version"] = llama_version();
  j["cpu_info"] = CpuInfo();
  j["type_k"] = ggml_type_name(options.tested.type_k);
  j["type_v"] = ggml_type_name(options.tested.type_v);
  j["cache_type"] = options.cache_type;
  j["format_k"] = options.format_k;
  j["format_v"] = options.format_v;
  j["n_ctx"] = config.n_ctx;
  j["n_batch"] = config.n_batch;
  j["n_ubatch"] = config.n_ubatch;
  j["n_ubatch_base"] = config.n_ubatch_base;
  j["flash_attn"] = options.tested.flash_attention;
  j["n_threads"] = config.n_threads;
  j["decode_only"] = config.decode_only;
}

void AddSizeFields(Json& j, const CacheSize& size, double n_tokens) {
  const auto share = [](double a, double b) { return b > 0 ? a / b : 0.0; };
  j["kv_bpw"] = share(16 * size.stored_bytes, size.logical_bytes);
  j["kv_bytes_per_token"] = share(size.stored_bytes, n_tokens);
  j["kv_bytes_logical_per_token"] = share(size.logical_bytes, n_tokens);
  j["kv_resident_bytes_per_token"] = share(size.resident_bytes, n_tokens);
  j["kv_factor"] = share(size.logical_bytes, size.stored_bytes);
}

Json FieldsOf(Task task) {
  Json fields;
  if (task == Task::kKl || task == Task::kPpl) {
    AddDivergence(fields, task, {});
  } else {
    AddTaskFields(fields, task, {}, {});
    fields["tg_ts"] = fields["tg_ts_base"] = 0;
  }
  AddSizeFields(fields, {}, 0);
  fields["pp_ts"] = fields["pp_ts_base"] = 0;
  if (task == Task::kKl) fields["worst_kld_mean"] = 0;
  return fields;
}

Json MakeReport(const EvalOptions& options, const EvalResult& result) {
  const Task task = options.task.task;
  const EvalConfig& config = options.config;
  const TestedResult& tested = result.tested.front();
  const bool floor = result.tested.size() > 1;
  Json j;
  AddRunFields(j, options, result.model);
  j["chunks"] = tested.chunks.size();
  j["scored"] = config.n_scored == 0 ? "second half of each chunk"
                                     : fmt::format("last {} of each chunk", config.n_scored);
  j["n_scored"] = tested.total.n;
  AddDivergence(j, task, tested.total);
  if (floor && task == Task::kKl) j["kld_floor"] = result.tested[1].total.kld_mean;
  if (floor && task == Task::kPpl) j["ppl_ratio_floor"] = result.tested[1].total.ppl_ratio;
  CacheSize size;
  for (const ChunkResult& chunk : tested.chunks) size += chunk.size;
  AddSizeFields(j, size, static_cast<double>(tested.chunks.size()) * config.n_ctx);
  j["pp_ts"] = Speed(tested.chunks, config.n_ctx, false);
  j["pp_ts_base"] = Speed(tested.chunks, config.n_ctx, true);
  AddChunks(j, task, tested.chunks);
  if (!floor && result.stats.is_object()) j["stats"] = result.stats;  // else of two caches
  return j;
}

void PrintReport(const EvalOptions& options, const Json& report) {
  if (options.output == "json") fmt::print("{}\n", Dump(report, 2));
  if (options.output == "jsonl") fmt::print("{}\n", Dump(report));
  if (options.output == "csv") PrintCsv(report);
  if (options.output == "md") options.asks() ? PrintTaskMarkdown(report) : PrintMarkdown(report);
  std::fflush(stdout);
}

}  // namespace kvtamp::tool
