#include "store/cache.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>

#include "cpu/convert.h"

namespace kvtamp::store {

using codec::Side;

namespace {
constexpr std::uint64_t kMaxRowsApart = 256;  // of a layer, for values f16 cannot hold
// As an integer: without their sign, floats are in the order of integers.
constexpr auto kMaxFinite = std::bit_cast<std::int32_t>(std::numeric_limits<float>::max());
}  // namespace

Cache::Cache(const Options& options, std::uint32_t n_streams, std::uint32_t n_cells)
    : options_(options), n_streams_(n_streams), n_cells_(n_cells) {
  if (!options_.prune.policy.empty()) pruner_.emplace(options_.prune);
}

Cache::~Cache() = default;

Cache::Layer* Cache::Get(std::uint32_t layer) {
  return layer < layers_.size() ? layers_[layer].get() : nullptr;
}

Status Cache::AddLayer(std::uint32_t layer, std::uint32_t n_embd_k, std::uint32_t n_embd_v,
                       const codec::Pair& format, std::vector<codec::Pair> heads) {
  const Gate::Host host(gate_);
  if (n_embd_k == 0 || n_cells_ == 0) return Status::Invalid("a layer needs cells and a row size");
  if (Get(layer) != nullptr) return Status::Invalid("layer " + std::to_string(layer) + " exists");
  if (layers_.size() <= layer) layers_.resize(layer + 1u);
  layers_[layer] = std::make_unique<Layer>();
  Layer& l = *layers_[layer];
  l.format = format;
  l.heads = std::move(heads);
  l.shape.n_embd_k = n_embd_k;
  l.shape.n_embd_v = n_embd_v;
  l.shape.page_size = options_.page_size;
  l.shape.n_sink = options_.n_sink;
  l.shape.residual_length = options_.residual_length;
  l.shape.hollow = options_.hollow;
  l.shape.prunes = pruner_.has_value();
  if (pruner_) l.observed.resize(n_streams_);
  l.streams.resize(n_streams_);
  for (auto& s : l.streams) s = std::make_unique<Stream>(l.shape, allocator_);
  return Status::Ok();
}

void Cache::RemoveLayer(std::uint32_t layer) {
  const Gate::Host host(gate_);
  if (Layer* l = Get(layer)) {
    for (auto& s : l->streams) s->Clear();
    layers_[layer].reset();
  }
}

Status Cache::SetLayouts(Layer& l) const {
  LayerShape& s = l.shape;
  if (!l.heads.empty() && l.heads.size() != s.n_head_kv)
    return Status::Unsupported("a profile of " + std::to_string(l.heads.size()) +
                               " KV heads for a layer that has " + std::to_string(s.n_head_kv));
  for (Side side : {Side::kK, Side::kV}) {
    const codec::Format& format = side == Side::kK ? s.k : s.v;
    if (s.n_embd(side) == 0 || !format.coded()) continue;
    codec::Format int8{codec::Levels::kInt, 800, codec::Axis::kChannel};
    int8.mean = format.mean;
    if (side == Side::kV) {
      int8 = {codec::Levels::kInt, 800, codec::Axis::kToken, 0, true, format.hadamard};
      if (format.axis == codec::Axis::kToken) int8.group = format.group;
      auto resolved = codec::Resolve(int8, side, s.dim(side));
      if (!resolved.ok()) return resolved.status();
      int8 = resolved.value();
      s.v_group = int8.group;
    }
    const auto layout = [&](const codec::Format& all,
                            bool by_head) -> Result<std::shared_ptr<codec::SideLayout>> {
      auto made = std::make_shared<codec::SideLayout>();
      for (std::uint32_t h = 0; h < s.n_head_kv; ++h) {
        codec::Format f = all;
        if (by_head && !l.heads.empty()) {
          f = side == Side::kK ? l.heads[h].k : l.heads[h].v;
          f.group = all.group;
          if (f.mean != all.mean || f.hadamard != all.hadamard || !f.coded())
            return Status::Unsupported("heads of one layer whose formats differ in more than bits");
        }
        const auto coding = codec::CodingOf(f, side);
        if (!coding.ok()) return coding.status();
        made->Add(coding.value(), codec::ShapeOf(f, side, s.dim(side), s.page_size));
        if (side == Side::kK) s.k_weighted = s.k_weighted || f.weighted;
      }
      return made;
    };
    auto final = layout(format, true);
    if (!final.ok()) return final.status();
    const int i = static_cast<int>(side);
    s.final[i] = final.value();
    s.ladder[i] = {s.final[i]->heads};
    for (std::uint32_t centibits : {400u, 300u, 200u, 150u, 100u}) {
      if (!s.prunes || !options_.prune.demote) break;
      const auto bits = static_cast<std::uint16_t>(centibits);
      const auto format_of = codec::Resolve(codec::WithBits(format, side, bits), side, s.dim(side));
      if (!format_of.ok()) return format_of.status();
      const auto fewer = layout(format_of.value(), false);
      if (fewer.ok()) s.ladder[i].push_back(fewer.value()->heads);
    }
    if (!options_.int8_window) continue;
    if (format == int8 && l.heads.empty()) {
      s.window[i] = s.final[i];
    } else if (auto window = layout(int8, false); window.ok()) {
      s.window[i] = window.value();
    }
  }
  return Status::Ok();
}

// E[q²] per channel, over all queries so far and the query heads of a KV head.
void Cache::NoteQueries(Layer& l, const attention::Job& job, std::uint32_t n_head) {
  const std::uint32_t dim = l.shape.dim(Side::kK), gqa = n_head / l.shape.n_head_kv;
  if (!l.shape.k_weighted || gqa == 0 || job.n_tok == 0) return;
  std::vector<float>& mean = l.shape.k_weight;
  mean.resize(l.shape.n_embd_k);
  const std::uint64_t n = std::uint64_t{job.n_tok} * gqa;
  const float share = static_cast<float>(n) / static_cast<float>(l.q_count + n);
  for (std::uint32_t head = 0; head < l.shape.n_head_kv; ++head) {
    float sum[codec::kMaxDim];
    std::fill_n(sum, dim, 0.0f);
    for (std::uint32_t i = 0; i < gqa * job.n_tok; ++i) {
      const float* q =
          job.q + i / gqa * job.q_tok_stride + (head * gqa + i % gqa) * job.q_head_stride;
      for (std::uint32_t c = 0; c < dim; ++c) sum[c] += q[c] * q[c];
    }
    // Loops without branches, since every token comes here. Of a query that is not finite nothing
    // is learnt.
    std::int32_t bad = 0;
    for (std::uint32_t c = 0; c < dim; ++c)
      bad |= (std::bit_cast<std::int32_t>(sum[c]) & INT32_MAX) > kMaxFinite;
    if (bad != 0) continue;
    float* to = mean.data() + std::size_t{head} * dim;
    const auto count = static_cast<float>(n);
    for (std::uint32_t c = 0; c < dim; ++c) to[c] += (sum[c] / count - to[c]) * share;
  }
  l.q_count += n;
}

Status Cache::SetHeads(std::uint32_t layer, std::uint32_t n_head_kv) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l == nullptr) return Status::Invalid("no layer " + std::to_string(layer));
  LayerShape& s = l->shape;
  if (s.n_head_kv == n_head_kv) return Status::Ok();
  const std::string what = "layer " + std::to_string(layer) + ": ";
  if (s.n_head_kv != 0) return Status::Unsupported(what + "its number of KV heads changed");
  if (n_head_kv == 0 || s.n_embd_k % n_head_kv != 0 || s.n_embd_v % n_head_kv != 0)
    return Status::Invalid(what + "rows do not divide into " + std::to_string(n_head_kv) +
                           " heads");
  const std::uint32_t dk = s.n_embd_k / n_head_kv, dv = s.n_embd_v / n_head_kv;
  for (std::uint32_t d : {dk, dv}) {
    if (d == 0 && s.n_embd_v == 0) continue;
    if (d % 8 != 0 || d < 32 || d > codec::kMaxDim)
      return Status::Unsupported(what + "head size " + std::to_string(d) +
                                 " (32 to 576 in steps of 8 are handled)");
  }
  auto k = codec::Resolve(l->format.k, Side::kK, dk);
  if (!k.ok()) return k.status();
  s.k = k.value();
  if (s.n_embd_v != 0) {
    auto v = codec::Resolve(l->format.v, Side::kV, dv);
    if (!v.ok()) return v.status();
    s.v = v.value();
  }
  s.n_head_kv = n_head_kv;
  for (auto& stream : l->streams) stream->NoteAllEvicted();
  return SetLayouts(*l);
}

