#include "tools/kvtamp/evaluate.h"

#include <fmt/format.h>
#include <llama.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

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

class Evaluation {
 public:
  Evaluation(const EvalConfig& config, const EvalHooks& hooks)
      : config_(config), hooks_(hooks), batch_(config.n_batch) {}

  Result<EvalResult> Run() {
    if (Status s = Begin(); !s.ok()) return s;
    if (Status s = CutText(); !s.ok()) return s;
    if (Status s = WarmUp(); !s.ok()) return s;
    std::vector<Score> all;
    for (std::uint32_t c = 0; c < result_.n_chunks && go_on_; ++c) {
      ChunkResult chunk;
      std::vector<Score> scores;
      if (Status s = TakeChunk(c, chunk, scores); !s.ok()) return s;
      if (scores.size() != n_scored()) break;  // stopped within a chunk
      chunk.divergence = Summarize(scores);
      result_.chunks.push_back(chunk);
      all.insert(all.end(), scores.begin(), scores.end());
    }
    result_.total = Summarize(all);
    Warn();
    return std::move(result_);
  }

 private:
  Status Begin();
  Status CutText();
  Status WarmUp();
  // From the log, or by running it.
  Status TakeChunk(std::uint32_t c, ChunkResult& chunk, std::vector<Score>& scores);
  Status RunChunk(std::uint32_t c, ChunkResult& chunk, std::vector<Score>& scores);
  // Tokens [start, end) of the chunk into the batch; the true next ones of those scored.
  std::vector<llama_token> Fill(std::uint32_t c, std::uint32_t start, std::uint32_t end);
  void Warn();

  std::uint32_t first() const { return config_.n_ctx / 2; }  // first scored position
  std::size_t n_scored() const { return config_.n_ctx - 1 - first(); }

  const EvalConfig& config_;
  const EvalHooks& hooks_;
  ModelPair models_;
  Context base_{nullptr, &llama_free}, tested_{nullptr, &llama_free};
  const llama_vocab* vocab_ = nullptr;
  std::vector<llama_token> tokens_;
  Batch batch_;
  bool go_on_ = true;
  nlohmann::json stats_ = nlohmann::json::object();
  EvalResult result_;
};

Status Evaluation::Begin() {
  Result<ModelPair> loaded = LoadPair(config_.model, config_.plugin);
  if (!loaded.ok()) return loaded.status();
  models_ = std::move(loaded.value());
  vocab_ = llama_model_get_vocab(models_.tested());
  base_ = MakeContext(models_.base.get(),
                      {config_.n_ctx, config_.n_batch, config_.n_ubatch_base, config_.n_threads});
  if (!base_)
    return HostError("cannot make a context of " + std::to_string(config_.n_ctx) + " tokens");
  tested_ = MakeContext(models_.tested(),
                        {config_.n_ctx, config_.n_batch, config_.n_ubatch, config_.n_threads,
                         config_.flash_attention, config_.type_k, config_.type_v});
  if (!tested_) return HostError("cannot make the context that is to be tested");
  result_.model = FactsOf(models_.tested());
  const std::uint32_t trained = result_.model.n_ctx_train;
  if (trained > 0 && config_.n_ctx > trained) {
    result_.warnings.push_back(fmt::format(
        "the model was trained with {} tokens of context, not {}", trained, config_.n_ctx));
  }
  return Status::Ok();
}

Status Evaluation::CutText() {
  tokens_ = Tokenize(vocab_, config_.text);
  result_.n_tokens_text = tokens_.size();
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

// Weights into memory, for the timing; the base alone, the tested cache starts untouched.
Status Evaluation::WarmUp() {
  double unused = 0;
  batch_.Clear();
  for (std::uint32_t i = 0; i < std::min(config_.n_batch, 8u); ++i)
    batch_.Add(tokens_[i], i, false);
  return Decode(base_.get(), batch_, "base", unused);
}

Status Evaluation::TakeChunk(std::uint32_t c, ChunkResult& chunk, std::vector<Score>& scores) {
  const std::string name = fmt::format("chunk {}", c + 1);
  if (const Json* found = hooks_.log->Find(hooks_.pass, name); found != nullptr) {
    if (!FromJson(*found, n_scored(), chunk, scores))
      return Status::Invalid("--resume: " + name + " of the file is not whole");
    go_on_ = hooks_.progress((c + 1.0) / result_.n_chunks, name);
    return Status::Ok();
  }
  if (Status s = RunChunk(c, chunk, scores); !s.ok() || scores.size() != n_scored()) return s;
  for (const Score& score : scores) {
    if (!std::isfinite(score.kld) || !std::isfinite(score.nll))
      return Status::Internal("the logits of " + name + " are not finite");
  }
  chunk.size = hooks_.size_of_host(config_.n_ctx);
  if (config_.plugin != nullptr) {
    result_.stats_json = config_.plugin->stats_json();
    stats_ = nlohmann::json::parse(result_.stats_json, nullptr, false);
    if (!stats_.is_object()) stats_ = nlohmann::json::object();
    chunk.size = SizeOfStats(stats_);
  }
  return hooks_.log->Add(hooks_.pass, name, ToJson(chunk, scores));
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

Status Evaluation::RunChunk(std::uint32_t c, ChunkResult& chunk, std::vector<Score>& scores) {
  const std::uint32_t n_ctx = config_.n_ctx;
  llama_memory_clear(llama_get_memory(base_.get()), true);
  llama_memory_clear(llama_get_memory(tested_.get()), true);
  for (std::uint32_t start = 0, end = 0; start < n_ctx && go_on_; start = end) {
    end = std::min(start + config_.n_batch, n_ctx);
    if (config_.decode_only) end = start < first() ? std::min(end, first()) : start + 1;
    const std::vector<llama_token> truth = Fill(c, start, end);
    if (Status s = Decode(base_.get(), batch_, "base", chunk.seconds_base); !s.ok()) return s;
    if (Status s = Decode(tested_.get(), batch_, "tested", chunk.seconds); !s.ok()) return s;
    if (!truth.empty()) {
      const std::size_t at = scores.size();
      scores.resize(at + truth.size());
      ScoreRows(llama_get_logits(base_.get()), llama_get_logits(tested_.get()),
                static_cast<std::size_t>(llama_vocab_n_tokens(vocab_)), truth, config_.n_threads,
                std::span(scores).subspan(at));
    }
    go_on_ = hooks_.progress((c + static_cast<double>(end) / n_ctx) / result_.n_chunks,
                             fmt::format("chunk {}", c + 1));
  }
  return Status::Ok();
}

void Evaluation::Warn() {
  if (config_.plugin == nullptr || result_.chunks.empty()) return;
  std::ranges::copy(CacheWarnings(stats_, result_.chunks.back().size),
                    std::back_inserter(result_.warnings));
}

}  // namespace

Result<EvalResult> Evaluate(const EvalConfig& config, const EvalHooks& hooks) {
  return Evaluation(config, hooks).Run();
}

}  // namespace kvtamp::tool
