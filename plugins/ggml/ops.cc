#include "plugins/ggml/ops.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "base/executor.h"
#include "base/log.h"
#include "plugins/ggml/buffer.h"
#include "plugins/ggml/plugin.h"
#include "plugins/ggml/report.h"

namespace kvtamp::ggml_plugin {

using codec::Side;

namespace {

// ThreadSanitizer does not see that a team starts and ends together: OpenMP's run-time library is
// not compiled with it. It has to be told.
#ifdef __SANITIZE_THREAD__
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#define KVTAMP_UNSEEN __attribute__((no_sanitize("thread")))
void After(void* moment) { __tsan_acquire(moment); }
void Before(void* moment) { __tsan_release(moment); }
#else
#define KVTAMP_UNSEEN
void After(void*) {}
void Before(void*) {}
#endif

// The host's threads: ggml-cpu of stock builds runs OpenMP teams too, and a runtime shared by both
// keeps one team in the process.
class OmpExecutor final : public Executor {
 public:
  explicit OmpExecutor(int n) : n_(std::max(1, n)) {}
  int n_threads() const override { return n_; }
  KVTAMP_UNSEEN void Run(void (*fn)(void*, int), void* arg) override {
    if (n_ == 1) {
      fn(arg, 0);
      return;
    }
    Before(&start_);
#pragma omp parallel num_threads(n_)
    {
      After(&start_);
      // A smaller team than asked for must still do every worker's part.
      for (int w = omp_get_thread_num(); w < n_; w += omp_get_num_threads()) fn(arg, w);
      Before(&end_);
    }
    After(&end_);
  }

