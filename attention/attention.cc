#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <string>

#include "attention/choose.h"
#include "attention/kernels.h"
#include "attention/unit.h"

namespace kvtamp::attention {
namespace {

// Units per thread, so that a slow thread does not hold up the others.
constexpr std::uint32_t kUnitsPerThread = 4;
// A shorter run costs more in merging than it gains.
constexpr std::uint32_t kMinRunTokens = 256;
// Multiply-adds that one thread is through with by the time a team has met and parted.
constexpr std::size_t kMinTeamWork = 1 << 17;

// How one job is cut: blocks of query rows, each against runs of pages.
struct JobPlan {
  const Job* job;
  bool decode;
  std::uint32_t rows;        // per KV head
  std::uint32_t block_rows;  // at most
  std::uint32_t n_blocks;    // per KV head
  std::uint32_t n_runs;      // per block
  std::uint32_t run_pages;
  std::size_t first_unit, first_block, first_partial;  // partial: in rows
  bool choose;                                         // pages to read, by their bounds
  std::size_t first_choice;                            // of n_head_kv * n_blocks

  std::size_t n_units(std::uint32_t n_head_kv) const {
    return std::size_t{n_head_kv} * n_blocks * n_runs;
  }
};

struct Plan {
  const Layer* layer;
  const Params* params;
  JobPlan* jobs;
  std::size_t n_jobs = 0;
  std::size_t n_units = 0;
  std::size_t n_blocks = 0;    // of blocks with several runs
  std::size_t n_partials = 0;  // rows of partial results of those
  std::size_t n_choices = 0;   // blocks whose pages are chosen
  std::size_t scratch = 0;     // bytes per thread
  std::uint32_t max_rows = 0;  // of a unit
};

void CutRows(const Plan& plan, JobPlan& j, std::uint32_t prefill_lanes) {
  j.rows = j.job->n_tok * (plan.params->n_head / plan.layer->n_head_kv);
  // Integer dot products need V coded per token: latent attention takes the other way at any size.
  j.decode = j.rows <= kMaxDecodeRows && !plan.layer->v_in_k;
  j.block_rows = j.decode ? kMaxDecodeRows : kMaxPrefillRows / prefill_lanes * prefill_lanes;
  j.n_blocks = (j.rows + j.block_rows - 1) / j.block_rows;
  const Params& p = *plan.params;
  j.choose = j.decode && p.max_bias == 0 && p.top_pages != 0 && j.job->pages.size() > p.top_pages;
}

// Smaller blocks, then runs of pages, until every thread has enough units.
void CutForThreads(const Plan& plan, JobPlan& j, std::uint32_t prefill_lanes,
                   std::size_t all_blocks, std::uint32_t n_threads) {
  const auto n_pages = static_cast<std::uint32_t>(j.job->pages.size());
  const std::size_t wanted = n_threads == 1 ? 1 : std::size_t{n_threads} * kUnitsPerThread;
  while (!j.decode && all_blocks < wanted && j.block_rows > 2 * prefill_lanes) {
    const std::uint32_t before = j.n_blocks;
    j.block_rows -= prefill_lanes;
    j.n_blocks = (j.rows + j.block_rows - 1) / j.block_rows;
    all_blocks += std::size_t{j.n_blocks - before} * plan.layer->n_head_kv;
  }
  const std::uint32_t min_pages = std::max(1u, kMinRunTokens / plan.layer->page_size);
  const auto by_threads =
      static_cast<std::uint32_t>((wanted + all_blocks - 1) / std::max<std::size_t>(1, all_blocks));
  j.n_runs = std::clamp((n_pages + min_pages - 1) / min_pages, 1u, std::max(1u, by_threads));
  j.run_pages = (n_pages + j.n_runs - 1) / j.n_runs;
  j.n_runs = j.run_pages == 0 ? 1 : (n_pages + j.run_pages - 1) / j.run_pages;
}

// Looks at no more pages than it takes to know.
bool WorthATeam(const Layer& layer, std::span<const Job> jobs, const Params& params) {
  std::size_t work = 0;
  for (const Job& job : jobs) {
    const std::size_t per_row =
        std::size_t{job.n_tok} * params.n_head * (layer.dim_k + layer.dim_v);
    for (std::size_t i = 0; i < job.pages.size() && work < kMinTeamWork; ++i)
      work += job.pages[i].rows * per_row;
  }
  return work >= kMinTeamWork;
}

void MakePlan(Plan& plan, std::span<const Job> jobs, std::uint32_t n_threads) {
  const std::uint32_t lanes = PrefillLanes();
  std::size_t all_blocks = 0;
  for (const Job& job : jobs) {
    if (job.n_tok == 0) continue;
    JobPlan& j = plan.jobs[plan.n_jobs++];
    j.job = &job;
    CutRows(plan, j, lanes);
    all_blocks += std::size_t{j.n_blocks} * plan.layer->n_head_kv;
  }
  for (std::size_t i = 0; i < plan.n_jobs; ++i) {
    JobPlan& j = plan.jobs[i];
    CutForThreads(plan, j, lanes, all_blocks, n_threads);
    j.first_unit = plan.n_units;
    j.first_block = plan.n_blocks;
    j.first_partial = plan.n_partials;
    j.first_choice = plan.n_choices;
    if (j.choose) plan.n_choices += std::size_t{plan.layer->n_head_kv} * j.n_blocks;
    plan.n_units += j.n_units(plan.layer->n_head_kv);
    if (j.n_runs > 1) {
      plan.n_blocks += std::size_t{plan.layer->n_head_kv} * j.n_blocks;
      plan.n_partials += std::size_t{plan.layer->n_head_kv} * j.n_blocks * j.n_runs *
                         std::min(j.rows, j.block_rows);
    }
    const std::uint32_t rows = std::min(j.rows, j.block_rows);
    plan.max_rows = std::max(plan.max_rows, rows);
    plan.scratch = std::max(plan.scratch, j.decode ? DecodeScratch(*plan.layer, rows)
                                                   : PrefillScratch(*plan.layer, rows));
  }
}

void WriteRows(const Plan& plan, const Unit& unit, float* partials, std::size_t run_stride,
               std::uint32_t n_runs) {
  for (std::uint32_t r = 0; r < unit.rows; ++r) {
    const std::uint32_t head = unit.head(r);
    Finish(partials + std::size_t{r} * PartialStride(*plan.layer), run_stride, n_runs,
           plan.params->sinks == nullptr ? nullptr : plan.params->sinks + head, plan.layer->dim_v,
           unit.job->out + unit.token(r) * unit.job->out_tok_stride +
               head * unit.job->out_head_stride);
  }
}

struct Shared {
  const Plan& plan;
  std::atomic<std::size_t>& next;         // unit
  std::atomic<std::uint32_t>* runs_done;  // [n_blocks]
  float* partials;                        // [n_partials, PartialStride]
  std::uint8_t* scratch;                  // [threads, scratch_stride]
  std::size_t scratch_stride, result_bytes;
  const PageChoice* choices;  // [n_choices]
};

// Heads innermost: f16 rows hold all heads, and a page's heads lie together.
Unit UnitOf(const Shared& s, const JobPlan& j, std::size_t block, std::size_t run) {
  const Layer& layer = *s.plan.layer;
  Unit unit;
  unit.layer = &layer;
  unit.job = j.job;
  unit.params = s.plan.params;
  unit.head_kv = static_cast<std::uint32_t>(block % layer.n_head_kv);
  unit.row0 = static_cast<std::uint32_t>(block / layer.n_head_kv) * j.block_rows;
  unit.rows = std::min(j.block_rows, j.rows - unit.row0);
  unit.page0 = static_cast<std::uint32_t>(run) * j.run_pages;
  unit.page1 = std::min(unit.page0 + j.run_pages, static_cast<std::uint32_t>(j.job->pages.size()));
  unit.choice = j.choose ? s.choices + j.first_choice + block : nullptr;
  return unit;
}

void BoundPages(const Shared& s, const JobPlan& j, std::size_t index, std::uint8_t* scratch) {
  if (!j.choose) return;
  const std::size_t n = std::size_t{s.plan.layer->n_head_kv} * j.n_blocks;
  const Unit unit = UnitOf(s, j, index % n, index / n);
  RunBounds(unit, scratch, unit.choice->bounds, unit.choice->n_pages);
}

void RunUnit(const Shared& s, const JobPlan& j, std::size_t index, std::uint8_t* scratch) {
  const Layer& layer = *s.plan.layer;
  const std::size_t run = index / (std::size_t{layer.n_head_kv} * j.n_blocks);
  const std::size_t block = index % (std::size_t{layer.n_head_kv} * j.n_blocks);
  const Unit unit = UnitOf(s, j, block, run);
  const std::size_t rows = std::min(j.rows, j.block_rows), run_stride = rows * PartialStride(layer);
  float* first = reinterpret_cast<float*>(scratch);
  if (j.n_runs > 1)
    first = s.partials + (j.first_partial + block * j.n_runs * rows) * PartialStride(layer);
  float* result = first + run * run_stride;
  (j.decode ? RunDecode : RunPrefill)(unit, scratch + s.result_bytes, result);
  if (j.n_runs > 1) {  // whoever ends last merges: no second round of the team
    std::atomic<std::uint32_t>& done = s.runs_done[j.first_block + block];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 != j.n_runs) return;
  }
  WriteRows(s.plan, unit, first, run_stride, j.n_runs);
}

template <class F>
void Work(const Shared& s, int worker, F&& run) {
  std::uint8_t* scratch = s.scratch + static_cast<std::size_t>(worker) * s.scratch_stride;
  std::size_t job = 0;
  for (;;) {
    const std::size_t unit = s.next.fetch_add(1, std::memory_order_relaxed);
    if (unit >= s.plan.n_units) return;
    while (job + 1 < s.plan.n_jobs && s.plan.jobs[job + 1].first_unit <= unit) ++job;
    run(s, s.plan.jobs[job], unit - s.plan.jobs[job].first_unit, scratch);
  }
}

// Lays out what choosing takes in `arena`; from a null base it only counts.
PageChoice* LayOutChoices(Arena& arena, const Plan& plan, bool fill) {
  auto* choices = arena.Take<PageChoice>(plan.n_choices);
  for (std::size_t i = 0; i < plan.n_jobs; ++i) {
    const JobPlan& j = plan.jobs[i];
    if (!j.choose) continue;
    for (std::size_t block = 0; block < std::size_t{plan.layer->n_head_kv} * j.n_blocks; ++block) {
      PageChoice c;
      c.n_pages = static_cast<std::uint32_t>(j.job->pages.size());
      const auto first = static_cast<std::uint32_t>(block / plan.layer->n_head_kv) * j.block_rows;
      c.rows = std::min(j.block_rows, j.rows - first);
      const std::size_t n = std::size_t{c.rows} * c.n_pages;
      c.bounds = arena.Take<float>(n);
      c.read = arena.Take<std::uint64_t>((c.n_pages + 63) / 64);
      if (fill) choices[j.first_choice + block] = c;
    }
  }
  return choices;
}

}  // namespace

