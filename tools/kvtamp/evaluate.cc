#include "tools/kvtamp/evaluate.h"

#include <fmt/format.h>
#include <llama.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <thread>

#include "tools/kvtamp/environment.h"

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

Json ToJson(const ChunkResult& chunk, std::span<const Score> scores) {
  Json j = {{"seconds", chunk.seconds},
            {"seconds_base", chunk.seconds_base},
            {"size", ToJson(chunk.size)}};
  for (const Score& s : scores) j["scores"].push_back({s.nll, s.nll_base, s.kld, s.dp, s.same_top});
  return j;
}

// False when `j` is not what ToJson() gives for n scores.
bool FromJson(const Json& j, std::size_t n, ChunkResult& chunk, std::vector<Score>& scores) {
  try {
    chunk.seconds = j.at("seconds");
    chunk.seconds_base = j.at("seconds_base");
    chunk.size = SizeOfJson(j.at("size"));
    for (const Json& s : j.at("scores"))
      scores.push_back({s.at(0), s.at(1), s.at(2), s.at(3), s.at(4)});
  } catch (const Json::exception&) {
    return false;
  }
  return scores.size() == n;
}

// What one chunk gave for one tested cache.
struct Taken {
  ChunkResult chunk;
  std::vector<Score> scores;
};

class Evaluation {
 public:
  Evaluation(const ModelPair& models, const EvalConfig& config, std::span<const TestedCache> tested,
             const ModelLayout& layout, const EvalHooks& hooks)
      : models_(models),
        config_(config),
        tested_(tested),
        layout_(layout),
        hooks_(hooks),
        vocab_(llama_model_get_vocab(models.tested())),
        batch_(config.n_batch) {}

  Result<EvalResult> Run() {
    if (Status s = Begin(); !s.ok()) return s;
    if (Status s = CutText(); !s.ok()) return s;
    if (Status s = WarmUp(); !s.ok()) return s;
    result_.tested.resize(tested_.size());
    std::vector<std::vector<Score>> all(tested_.size());
    for (std::uint32_t c = 0; c < result_.n_chunks && go_on_; ++c) {
      std::vector<Taken> taken(tested_.size());
      if (Status s = TakeChunk(c, taken); !s.ok()) return s;
      if (taken.front().scores.size() != n_scored()) break;  // stopped within a chunk
      for (std::size_t i = 0; i < taken.size(); ++i) {
        taken[i].chunk.divergence = Summarize(taken[i].scores);
        result_.tested[i].chunks.push_back(taken[i].chunk);
        all[i].insert(all[i].end(), taken[i].scores.begin(), taken[i].scores.end());
      }
    }
    for (std::size_t i = 0; i < all.size(); ++i) result_.tested[i].total = Summarize(all[i]);
    Warn();
    return std::move(result_);
  }

 private:
  Status Begin();
  Status MakeContexts();
  Status CutText();
  Status WarmUp();
  // From the log, or by running it.
  Status TakeChunk(std::uint32_t c, std::vector<Taken>& taken);
  Result<bool> FindChunk(const std::string& name, std::vector<Taken>& taken) const;
  Status RunChunk(std::uint32_t c, std::vector<Taken>& taken);
  Status MeasureSizes(std::vector<Taken>& taken);
  // Tokens [start, end) of the chunk into the batch; the true next ones of those scored.
  std::vector<llama_token> Fill(std::uint32_t c, std::uint32_t start, std::uint32_t end);
  void Warn();

  std::uint32_t first() const {  // scored position
    return config_.n_scored == 0 ? config_.n_ctx / 2 : config_.n_ctx - config_.n_scored;
  }
  std::size_t n_scored() const { return config_.n_ctx - 1 - first(); }

  const ModelPair& models_;
  const EvalConfig& config_;
  const std::span<const TestedCache> tested_;
  const ModelLayout& layout_;
  const EvalHooks& hooks_;
  Context base_{nullptr, &llama_free};
  std::vector<Context> contexts_;  // of tested_
  const llama_vocab* vocab_;
  std::vector<llama_token> tokens_;
  Batch batch_;
  bool go_on_ = true;
  EvalResult result_;
};

