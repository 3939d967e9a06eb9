#include "tools/kvtamp/evaluate.h"

#include <fmt/format.h>
#include <llama.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "tools/kvtamp/host_model.h"

namespace kvtamp::tool {
namespace {

using Json = nlohmann::json;

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

// Variables set for a while.
class Environment {
 public:
  explicit Environment(const std::vector<std::pair<std::string, std::string>>& values) {
    for (const auto& [name, value] : values) {
      const char* old = ::getenv(name.c_str());
      before_.emplace_back(name, old == nullptr ? std::nullopt : std::optional<std::string>(old));
      Set(name, value);
    }
  }
  ~Environment() {
    for (const auto& [name, value] : before_) Set(name, value);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  static void Set(const std::string& name, const std::optional<std::string>& value) {
    if (value && !value->empty()) {
      ::setenv(name.c_str(), value->c_str(), 1);
    } else {
      ::unsetenv(name.c_str());
    }
  }
  std::vector<std::pair<std::string, std::optional<std::string>>> before_;
};

class Lockstep {
 public:
  Lockstep(const EvalConfig& config, std::span<const TestedCache> tested, const ModelLayout& layout)
      : config_(config), tested_(tested), layout_(layout), batch_(config.n_batch) {}

  Status Begin(EvalResult& result);
  // Scores of one chunk by tested cache; empty when `progress` stopped it.
  Status RunChunk(std::uint32_t chunk, const std::function<bool(double)>& progress,
                  std::vector<ChunkResult>& out, std::vector<std::vector<Score>>& scores);
  // Bytes, names of formats and warnings, from the plug-in's snapshot.
  Status Measure(std::vector<ChunkResult>& chunks, EvalResult& result) const;

 private:
  Status MakeContexts();
  Status Warm();
  std::uint32_t first_scored() const {
    return config_.n_scored == 0 ? config_.n_ctx / 2 : config_.n_ctx - config_.n_scored;
  }