Status Cache::Write(std::uint32_t layer, Side side, std::span<const std::uint64_t> cells,
                    const float* rows, std::size_t stride, const Sight* sight) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l == nullptr) return Status::Invalid("no layer " + std::to_string(layer));
  if (Status s = FlushCopy(*l); !s.ok()) return s;
  for (auto& stream : l->streams) stream->BeginBatch();
  const std::uint32_t n_embd = l->shape.n_embd(side);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (cells[i] >= std::uint64_t{n_cells_} * n_streams_)
      return Status::Invalid("cell " + std::to_string(cells[i]) + " is outside the cache");
    auto place = StreamOf(*l, cells[i])
                     .Place(side, static_cast<std::uint32_t>(cells[i] % n_cells_), sight, i);
    if (!place.ok()) return place.status();
    const std::uint64_t clamped = cpu::FloatToHalf(rows + i * stride, place.value(), n_embd);
    if (clamped == 0) continue;
    // Such a row would spoil the scales of its whole page: it stays f16, as long as they are few.
    clamped_ += clamped;
    if (l->rows_clamped++ < kMaxRowsApart)
      StreamOf(*l, cells[i]).MarkSink(static_cast<std::uint32_t>(cells[i] % n_cells_));
  }
  if (side == Side::kK) NoteWritten(*l, cells);
  return Status::Ok();
}

