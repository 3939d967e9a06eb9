#include "tools/kvtamp/errors.h"

#include <fmt/format.h>
#include <ggml-backend.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "control/store_options.h"
#include "store/cache.h"

namespace kvtamp::tool {
namespace {

using codec::Side;

enum Variant { kExact, kCodedK, kCodedV, kCodedBoth, kVariants };

// "cache_k_l12" -> K of layer 12.
bool ParseCacheName(const char* name, Side& side, std::uint32_t& layer) {
  char letter = 0;
  unsigned number = 0;
  if (std::sscanf(name, "cache_%c_l%u", &letter, &number) != 2 || (letter != 'k' && letter != 'v'))
    return false;
  side = letter == 'k' ? Side::kK : Side::kV;
  layer = number;
  return true;
}

const ggml_tensor* Root(const ggml_tensor* t) {
  while (t->view_src != nullptr) t = t->view_src;
  return t;
}

float Param(const ggml_tensor* op, int i) {
  float x;
  std::memcpy(&x, op->op_params + i, sizeof x);
  return x;
}

// Squared lengths over the scored positions.
struct Sums {
  double exact = 0, off[kVariants] = {};
};

class Tap {
 public:
  Tap(const ErrorsConfig& config, const control::Settings& settings)
      : config_(config), settings_(settings) {
    for (auto& cache : caches_)
      cache = std::make_unique<store::Cache>(control::StoreOptions(settings), 1, config.n_ctx);
  }

  static bool Callback(ggml_tensor* t, bool ask, void* self) {
    return static_cast<Tap*>(self)->See(t, ask);
  }
  void Score(bool scored) { scored_ = scored; }
  const Status& status() const { return status_; }
  const std::map<std::uint32_t, std::vector<Sums>>& sums() const { return sums_; }
  const std::map<std::uint32_t, std::string>& skipped() const { return skipped_; }

 private:
  bool See(const ggml_tensor* t, bool ask) {
    if (t->op != GGML_OP_SET_ROWS && t->op != GGML_OP_FLASH_ATTN_EXT) return false;
    Side side;
    std::uint32_t layer;
    const ggml_tensor* cache = Root(t->op == GGML_OP_SET_ROWS ? t : t->src[1]);
    if (!ParseCacheName(cache->name, side, layer)) return false;
    if (ask) return true;
    if (!status_.ok() || skipped_.contains(layer)) return status_.ok();
    Status s = t->op == GGML_OP_SET_ROWS ? Write(t, layer, side) : Attend(t, layer);
    if (s.code() == Code::kUnsupported) {
      skipped_[layer] = s.message();
    } else if (!s.ok()) {
      status_ = s;
    }
    return status_.ok();
  }

  Status AddLayer(std::uint32_t layer, const ggml_tensor* attention) {
    const ggml_tensor *k = attention->src[1], *v = attention->src[2];
    if (attention->src[4] != nullptr) return Status::Unsupported("attention sinks");
    if (Root(k) == Root(v)) return Status::Unsupported("V is a view of K");
    if (k->ne[3] != 1) return Status::Unsupported("several streams");
    const auto heads = static_cast<std::uint32_t>(k->ne[2]);
    const codec::Pair type = settings_.TypeOfLayer(layer);
    const std::vector<codec::Pair> by_head = settings_.TypesOfHeads(layer);
    for (int i = 0; i < kVariants; ++i) {
      const auto coded = [&](codec::Pair p) {
        if (i == kExact || i == kCodedV) p.k = {};
        if (i == kExact || i == kCodedK) p.v = {};
        return p;
      };
      // A profile's formats by head belong to sides that are coded.
      std::vector<codec::Pair> list;
      if (i == kCodedBoth) list = by_head;
      Status s = caches_[i]->AddLayer(layer, heads * static_cast<std::uint32_t>(k->ne[0]),
                                      heads * static_cast<std::uint32_t>(v->ne[0]), coded(type),
                                      std::move(list));
      if (s.ok()) s = caches_[i]->SetHeads(layer, heads);
      if (!s.ok()) return s.code() == Code::kInvalidArgument ? Status::Unsupported(s.message()) : s;
    }
    sums_[layer].resize(heads);
    return Status::Ok();
  }

  // Rows come before the attention that tells their layout: kept until it does.
  Status Write(const ggml_tensor* t, std::uint32_t layer, Side side) {
    const ggml_tensor *rows = t->src[0], *index = t->src[1];
    if (rows->type != GGML_TYPE_F32 || index->type != GGML_TYPE_I64)
      return Status::Unsupported("rows of another type than f32");
    Pending& p = pending_[layer][side == Side::kK ? 0 : 1];
    const auto n_embd = static_cast<std::size_t>(rows->ne[0]);
    const auto n = static_cast<std::size_t>(rows->ne[1]);
    if (rows->ne[2] != 1 || n != static_cast<std::size_t>(index->ne[0]))
      return Status::Unsupported("rows in parts");
    p.n_embd = n_embd;
    p.rows.resize(n * n_embd);
    p.cells.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
      std::memcpy(p.rows.data() + i * n_embd,
                  static_cast<const char*>(rows->data) + i * rows->nb[1], n_embd * sizeof(float));
      p.cells[i] = static_cast<std::uint64_t>(static_cast<const std::int64_t*>(index->data)[i]);
    }
    return Status::Ok();
  }

