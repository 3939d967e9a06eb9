#include "policy/registry.h"

#include <algorithm>

#include "policy/scores/expected_attention.h"
#include "policy/scores/h2o.h"
#include "policy/scores/keydiff.h"
#include "policy/scores/knorm.h"
#include "policy/scores/kvzip.h"
#include "policy/scores/pool.h"
#include "policy/scores/r_kv.h"
#include "policy/scores/random.h"
#include "policy/scores/snapkv.h"
#include "policy/scores/streaming_llm.h"
#include "policy/scores/tova.h"
#include "policy/scores/value_norm.h"

namespace kvtamp::policy {
namespace {

constexpr std::string_view kWeight = "+value_norm";

using Scores = std::span<const std::span<float>>;

// A policy that looks at one head at a time.
template <auto kScore>
void EachHead(const Layer& layer, const Options& options, Scores scores) {
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    kScore(layer, h, options, scores[h]);
  }
}

template <void (*kScore)(const Head&, std::span<float>)>
void Plain(const Layer& layer, std::size_t h, const Options&, std::span<float> score) {
  kScore(layer.heads[h], score);
}

void ScoreStreamingLlm(const Layer&, std::size_t, const Options& o, std::span<float> score) {
  StreamingLlm(o.n_sink, score);
}

void ScoreTova(const Layer& layer, const Options&, Scores scores) { Tova(layer.heads, scores); }

void ScoreSnapKv(const Layer& layer, std::size_t h, const Options& o, std::span<float> score) {
  SnapKv(layer.heads[h], o.window_size, o.kernel_size, score);
}

void ScoreExpected(const Layer& layer, std::size_t h, const Options& o, std::span<float> score) {
  const ExpectedAttentionOptions options{o.n_future_positions, o.n_sink, o.epsilon, o.use_vnorm};
  ExpectedAttention(layer, layer.heads[h], options, score);
}

void ScoreRKv(const Layer& layer, std::size_t h, const Options& o, std::span<float> score) {
  const RKvOptions options{o.window_size, o.kernel_size, o.mix_lambda, o.similarity, o.n_retain};
  RKv(layer.heads[h], layer.window_queries, options, score);
}

void ScoreRandom(const Layer& layer, std::size_t h, const Options& o, std::span<float> score) {
  Random(layer.heads[h], o.seed, layer.index, static_cast<std::uint32_t>(h), score);
}

constexpr PolicyInfo kPolicies[] = {
    {"streaming_llm", "", "2309.17453", "the first n_sink tokens, then the newest", 0, false,
     EachHead<ScoreStreamingLlm>},
    {"h2o", "", "2306.14048", "attention over all queries so far, added up", kAttentionSum, true,
     EachHead<Plain<H2o>>},
    {"observed_attention", "", "2306.14048", "the same as a mean over the queries that saw it",
     kAttentionSum | kAttentionRows, true, EachHead<Plain<ObservedAttention>>},
    {"tova", "", "2401.06104", "attention of the last token, a mean over the layer's heads",
     kPositions | kAttentionLast, true, ScoreTova},
    {"snapkv", "", "2404.14469", "attention of the observation window, smoothed over neighbours",
     kAttentionWindow, true, EachHead<ScoreSnapKv>},
    {"expected_attention", "", "2510.00636", "attention that future queries are expected to pay",
     kK | kV | kQueries, true, EachHead<ScoreExpected>},
    {"keydiff", "", "2504.15364", "how unlike the mean key its key is", kK, false,
     EachHead<Plain<KeyDiff>>},
    {"knorm", "", "2406.11430", "how short its key is", kK, false, EachHead<Plain<Knorm>>},
    {"r_kv", "rkv", "2505.24133", "attention of the observation window, less redundancy of keys",
     kAttentionWindow | kK, false, EachHead<ScoreRKv>},
    {"value_norm", "", "2406.12335", "how long its value is", kV, false,
     EachHead<Plain<ValueNorm>>},
    {"kvzip", "", "2505.23416", "largest attention while the context is replayed", kAttentionMax,
     true, EachHead<Plain<KvZip>>},
    {"random", "", "", "a hash of its position: the baseline", kPositions, false,
     EachHead<ScoreRandom>},
};

Status CheckOptions(const Options& o) {
  if (o.window_size == 0) return Status::Invalid("window_size must be at least 1");
  if (o.kernel_size % 2 == 0) return Status::Invalid("kernel_size must be odd");
  if (o.n_future_positions == 0) return Status::Invalid("n_future_positions must be at least 1");
  if (!(o.epsilon >= 0)) return Status::Invalid("epsilon must be 0 or more");
  if (!(o.mix_lambda >= 0 && o.mix_lambda <= 1)) {
    return Status::Invalid("mix_lambda must be from 0 to 1");
  }
  if (!(o.similarity >= -1 && o.similarity <= 1)) {
    return Status::Invalid("similarity must be from -1 to 1");
  }
  return Status::Ok();
}

Status CheckSizes(const Layer& layer, Scores scores, Needs needs, const std::string& name) {
  if (scores.size() != layer.heads.size()) {
    return Status::Invalid(name + ": there must be scores for each head");
  }
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    const Head& head = layer.heads[h];
    if (scores[h].size() != head.n) {
      return Status::Invalid(name + ": there must be a score for each entry");
    }
    if (const Needs missing = MissingNeed(layer, head, needs); missing != 0) {
      return Status::Invalid(name + " needs " + NeedNames(missing) + " of KV head " +
                             std::to_string(h) + " of layer " + std::to_string(layer.index));
    }
  }
  return Status::Ok();
}

}  // namespace