  const EvalConfig& config_;
  const std::span<const TestedCache> tested_;
  const ModelLayout& layout_;
  Model base_model_{nullptr, &llama_model_free}, own_model_{nullptr, &llama_model_free};
  Context base_{nullptr, &llama_free};
  std::vector<Context> contexts_;  // of tested_
  Batch batch_;
  const llama_vocab* vocab_ = nullptr;
  std::size_t n_vocab_ = 0;
  std::vector<llama_token> tokens_;
};

Status Lockstep::Begin(EvalResult& result) {
  TakeHostErrors();
  base_model_ = LoadModel(config_.model, nullptr);
  if (!base_model_) return HostError("cannot load " + config_.model);
  if (std::any_of(tested_.begin(), tested_.end(), [](const auto& t) { return !t.host; })) {
    own_model_ = LoadModel(config_.model, config_.plugin->device);
    if (!own_model_)
      return HostError("cannot load " + config_.model + " for device " + kDeviceName);
  }
  if (Status s = MakeContexts(); !s.ok()) return s;
  llama_model* model = base_model_.get();
  vocab_ = llama_model_get_vocab(model);
  n_vocab_ = static_cast<std::size_t>(llama_vocab_n_tokens(vocab_));
  char desc[128] = "";
  llama_model_desc(model, desc, sizeof(desc));
  result.model_type = desc;
  result.model_size = llama_model_size(model);
  result.n_params = llama_model_n_params(model);
  const auto n_ctx_train = static_cast<std::uint32_t>(llama_model_n_ctx_train(model));
  if (n_ctx_train > 0 && config_.n_ctx > n_ctx_train) {
    result.warnings.push_back(fmt::format("the model was trained with {} tokens of context, not {}",
                                          n_ctx_train, config_.n_ctx));
  }
  tokens_ = Tokenize(vocab_, config_.text);
  result.n_tokens_text = tokens_.size();
  result.n_chunks = static_cast<std::uint32_t>(tokens_.size() / config_.n_ctx);
  if (config_.max_chunks > 0) result.n_chunks = std::min(result.n_chunks, config_.max_chunks);
  if (result.n_chunks == 0) {
    return Status::Invalid(fmt::format("the text has {} tokens, fewer than one chunk of {}",
                                       tokens_.size(), config_.n_ctx));
  }
  if (result.n_chunks < config_.max_chunks) {
    result.warnings.push_back(fmt::format("the text has {} tokens: {} chunks instead of {}",
                                          tokens_.size(), result.n_chunks, config_.max_chunks));
  }
  return Warm();
}

Status Lockstep::MakeContexts() {
  base_ = MakeContext(base_model_.get(),
                      {config_.n_ctx, config_.n_batch, config_.n_ubatch_base, config_.n_threads});
  if (!base_)
    return HostError("cannot make a context of " + std::to_string(config_.n_ctx) + " tokens");
  for (const TestedCache& t : tested_) {
    const Environment environment(t.environment);
    contexts_.push_back(MakeContext(t.host ? base_model_.get() : own_model_.get(),
                                    {config_.n_ctx, config_.n_batch, config_.n_ubatch,
                                     config_.n_threads, t.flash_attention, t.type_k, t.type_v}));
    if (!contexts_.back()) return HostError("cannot make the context that is to be tested");
  }
  return Status::Ok();
}

// Weights into memory, for the timing; the base alone, the tested caches start untouched.
Status Lockstep::Warm() {
  double unused = 0;
  batch_.Clear();
  for (std::uint32_t i = 0; i < std::min(config_.n_batch, 8u); ++i)
    batch_.Add(tokens_[i], i, false);
  return Decode(base_.get(), batch_, "base", unused);
}

Status Lockstep::RunChunk(std::uint32_t chunk, const std::function<bool(double)>& progress,
                          std::vector<ChunkResult>& out, std::vector<std::vector<Score>>& scores) {
  const std::uint32_t n_ctx = config_.n_ctx, first = first_scored();
  const std::span<const llama_token> text{tokens_.data() + std::size_t{chunk} * n_ctx, n_ctx};
  const bool add_bos = llama_vocab_get_add_bos(vocab_);
  llama_memory_clear(llama_get_memory(base_.get()), true);
  for (const Context& c : contexts_) llama_memory_clear(llama_get_memory(c.get()), true);
  out.assign(tested_.size(), {});
  scores.assign(tested_.size(), {});
  std::vector<llama_token> truth;
  for (std::uint32_t start = 0, end = 0; start < n_ctx; start = end) {
    end = std::min(start + config_.n_batch, n_ctx);
    if (config_.decode_only) end = start < first ? std::min(end, first) : start + 1;
    batch_.Clear();
    truth.clear();
    for (std::uint32_t pos = start; pos < end; ++pos) {
      const bool scored = pos >= first && pos + 1 < n_ctx;
      batch_.Add(pos == 0 && add_bos ? llama_vocab_bos(vocab_) : text[pos], pos, scored);
      if (scored) truth.push_back(text[pos + 1]);
    }
    double seconds_base = 0;
    if (Status s = Decode(base_.get(), batch_, "base", seconds_base); !s.ok()) return s;
    for (std::size_t i = 0; i < contexts_.size(); ++i) {
      out[i].seconds_base += seconds_base;
      if (Status s = Decode(contexts_[i].get(), batch_, "tested", out[i].seconds); !s.ok())
        return s;
      if (truth.empty()) continue;
      const std::size_t at = scores[i].size();
      scores[i].resize(at + truth.size());
      ScoreRows(llama_get_logits(base_.get()), llama_get_logits(contexts_[i].get()), n_vocab_,
                truth, config_.n_threads, std::span(scores[i]).subspan(at));
    }
    if (!progress(static_cast<double>(end) / n_ctx) && end < n_ctx) {
      scores.clear();
      return Status::Ok();
    }
  }
  for (std::size_t i = 0; i < scores.size(); ++i) {
    for (const Score& score : scores[i]) {
      if (!std::isfinite(score.kld) || !std::isfinite(score.nll))
        return Status::Internal(fmt::format("the logits of chunk {} are not finite", chunk + 1));
    }
    out[i].divergence = Summarize(scores[i]);
  }
  return Status::Ok();
}

Status Lockstep::Measure(std::vector<ChunkResult>& chunks, EvalResult& result) const {
  std::size_t n_own = 0;
  for (const TestedCache& t : tested_) n_own += t.host ? 0 : 1;
  Json caches = Json::array();
  if (n_own != 0) {
    result.stats_json = config_.plugin->stats_json();
    const Json stats = Json::parse(result.stats_json, nullptr, false);
    if (stats.is_object()) caches = stats.value("caches", Json::array());
  }
  // Contexts of one model have equally many caches, in the order they were made.
  if (n_own != 0 && caches.size() % n_own != 0)
    return Status::Internal("the plug-in's caches cannot be told apart");
  const std::size_t each = n_own == 0 ? 0 : caches.size() / n_own;
  for (std::size_t i = 0, at = 0; i < tested_.size(); ++i) {
    TestedResult& to = result.tested[i];
    if (tested_[i].host) {
      chunks[i].size = HostCacheSize(layout_, tested_[i], config_.n_ctx);
      to.format_k = ggml_type_name(tested_[i].type_k);
      to.format_v = ggml_type_name(tested_[i].type_v);
      continue;
    }
    for (std::size_t n = 0; n < each; ++n) {
      const Json& cache = caches[at++];
      chunks[i].size.logical_bytes += cache.value("logical_bytes", 0.0);
      chunks[i].size.stored_bytes += cache.value("stored_bytes", 0.0);
      chunks[i].size.resident_bytes += cache.value("resident_bytes", 0.0);
      if (!to.format_k.empty() || cache.value("layers", Json::array()).empty()) continue;
      to.format_k = cache["layers"][0].value("format_k", "");
      to.format_v = cache["layers"][0].value("format_v", "");
    }
  }
  return Status::Ok();
}

}  // namespace

CacheSize HostCacheSize(const ModelLayout& layout, const TestedCache& cache, std::uint32_t n) {
  CacheSize size;
  const auto bytes = [](ggml_type t) {
    return static_cast<double>(ggml_type_size(t)) / static_cast<double>(ggml_blck_size(t));
  };
  for (const LayerLayout& layer : layout.layers) {
    const double kept = layer.swa ? std::min(n, layout.n_swa) : n;
    const double k = static_cast<double>(layer.elements_k()) * kept;
    const double v = static_cast<double>(layer.elements_v()) * kept;
    size.logical_bytes += 2 * (k + v);
    size.stored_bytes += k * bytes(cache.type_k) + v * bytes(cache.type_v);
  }
  size.resident_bytes = size.stored_bytes;
  return size;
}

Result<EvalResult> Evaluate(const EvalConfig& config, std::span<const TestedCache> tested,
                            const ModelLayout& layout, const EvalProgress& progress) {
  EvalResult result;
  result.tested.resize(tested.size());
  Lockstep lockstep(config, tested, layout);
  if (Status s = lockstep.Begin(result); !s.ok()) return s;
  std::vector<std::vector<Score>> all(tested.size()), scores;
  std::vector<ChunkResult> chunks;
  bool go_on = true;
  for (std::uint32_t c = 0; c < result.n_chunks && go_on; ++c) {
    const Status ran = lockstep.RunChunk(
        c,
        [&](double done) {
          go_on = progress(c, (c + done) / result.n_chunks);
          return go_on;
        },
        chunks, scores);
    if (!ran.ok()) return ran;
    if (scores.empty()) break;
    if (Status s = lockstep.Measure(chunks, result); !s.ok()) return s;
    for (std::size_t i = 0; i < tested.size(); ++i) {
      result.tested[i].chunks.push_back(chunks[i]);
      all[i].insert(all[i].end(), scores[i].begin(), scores[i].end());
    }
  }
  for (std::size_t i = 0; i < tested.size(); ++i) {
    result.tested[i].total = Summarize(all[i]);
    if (!tested[i].host && !result.tested[i].chunks.empty() &&
        result.tested[i].chunks.back().size.logical_bytes == 0) {
      result.warnings.push_back("the plug-in holds nothing: this measures an uncompressed cache");
    }
  }
  const Json stats = Json::parse(result.stats_json, nullptr, false);
  if (stats.is_object()) {
    for (const auto& warning : stats.value("warnings", Json::array()))
      result.warnings.push_back(warning.get<std::string>());
  }
  return result;
}

}  // namespace kvtamp::tool