Status Cache::Write(std::uint32_t layer, Side side, std::span<const std::uint64_t> cells,
                    const half_t* rows, std::size_t stride, const Sight* sight) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l == nullptr) return Status::Invalid("no layer " + std::to_string(layer));
  if (Status s = FlushCopy(*l); !s.ok()) return s;
  for (auto& stream : l->streams) stream->BeginBatch();
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (cells[i] >= std::uint64_t{n_cells_} * n_streams_)
      return Status::Invalid("cell " + std::to_string(cells[i]) + " is outside the cache");
    const auto cell = static_cast<std::uint32_t>(cells[i] % n_cells_);
    auto place = StreamOf(*l, cells[i]).Place(side, cell, sight, i);
    if (!place.ok()) return place.status();
    if (options_.hollow) continue;
    const half_t* row = rows + i * stride;
    std::memcpy(place.value(), row, l->shape.n_embd(side) * sizeof(half_t));
    if (side == Side::kK) StreamOf(*l, cells[i]).NoteEvicted(cell, row);
    const bool finite = std::all_of(row, row + l->shape.n_embd(side),
                                    [](half_t h) { return (h & 0x7C00) != 0x7C00; });
    if (!finite && l->rows_clamped++ < kMaxRowsApart) StreamOf(*l, cells[i]).MarkSink(cell);
  }
  if (side == Side::kK) NoteWritten(*l, cells);
  return Status::Ok();
}

// Keys of these cells are new.
void Cache::NoteWritten(Layer& l, std::span<const std::uint64_t> cells) {
  l.rows_written += cells.size();
  if (l.observed.empty()) return;
  for (std::uint64_t c : cells) {
    Observed& observed = l.observed[c / n_cells_];
    observed.rows++;
    observed.Forget(static_cast<std::uint32_t>(c % n_cells_));
  }
}

Status Cache::WriteZero(std::uint32_t layer, Side side, std::uint64_t cell) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l == nullptr) return Status::Invalid("no layer " + std::to_string(layer));
  if (Status s = FlushCopy(*l); !s.ok()) return s;
  return StreamOf(*l, cell).WriteZero(side, static_cast<std::uint32_t>(cell % n_cells_));
}