std::span<const PolicyInfo> Policies() { return kPolicies; }

std::string Policy::name() const {
  return info_->name + std::string(weighted_ ? kWeight : std::string_view());
}

Needs Policy::needs() const {
  const bool expected = std::string_view(info_->name) == "expected_attention";
  const Needs needs = expected && !options_.use_vnorm ? info_->needs & ~kV : info_->needs;
  return weighted_ ? needs | kV : needs;
}

Status Policy::Score(const Layer& layer, Scores scores) const {
  if (Status status = CheckSizes(layer, scores, needs(), name()); !status.ok()) return status;
  info_->score(layer, options_, scores);
  if (!weighted_) return Status::Ok();
  const bool keeps_window = (info_->needs & kAttentionWindow) != 0;
  for (std::size_t h = 0; h < scores.size(); ++h) {
    WeightByValueNorm(layer.heads[h], scores[h]);
    if (keeps_window) KeepWindow(options_.window_size, scores[h]);
  }
  return Status::Ok();
}

Result<Policy> MakePolicy(std::string_view name, const Options& options) {
  const bool weighted = name.ends_with(kWeight);
  const std::string_view plain = weighted ? name.substr(0, name.size() - kWeight.size()) : name;
  const auto* info = std::find_if(std::begin(kPolicies), std::end(kPolicies), [&](const auto& p) {
    return plain == p.name || (!plain.empty() && plain == p.alias);
  });
  if (info == std::end(kPolicies)) {
    std::string names;
    for (const PolicyInfo& policy : kPolicies) names += std::string(" ") + policy.name;
    return Status::Invalid("unknown policy \"" + std::string(name) + "\"; there are" + names);
  }
  if (weighted && plain == "expected_attention") {
    return Status::Invalid("expected_attention is weighted by values already (use_vnorm)");
  }
  if (weighted && !info->attention) {
    return Status::Invalid(std::string(info->name) + " is not made of attention and cannot be " +
                           "weighted by values");
  }
  if (Status status = CheckOptions(options); !status.ok()) return status;
  return Policy(info, weighted, options);
}

}  // namespace kvtamp::policy