Status Check(const Layer& layer, std::span<const Job> jobs, const Params& params) {
  const auto bad = [](std::uint32_t dim) {
    return dim < 8 || dim > codec::kMaxDim || dim % 8 != 0;
  };
  if (layer.n_head_kv == 0 || params.n_head == 0 || params.n_head % layer.n_head_kv != 0 ||
      params.n_head / layer.n_head_kv > kMaxGqa) {
    return Status::Invalid("attention: " + std::to_string(params.n_head) + " query heads over " +
                           std::to_string(layer.n_head_kv) + " KV heads");
  }
  if (bad(layer.dim_k) || bad(layer.dim_v)) {
    return Status::Invalid("attention: head sizes " + std::to_string(layer.dim_k) + " and " +
                           std::to_string(layer.dim_v) + " are not multiples of 8 up to " +
                           std::to_string(codec::kMaxDim));
  }
  if (layer.turn.first + 2 * layer.turn.pairs > layer.dim_k)
    return Status::Invalid("attention: a turn of more channels than a key has");
  if (layer.v_in_k &&
      (layer.dim_v > layer.dim_k || (layer.turn.pairs != 0 && layer.turn.first < layer.dim_v)))
    return Status::Invalid("attention: V lies in K, but beyond it or where keys are turned");
  const std::uint32_t ps = layer.page_size;
  if (ps != 16 && ps != 32 && ps != 64 && ps != 128) {
    return Status::Invalid("attention: page size " + std::to_string(ps) +
                           " is not 16, 32, 64 or 128");
  }
  for (const Job& job : jobs) {
    for (const Page& page : job.pages) {
      if (page.rows > ps)
        return Status::Invalid("attention: a page holds more rows than the page size");
      if (page.turn != nullptr && layer.turn.pairs == 0)
        return Status::Invalid("attention: a turned page in a layer without turns");
      if (!layer.v_in_k && page.v_layout != nullptr &&
          (layer.v_group == 0 || layer.dim_v % layer.v_group != 0)) {
        return Status::Invalid("attention: V group " + std::to_string(layer.v_group) +
                               " does not divide " + std::to_string(layer.dim_v));
      }
      for (const codec::SideLayout* layout : {page.k_layout, page.v_layout}) {
        if (layout != nullptr && layout->heads.size() != layer.n_head_kv)
          return Status::Invalid("attention: a page's layout of another number of heads");
      }
    }
  }
  return Status::Ok();
}

