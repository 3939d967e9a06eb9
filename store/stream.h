// The rows of one layer and one stream of the host's cache: pages in order of writing, found by
// cell.
//
// A row is written in two halves, K and V, in any order. Writing a half again replaces it: in place
// while that side of the row is still f16, else as a new row that takes the other half along, and
// the old row dies. Sealing is the caller's decision (Maintain), made after the writers have
// attended. Nothing here is thread-safe; Cache serialises.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "base/executor.h"
#include "base/status.h"
#include "page/allocator.h"
#include "page/cell_index.h"
#include "page/page.h"

namespace kvtamp::store {

using attention::TurnShape;

// What all streams of a layer share.
struct LayerShape {
  std::uint32_t n_embd_k = 0, n_embd_v = 0;  // whole rows; n_embd_v 0: a layer without V
  std::uint32_t v_in_k = 0;     // then the first so many channels of a key are its value
  std::uint32_t n_head_kv = 0;  // 0: not known yet, rows stay f16
  std::uint32_t page_size = 64;
  std::uint32_t n_sink = 4;
  std::uint32_t residual_length = 64;
  bool hollow = false;  // Options::hollow
  bool prunes = false;  // a policy lets go of entries, run by run
  codec::Format k, v;   // resolved for the head sizes once those are known
  // How coded sides lie, by codec::Side: for good, and while in the recent window. Without heads:
  // they stay f16. The two may be one. Their addresses must not change once rows are written.
  std::shared_ptr<const codec::SideLayout> final[2], window[2];
  // What a head's block can be, by codec::Side: [levels][n_head_kv]. Level 0 is that of `final`,
  // each further one has fewer bits. Empty for a side that stays f16.
  std::vector<std::vector<codec::SideLayout::Head>> ladder[2];
  // Layouts of pages whose heads differ in level, or lack one, made when first asked for.
  static constexpr std::uint8_t kGone = 0xFF;
  using Levels = std::vector<std::uint8_t>;  // [n_head_kv]
  struct Mixed {
    Levels levels;
    codec::SideLayout layout[2];
  };
  std::vector<std::unique_ptr<Mixed>> mixed;
  std::uint32_t v_group = 0;    // elements per scale, where kernels ask (attention::Layer::v_group)
  bool k_weighted = false;      // some head's widths are
  std::vector<float> k_weight;  // [n_embd_k] mean of q² so far; empty: nothing known
  std::vector<float> k_mean;    // [n_embd_k], empty until the first page is sealed
  std::vector<float> k_mean_before;  // that of what Clear took away
  TurnShape turn;
  std::map<std::int32_t, std::vector<float>>
      turns;  // of each shift in use: [turn.pairs] (cos, sin)