  Status Attend(const ggml_tensor* t, std::uint32_t layer) {
    if (!sums_.contains(layer)) {
      if (Status s = AddLayer(layer, t); !s.ok()) return s;
    }
    if (auto it = pending_.find(layer); it != pending_.end()) {
      for (Side side : {Side::kK, Side::kV}) {
        const Pending& p = it->second[side == Side::kK ? 0 : 1];
        for (auto& cache : caches_) {
          if (Status s = cache->Write(layer, side, p.cells, p.rows.data(), p.n_embd); !s.ok())
            return s;
        }
      }
      pending_.erase(it);
    }
    if (Status s = Compare(t, layer); !s.ok()) return s;
    for (auto& cache : caches_) {
      if (Status s = cache->Maintain(layer, executor_); !s.ok()) return s;
    }
    return Status::Ok();
  }

  // All queries attend, so that weights are gathered as in use; scored ones are compared.
  Status Compare(const ggml_tensor* t, std::uint32_t layer) {
    const ggml_tensor *q = t->src[0], *v = t->src[2], *mask = t->src[3];
    const auto n_tok = static_cast<std::uint32_t>(q->ne[1]);
    const auto n_head = static_cast<std::uint32_t>(q->ne[2]);
    const auto dim_v = static_cast<std::size_t>(v->ne[0]);
    attention::Params params;
    params.n_head = n_head;
    params.scale = Param(t, 0);
    params.max_bias = Param(t, 1);
    params.softcap = Param(t, 2);
    std::vector<float> out[kVariants];
    for (int i = 0; i < kVariants; ++i) {
      out[i].resize(n_tok * n_head * dim_v);
      store::Cache::StreamJob job;
      job.job.q = static_cast<const float*>(q->data);
      job.job.q_tok_stride = q->nb[1] / sizeof(float);
      job.job.q_head_stride = q->nb[2] / sizeof(float);
      job.job.out = out[i].data();
      job.job.out_tok_stride = n_head * dim_v;
      job.job.out_head_stride = dim_v;
      job.job.mask = mask == nullptr ? nullptr : static_cast<const half_t*>(mask->data);
      job.job.mask_tok_stride = mask == nullptr ? 0 : mask->nb[1] / sizeof(half_t);
      job.job.n_tok = n_tok;
      job.job.n_kv = static_cast<std::uint32_t>(t->src[1]->ne[1]);
      if (Status s = caches_[i]->Attend(layer, std::span(&job, 1), params, executor_); !s.ok())
        return s;
    }
    if (!scored_) return Status::Ok();
    std::vector<Sums>& sums = sums_[layer];
    const std::size_t gqa = n_head / sums.size();
    for (std::size_t at = 0; at < out[kExact].size(); ++at) {
      Sums& to = sums[at / dim_v % n_head / gqa];
      const double exact = out[kExact][at];
      to.exact += exact * exact;
      for (int i = kCodedK; i < kVariants; ++i) {
        const double d = out[i][at] - exact;
        to.off[i] += d * d;
      }
    }
    return Status::Ok();
  }

  struct Pending {
    std::size_t n_embd = 0;
    std::vector<float> rows;
    std::vector<std::uint64_t> cells;
  };
  const ErrorsConfig& config_;
  const control::Settings& settings_;
  std::unique_ptr<store::Cache> caches_[kVariants];
  std::map<std::uint32_t, Pending[2]> pending_;
  std::map<std::uint32_t, std::vector<Sums>> sums_;
  std::map<std::uint32_t, std::string> skipped_;
  SerialExecutor executor_;
  Status status_;
  bool scored_ = false;
};

}  // namespace

Result<ErrorsResult> MeasureErrors(llama_model* model, const ErrorsConfig& config,
                                   const ModelLayout& layout, const control::Settings& settings,
                                   const ProgressCall& progress) {
  Tap tap(config, settings);
  ContextShape shape{config.n_ctx, config.n_ubatch, config.n_ubatch, config.n_threads};
  shape.on_node = &Tap::Callback;
  shape.on_node_data = &tap;
  const Context context = MakeContext(model, shape);
  if (!context) return HostError("cannot make a context");
  const std::vector<llama_token> tokens = Tokenize(llama_model_get_vocab(model), config.text);
  if (tokens.size() < config.n_ctx)
    return Status::Invalid(fmt::format("the text has {} tokens, fewer than the {} of -c",
                                       tokens.size(), config.n_ctx));
  Batch batch(config.n_ubatch);
  double seconds = 0;
  for (std::uint32_t start = 0; start < config.n_ctx; start += config.n_ubatch) {
    const std::uint32_t end = std::min(start + config.n_ubatch, config.n_ctx);
    batch.Clear();
    for (std::uint32_t pos = start; pos < end; ++pos) batch.Add(tokens[pos], pos, pos + 1 == end);
    tap.Score(start + config.n_scored >= config.n_ctx);
    const Status s = Decode(context.get(), batch, "host's", seconds);
    if (!tap.status().ok()) return tap.status();
    if (!s.ok()) return s;
    if (!progress(static_cast<double>(end) / config.n_ctx, "tokens"))
      return Status::Invalid("interrupted");
  }
  ErrorsResult result;
  for (const auto& [layer, sums] : tap.sums()) {
    for (std::uint32_t h = 0; h < sums.size(); ++h) {
      const auto error = [&of = sums[h]](Variant i) {
        return of.exact > 0 ? std::sqrt(of.off[i] / of.exact) : 0.0;
      };
      result.heads.push_back({layer, h, error(kCodedK), error(kCodedV), error(kCodedBoth)});
    }
  }
  for (const auto& [layer, why] : tap.skipped())
    result.skipped.push_back(fmt::format("layer {}: {}", layer, why));
  for (const LayerLayout& l : layout.layers) {
    if (!tap.sums().contains(l.layer) && !tap.skipped().contains(l.layer))
      result.skipped.push_back(fmt::format("layer {}: not attended with flash attention", l.layer));
  }
  return result;
}

}  // namespace kvtamp::tool
