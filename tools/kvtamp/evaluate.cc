#include "tools/kvtamp/evaluate.h"

#include <fmt/format.h>
#include <llama.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "tools/kvtamp/host_model.h"

namespace kvtamp::tool {
namespace {

void ScoreRows(const float* base, const float* tested, std::size_t n_vocab,
               std::span<const llama_token> truth, int n_threads, std::span<Score> out) {
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < out.size(); i = next++) {
      out[i] =
          ScoreLogits({base + i * n_vocab, n_vocab}, {tested + i * n_vocab, n_vocab}, truth[i]);
    }
  };
  std::vector<std::thread> helpers;
  for (int t = 1; t < n_threads; ++t) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
}

CacheSize SizeOf(const nlohmann::json& stats) {
  return {stats.value("logical_bytes", 0.0), stats.value("stored_bytes", 0.0),
          stats.value("resident_total_bytes", 0.0)};
}

}  // namespace

Result<EvalResult> Evaluate(const EvalConfig& config,
                            const std::function<bool(std::uint32_t, double)>& progress,
                            const std::function<CacheSize(std::uint32_t)>& size_of_host) {
  TakeHostErrors();
  const Model base_model = LoadModel(config.model, nullptr);
  if (!base_model) return HostError("cannot load " + config.model);
  Model own_model{nullptr, &llama_model_free};
  if (config.plugin != nullptr) {
    own_model = LoadModel(config.model, config.plugin->device);
    if (!own_model) return HostError("cannot load " + config.model + " for device " + kDeviceName);
  }
  llama_model* model = own_model ? own_model.get() : base_model.get();
  const llama_vocab* vocab = llama_model_get_vocab(model);
  const auto n_vocab = static_cast<std::size_t>(llama_vocab_n_tokens(vocab));

  const Context base = MakeContext(
      base_model.get(), {config.n_ctx, config.n_batch, config.n_ubatch_base, config.n_threads});
  if (!base)
    return HostError("cannot make a context of " + std::to_string(config.n_ctx) + " tokens");
  const Context tested =
      MakeContext(model, {config.n_ctx, config.n_batch, config.n_ubatch, config.n_threads,
                          config.flash_attention, config.type_k, config.type_v});
  if (!tested) return HostError("cannot make the context that is to be tested");

  EvalResult result;
  char desc[128] = "";
  llama_model_desc(model, desc, sizeof(desc));
  result.model_type = desc;
  result.model_size = llama_model_size(model);
  result.n_params = llama_model_n_params(model);
  const auto n_ctx_train = static_cast<std::uint32_t>(llama_model_n_ctx_train(model));
  if (n_ctx_train > 0 && config.n_ctx > n_ctx_train) {
    result.warnings.push_back(fmt::format("the model was trained with {} tokens of context, not {}",
                                          n_ctx_train, config.n_ctx));
  }

  const std::vector<llama_token> tokens = Tokenize(vocab, config.text);
  result.n_tokens_text = tokens.size();
  const std::uint32_t n_ctx = config.n_ctx;
  result.n_chunks = static_cast<std::uint32_t>(tokens.size() / n_ctx);
  if (config.max_chunks > 0 && result.n_chunks > config.max_chunks)
    result.n_chunks = config.max_chunks;
  if (result.n_chunks == 0) {
    return Status::Invalid(
        fmt::format("the text has {} tokens, fewer than one chunk of {}", tokens.size(), n_ctx));
  }
  if (result.n_chunks < config.max_chunks) {
    result.warnings.push_back(fmt::format("the text has {} tokens: {} chunks instead of {}",
                                          tokens.size(), result.n_chunks, config.max_chunks));
  }
  const bool add_bos = llama_vocab_get_add_bos(vocab);
  const std::uint32_t first = n_ctx / 2;  // first scored position

  Batch batch(config.n_batch);
  {  // Weights into memory, for the timing; the base alone, the tested cache starts untouched.
    double unused = 0;
    batch.Clear();
    for (std::uint32_t i = 0; i < std::min(config.n_batch, 8u); ++i) batch.Add(tokens[i], i, false);
    if (Status status = Decode(base.get(), batch, "base", unused); !status.ok()) return status;
  }

  std::vector<Score> all;
  std::vector<llama_token> truth;
  nlohmann::json stats;
  for (std::uint32_t c = 0; c < result.n_chunks; ++c) {
    const std::span<const llama_token> text{tokens.data() + std::size_t{c} * n_ctx, n_ctx};
    llama_memory_clear(llama_get_memory(base.get()), true);
    llama_memory_clear(llama_get_memory(tested.get()), true);
    ChunkResult chunk;
    std::vector<Score> scores;
    bool go_on = true;
    for (std::uint32_t start = 0, end = 0; start < n_ctx && go_on; start = end) {
      end = std::min(start + config.n_batch, n_ctx);
      if (config.decode_only) end = start < first ? std::min(end, first) : start + 1;
      batch.Clear();
      truth.clear();
      for (std::uint32_t pos = start; pos < end; ++pos) {
        const bool scored = pos >= first && pos + 1 < n_ctx;
        batch.Add(pos == 0 && add_bos ? llama_vocab_bos(vocab) : text[pos], pos, scored);
        if (scored) truth.push_back(text[pos + 1]);
      }
      if (Status s = Decode(base.get(), batch, "base", chunk.seconds_base); !s.ok()) return s;
      if (Status s = Decode(tested.get(), batch, "tested", chunk.seconds); !s.ok()) return s;
      if (!truth.empty()) {
        const std::size_t at = scores.size();
        scores.resize(at + truth.size());
        ScoreRows(llama_get_logits(base.get()), llama_get_logits(tested.get()), n_vocab, truth,
                  config.n_threads, std::span(scores).subspan(at));
      }
      go_on = progress(c, (c + static_cast<double>(end) / n_ctx) / result.n_chunks);
    }
    if (scores.size() != n_ctx - 1 - first) break;  // stopped within a chunk
    for (const Score& score : scores) {
      if (!std::isfinite(score.kld) || !std::isfinite(score.nll)) {
        return Status::Internal(fmt::format("the logits of chunk {} are not finite", c + 1));
      }
    }
    if (config.plugin != nullptr) {
      result.stats_json = config.plugin->stats_json();
      stats = nlohmann::json::parse(result.stats_json, nullptr, false);
      if (!stats.is_object()) stats = nlohmann::json::object();
      chunk.size = SizeOf(stats);
    } else {
      chunk.size = size_of_host(n_ctx);
    }
    chunk.divergence = Summarize(scores);
    result.chunks.push_back(chunk);
    all.insert(all.end(), scores.begin(), scores.end());
    if (!go_on) break;
  }
  result.total = Summarize(all);
  if (config.plugin != nullptr && !result.chunks.empty()) {
    for (const auto& warning : stats.value("warnings", nlohmann::json::array())) {
      result.warnings.push_back(warning.get<std::string>());
    }
    if (result.chunks.back().size.logical_bytes == 0) {
      result.warnings.push_back("the plug-in holds nothing: this measures an uncompressed cache");
    }
  }
  return result;
}

}  // namespace kvtamp::tool