  std::uint32_t n_embd(codec::Side s) const { return s == codec::Side::kK ? n_embd_k : n_embd_v; }
  std::uint32_t dim(codec::Side s) const { return n_embd(s) / n_head_kv; }
  const codec::SideLayout* final_of(codec::Side s) const {
    return final[static_cast<int>(s)].get();
  }
  // As final_of, for heads of those levels.
  const codec::SideLayout* layout_of(codec::Side s, const Levels& levels);
  // The levels of a page's K; null: all 0.
  const Levels* LevelsOf(const codec::SideLayout* k) const;
  const codec::SideLayout* window_of(codec::Side s) const {
    return window[static_cast<int>(s)].get();
  }
  const float* mean_of(std::uint32_t head) const {
    return k_mean.empty() ? nullptr : k_mean.data() + std::size_t{head} * dim(codec::Side::kK);
  }
};

// Each half of an entry that was evicted, as it reads: a zero to any host, and to us, where a whole
// head of a key is nothing else, the news that it is gone.
inline constexpr half_t kEvicted = 0x8000;
// `key`: a head's part of one.
inline bool IsEvicted(std::span<const half_t> key) {
  return std::all_of(key.begin(), key.end(), [](half_t x) { return x == kEvicted; });
}

// Bytes and pages of a stream, by what they are for (control/stats.h adds them up).
struct StreamBytes {
  std::uint64_t coded[2] = {}, scales[2] = {}, open[2] = {};  // by codec::Side
  // Of those, what is not in its final format: pinned rows, full pages, pages being filled.
  std::uint64_t sinks = 0, window = 0, filling = 0;
  std::uint64_t slack = 0, index = 0;
  std::uint64_t n_open = 0, n_settled = 0, n_sealed = 0, n_demoted = 0, n_pruned = 0;
  std::uint64_t live_rows = 0, dead_rows = 0;
};

// What the tokens that write a batch of rows see of the cache: row i of them sees `cell` where
// mask[i * stride + cell] is not -inf. So rows of one sequence find each other: nobody tells a
// backend whose rows it is given.
struct Sight {
  const half_t* mask = nullptr;
  std::size_t stride = 0;
  std::uint32_t n_kv = 0;
  bool Sees(std::size_t row, std::uint32_t cell) const;
};

class Stream {
 public:
  Stream(LayerShape& shape, page::Allocator& allocator) : shape_(shape), alloc_(allocator) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // One row's half as f16 [n_embd].
  Status Write(codec::Side side, std::uint32_t cell, const half_t* row);
  // As Write, but the row is filled in by the caller: the returned [n_embd] halves are the row's
  // place. `sight`, if any: row `in_batch` of it is this one; without, it follows the row before.
  Result<half_t*> Place(codec::Side side, std::uint32_t cell, const Sight* sight = nullptr,
                        std::size_t in_batch = 0);
  // The rows that follow were not written with those before.
  void BeginBatch() { batch_begin_ = clock_ + 1; }
  // The rows that follow are a sequence of their own, from its first token on.
  void BeginRun();
  // Zeros over one half of a row that exists. A row of which both halves went that way keeps no
  // bytes (it is still attended, as a row of zeros): so does the host give up what it failed to
  // restore.
  Status WriteZero(codec::Side side, std::uint32_t cell);
  // Halves zeroed of rows whose other half is not: written at last. Before attention.
  Status FlushZeros();
  // Rows of cells from `cell` on are no more.
  void DropFrom(std::uint32_t cell);

  // The row as f16 [n_embd]; false (and zeros) where the cell has none. A head whose entry was
  // evicted reads as kEvicted on both sides.
  bool Read(codec::Side side, std::uint32_t cell, half_t* row) const;

  // One side of one page that is due for another format.
  struct SealTask {
    std::uint32_t page;
    codec::Side side;
    const codec::SideLayout* to;
    std::uint8_t* coded;  // to be filled, all heads
  };

  // The entry of `head` is attended no more; false where there was none, or it must stay (sinks,
  // rows of zeros). Its bytes go when its page is packed.
  bool Evict(std::uint32_t head, std::uint32_t cell);
  // An entry of a head, and all of a run's, by head, oldest first. A run is known as one only where
  // LayerShape::prunes.
  struct Entry {
    std::uint32_t cell;
    std::int32_t position;  // rows of the run before it, dead ones included
    bool stays;             // Evict refuses it
    std::uint32_t page, row;
  };
  struct RunEntries {
    std::uint64_t rows = 0;  // that live, whether or not they have entries left
    std::int32_t next_position = 0;
    std::vector<std::vector<Entry>> heads;
    std::vector<std::uint32_t> pages;  // of all heads, coded for good: can be demoted
  };
  std::vector<RunEntries> Entries() const;
  // The level of a head's block in such a page.
  std::uint8_t LevelOf(std::uint32_t page, std::uint32_t head) const;
  // Appends what is to be coded for the page's heads to have these levels, none lower than now.
  Status Demote(std::uint32_t page, const LayerShape::Levels& levels, std::vector<SealTask>& tasks);
  // As Read, of one head; valid until the stream changes.
  void ReadEntry(codec::Side side, std::uint32_t head, const Entry& entry, half_t* out) const;
  // `row` is a key just written to `cell`: heads of it that are all kEvicted have no entry. So what
  // a saved state says to be gone stays gone.
  void NoteEvicted(std::uint32_t cell, const half_t* row);
  // The same for all rows, once it is known where the heads of a key lie.
  void NoteAllEvicted();
  // Adds the entries that are attended, and how many of these have fewer bits than their format
  // says, by head [n_head_kv]. False where entries do not go by head.
  bool CountEntries(std::span<std::uint64_t> kept, std::span<std::uint64_t> demoted) const;