void Cache::DropFrom(std::uint32_t layer, std::uint32_t stream, std::uint32_t n_kv) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l != nullptr && FlushCopy(*l).ok()) l->streams[stream]->DropFrom(n_kv);
}

bool Cache::Read(std::uint32_t layer, Side side, std::uint64_t cell, half_t* row) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l == nullptr || !FlushCopy(*l).ok()) return false;
  return StreamOf(*l, cell).Read(side, static_cast<std::uint32_t>(cell % n_cells_), row);
}

std::size_t Cache::Evict(std::uint32_t layer, std::uint32_t stream, std::uint32_t head,
                         std::span<const std::uint32_t> cells) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l == nullptr || head >= l->shape.n_head_kv || !FlushCopy(*l).ok()) return 0;
  std::size_t n = 0;
  for (std::uint32_t c : cells) n += l->streams[stream]->Evict(head, c);
  return n;
}

void Cache::MarkSinks(std::uint32_t layer, std::uint32_t stream,
                      std::span<const std::uint32_t> cells) {
  const Gate::Host host(gate_);
  if (Layer* l = Get(layer))
    for (std::uint32_t c : cells) l->streams[stream]->MarkSink(c);
}

void Cache::BeginRestored(std::uint32_t layer, std::uint32_t stream) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l == nullptr) return;
  l->restored = true;
  l->streams[stream]->BeginRun();
}

Status Cache::SetValuesInKeys(std::uint32_t layer, std::uint32_t dim) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l == nullptr) return Status::Invalid("no layer " + std::to_string(layer));
  if (l->shape.v_in_k == dim) return Status::Ok();
  if (l->shape.n_embd_v != 0 || l->shape.n_head_kv == 0 || dim > l->shape.dim(Side::kK) ||
      dim % 8 != 0)
    return Status::Unsupported("layer " + std::to_string(layer) + ": values of " +
                               std::to_string(dim) + " channels inside keys");
  if (!l->shape.turns.empty() && l->shape.turn.first < dim)
    return Status::Unsupported("layer " + std::to_string(layer) + ": values where keys are turned");
  l->shape.v_in_k = dim;
  return Status::Ok();
}

Status Cache::Attend(std::uint32_t layer, std::span<const StreamJob> jobs,
                     const attention::Params& params, Executor& executor) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l == nullptr) return Status::Invalid("no layer " + std::to_string(layer));
  if (l->shape.n_head_kv == 0) return Status::Invalid("heads of the layer are not known");
  if (Status s = FlushCopy(*l); !s.ok()) return s;
  attention::Layer view;
  view.n_head_kv = l->shape.n_head_kv;
  view.dim_k = l->shape.dim(Side::kK);
  view.v_in_k = l->shape.v_in_k != 0;
  view.dim_v = view.v_in_k ? l->shape.v_in_k : l->shape.dim(Side::kV);
  if (view.dim_v == 0) return Status::Invalid("the layer has no values");
  view.page_size = l->shape.page_size;
  view.v_group = l->shape.v_group;
  view.v_hadamard = l->shape.v.hadamard;
  view.k_mean = l->shape.k_mean.empty() ? nullptr : l->shape.k_mean.data();
  view.turn = l->shape.turn;
  views_.clear();
  view_masks_.clear();
  view_ends_.clear();
  jobs_.clear();
  for (const StreamJob& j : jobs) {
    if (Status s = l->streams[j.stream]->FlushZeros(); !s.ok()) return s;
    l->streams[j.stream]->AppendViews(views_, view_masks_);
    view_ends_.push_back(views_.size());
  }
  std::size_t first = 0;
  for (std::size_t i = 0; i < jobs.size(); first = view_ends_[i++]) {
    NoteQueries(*l, jobs[i].job, params.n_head);
    jobs_.push_back(jobs[i].job);
    jobs_.back().pages = std::span(views_).subspan(first, view_ends_[i] - first);
  }
  attention::Params p = params;
  p.top_pages = options_.top_pages;
  Status status = attention::Attend(view, jobs_, p, workspace_, executor, &pages_read_);
  for (std::size_t i = 0; i < jobs.size() && pruner_ && status.ok(); ++i) {
    Observed& observed = l->observed[jobs[i].stream];
    if (pruner_->Due(observed))
      status = pruner_->Observe(view, jobs_[i], p, workspace_, executor, observed);
  }
  return status;
}