Status Evaluation::Begin() {
  if (Status s = MakeContexts(); !s.ok()) return s;
  result_.model = FactsOf(models_.tested());
  const std::uint32_t trained = result_.model.n_ctx_train;
  if (trained > 0 && config_.n_ctx > trained) {
    result_.warnings.push_back(fmt::format(
        "the model was trained with {} tokens of context, not {}", trained, config_.n_ctx));
  }
  return Status::Ok();
}

Status Evaluation::MakeContexts() {
  base_ = MakeContext(models_.base.get(),
                      {config_.n_ctx, config_.n_batch, config_.n_ubatch_base, config_.n_threads});
  if (!base_)
    return HostError("cannot make a context of " + std::to_string(config_.n_ctx) + " tokens");
  for (const TestedCache& t : tested_) {
    const Environment environment(t.environment);
    contexts_.push_back(MakeContext(t.host ? models_.base.get() : models_.own.get(),
                                    {config_.n_ctx, config_.n_batch, config_.n_ubatch,
                                     config_.n_threads, t.flash_attention, t.type_k, t.type_v}));
    if (!contexts_.back()) return HostError("cannot make the " + t.name + " context");
  }
  return Status::Ok();
}

Status Evaluation::CutText() {
  tokens_ = Tokenize(vocab_, config_.text);
  std::uint32_t& n = result_.n_chunks;
  n = static_cast<std::uint32_t>(tokens_.size() / config_.n_ctx);
  if (config_.max_chunks > 0 && n > config_.max_chunks) n = config_.max_chunks;
  if (n == 0) {
    return Status::Invalid(fmt::format("the text has {} tokens, fewer than one chunk of {}",
                                       tokens_.size(), config_.n_ctx));
  }
  if (n < config_.max_chunks) {
    result_.warnings.push_back(fmt::format("the text has {} tokens: {} chunks instead of {}",
                                           tokens_.size(), n, config_.max_chunks));
  }
  return Status::Ok();
}

// Weights into memory, for the timing; the base alone, the tested caches start untouched.
Status Evaluation::WarmUp() {
  double unused = 0;
  batch_.Clear();
  for (std::uint32_t i = 0; i < std::min(config_.n_batch, 8u); ++i)
    batch_.Add(tokens_[i], i, false);
  return Decode(base_.get(), batch_, "base", unused);
}

Result<bool> Evaluation::FindChunk(const std::string& name, std::vector<Taken>& taken) const {
  for (std::size_t i = 0; i < taken.size(); ++i) {
    const Json* found = hooks_.log->Find(tested_[i].name, name);
    if (found == nullptr) return false;
    if (!FromJson(*found, n_scored(), taken[i].chunk, taken[i].scores))
      return Status::Invalid("--resume: " + name + " of the file is not whole");
  }
  return true;
}

Status Evaluation::TakeChunk(std::uint32_t c, std::vector<Taken>& taken) {
  const std::string name = fmt::format("chunk {}", c + 1);
  const Result<bool> found = FindChunk(name, taken);
  if (!found.ok()) return found.status();
  if (found.value()) {
    go_on_ = hooks_.progress((c + 1.0) / result_.n_chunks, name);
    return Status::Ok();
  }
  taken.assign(tested_.size(), {});
  if (Status s = RunChunk(c, taken); !s.ok()) return s;
  if (taken.front().scores.size() != n_scored()) return Status::Ok();
  for (const Taken& t : taken) {
    for (const Score& score : t.scores) {
      if (!std::isfinite(score.kld) || !std::isfinite(score.nll))
        return Status::Internal("the logits of " + name + " are not finite");
    }
  }
  if (Status s = MeasureSizes(taken); !s.ok()) return s;
  for (std::size_t i = 0; i < taken.size(); ++i) {
    if (hooks_.log->Find(tested_[i].name, name) != nullptr) continue;
    if (Status s = hooks_.log->Add(tested_[i].name, name, ToJson(taken[i].chunk, taken[i].scores));
        !s.ok())
      return s;
  }
  return Status::Ok();
}