float Slope(std::uint32_t head, std::uint32_t n_head, float max_bias) {
  if (max_bias <= 0.0f) return 1.0f;
  std::uint32_t n = 1;
  while (2 * n <= n_head) n *= 2;
  const float base = std::exp2(-max_bias / static_cast<float>(n));
  const float base2 = std::exp2(-max_bias / 2.0f / static_cast<float>(n));
  return head < n ? std::pow(base, static_cast<float>(head + 1))
                  : std::pow(base2, static_cast<float>(2 * (head - n) + 1));
}

void TurnedQuery(const Layer& layer, const float* turn, const float* q, float scale, float* out,
                 std::size_t stride) {
  for (std::uint32_t c = 0; c < layer.dim_k; ++c) out[c * stride] = q[c] * scale;
  if (turn == nullptr) return;
  for (std::uint32_t i = 0; i < layer.turn.pairs; ++i) {
    const std::uint32_t a = layer.turn.a(i), b = layer.turn.b(i);
    const float cos = turn[2 * i] * scale, sin = turn[2 * i + 1] * scale;
    out[a * stride] = cos * q[a] + sin * q[b];
    out[b * stride] = cos * q[b] - sin * q[a];
  }
}

std::uint8_t* Workspace::Get(std::size_t n) {
  if (storage_.size() < n + 64) {
    try {
      storage_ = {};  // nothing is worth copying
      storage_.resize(n + 64);
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
  }
  const auto at = reinterpret_cast<std::uintptr_t>(storage_.data());
  return storage_.data() + ((at + 63) / 64 * 64 - at);
}

Status Attend(const Layer& layer, std::span<const Job> jobs, const Params& params,
              Workspace& workspace, Executor& executor, PagesRead* counts) {
  if (Status status = Check(layer, jobs, params); !status.ok()) return status;
  Layer checked = layer;
  if (checked.v_group == 0 || checked.dim_v % checked.v_group != 0)
    checked.v_group = checked.dim_v;  // unused

  const bool alone = executor.n_threads() <= 1 || !WorthATeam(layer, jobs, params);
  const auto n_threads = alone ? 1 : static_cast<std::uint32_t>(executor.n_threads());
  // Plans first, since they say how much else is needed.
  std::uint8_t* memory = workspace.Get(jobs.size() * sizeof(JobPlan));
  if (memory == nullptr) return Status::OutOfMemory("attention: no scratch memory");
  Plan plan{&checked, &params, reinterpret_cast<JobPlan*>(memory)};
  MakePlan(plan, jobs, n_threads);
  if (plan.n_units == 0) return Status::Ok();

  const std::size_t result_bytes =
      (plan.max_rows * PartialStride(checked) * sizeof(float) + 63) / 64 * 64;
  const std::size_t scratch_stride = result_bytes + (plan.scratch + 63) / 64 * 64;
  JobPlan* jobs_at = nullptr;
  std::atomic<std::uint32_t>* runs_done = nullptr;
  float* partials = nullptr;
  std::uint8_t* scratch = nullptr;
  PageChoice* choices = nullptr;
  const auto lay_out = [&](std::uint8_t* base) {
    Arena arena(base);
    jobs_at = arena.Take<JobPlan>(plan.n_jobs);
    runs_done = arena.Take<std::atomic<std::uint32_t>>(plan.n_blocks);
    partials = arena.Take<float>(plan.n_partials * PartialStride(checked));
    scratch = arena.Take<std::uint8_t>(n_threads * scratch_stride);
    choices = LayOutChoices(arena, plan, base != nullptr);
    return arena.used();
  };
  const std::size_t before = workspace.bytes();
  memory = workspace.Get(lay_out(nullptr));
  if (memory == nullptr) return Status::OutOfMemory("attention: no scratch memory");
  if (workspace.bytes() != before) {  // it grew, so the plans are gone
    plan = Plan{&checked, &params, reinterpret_cast<JobPlan*>(memory)};
    MakePlan(plan, jobs, n_threads);
  }
  lay_out(memory);
  for (std::size_t i = 0; i < plan.n_blocks; ++i) new (runs_done + i) std::atomic<std::uint32_t>(0);
  std::atomic<std::size_t> next{0};
  const Shared shared{plan,    next,           runs_done,    partials,
                      scratch, scratch_stride, result_bytes, choices};
  const auto for_all = [&](auto&& run) {
    auto work = [&](int worker) { Work(shared, worker, run); };
    alone ? work(0) : executor.ForEachWorker(work);
  };
  if (plan.n_choices != 0) {
    for_all(BoundPages);
    next = 0;
    std::vector<float> worth;
    for (std::size_t i = 0; i < plan.n_choices; ++i) {
      const std::uint32_t read = ChoosePages(choices[i], params.top_pages, worth);
      if (counts == nullptr) continue;
      counts->read += read;
      counts->seen += static_cast<std::uint64_t>(
          std::count_if(worth.begin(), worth.end(), [](float x) { return !(x < -3e38f); }));
    }
  }
  for_all(RunUnit);
  return Status::Ok();
}

}  // namespace kvtamp::attention