  // Cells that must stay f16 for ever, e.g. a sequence's first tokens.
  void MarkSink(std::uint32_t cell);

  // Appends what is due: full pages with all rows written, for the format of the recent window or,
  // if they are out of it, for their final one; sinks are moved out first. Those that lost entries
  // are for Pack.
  Status CollectSeals(std::vector<SealTask>& tasks, std::vector<std::uint32_t>& packs);
  // Moves what these pages have left to pages of one head each, in their final format once `tasks`
  // are done; single pages with many holes go along.
  Status Pack(std::span<const std::uint32_t> ids, std::vector<SealTask>& tasks);
  // The encoding itself: may run on any thread, tasks and heads in any order.
  void EncodeHead(const SealTask& task, std::uint32_t head) const;
  // Puts the coded side in place of what was there.
  void FinishSeal(const SealTask& task);
  // The mean key of a page, for the layer's first seal.
  std::vector<float> MeanKey(std::uint32_t page) const;

  // Merges sealed pages that are mostly dead, two at a time, if rows died since the last time.
  Status Compact();

  // Notes that the key of cell c has moved by delta[c] positions. Nothing is turned, but a page of
  // more than kMaxTurnsOfPage distinct shifts: those it would cost attention a pass each.
  Status ShiftK(std::span<const std::int32_t> delta);
  // Shifts in use once ShiftK(delta) is done, each once or more.
  void AppendShifts(std::span<const std::int32_t> delta, std::vector<std::int32_t>& shifts) const;
  // Pages of too many shifts are turned for good; needs LayerShape::turns.
  Status SettleShifts();

  // Every live row with a K: fn(cell, f16 row as Read gives it) may change the row and returns
  // whether it did. Pages with changes are turned and, if sealed, coded again.
  template <class F>
  Status RewriteK(F&& fn);

  void Clear();
  void CopyFrom(const Stream& other, Status& status);

  // Appends every page as attention sees it, a page of several shifts once for each; valid until
  // the stream changes. `masks` keeps the rows of those.
  void AppendViews(std::vector<attention::Page>& views, std::deque<page::RowMask>& masks) const;
  StreamBytes bytes() const;

 private:
  struct Where {
    std::uint32_t page;
    std::uint32_t row;
  };
  // Rows that follow each other, one sequence's as far as can be seen: they share pages, so that
  // these are read, shifted, restored and passed over as one.
  struct Run {
    std::uint32_t page = page::CellIndex::kNone;         // its last
    std::uint32_t batch_row = 0;                         // of the page: from here on, last batch
    std::uint32_t passed_over = page::CellIndex::kNone;  // row of it that was taken for a dead one
    std::uint32_t serial = 0;                            // no other has it
    std::uint64_t used = 0;                              // clock_ at its last row
  };
  static constexpr std::uint32_t kNoRun = UINT32_MAX;
  static constexpr std::size_t kMaxRuns = 16;  // each may have an open page, in f16
  // So many rows have gone elsewhere since its last: the host may have removed it, or its user
  // reads.
  static constexpr std::uint64_t kIdleRows = 256;
  bool IsOpen(const Run& run) const;
  bool IsIdle(const Run& run) const { return clock_ - run.used > kIdleRows; }
  // Open pages of idle runs are as full as they will be, if it is worth coding them.
  void SettleIdle();
  std::uint32_t RowsBehind(const Run& run, const Sight& sight, std::size_t row) const;
  std::uint32_t RunOf(const Sight& sight, std::size_t row);
  std::uint32_t NewRun();
  Result<Run*> RunFor(std::uint32_t cell, const Sight* sight, std::size_t row);
  void ForgetPage(std::uint32_t id);
  // A row of it was written anew where it lies: whoever does that goes on there.
  void NoteOverwritten(std::uint32_t id);
  void NotUnsealed(std::uint32_t id);