// Its place among the cache's layers counts, since a pyramid's share depends on it.
Pruner::Place Cache::PlaceOf(std::uint32_t layer, std::size_t stream) {
  std::uint32_t index = 0, n = 0;
  for (std::uint32_t il = 0; il < layers_.size(); ++il) {
    if (layers_[il] == nullptr) continue;
    if (il == layer) index = n;
    ++n;
  }
  Layer& l = *layers_[layer];
  return {index, n, l.shape, l.observed[stream], *l.streams[stream]};
}

Status Cache::Maintain(std::uint32_t layer, Executor& executor) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l == nullptr) return Status::Invalid("no layer " + std::to_string(layer));
  struct Item {
    Stream* stream;
    Stream::SealTask task;
  };
  // Without a page to code these stay empty, and nothing is allocated.
  std::vector<Item> items;
  std::vector<Stream::SealTask> tasks;
  std::vector<std::uint32_t> packs;
  Status status;
  const bool prunes = !l->observed.empty() && l->shape.n_head_kv != 0;
  for (std::size_t i = 0; i < l->streams.size(); ++i) {
    Stream* stream = l->streams[i].get();
    tasks.clear();
    packs.clear();
    const bool due = prunes && pruner_->Due(l->observed[i]);
    if (due) status = pruner_->Prune(PlaceOf(layer, i));
    if (status.ok()) status = stream->CollectSeals(tasks, packs);
    if (l->shape.k.mean && l->shape.k_mean.empty()) {
      const auto first = std::find_if(tasks.begin(), tasks.end(),
                                      [](const Stream::SealTask& t) { return t.side == Side::kK; });
      if (first != tasks.end() || !packs.empty()) {
        l->shape.k_mean = l->restored && !l->shape.k_mean_before.empty()
                              ? l->shape.k_mean_before
                              : stream->MeanKey(first != tasks.end() ? first->page : packs.front());
      }
    }
    if (status.ok()) status = stream->Pack(packs, tasks);
    if (due && status.ok()) status = pruner_->Demote(PlaceOf(layer, i), tasks);
    for (const Stream::SealTask& t : tasks) items.push_back({stream, t});
    if (!status.ok()) break;
  }
  if (!items.empty()) {
    const std::size_t n = items.size() * l->shape.n_head_kv;
    std::atomic<std::size_t> next{0};
    auto work = [&](int) {
      for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
        const Item& item = items[i / l->shape.n_head_kv];
        item.stream->EncodeHead(item.task, static_cast<std::uint32_t>(i % l->shape.n_head_kv));
      }
    };
    if (n > 1) {
      executor.ForEachWorker(work);
    } else {
      work(0);
    }
    for (Item& item : items) item.stream->FinishSeal(item.task);
  }
  for (auto& stream : l->streams)
    if (Status s = stream->Compact(); !s.ok() && status.ok()) status = s;
  return status;
}

