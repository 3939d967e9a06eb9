// Runs: which open page a new row goes to.
#include <algorithm>

#include "store/stream.h"

namespace kvtamp::store {

using page::CellIndex;
using page::Page;
using page::State;

namespace {
constexpr half_t kMasked = 0xFC00;
// A page with more than so many rows behind the last one that a token sees is not its own.
constexpr std::uint32_t kMaxBehind = 16;
}  // namespace

bool Sight::Sees(std::size_t row, std::uint32_t cell) const {
  return cell < n_kv && mask[row * stride + cell] != kMasked;
}

void Stream::BeginRun() {
  run_ = kNoRun;
  first_rows_ = 0;
}

bool Stream::IsOpen(const Run& run) const {
  return run.page != CellIndex::kNone && pages_[run.page]->state == State::kOpen;
}

void Stream::SettleIdle() {
  for (std::uint32_t i = 0; i < runs_.size(); ++i) {
    if (!IsIdle(runs_[i]) || !IsOpen(runs_[i])) continue;
    Page& p = *pages_[runs_[i].page];
    if (p.live.count() * 4u < p.capacity) continue;  // its codes would take more than its rows do
    p.state = State::kSettled;
    unsealed_.push_back({runs_[i].page, i});
  }
}

void Stream::ForgetPage(std::uint32_t id) {
  for (Run& run : runs_)
    if (run.page == id) run.page = CellIndex::kNone;
}

void Stream::NoteOverwritten(std::uint32_t id) {
  ++clock_;
  for (Run& run : runs_)
    if (run.page == id) run.used = clock_;
  for (const Unsealed& u : unsealed_)
    if (u.page == id) runs_[u.run].used = clock_;
}

// What stands behind the last row of the run that the token sees: 0 if that is its last.
std::uint32_t Stream::RowsBehind(const Run& run, const Sight& sight, std::size_t row) const {
  const Page& p = *pages_[run.page];
  for (std::uint32_t behind = 0; behind < p.rows && behind <= kMaxBehind; ++behind)
    if (sight.Sees(row, p.cell(p.rows - 1u - behind))) return behind;
  return kMaxBehind + 1;
}

// The run whose last row is seen, latest first. Else one whose last rows are not seen but may be
// what the host took back (a rejected draft, a shortened answer), or a hole in the mask. They are
// not if they came with this batch and what is seen before them did not: then two sequences go on
// from one beginning. Nor if the row before was passed over already and is seen now.
std::uint32_t Stream::RunOf(const Sight& sight, std::size_t row) {
  std::uint32_t best = kNoRun, other = kNoRun, other_behind = kMaxBehind + 1;
  for (std::uint32_t i = 0; i < runs_.size(); ++i) {
    const Run& run = runs_[i];
    if (run.page == CellIndex::kNone || pages_[run.page]->rows == 0) continue;
    const std::uint32_t behind = RowsBehind(run, sight, row);
    if (behind == 0) {
      if (best == kNoRun || run.used > runs_[best].used) best = i;
    } else if (behind < other_behind && IsOpen(run)) {
      const std::uint32_t seen = pages_[run.page]->rows - 1u - behind;
      const bool parted = run.used >= batch_begin_ && seen < run.batch_row;
      if (parted || seen == run.passed_over) continue;
      other = i;
      other_behind = behind;
    }
  }
  if (best != kNoRun || other == kNoRun) return best;
  runs_[other].passed_over = pages_[runs_[other].page]->rows - 1u;
  return other;
}

// With all places taken the oldest run is ended; has it an open page, the new one goes on there.
std::uint32_t Stream::NewRun() {
  if (runs_.size() < kMaxRuns) {
    runs_.reserve(runs_.size() + 1);  // most streams have one
    runs_.emplace_back();
    runs_.back().serial = ++n_runs_;
    return static_cast<std::uint32_t>(runs_.size() - 1);
  }
  const auto oldest = std::min_element(runs_.begin(), runs_.end(),
                                       [](const Run& a, const Run& b) { return a.used < b.used; });
  oldest->serial = ++n_runs_;
  return static_cast<std::uint32_t>(oldest - runs_.begin());
}

// A token that does not see itself sees nothing that could tell.
Result<Stream::Run*> Stream::RunFor(std::uint32_t cell, const Sight* sight, std::size_t row) {
  if (sight != nullptr && sight->Sees(row, cell)) run_ = RunOf(*sight, row);
  if (run_ == kNoRun) run_ = NewRun();
  Run& run = runs_[run_];
  if (!IsOpen(run)) {
    auto id = NewPage(shape_.page_size, false);
    if (!id.ok()) return id.status();
    run.page = id.value();
    run.passed_over = CellIndex::kNone;
    run.batch_row = 0;
    if (shape_.prunes) NotePage(run.page, {run.serial, clock_});
  } else if (run.used < batch_begin_) {
    run.batch_row = pages_[run.page]->rows;
  }
  run.used = ++clock_;
  return &run;
}

}  // namespace kvtamp::store