  // What is only there once entries went by head.
  struct Pruned {
    // Of pages of all heads: [n_head_kv] rows whose entry of the head is gone.
    std::map<std::uint32_t, std::vector<page::RowMask>> gone;
    // By page: whose rows they are, in which order; where LayerShape::prunes.
    struct Note {
      std::uint32_t run = 0;
      std::uint64_t order = 0;
    };
    std::vector<Note> notes;
    bool holes = false;  // entries of single pages died since Pack
    // [n_head_kv][cells] page * kMaxRows + row of an entry in a single page, made when asked for; a
    // hint, the page decides.
    std::vector<std::vector<std::uint32_t>> at;
  };
  bool Find(std::uint32_t cell, Where& where) const;
  // Of a page that is kPruned.
  bool FindEntry(std::uint32_t head, std::uint32_t cell, Where& where) const;
  const std::vector<page::RowMask>* GoneOf(std::uint32_t id) const;
  void SetGone(std::uint32_t id, std::uint32_t head, std::uint32_t row);
  void ForgetGone(std::uint32_t id, std::uint32_t row);  // of all heads
  void CopyGone(std::uint32_t from, std::uint32_t row, std::uint32_t to, std::uint32_t at);
  // The page has no bytes for the head.
  static bool Lacks(const page::Page& p, std::uint32_t head) {
    if (p.single()) return p.head != head;
    return p.k.coded() && p.k.layout()->heads[head].bytes == 0;
  }
  // Rows of which the page holds the head's entry.
  page::RowMask HeldRows(std::uint32_t id, std::uint32_t head) const;
  bool Holds(std::uint32_t id, std::uint32_t head, std::uint32_t row) const {
    return HeldRows(id, head).test(row);
  }
  static bool IsCodedForGood(const page::Page& p) {
    return p.state == page::State::kSealed || p.state == page::State::kDemoted;
  }
  // The row as Read gives it, of a page that exists.
  void ReadTurned(std::uint32_t id, codec::Side side, std::uint32_t row, half_t* out) const;
  void NotePage(std::uint32_t id, const Pruned::Note& note);
  bool WorthPacking(std::span<const std::uint32_t> ids) const;
  // The single pages of a head that are worth packing anew beside `n` more entries.
  std::vector<std::uint32_t> ThinPages(std::uint32_t head, std::size_t n) const;
  Status PackHead(std::uint32_t head, std::span<const Where> entries, std::vector<SealTask>& tasks);
  Result<Where> Append(std::uint32_t cell, const Sight* sight, std::size_t in_batch);
  Result<std::uint32_t> NewPage(std::uint32_t capacity, bool pinned);
  Status AppendZero(std::uint32_t cell);
  // The last rows of open pages, if dead, are used again.
  void PopDead();
  // The key of `cell` need not become zeros any more.
  void ForgetZero(std::uint32_t cell);
  // [capacity] numbers, one for each row of a page; null when the system refuses.
  template <class T>
  T* NewRowNumbers(const page::Page& p) {
    return reinterpret_cast<T*>(alloc_.Allocate(p.capacity * sizeof(T)));
  }
  bool ZeroPending(std::uint32_t cell) const { return cell < zero_k_.size() && zero_k_[cell]; }
  Status NoteCell(page::Page& p, std::uint32_t row, std::uint32_t cell);
  // Room up to row `row` on a side that is f16 (or not there yet), zeroed where it is new. A side
  // that is there always covers all rows of its page: attention reads them without asking.
  Status EnsureF16(page::Page& p, codec::Side side, std::uint32_t row);
  void Kill(Where where);
  void FreePage(std::uint32_t id);
  void FreeBlock(page::Block& block);
  bool SideComplete(const page::Page& p, codec::Side side) const;
  bool Written(const page::Page& p, codec::Side side, std::uint32_t row) const;
  // A row of a page that holds that head alone has its elements only.
  std::uint32_t RowElements(const page::Page& p, codec::Side side) const {
    return p.single() ? shape_.dim(side) : shape_.n_embd(side);
  }
  // One head of a row of a coded block.
  void DecodeHead(const page::Block& b, codec::Side side, std::uint32_t head, std::uint32_t row,
                  float* out) const;
  // All heads of the row as its page has them, kEvicted where it has none.
  void ReadRow(const page::Page& p, codec::Side side, std::uint32_t row, half_t* out) const;
  void ReadHead(const page::Page& p, codec::Side side, std::uint32_t head, std::uint32_t row,
                half_t* out) const;
  // Turns a stored key by what is still due.
  void TurnRow(std::int32_t shift, half_t* row) const;
  void TurnHead(std::int32_t shift, half_t* row) const;
  // What a shift by `delta` (by cell) means for a row.
  std::int32_t DeltaOf(const page::Page& p, std::uint32_t row,
                       std::span<const std::int32_t> delta) const;
  Status SetShift(page::Page& p, std::uint32_t row, std::int32_t shift);
  void FreeShifts(page::Page& p);
  // Back to one number where all rows agree.
  void MergeShifts(page::Page& p);
  Status MovePinned(std::uint32_t id);
  Status PinRow(std::uint32_t from_id, std::uint32_t row);
  Status CompactInto(std::uint32_t a, std::uint32_t b);
  bool IsFinal(const page::Page& p, codec::Side side) const;
  void EncodeRows(codec::Side side, const codec::SideLayout::Head& to, std::uint32_t head,
                  const codec::EncodeInput& rows, std::uint8_t* out) const;
  bool IsSink(std::uint32_t cell) const;
  Status RecodeK(page::Page& p, const std::vector<half_t>& rows);