Status Cache::ShiftK(std::uint32_t layer, std::span<const std::int32_t> delta,
                     const TurnShape& turn, const Angles& angles) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l == nullptr) return Status::Invalid("no layer " + std::to_string(layer));
  LayerShape& shape = l->shape;
  if (shape.n_head_kv == 0 || turn.first + 2 * turn.pairs > shape.dim(Side::kK))
    return Status::Invalid("a shift of more channels than a key has");
  if (!shape.turns.empty() && !(shape.turn == turn))
    return Status::Unsupported("keys that turn in two ways");
  if (turn.first < shape.v_in_k)
    return Status::Unsupported("values that would turn with their keys");
  if (Status s = FlushCopy(*l); !s.ok()) return s;
  const auto of_stream = [&](std::size_t s) {
    const std::size_t first = std::min<std::size_t>(s * n_cells_, delta.size());
    return delta.subspan(first, std::min<std::size_t>(n_cells_, delta.size() - first));
  };
  const auto in_use = [&](bool after) {
    std::vector<std::int32_t> used;
    for (std::size_t s = 0; s < l->streams.size(); ++s)
      l->streams[s]->AppendShifts(after ? of_stream(s) : std::span<const std::int32_t>(), used);
    std::sort(used.begin(), used.end());
    used.erase(std::unique(used.begin(), used.end()), used.end());
    return used;
  };
  for (auto& stream : l->streams)
    if (Status s = stream->FlushZeros(); !s.ok()) return s;
  // Angles first: a shift without them could not be read.
  shape.turn = turn;
  for (std::int32_t shift : in_use(true)) {
    if (shift == 0 || shape.turns.contains(shift)) continue;
    std::vector<float> cos_sin(std::size_t{2} * turn.pairs);
    if (Status s = angles(shift, cos_sin); !s.ok()) return s;
    shape.turns.emplace(shift, std::move(cos_sin));
  }
  Status status;
  for (std::size_t s = 0; s < l->streams.size() && status.ok(); ++s) {
    status = l->streams[s]->ShiftK(of_stream(s));
    if (status.ok()) status = l->streams[s]->SettleShifts();
  }
  const std::vector<std::int32_t> used = in_use(false);
  std::erase_if(shape.turns, [&](const auto& t) {
    return !std::binary_search(used.begin(), used.end(), t.first);
  });
  return status;
}

Status Cache::ReplaceK(std::uint32_t layer, std::uint32_t stream,
                       std::span<const std::uint32_t> cells, const half_t* rows) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l == nullptr) return Status::Invalid("no layer " + std::to_string(layer));
  if (Status s = FlushCopy(*l); !s.ok()) return s;
  if (Status s = l->streams[stream]->FlushZeros(); !s.ok()) return s;
  const std::uint32_t n_embd = l->shape.n_embd_k;
  return l->streams[stream]->RewriteK([&](std::uint32_t cell, half_t* row) {
    auto it = std::lower_bound(cells.begin(), cells.end(), cell);
    if (it == cells.end() || *it != cell) return false;
    std::memcpy(row, rows + static_cast<std::size_t>(it - cells.begin()) * n_embd,
                n_embd * sizeof(half_t));
    return true;
  });
}

Status Cache::CopyRows(Layer& l, Side side, std::uint32_t from, std::uint32_t to) {
  std::vector<half_t> row(l.shape.n_embd(side));
  for (std::uint32_t c = 0; c < n_cells_; ++c) {
    const bool has = l.streams[from]->Read(side, c, row.data());
    std::vector<half_t> old(row.size());
    if (!has && !l.streams[to]->Read(side, c, old.data())) continue;
    if (Status s = l.streams[to]->Write(side, c, row.data()); !s.ok()) return s;
  }
  return Status::Ok();
}

Status Cache::FlushCopy(Layer& l) {
  if (!l.copy_pending) return Status::Ok();
  l.copy_pending = false;
  return CopyRows(l, Side::kK, l.copy_from, l.copy_to);
}

Status Cache::CopySide(std::uint32_t layer, Side side, std::uint32_t from, std::uint32_t to) {
  const Gate::Host host(gate_);
  Layer* l = Get(layer);
  if (l == nullptr) return Status::Invalid("no layer " + std::to_string(layer));
  if (from == to) return Status::Ok();
  const bool whole = l->shape.n_embd_v == 0 || (side == Side::kV && l->copy_pending &&
                                                l->copy_from == from && l->copy_to == to);
  if (whole) {
    l->copy_pending = false;
    Status status;
    l->streams[to]->CopyFrom(*l->streams[from], status);
    if (!l->observed.empty()) l->observed[to] = l->observed[from];
    return status;
  }
  if (Status s = FlushCopy(*l); !s.ok()) return s;
  if (side == Side::kV) return CopyRows(*l, side, from, to);
  l->copy_pending = true;
  l->copy_from = from;
  l->copy_to = to;
  return Status::Ok();
}