 private:
  const int n_;
  char start_ = 0, end_ = 0;  // only their addresses matter
};

Buffer* OurBuffer(const ggml_tensor* t) {
  if (t == nullptr) return nullptr;
  ggml_backend_buffer_t b = BufferOf(t);
  return IsOurs(b) ? Buffer::From(b) : nullptr;
}

const KvTensor* KvOf(const ggml_tensor* t) {
  Buffer* b = OurBuffer(t);
  return b == nullptr || t->data == nullptr ? nullptr : b->Find(t->data);
}

bool IsViewOp(const ggml_tensor* t) {
  return t->op == GGML_OP_NONE || t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE ||
         t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

float ParamF32(const ggml_tensor* t, int i) { return std::bit_cast<float>(t->op_params[i]); }

// `head_size`: of the row's heads; a view of V inside K shows only the first part of each.
const char* CheckSide(const KvTensor& kv, const ggml_tensor* t, std::uint32_t n_head_kv,
                      std::size_t head_size, std::uint32_t& first_stream) {
  const std::size_t row = kv.row_bytes();
  if (t->type != GGML_TYPE_F16) return "a cache type other than f16";
  if (head_size * n_head_kv != kv.n_embd) return "heads that do not fill a row";
  if (t->nb[0] != 2 || t->nb[1] != row) return "rows in an unknown layout";
  if (n_head_kv > 1 && t->nb[2] != head_size * 2) return "heads in an unknown layout";
  if (t->ne[3] > 1 && t->nb[3] != row * kv.n_cells) return "streams in an unknown layout";
  const std::size_t offset =
      static_cast<std::size_t>(static_cast<const std::uint8_t*>(t->data) - kv.base);
  if (offset % (row * kv.n_cells) != 0) return "a view that starts inside a stream";
  first_stream = static_cast<std::uint32_t>(offset / (row * kv.n_cells));
  return nullptr;
}

AttentionLayout LayoutOf(const ggml_tensor* op) {
  AttentionLayout a;
  a.op = op;
  const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
  a.k = KvOf(k);
  a.v = KvOf(v);
  if (a.k == nullptr || a.v == nullptr) {
    a.why_not = "K or V is not a cache tensor";
    return a;
  }
  a.buffer = OurBuffer(k);
  if (a.k->side != Side::kK || a.k->pair != a.v->pair || (a.v != a.k && a.v->side != Side::kV)) {
    a.why_not = "K and V belong to different layers";
    return a;
  }
  a.n_head_kv = static_cast<std::uint32_t>(k->ne[2]);
  a.n_streams = static_cast<std::uint32_t>(k->ne[3]);
  std::uint32_t v_first = 0;
  const auto head_k = static_cast<std::size_t>(k->ne[0]),
             head_v = static_cast<std::size_t>(v->ne[0]);
  a.why_not = CheckSide(*a.k, k, a.n_head_kv, head_k, a.first_stream);
  if (a.why_not == nullptr)
    a.why_not = CheckSide(*a.v, v, a.n_head_kv, a.v == a.k ? head_k : head_v, v_first);
  if (a.why_not != nullptr) return a;
  if (a.v == a.k) {
    a.v_in_k = static_cast<std::uint32_t>(head_v);
    if (head_v > head_k) a.why_not = "values beyond the keys they lie in";
    if (a.buffer->layer(*a.k).v != nullptr)
      a.why_not = "values inside keys beside a V of the layer's own";
    if (a.why_not != nullptr) return a;
  }
  if (v->ne[2] != k->ne[2] || v->ne[3] != k->ne[3] || v->ne[1] != k->ne[1] ||
      v_first != a.first_stream)
    a.why_not = "K and V views that differ";
  else if (q->type != GGML_TYPE_F32 || q->nb[0] != 4 || q->ne[3] != k->ne[3] ||
           q->ne[2] % k->ne[2] != 0)
    a.why_not = "queries in an unknown layout";
  else if (const ggml_tensor* mask = op->src[3];
           mask != nullptr && (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 ||
                               (mask->ne[2] != 1 && mask->ne[2] != q->ne[2])))
    a.why_not = "a mask in an unknown layout";
  return a;
}

// Learns a layer's head size as early as the host shows it, and settles early what the store cannot
// hold: before the first row nothing has to be moved. Says whether the store holds it.
bool PrepareAttention(const AttentionLayout& a) {
  if (a.why_not == nullptr) return a.buffer->SetHeads(*a.k, a.n_head_kv, a.v_in_k);
  if (a.k != nullptr) OurBuffer(a.op->src[1])->MakePlain(*a.k, a.why_not);
  if (a.v != nullptr) OurBuffer(a.op->src[2])->MakePlain(*a.v, a.why_not);
  return false;
}

// A sequence's first tokens show in the mask: a query that sees at most n_sink cells. Those cells
// are the ones every later token leans on.
void FindSinks(const half_t* mask, std::size_t row_stride, std::uint32_t n_tok, std::uint32_t n_kv,
               std::uint32_t n_sink, std::vector<std::uint32_t>& cells) {
  constexpr half_t kMasked = 0xFC00;
  cells.clear();
  std::uint32_t seen[64];
  for (std::uint32_t t = 0; t < n_tok; ++t) {
    const half_t* row = mask + t * row_stride;
    std::uint32_t n = 0;
    for (std::uint32_t base = 0; base < n_kv && n <= n_sink; base += 64) {
      const std::uint32_t end = std::min(n_kv, base + 64);
      std::uint32_t open = 0;
      for (std::uint32_t i = base; i < end; ++i) open += row[i] != kMasked;  // vectorised
      if (open == 0) continue;
      for (std::uint32_t i = base; i < end && n <= n_sink; ++i) {
        if (row[i] == kMasked) continue;
        if (n < n_sink) seen[n] = i;
        n++;
      }
    }
    if (n <= n_sink) cells.insert(cells.end(), seen, seen + n);
  }
  std::sort(cells.begin(), cells.end());
  cells.erase(std::unique(cells.begin(), cells.end()), cells.end());
}

// What the tokens that write `n_rows` rows of a layer see, from the mask of the attention that
// follows in the graph. Without a mask, or with one of another shape: nothing is known.
store::Sight SightOf(const KvTensor& k, std::span<const AttentionLayout> attentions,
                     std::size_t n_rows) {
  for (const AttentionLayout& a : attentions) {
    if (a.k != &k) continue;
    const ggml_tensor *q = a.op->src[0], *mask = a.op->src[3];
    if (mask == nullptr || mask->type != GGML_TYPE_F16 || mask->nb[0] != sizeof(half_t) ||
        static_cast<std::size_t>(q->ne[1] * q->ne[3]) != n_rows)
      return {};
    // Rows of several streams lie one stream's after the other's, and so must the mask.
    if (q->ne[3] > 1 && (mask->ne[3] != q->ne[3] ||
                         mask->nb[3] != mask->nb[1] * static_cast<std::size_t>(q->ne[1])))
      return {};
    return {static_cast<const half_t*>(mask->data), mask->nb[1] / sizeof(half_t),
            static_cast<std::uint32_t>(mask->ne[0])};
  }
  return {};
}

// The layer of "blk.12.attn_q_norm.weight", -1 for any other name.
int LayerOfQueryNorm(std::string_view name) {
  int layer = -1;
  if (!name.starts_with("blk.")) return -1;
  name.remove_prefix(4);
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  return error == std::errc() && std::string_view(end) == ".attn_q_norm.weight" ? layer : -1;
}

// Some models' later layers attend over an earlier layer's cache and write none of their own (Gemma
// 3n, Gemma 4). Nothing in such a layer lies in our buffers before its attention, so the scheduler
// gives that to the CPU, which has the host turn flash attention off altogether. Taking the norm of
// its queries, and their ROPE to save a split, has attention follow. The weight tells the layer;
// what has K of its own is known by then, since caches are made before the first graph.
bool IsQueryOfSharedLayer(const ggml_tensor* op) {
  if (op->op == GGML_OP_ROPE) {
    op = op->src[0];
    while (op != nullptr && IsViewOp(op)) op = op->src[0];
  }
  if (op == nullptr || op->op != GGML_OP_MUL || op->src[1] == nullptr) return false;
  ggml_backend_buffer* const weight = BufferOf(op->src[1]);
  if (weight == nullptr || IsOurs(weight) || !ggml_backend_buffer_is_host(weight)) return false;
  const int layer = LayerOfQueryNorm(op->src[1]->name), last = LastLayerWithK();
  return last >= 0 && layer > last;
}

}  // namespace

bool SupportsOp(const ggml_tensor* op) {
  if (IsViewOp(op)) return true;
  if (IsOurs(BufferOf(op))) {
    // Flash attention is off: V is stored transposed, element by element, which no page can hold.
    if (op->op == GGML_OP_SET_ROWS && op->ne[0] == 1) {
      if (const KvTensor* kv = KvOf(op); kv != nullptr && kv->n_embd != 1)
        OurBuffer(op)->MakeAllPlain("flash attention is off (-fa on keeps the cache compressed)");
    }
    return true;
  }
  if (op->op == GGML_OP_FLASH_ATTN_EXT && IsOurs(BufferOf(op->src[1])) &&
      IsOurs(BufferOf(op->src[2]))) {
    if (OurBuffer(op->src[1]) != nullptr && OurBuffer(op->src[2]) != nullptr)
      PrepareAttention(LayoutOf(op));
    return true;
  }
  // Reading recurrent state in place saves the host a copy of all of it for every token.
  if (op->op == GGML_OP_GET_ROWS || op->op == GGML_OP_SSM_SCAN) {
    Buffer* b = OurBuffer(op->src[0]);
    return b != nullptr && !b->HasKv() &&
           BufferOf(op->src[0])->usage != GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
  }
  if (IsQueryOfSharedLayer(op)) return true;
  if (op->op == GGML_OP_SET_ROWS || op->op == GGML_OP_FLASH_ATTN_EXT || op->op == GGML_OP_ROPE)
    return CurrentSettings()->accept_ops != 0;
  return false;
}

ggml_status Backend::HostCompute(ggml_tensor* node, const char* why) {
  for (int i = -1; i < GGML_MAX_SRC; ++i) {
    const ggml_tensor* t = i < 0 ? node : node->src[i];
    Buffer* b = OurBuffer(t);
    if (b == nullptr) continue;
    if (const KvTensor* kv = b->Find(t->data)) {
      b->MakePlain(*kv, std::string(ggml_op_name(node->op)) + ": " + why);
    } else if (!b->Commit(t->data, ggml_nbytes(t))) {
      return GGML_STATUS_ALLOC_FAILED;
    }
  }
  return delegate_.Compute(node, n_threads);
}

ggml_status Backend::SetRows(ggml_tensor* node) {
  const KvTensor* kv = KvOf(node);
  if (kv == nullptr) return HostCompute(node, "not a cache tensor");
  Buffer* b = OurBuffer(node);
  const ggml_tensor *rows = node->src[0], *index = node->src[1];
  const std::size_t offset =
      static_cast<std::size_t>(static_cast<const std::uint8_t*>(node->data) - kv->base);
  const bool whole_rows = node->ne[0] == kv->n_embd && node->nb[1] == kv->row_bytes() &&
                          node->ne[2] == 1 && node->ne[3] == 1 && rows->ne[2] == 1 &&
                          rows->ne[3] == 1 && offset % kv->row_bytes() == 0;
  const bool types = (rows->type == GGML_TYPE_F32 || rows->type == GGML_TYPE_F16) &&
                     (index->type == GGML_TYPE_I64 || index->type == GGML_TYPE_I32);
  if (!whole_rows || !types) {
    return HostCompute(node, node->ne[0] == 1
                                 ? "flash attention is off (-fa on keeps the cache compressed)"
                                 : "rows written in parts");
  }
  if (!b->EnsureStored(*kv)) return HostCompute(node, "layer is plain");
  cells_.resize(static_cast<std::size_t>(rows->ne[1]));
  const std::uint64_t first = offset / kv->row_bytes();
  for (std::size_t i = 0; i < cells_.size(); ++i) {
    const auto* p = static_cast<const std::uint8_t*>(index->data) + i * index->nb[0];
    const std::int64_t cell = index->type == GGML_TYPE_I64
                                  ? *reinterpret_cast<const std::int64_t*>(p)
                                  : *reinterpret_cast<const std::int32_t*>(p);
    cells_[i] = first + static_cast<std::uint64_t>(cell);
  }
  store::Cache& cache = *b->cache();
  // Keys come first; values join the rows that these began.
  const store::Sight sees =
      kv->side == Side::kK ? SightOf(*kv, attentions_, cells_.size()) : store::Sight();
  const store::Sight* sight = sees.mask == nullptr ? nullptr : &sees;
  Status s = rows->type == GGML_TYPE_F32
                 ? cache.Write(kv->layer, kv->side, cells_, static_cast<const float*>(rows->data),
                               rows->nb[1] / sizeof(float), sight)
                 : cache.Write(kv->layer, kv->side, cells_, static_cast<const half_t*>(rows->data),
                               rows->nb[1] / sizeof(half_t), sight);
  kv->pair->wrote = true;
  kv->pair->from = KvLayer::From::kGraph;
  if (s.ok()) return GGML_STATUS_SUCCESS;
  Log(LogLevel::kError, s.message());
  return s.code() == Code::kOutOfMemory ? GGML_STATUS_ALLOC_FAILED : GGML_STATUS_FAILED;
}

ggml_status Backend::Attend(ggml_tensor* node) {
  const auto found = std::find_if(attentions_.begin(), attentions_.end(),
                                  [&](const AttentionLayout& a) { return a.op == node; });
  // A layer may have become plain since.
  if (found == attentions_.end() || found->k->pair->plain)
    return HostCompute(node, "layer is plain");
  const AttentionLayout& a = *found;
  Buffer* b = a.buffer;
  KvLayer& layer = *a.k->pair;
  const ggml_tensor *q = node->src[0], *mask = node->src[3], *sinks = node->src[4];

  attention::Params params;
  params.n_head = static_cast<std::uint32_t>(q->ne[2]);
  params.scale = ParamF32(node, 0);
  params.max_bias = ParamF32(node, 1);
  params.softcap = ParamF32(node, 2);
  params.sinks = sinks == nullptr ? nullptr : static_cast<const float*>(sinks->data);

  const std::uint32_t n_tok = static_cast<std::uint32_t>(q->ne[1]);
  const std::uint32_t n_kv = static_cast<std::uint32_t>(node->src[1]->ne[1]);
  store::Cache& cache = *b->cache();
  jobs_.assign(a.n_streams, {});
  for (std::uint32_t s = 0; s < a.n_streams; ++s) {
    jobs_[s].stream = a.first_stream + s;
    attention::Job& j = jobs_[s].job;
    j.q = reinterpret_cast<const float*>(static_cast<const std::uint8_t*>(q->data) + s * q->nb[3]);
    j.q_tok_stride = q->nb[1] / sizeof(float);
    j.q_head_stride = q->nb[2] / sizeof(float);
    j.out = reinterpret_cast<float*>(static_cast<std::uint8_t*>(node->data) + s * node->nb[3]);
    j.out_tok_stride = node->nb[2] / sizeof(float);
    j.out_head_stride = node->nb[1] / sizeof(float);
    j.n_tok = n_tok;
    j.n_kv = n_kv;
    if (mask != nullptr) {
      j.mask = reinterpret_cast<const half_t*>(static_cast<const std::uint8_t*>(mask->data) +
                                               (s % mask->ne[3]) * mask->nb[3]);
      j.mask_tok_stride = mask->nb[1] / sizeof(half_t);
      j.mask_head_stride = mask->ne[2] > 1 ? mask->nb[2] / sizeof(half_t) : 0;
      if (layer.wrote && cache.n_sink() > 0) {
        FindSinks(j.mask, j.mask_tok_stride, n_tok, n_kv, cache.n_sink(), sink_cells_);
        if (!sink_cells_.empty()) cache.MarkSinks(a.k->layer, jobs_[s].stream, sink_cells_);
      }
    }
  }
  if (layer.wrote) {
    // The host counts n_kv from the highest used cell of these streams (docs/reclaim.md): what lies
    // beyond was removed.
    for (const auto& j : jobs_) {
      b->NoteAttended(j.stream, n_kv);
      cache.DropFrom(a.k->layer, j.stream, n_kv);
    }
  }
  OmpExecutor executor(n_threads);
  Status s = cache.Attend(a.k->layer, jobs_, params, executor);
  if (s.ok() && layer.wrote) {
    // The micro-batch has attended its own rows in f16; now they may be coded.
    s = cache.Maintain(a.k->layer, executor);
    layer.wrote = false;
  }
  if (s.ok()) return GGML_STATUS_SUCCESS;
  Log(LogLevel::kError, s.message());
  return s.code() == Code::kOutOfMemory ? GGML_STATUS_ALLOC_FAILED : GGML_STATUS_FAILED;
}

// K-shift: ROPE in place over the cells, by a shift per cell. Only the shift is noted; ggml's own
// ROPE says by which angles it turns.
ggml_status Backend::Shift(ggml_tensor* node) {
  const KvTensor* kv = KvOf(node);
  Buffer* b = OurBuffer(node);
  const ggml_tensor *in = node->src[0], *shifts = node->src[1];
  if (kv == nullptr || kv->side != Side::kK || in->data != node->data ||
      node->type != GGML_TYPE_F16 || node->nb[2] != kv->row_bytes() || node->ne[3] != 1)
    return HostCompute(node, "not a shift of whole cells");
  const std::size_t offset =
      static_cast<std::size_t>(static_cast<const std::uint8_t*>(node->data) - kv->base);
  const std::uint64_t first = offset / kv->row_bytes();
  const auto n = static_cast<std::size_t>(node->ne[2]);
  const auto* delta = static_cast<const std::int32_t*>(shifts->data);
  if (std::all_of(delta, delta + n, [](std::int32_t d) { return d == 0; }))
    return GGML_STATUS_SUCCESS;
  const auto n_head_kv = static_cast<std::uint32_t>(node->ne[1]);
  if (!b->SetHeads(*kv, n_head_kv, 0)) return HostCompute(node, "layer is plain");

  const std::uint32_t dim = kv->n_embd / n_head_kv;
  const int n_rot = node->op_params[1], mode = node->op_params[2];
  const std::size_t in_row = offset % kv->row_bytes() / sizeof(half_t);
  const bool head_views = n_head_kv == 1 || node->nb[1] == dim * sizeof(half_t);
  if ((mode == GGML_ROPE_TYPE_NORMAL || mode == GGML_ROPE_TYPE_NEOX) && first == 0 && head_views &&
      in_row + static_cast<std::size_t>(n_rot) <= dim) {
    const store::TurnShape turn{static_cast<std::uint32_t>(in_row),
                                static_cast<std::uint32_t>(n_rot) / 2, mode == GGML_ROPE_TYPE_NEOX};
    Status s = b->cache()->ShiftK(kv->layer, std::span(delta, n), turn,
                                  [&](std::int32_t shift, std::span<float> cos_sin) {
                                    return Angles(*node, shift, cos_sin);
                                  });
    if (s.ok()) return GGML_STATUS_SUCCESS;
    if (s.code() != Code::kUnsupported) {
      Log(LogLevel::kError, s.message());
      return GGML_STATUS_FAILED;
    }
  }
  return ShiftRows(node, *kv, first, in_row);
}

// The angles of ggml's ROPE as `node` asks for it, for one number of positions: what it makes of
// unit vectors. With YaRN it also scales, by a factor that keys got when they were written and that
// the host applies once more at each shift, to moved and unmoved cells alike: a fault, which is not
// followed.
Status Backend::Angles(const ggml_tensor& node, std::int32_t shift, std::span<float> cos_sin) {
  const std::size_t pairs = cos_sin.size() / 2;
  const bool neox = node.op_params[2] == GGML_ROPE_TYPE_NEOX;
  std::vector<float> row(static_cast<std::size_t>(node.ne[0]), 0.0f);
  const auto at = [&](std::size_t i, bool second) -> float& {
    return neox ? row[i + (second ? pairs : 0)] : row[2 * i + (second ? 1 : 0)];
  };
  for (std::size_t i = 0; i < pairs; ++i) at(i, false) = 1.0f;
  ggml_tensor x = *node.src[0], index = *node.src[1], op = node;
  for (ggml_tensor* t : {&x, &op}) {
    t->type = GGML_TYPE_F32;
    t->ne[1] = t->ne[2] = t->ne[3] = 1;
    t->nb[0] = sizeof(float);
    t->nb[1] = t->nb[2] = t->nb[3] = row.size() * sizeof(float);
    t->data = row.data();
  }
  index.ne[0] = 1;
  index.data = &shift;
  x.buffer = op.buffer = index.buffer = nullptr;
  x.view_src = op.view_src = index.view_src = nullptr;
  x.op = index.op = GGML_OP_NONE;
  op.src[0] = &x;
  op.src[1] = &index;
  if (delegate_.Compute(&op, 1) != GGML_STATUS_SUCCESS)
    return Status::Invalid("ggml's ROPE failed");
  for (std::size_t i = 0; i < pairs; ++i) {
    const float cos = at(i, false), sin = at(i, true);
    const float length = std::sqrt(cos * cos + sin * sin);
    if (!(length > 1e-3f && length < 1e3f))
      return Status::Unsupported("a shift that is not a turn");
    cos_sin[2 * i] = cos / length;
    cos_sin[2 * i + 1] = sin / length;
  }
  return Status::Ok();
}

// A shift that is more than a turn: the rows go through ggml's ROPE as one small tensor, and back.
ggml_status Backend::ShiftRows(ggml_tensor* node, const KvTensor& kv, std::uint64_t first,
                               std::size_t in_row) {
  store::Cache& cache = *OurBuffer(node)->cache();
  const auto* delta = static_cast<const std::int32_t*>(node->src[1]->data);
  std::vector<std::uint64_t> cells;
  std::vector<std::int32_t> deltas;
  std::vector<half_t> rows, row(kv.n_embd);
  for (std::int64_t i = 0; i < node->ne[2]; ++i) {
    if (delta[i] == 0 ||
        !cache.Read(kv.layer, Side::kK, first + static_cast<std::uint64_t>(i), row.data()))
      continue;
    cells.push_back(first + static_cast<std::uint64_t>(i));
    deltas.push_back(delta[i]);
    rows.insert(rows.end(), row.begin(), row.end());
  }
  if (cells.empty()) return GGML_STATUS_SUCCESS;

  ggml_tensor x = *node->src[0], index = *node->src[1], op = *node;
  x.ne[2] = op.ne[2] = static_cast<std::int64_t>(cells.size());
  x.nb[3] = op.nb[3] = x.nb[2] * cells.size();
  x.data = op.data = rows.data() + in_row;
  index.ne[0] = static_cast<std::int64_t>(cells.size());
  index.data = deltas.data();
  x.buffer = op.buffer = index.buffer = nullptr;
  x.view_src = op.view_src = index.view_src = nullptr;
  x.op = index.op = GGML_OP_NONE;
  op.src[0] = &x;
  op.src[1] = &index;
  if (ggml_status st = delegate_.Compute(&op, n_threads); st != GGML_STATUS_SUCCESS) return st;

  for (std::size_t i = 0; i < cells.size();) {
    const std::uint32_t stream = static_cast<std::uint32_t>(cells[i] / kv.n_cells);
    std::vector<std::uint32_t> of_stream;
    std::size_t end = i;
    for (; end < cells.size() && cells[end] / kv.n_cells == stream; ++end)
      of_stream.push_back(static_cast<std::uint32_t>(cells[end] % kv.n_cells));
    Status s = cache.ReplaceK(kv.layer, stream, of_stream, rows.data() + i * kv.n_embd);
    if (!s.ok()) {
      Log(LogLevel::kError, s.message());
      return GGML_STATUS_FAILED;
    }
    i = end;
  }
  return GGML_STATUS_SUCCESS;
}

ggml_status Backend::ComputeNode(ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_SET_ROWS:
      return SetRows(node);
    case GGML_OP_FLASH_ATTN_EXT:
      return Attend(node);
    case GGML_OP_ROPE:
      if (KvOf(node) != nullptr) return Shift(node);
      return HostCompute(node, "");
    default:
      return HostCompute(node, "an op the store does not know");
  }
}

ggml_status Backend::Compute(ggml_cgraph* graph) {
  NoteWork();
  const std::span nodes(ggml_graph_nodes(graph),
                        static_cast<std::size_t>(ggml_graph_n_nodes(graph)));
  // Heads first: rows of a graph may come before the attention that tells their layout.
  attentions_.clear();
  for (const ggml_tensor* node : nodes) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT || OurBuffer(node->src[1]) == nullptr ||
        OurBuffer(node->src[2]) == nullptr)
      continue;
    const AttentionLayout layout = LayoutOf(node);
    if (PrepareAttention(layout)) attentions_.push_back(layout);
  }
  for (ggml_tensor* node : nodes) {
    if (IsViewOp(node) || ggml_is_empty(node) || !(node->flags & GGML_TENSOR_FLAG_COMPUTE))
      continue;
    if (abort_callback != nullptr && abort_callback(abort_data)) return GGML_STATUS_ABORTED;
    if (Buffer* b = OurBuffer(node)) b->Announce();
    if (ggml_status s = ComputeNode(node); s != GGML_STATUS_SUCCESS) return s;
  }
  return GGML_STATUS_SUCCESS;
}

}  // namespace kvtamp::ggml_plugin