  LayerShape& shape_;
  page::Allocator& alloc_;
  std::vector<std::unique_ptr<page::Page>> pages_;  // by number; null: free
  std::vector<std::uint32_t> free_;
  struct Unsealed {
    std::uint32_t page;
    std::uint32_t run;
  };
  std::vector<Unsealed> unsealed_;    // full pages not sealed yet, oldest first
  std::vector<std::uint32_t> sinks_;  // cells, ascending
  page::CellIndex index_;
  std::vector<Run> runs_;
  std::uint32_t run_ = kNoRun;  // that of the last row
  std::uint64_t clock_ = 0;     // rows written so far
  std::uint64_t batch_begin_ = 0;
  std::uint32_t pinned_ = page::CellIndex::kNone;  // pinned page that still has room
  std::uint32_t zero_ = page::CellIndex::kNone;    // page of zero rows that still has room
  std::uint32_t cells_end_ = 0;                    // no live row's cell is beyond
  bool died_ = false;                              // rows of sealed pages died since Compact
  std::vector<bool> zero_k_;                       // by cell: K is to be zeros, V still is not
  std::uint32_t n_zero_k_ = 0;
  std::uint32_t n_runs_ = 0;      // so far
  std::uint32_t first_rows_ = 0;  // written since Clear or BeginRun; sinks, if that few
  mutable std::unique_ptr<Pruned> pruned_;
};

template <class F>
Status Stream::RewriteK(F&& fn) {
  std::vector<half_t> rows;
  for (std::uint32_t id = 0; id < pages_.size(); ++id) {
    page::Page* p = pages_[id].get();
    if (p == nullptr || p->k.data == nullptr) continue;
    bool changed = false;
    rows.assign(std::size_t{p->capacity} * shape_.n_embd_k, 0);
    for (std::uint32_t r = 0; r < p->rows; ++r) {
      if (!p->live.test(r) || !Written(*p, codec::Side::kK, r)) continue;
      half_t* row = rows.data() + std::size_t{r} * shape_.n_embd_k;
      ReadRow(*p, codec::Side::kK, r, row);
      TurnRow(p->shift_of(r), row);
      changed |= fn(p->cell(r), row);
    }
    if (!changed) continue;
    if (Status s = RecodeK(*p, rows); !s.ok()) return s;
  }
  return Status::Ok();
}

}  // namespace kvtamp::store