void Cache::Clear() {
  const Gate::Host host(gate_);
  for (auto& layer : layers_) {
    if (layer == nullptr) continue;
    Layer& l = *layer;
    l.copy_pending = false;
    for (auto& s : l.streams) s->Clear();
    std::fill(l.observed.begin(), l.observed.end(), Observed());
    // No coded page is left that needs it.
    if (!l.shape.k_mean.empty()) l.shape.k_mean_before = std::move(l.shape.k_mean);
    l.shape.k_mean.clear();
    l.restored = false;
    l.shape.turns.clear();
  }
}

CacheBytes Cache::bytes() {
  const Gate::Guest guest(gate_);
  CacheBytes out;
  for (std::uint32_t id = 0; id < layers_.size(); ++id) {
    if (layers_[id] == nullptr) continue;
    Layer& l = *layers_[id];
    LayerBytes lb;
    lb.layer = id;
    lb.n_head_kv = l.shape.n_head_kv;
    if (l.shape.n_head_kv != 0) {
      lb.head_size_k = l.shape.dim(Side::kK);
      lb.head_size_v = l.shape.dim(Side::kV);
      lb.format = {l.shape.k, l.shape.v};
    } else {
      lb.format = l.format;
    }
    for (auto& s : l.streams) {
      const StreamBytes b = s->bytes();
      for (int side = 0; side < 2; ++side) {
        lb.sum.coded[side] += b.coded[side];
        lb.sum.scales[side] += b.scales[side];
        lb.sum.open[side] += b.open[side];
        lb.logical[side] +=
            b.live_rows * (side == 0 ? l.shape.n_embd_k : l.shape.n_embd_v) * sizeof(half_t);
      }
      lb.sum.sinks += b.sinks;
      lb.sum.window += b.window;
      lb.sum.filling += b.filling;
      lb.sum.slack += b.slack;
      lb.sum.index += b.index + sizeof(Stream);
      lb.sum.n_open += b.n_open;
      lb.sum.n_settled += b.n_settled;
      lb.sum.n_sealed += b.n_sealed;
      lb.sum.live_rows += b.live_rows;
      lb.sum.dead_rows += b.dead_rows;
      lb.sum.n_demoted += b.n_demoted;
      lb.sum.n_pruned += b.n_pruned;
    }
    std::vector<std::uint64_t> kept(l.shape.n_head_kv), demoted(l.shape.n_head_kv);
    bool pruned = false;
    for (auto& s : l.streams) pruned = s->CountEntries(kept, demoted) || pruned;
    for (std::uint32_t h = 0; h < kept.size() && pruned; ++h)
      lb.heads.push_back({kept[h], lb.sum.live_rows - kept[h], demoted[h]});
    lb.sum.index += l.shape.k_mean_before.capacity() * sizeof(float);
    lb.sum.index += l.shape.k_weight.capacity() * sizeof(float);
    for (const Observed& o : l.observed) lb.sum.index += o.bytes();
    for (const auto& [shift, angles] : l.shape.turns)
      lb.sum.index += sizeof(shift) + sizeof(angles) + angles.capacity() * sizeof(float);
    out.cells_used = std::max(out.cells_used, lb.sum.live_rows);
    out.rows_written = std::max(out.rows_written, l.rows_written);
    out.shared_index += sizeof(Layer);
    out.layers.push_back(lb);
  }
  // Blocks handed out are accounted by their owners up to their rounding to vector size.
  std::uint64_t claimed = 0;
  for (LayerBytes& lb : out.layers) {
    for (int s = 0; s < 2; ++s) claimed += lb.sum.coded[s] + lb.sum.scales[s] + lb.sum.open[s];
    claimed += lb.sum.slack;
    // Not of the allocator's memory.
    lb.sum.scales[0] += layers_[lb.layer]->shape.k_mean.capacity() * sizeof(float);
  }
  out.allocator_slack =
      allocator_.resident_bytes() > claimed ? allocator_.resident_bytes() - claimed : 0;
  out.shared_index += allocator_.index_bytes();
  out.scratch = workspace_.bytes() + views_.capacity() * sizeof(attention::Page);
  out.peak_pages = allocator_.peak_bytes();
  out.values_clamped = clamped_;
  out.pages_read = pages_read_;
  return out;
}

}  // namespace kvtamp::store
