#include "store/prune.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "attention/observe.h"
#include "policy/demote.h"
#include "policy/select.h"

namespace kvtamp::store {

using codec::Side;

namespace {

constexpr half_t kMasked = 0xFC00;
constexpr policy::Needs kAttention = policy::kAttentionSum | policy::kAttentionRows |
                                     policy::kAttentionWindow | policy::kAttentionLast;
constexpr policy::Needs kUnknown = policy::kAttentionMax | policy::kQueries;

// One head's numbers, in the order of its entries.
struct Gathered {
  std::vector<std::int32_t> positions;
  std::vector<float> mass, seen;
  std::vector<half_t> k, v;
  std::vector<float> scores;
  std::vector<std::uint8_t> is_protected;
};

std::vector<half_t> ReadAll(const Stream& stream, Side side, std::uint32_t dim, std::uint32_t head,
                            std::span<const Stream::Entry> entries) {
  std::vector<half_t> rows(entries.size() * dim);
  for (std::size_t i = 0; i < entries.size(); ++i)
    stream.ReadEntry(side, head, entries[i], rows.data() + i * dim);
  return rows;
}

policy::Rows RowsOf(const std::vector<half_t>& rows, std::uint32_t n, std::uint32_t dim) {
  policy::Rows out;
  out.f16 = rows.data();
  out.n = n;
  out.dim = dim;
  out.stride = dim;
  return out;
}

}  // namespace

Status CheckPruneOptions(const PruneOptions& options) {
  if (options.policy.empty()) return Status::Ok();
  const auto made = policy::MakePolicy(options.policy, options.scores);
  if (!made.ok()) return made.status();
  if ((made.value().needs() & kUnknown) != 0)
    return Status::Unsupported(made.value().name() + " needs " +
                               policy::NeedNames(made.value().needs() & kUnknown) +
                               ", which is not available behind ggml");
  const policy::HeadEntries none[1] = {};
  policy::BudgetOptions budget = options.budget;
  budget.ada = false;  // which wants scores
  return policy::Allocate(budget, 1, none).status();
}

void Observed::Forget(std::uint32_t cell) {
  if (cell >= cells) return;
  for (std::size_t at = cell; at < mass.size(); at += cells) mass[at] = 0;
  seen[cell] = 0;
}

Pruner::Pruner(const PruneOptions& options)
    : options_(options), policy_(policy::MakePolicy(options.policy, options.scores).value()) {
  const policy::Needs needs = policy_.needs();
  watches_ = (needs & kAttention) != 0;
  n_observe_ = options.scores.window_size;
  if ((needs & policy::kAttentionLast) != 0) n_observe_ = 1;
  window_ = (needs & (policy::kAttentionWindow | policy::kAttentionLast)) != 0 ? n_observe_ : 0;
}

Status Pruner::Observe(const attention::Layer& layer, const attention::Job& job,
                       const attention::Params& params, attention::Workspace& workspace,
                       Executor& executor, Observed& observed) const {
  if (!watches_ || job.n_tok == 0) return Status::Ok();
  const std::uint32_t n = layer.n_head_kv;
  if (observed.cells < job.n_kv) {
    std::vector<float> mass(std::size_t{n} * job.n_kv);
    for (std::uint32_t h = 0; h < n && observed.cells > 0; ++h)
      std::copy_n(observed.mass.begin() + std::ptrdiff_t{h} * observed.cells, observed.cells,
                  mass.begin() + std::ptrdiff_t{h} * job.n_kv);
    observed.mass = std::move(mass);
    observed.seen.resize(job.n_kv);
    observed.cells = job.n_kv;
  }
  const std::uint32_t n_tok = std::min(n_observe_, job.n_tok), first = job.n_tok - n_tok;
  for (std::uint32_t c = 0; c < job.n_kv; ++c) {
    std::uint32_t see = n_tok;
    for (std::uint32_t t = first; t < job.n_tok && job.mask != nullptr; ++t)
      see -= job.mask[t * job.mask_tok_stride + c] == kMasked;
    observed.seen[c] += static_cast<float>(see * (params.n_head / n));
    // So the newest `window_` queries that saw an entry count, the older ones less and less.
    if (window_ == 0 || see == 0) continue;
    const float left =
        1.0f - static_cast<float>(std::min(see, window_)) / static_cast<float>(window_);
    for (std::uint32_t h = 0; h < n; ++h)
      observed.mass[std::size_t{h} * observed.cells + c] *= left;
  }
  observed.seen_now = true;
  observed.gqa = params.n_head / n;
  return attention::Observe(layer, job, params, first, n_tok, observed.mass.data(), observed.cells,
                            workspace, executor);
}

struct Pruner::Scored {
  std::vector<Gathered> heads;
  std::vector<policy::HeadEntries> sizes;
};

bool Pruner::Demotes(const LayerShape& shape) const {
  return options_.demote && !shape.ladder[0].empty() &&
         (shape.n_embd_v == 0 || !shape.ladder[1].empty());
}

// Whether it is time, which then starts anew.
bool Pruner::Begin(const Place& place) const {
  Observed& observed = place.observed;
  if (!Due(observed) || (watches_ && !observed.seen_now)) return false;
  observed.rows = 0;
  observed.seen_now = false;
  return true;
}

std::uint32_t Pruner::MeanSize(const Stream::RunEntries& run) const {
  if (options_.budget.target_size != 0) return options_.budget.target_size;
  return std::max(
      1u, static_cast<std::uint32_t>(options_.budget.keep_ratio * static_cast<double>(run.rows)));
}

// A layer's share of a pyramid is reckoned as if all layers had the entries that this one has.
Result<std::vector<std::uint32_t>> Pruner::Keep(const Place& place, std::uint32_t mean, bool ada,
                                                std::span<const policy::HeadEntries> heads) const {
  policy::BudgetOptions budget = options_.budget;
  budget.target_size = mean;
  budget.ada = false;
  if (budget.pyramid && place.n_layers > 1) {
    std::vector<policy::HeadEntries> all;
    for (std::uint32_t il = 0; il < place.n_layers; ++il)
      all.insert(all.end(), heads.begin(), heads.end());
    const auto layers = policy::Allocate(budget, place.n_layers, all);
    if (!layers.ok()) return layers.status();
    std::uint64_t own = 0;
    for (std::size_t h = 0; h < heads.size(); ++h)
      own += layers.value().keep[place.index * heads.size() + h];
    budget.target_size = std::max(1u, static_cast<std::uint32_t>(own / heads.size()));
  }
  budget.pyramid = false;
  budget.ada = ada;
  auto made = policy::Allocate(budget, 1, heads);
  if (!made.ok()) return made.status();
  return std::move(made.value().keep);
}

Status Pruner::Score(const Place& place, const Stream::RunEntries& run, Scored& scored) const {
  const LayerShape& shape = place.shape;
  const Observed& observed = place.observed;
  const policy::Needs needs = policy_.needs();
  const auto n_heads = static_cast<std::uint32_t>(run.heads.size());
  scored.heads.resize(n_heads);
  std::vector<policy::Head> heads(n_heads);
  std::vector<std::span<float>> scores(n_heads);
  for (std::uint32_t h = 0; h < n_heads; ++h) {
    const auto& entries = run.heads[h];
    const auto n = static_cast<std::uint32_t>(entries.size());
    Gathered& g = scored.heads[h];
    for (const Stream::Entry& e : entries) {
      const bool known = e.cell < observed.cells;
      g.positions.push_back(e.position);
      g.mass.push_back(known ? observed.mass[std::size_t{h} * observed.cells + e.cell] : 0);
      g.seen.push_back(known ? observed.seen[e.cell] : 0);
      // What no query that was looked at has seen has no score yet.
      const bool unknown = watches_ && g.seen.back() == 0;
      const bool recent = run.next_position - e.position <= std::int64_t{options_.n_recent};
      g.is_protected.push_back(e.stays || unknown || recent);
    }
    g.scores.resize(n);
    scores[h] = g.scores;
    policy::Head& head = heads[h];
    head.n = n;
    head.positions = g.positions;
    head.attention_sum = head.attention_window = head.attention_last = g.mass;
    head.attention_rows = g.seen;
    const std::uint32_t dim_k = shape.dim(Side::kK), dim_v = shape.dim(Side::kV);
    const bool v_in_k = (needs & policy::kV) != 0 && dim_v == 0;
    if ((needs & policy::kK) != 0 || v_in_k) {
      g.k = ReadAll(place.stream, Side::kK, dim_k, h, entries);
      head.k = RowsOf(g.k, n, dim_k);
    }
    if (v_in_k) {
      head.v = head.k;
      if (shape.v_in_k != 0) head.v.dim = shape.v_in_k;
    } else if ((needs & policy::kV) != 0) {
      g.v = ReadAll(place.stream, Side::kV, dim_v, h, entries);
      head.v = RowsOf(g.v, n, dim_v);
    }
    scored.sizes.push_back({n, g.scores, g.is_protected});
  }
  policy::Layer layer;
  layer.index = place.index;
  layer.heads = heads;
  layer.next_position = run.next_position;
  layer.window_queries = window_ * observed.gqa;
  return policy_.Score(layer, scores);
}

Status Pruner::PruneRun(const Place& place, const Stream::RunEntries& run) const {
  const std::uint32_t mean = MeanSize(run);
  const bool fits = std::all_of(run.heads.begin(), run.heads.end(),
                                [&](const auto& entries) { return entries.size() <= mean; });
  if (fits && !options_.budget.pyramid) return Status::Ok();
  Scored scored;
  if (Status s = Score(place, run, scored); !s.ok()) return s;
  const auto keep = Keep(place, mean, options_.budget.ada, scored.sizes);
  if (!keep.ok()) return keep.status();
  for (std::uint32_t h = 0; h < run.heads.size(); ++h) {
    const auto& entries = run.heads[h];
    const std::vector<std::uint32_t> kept =
        policy::SelectKept(scored.heads[h].scores, scored.heads[h].is_protected, keep.value()[h]);
    auto next = kept.begin();
    for (std::uint32_t i = 0; i < entries.size(); ++i) {
      if (next != kept.end() && *next == i) {
        ++next;
      } else {
        place.stream.Evict(h, entries[i].cell);
      }
    }
  }
  return Status::Ok();
}

Status Pruner::Prune(const Place& place) const {
  if (Demotes(place.shape) || !Begin(place)) return Status::Ok();
  for (const Stream::RunEntries& run : place.stream.Entries())
    if (Status s = PruneRun(place, run); !s.ok()) return s;
  return Status::Ok();
}

namespace {

// What a head's page costs at each level, and what it loses there: those of fewer bytes than the
// one before, then none.
struct Ladder {
  std::vector<policy::Precision> precisions;
  std::vector<std::uint8_t> levels;
};

Ladder LadderOf(const LayerShape& shape, std::uint32_t head) {
  Ladder ladder;
  for (std::uint8_t level = 0; level < shape.ladder[0].size(); ++level) {
    std::uint32_t bytes = 0, codes = 0, elements = 0;
    for (int side = 0; side < 2; ++side) {
      if (shape.ladder[side].empty()) continue;
      const codec::SideLayout::Head& block = shape.ladder[side][level][head];
      bytes += block.bytes;
      codes += block.bytes - block.scales;
      elements += block.shape.rows * block.shape.dim;
    }
    if (level > 0 && bytes >= ladder.precisions.back().bytes) continue;
    // Each bit halves it.
    ladder.precisions.push_back(
        {bytes, std::exp2(-8.0f * static_cast<float>(codes) / static_cast<float>(elements))});
    ladder.levels.push_back(level);
  }
  ladder.precisions.push_back({0, 1});
  ladder.levels.push_back(LayerShape::kGone);
  return ladder;
}

}  // namespace

Status Pruner::DemoteRun(const Place& place, const Stream::RunEntries& run,
                         std::vector<Stream::SealTask>& tasks) const {
  Scored scored;
  const auto n_heads = static_cast<std::uint32_t>(run.heads.size());
  if (run.pages.empty()) return Status::Ok();
  if (Status s = Score(place, run, scored); !s.ok()) return s;
  const auto keep = Keep(place, MeanSize(run), false, scored.sizes);
  if (!keep.ok()) return keep.status();

  std::vector<Ladder> ladders;
  std::vector<policy::PrecisionTable> tables;
  for (std::uint32_t h = 0; h < n_heads; ++h) ladders.push_back(LadderOf(place.shape, h));
  for (const Ladder& l : ladders) tables.push_back(l.precisions);
  std::vector<std::vector<policy::Unit>> units(n_heads);  // [n_heads][pages]
  std::vector<std::vector<std::uint8_t>> planned(n_heads);
  std::vector<std::uint64_t> budgets(n_heads);
  std::vector<std::uint32_t> unit_of(1 + *std::max_element(run.pages.begin(), run.pages.end()),
                                     UINT32_MAX);
  for (std::uint32_t i = 0; i < run.pages.size(); ++i) unit_of[run.pages[i]] = i;
  for (std::uint32_t h = 0; h < n_heads; ++h) {
    const Gathered& g = scored.heads[h];
    const Ladder& ladder = ladders[h];
    const auto gone = static_cast<std::uint8_t>(ladder.levels.size() - 1);
    for (std::uint32_t page : run.pages) {
      const std::uint8_t level = place.stream.LevelOf(page, h);
      const auto now = static_cast<std::uint8_t>(
          std::find(ladder.levels.begin(), ladder.levels.end(), level) - ladder.levels.begin());
      units[h].push_back({0, h, std::min(now, gone), gone});
    }
    float least = 0;
    for (float x : g.scores)
      if (std::isfinite(x)) least = std::min(least, x);
    // Rows that are in no such page cost what they would there.
    std::uint64_t elsewhere = 0;
    for (std::uint32_t i = 0; i < run.heads[h].size(); ++i) {
      const std::uint32_t page = run.heads[h][i].page;
      const std::uint32_t at = page < unit_of.size() ? unit_of[page] : UINT32_MAX;
      if (at == UINT32_MAX) {
        ++elsewhere;
        continue;
      }
      policy::Unit& unit = units[h][at];
      if (std::isfinite(g.scores[i])) unit.mass += g.scores[i] - least;
      if (g.is_protected[i] != 0) unit.last = unit.first;
    }
    const std::uint64_t rows =
        keep.value()[h] - std::min<std::uint64_t>(keep.value()[h], elsewhere);
    budgets[h] = rows * ladder.precisions[0].bytes / place.shape.page_size;
  }
  const auto plan = [&](std::span<const policy::Unit> some, std::uint64_t budget) {
    std::uint64_t now = 0, least = 0;
    for (const policy::Unit& u : some) {
      now += tables[u.table][u.first].bytes;
      least += tables[u.table][u.last].bytes;
    }
    std::vector<std::uint8_t> precision;
    if (now <= budget) {
      for (const policy::Unit& u : some) precision.push_back(u.first);
      return precision;
    }
    auto made = policy::PlanPrecisions(tables, some, std::max(budget, least));
    if (made.ok()) precision = std::move(made.value().precision);
    return precision;
  };
  if (options_.budget.ada) {
    std::vector<policy::Unit> all;
    std::uint64_t budget = 0;
    for (std::uint32_t h = 0; h < n_heads; ++h) {
      all.insert(all.end(), units[h].begin(), units[h].end());
      budget += budgets[h];
    }
    const std::vector<std::uint8_t> precision = plan(all, budget);
    const std::size_t n = run.pages.size();
    for (std::uint32_t h = 0; h < n_heads && !precision.empty(); ++h)
      planned[h].assign(precision.begin() + static_cast<std::ptrdiff_t>(h * n),
                        precision.begin() + static_cast<std::ptrdiff_t>((h + 1) * n));
  } else {
    for (std::uint32_t h = 0; h < n_heads; ++h) planned[h] = plan(units[h], budgets[h]);
  }
  for (std::uint32_t i = 0; i < run.pages.size(); ++i) {
    LayerShape::Levels levels(n_heads);
    bool changes = false;
    for (std::uint32_t h = 0; h < n_heads; ++h) {
      if (planned[h].empty()) return Status::Internal("a page whose precision nobody planned");
      levels[h] = ladders[h].levels[planned[h][i]];
      changes = changes || planned[h][i] != units[h][i].first;
    }
    if (!changes) continue;
    if (Status s = place.stream.Demote(run.pages[i], levels, tasks); !s.ok()) return s;
  }
  return Status::Ok();
}

Status Pruner::Demote(const Place& place, std::vector<Stream::SealTask>& tasks) const {
  if (!Demotes(place.shape) || !Begin(place)) return Status::Ok();
  for (const Stream::RunEntries& run : place.stream.Entries())
    if (Status s = DemoteRun(place, run, tasks); !s.ok()) return s;
  return Status::Ok();
}

}  // namespace kvtamp::store