std::vector<llama_token> Evaluation::Fill(std::uint32_t c, std::uint32_t start, std::uint32_t end) {
  const llama_token* text = tokens_.data() + std::size_t{c} * config_.n_ctx;
  const bool add_bos = llama_vocab_get_add_bos(vocab_);
  std::vector<llama_token> truth;
  batch_.Clear();
  for (std::uint32_t pos = start; pos < end; ++pos) {
    const bool scored = pos >= first() && pos + 1 < config_.n_ctx;
    batch_.Add(pos == 0 && add_bos ? llama_vocab_bos(vocab_) : text[pos], pos, scored);
    if (scored) truth.push_back(text[pos + 1]);
  }
  return truth;
}

Status Evaluation::RunChunk(std::uint32_t c, std::vector<Taken>& taken) {
  const std::uint32_t n_ctx = config_.n_ctx;
  llama_memory_clear(llama_get_memory(base_.get()), true);
  for (const Context& context : contexts_)
    llama_memory_clear(llama_get_memory(context.get()), true);
  for (std::uint32_t start = 0, end = 0; start < n_ctx && go_on_; start = end) {
    end = std::min(start + config_.n_batch, n_ctx);
    if (config_.decode_only) end = start < first() ? std::min(end, first()) : start + 1;
    const std::vector<llama_token> truth = Fill(c, start, end);
    double seconds_base = 0;
    if (Status s = Decode(base_.get(), batch_, "base", seconds_base); !s.ok()) return s;
    for (std::size_t i = 0; i < contexts_.size(); ++i) {
      Taken& to = taken[i];
      to.chunk.seconds_base += seconds_base;
      if (Status s = Decode(contexts_[i].get(), batch_, tested_[i].name, to.chunk.seconds); !s.ok())
        return s;
      if (truth.empty()) continue;
      const std::size_t at = to.scores.size();
      to.scores.resize(at + truth.size());
      ScoreRows(llama_get_logits(base_.get()), llama_get_logits(contexts_[i].get()),
                static_cast<std::size_t>(llama_vocab_n_tokens(vocab_)), truth, config_.n_threads,
                std::span(to.scores).subspan(at));
    }
    go_on_ = hooks_.progress((c + static_cast<double>(end) / n_ctx) / result_.n_chunks,
                             fmt::format("chunk {}", c + 1));
  }
  return Status::Ok();
}

// Contexts of one model have equally many caches in the plug-in, in the order they were made.
Status Evaluation::MeasureSizes(std::vector<Taken>& taken) {
  std::size_t n_own = 0;
  for (const TestedCache& t : tested_) n_own += t.host ? 0 : 1;
  Json caches = Json::array();
  if (n_own != 0) {
    result_.stats = StatsOf(*models_.plugin);
    caches = result_.stats.value("caches", caches);
    if (caches.size() % n_own != 0)
      return Status::Internal("the plug-in's caches cannot be told apart");
  }
  const std::size_t each = n_own == 0 ? 0 : caches.size() / n_own;
  std::size_t at = 0;
  for (std::size_t i = 0; i < taken.size(); ++i) {
    const TestedCache& t = tested_[i];
    CacheSize& size = taken[i].chunk.size;
    if (t.host) size = SizeOfHostCache(layout_, t.type_k, t.type_v, config_.n_ctx);
    for (std::size_t n = 0; !t.host && n < each; ++n) size += SizeOfCache(caches[at++]);
  }
  return Status::Ok();
}

void Evaluation::Warn() {
  for (std::size_t i = 0; i < tested_.size(); ++i) {
    if (tested_[i].host || result_.tested[i].chunks.empty()) continue;
    for (std::string& w : CacheWarnings(result_.stats, result_.tested[i].chunks.back().size))
      result_.warnings.push_back(std::move(w));
    break;
  }
}

}  // namespace

TestedCache FloorCache() {
  return {.name = "floor",
          .environment = {{"KVTAMP_CACHE_TYPE", "f16"},
                          {"KVTAMP_CACHE_TYPE_K", ""},
                          {"KVTAMP_CACHE_TYPE_V", ""},
                          {"KVTAMP_CACHE_PROFILE", ""},
                          {"KVTAMP_EVICT_POLICY", ""},
                          {"KVTAMP_CONFIG", ""}}};
}

Result<EvalResult> Evaluate(const ModelPair& models, const EvalConfig& config,
                            std::span<const TestedCache> tested, const ModelLayout& layout,
                            const EvalHooks& hooks) {
  return Evaluation(models, config, tested, layout, hooks).Run();
}

}  // namespace kvtamp::tool
