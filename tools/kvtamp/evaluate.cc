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

namespace kvtamp::tool {
namespace {

using Clock = std::chrono::steady_clock;
using Model = std::unique_ptr<llama_model, decltype(&llama_model_free)>;
using Context = std::unique_ptr<llama_context, decltype(&llama_free)>;

Model LoadModel(const std::string& path, ggml_backend_dev_t device) {
  ggml_backend_dev_t devices[] = {device, nullptr};  // null first: the CPU alone
  llama_model_params params = llama_model_default_params();
  params.devices = devices;
  params.n_gpu_layers = device == nullptr ? 0 : 999;
  return {llama_model_load_from_file(path.c_str(), params), &llama_model_free};
}

Context MakeContext(llama_model* model, const EvalConfig& config, std::uint32_t n_ubatch,
                    bool flash_attention, ggml_type type_k, ggml_type type_v) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = config.n_ctx;
  params.n_batch = config.n_batch;
  params.n_ubatch = n_ubatch;
  params.n_seq_max = 1;
  params.n_threads = config.n_threads;
  params.n_threads_batch = config.n_threads;
  params.flash_attn_type =
      flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = type_k;
  params.type_v = type_v;
  params.swa_full = false;  // as the host's programs do
  params.no_perf = true;
  return {llama_init_from_model(model, params), &llama_free};
}

std::vector<llama_token> Tokenize(const llama_vocab* vocab, const std::string& text) {
  std::vector<llama_token> tokens(text.size() + 8);
  const auto call = [&] {
    return llama_tokenize(vocab, text.data(), static_cast<std::int32_t>(text.size()), tokens.data(),
                          static_cast<std::int32_t>(tokens.size()), true, false);
  };
  std::int32_t n = call();
  if (n < 0) {
    tokens.resize(static_cast<std::size_t>(-n));
    n = call();
  }
  tokens.resize(static_cast<std::size_t>(std::max(n, 0)));
  return tokens;
}

// One llama_batch of up to n tokens of sequence 0.
class Batch {
 public:
  explicit Batch(std::uint32_t n) : batch_(llama_batch_init(static_cast<std::int32_t>(n), 0, 1)) {}
  ~Batch() { llama_batch_free(batch_); }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  void Clear() { batch_.n_tokens = 0; }
  void Add(llama_token token, std::uint32_t pos, bool wants_logits) {
    const auto i = static_cast<std::size_t>(batch_.n_tokens++);
    batch_.token[i] = token;
    batch_.pos[i] = static_cast<llama_pos>(pos);
    batch_.n_seq_id[i] = 1;
    batch_.seq_id[i][0] = 0;
    batch_.logits[i] = wants_logits ? 1 : 0;
  }
  llama_batch get() const { return batch_; }

 private:
  llama_batch batch_;
};

Status Decode(llama_context* context, const Batch& batch, const char* which, double& seconds) {
  const auto start = Clock::now();
  const int code = llama_decode(context, batch.get());
  llama_synchronize(context);
  seconds += std::chrono::duration<double>(Clock::now() - start).count();
  if (code == 0) return Status::Ok();
  const std::string said = TakeHostErrors();
  return Status::Internal(fmt::format("the {} context cannot decode ({}){}", which, code,
                                      said.empty() ? "" : ": " + said));
}

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

Status HostError(const std::string& what) {
  const std::string said = TakeHostErrors();
  return Status::Invalid(said.empty() ? what : what + ": " + said);
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

  const Context base = MakeContext(base_model.get(), config, config.n_ubatch_base, true,
                                   GGML_TYPE_F16, GGML_TYPE_F16);
  if (!base)
    return HostError("cannot make a context of " + std::to_string(config.n_ctx) + " tokens");
  const Context tested = MakeContext(model, config, config.n_ubatch, config.flash_attention,
                                     config.type_k, config.type_v);
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
    for (std::uint32_t start = 0; start < n_ctx && go_on; start += config.n_batch) {
      const std::uint32_t end = std::min(start + config.n_batch, n_ctx);
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
