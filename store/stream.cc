#include "store/stream.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

namespace kvtamp::store {

using codec::Side;
using page::Block;
using page::CellIndex;
using page::kAllHeads;
using page::Page;
using page::RowMask;
using page::State;

namespace {

// Sinks come four at a time (a sequence's first tokens); more would be slack.
constexpr std::uint32_t kPinnedRows = 4;
constexpr std::uint32_t kFirstRows = 16;
}  // namespace

// --- pages --------------------------------------------------------------------------------------

void Stream::AppendViews(std::vector<attention::Page>& views, std::deque<RowMask>& masks) const {
  const std::size_t first = views.size();
  const auto turn_of = [&](std::int32_t shift) {
    return shift == 0 ? nullptr : shape_.turns.at(shift).data();
  };
  bool turned = false;
  const auto add = [&](const Page& p, attention::Page v, const RowMask& live) {
    v.live = live.word;
    if (p.shifts == nullptr) {
      v.turn = turn_of(p.shift);
      turned = turned || v.turn != nullptr;
      views.push_back(v);
      return;
    }
    turned = true;
    RowMask left = live;
    for (std::uint32_t r = 0; r < p.rows; ++r) {
      if (!left.test(r)) continue;
      RowMask& mine = masks.emplace_back();
      for (std::uint32_t other = r; other < p.rows; ++other) {
        if (!left.test(other) || p.shifts[other] != p.shifts[r]) continue;
        mine.set(other);
        left.reset(other);
      }
      v.live = mine.word;
      v.turn = turn_of(p.shifts[r]);
      views.push_back(v);
    }
  };
  for (std::uint32_t id = 0; id < pages_.size(); ++id) {
    const Page* p = pages_[id].get();
    if (p == nullptr || p->state == State::kPruned) continue;
    attention::Page v;
    v.k = p->k.data;
    v.v = p->v.data;
    v.cells = p->cells;
    v.first_cell = p->first_cell;
    v.rows = p->rows;
    v.k_layout = p->k.layout();
    v.v_layout = p->v.layout();
    v.head = p->head & kAllHeads;
    v.alone = p->single();
    const std::vector<RowMask>* gone = GoneOf(id);
    if (gone == nullptr) {
      add(*p, v, p->live);
      continue;
    }
    for (std::uint32_t h = 0; h < gone->size(); ++h) {  // each head its own rows
      v.head = h & kAllHeads;
      add(*p, v, masks.emplace_back(HeldRows(id, h)));
    }
  }
  // Pages of one turn together: the query is turned once for them.
  if (turned)
    std::stable_sort(
        views.begin() + static_cast<std::ptrdiff_t>(first), views.end(),
        [](const attention::Page& a, const attention::Page& b) { return a.turn < b.turn; });
}

Result<std::uint32_t> Stream::NewPage(std::uint32_t capacity, bool pinned) {
  std::uint32_t id;
  if (!free_.empty()) {
    id = free_.back();
    free_.pop_back();
  } else {
    id = static_cast<std::uint32_t>(pages_.size());
    if (pages_.size() == pages_.capacity()) {  // by an eighth: doubling would show in the figures
      pages_.reserve(pages_.size() + pages_.size() / 8 + 4);
    }
    pages_.emplace_back();
  }
  pages_[id] = std::make_unique<Page>();
  Page& p = *pages_[id];
  p.capacity = static_cast<std::uint16_t>(capacity);
  p.state = pinned ? State::kSettled : State::kOpen;
  p.pinned = pinned;
  return id;
}

void Stream::FreeBlock(Block& block) {
  alloc_.Free(block.data, block.bytes);
  alloc_.Free(reinterpret_cast<std::uint8_t*>(block.written()), sizeof(RowMask));
  block = {};
}

void Stream::FreePage(std::uint32_t id) {
  Page& p = *pages_[id];
  FreeBlock(p.k);
  FreeBlock(p.v);
  alloc_.Free(reinterpret_cast<std::uint8_t*>(p.cells), p.capacity * sizeof(std::uint32_t));
  FreeShifts(p);
  pages_[id].reset();
  free_.push_back(id);
  NotUnsealed(id);
  ForgetPage(id);
  if (pruned_ != nullptr) pruned_->gone.erase(id);
  if (pinned_ == id) pinned_ = CellIndex::kNone;
  if (zero_ == id) zero_ = CellIndex::kNone;
}

void Stream::Clear() {
  for (std::uint32_t id = 0; id < pages_.size(); ++id)
    if (pages_[id]) FreePage(id);
  pages_.clear();
  free_.clear();
  sinks_.clear();
  index_.Clear();
  runs_.clear();
  BeginRun();
  cells_end_ = 0;
  died_ = false;
  zero_k_.clear();
  n_zero_k_ = 0;
  pruned_.reset();
}

Status Stream::NoteCell(Page& p, std::uint32_t row, std::uint32_t cell) {
  if (row == 0) {
    p.first_cell = cell;
  } else if (p.cells == nullptr && cell != p.first_cell + row) {
    p.cells = NewRowNumbers<std::uint32_t>(p);
    if (p.cells == nullptr) return page::NoMemory(p.capacity * sizeof(std::uint32_t));
    for (std::uint32_t r = 0; r < row; ++r) p.cells[r] = p.first_cell + r;
  }
  if (p.cells != nullptr) p.cells[row] = cell;
  return Status::Ok();
}

Status Stream::EnsureF16(Page& p, Side side, std::uint32_t row) {
  Block& b = p.side(side);
  if (b.data != nullptr && b.coded()) return Status::Ok();
  const std::size_t row_bytes = RowElements(p, side) * sizeof(half_t);
  if ((row + 1) * row_bytes <= b.bytes) return Status::Ok();
  // Doubling from 16 rows: an open page of every layer is there all the time, and its empty half
  // counts.
  std::uint32_t rows = std::min<std::uint32_t>(kFirstRows, p.capacity);
  while (rows <= row) rows = std::min<std::uint32_t>(rows * 2, p.capacity);
  const std::size_t bytes = rows * row_bytes;
  std::uint8_t* data = alloc_.Allocate(bytes);
  if (data == nullptr) return page::NoMemory(bytes);
  if (b.written() == nullptr) {
    std::uint8_t* mask = alloc_.Allocate(sizeof(RowMask));
    if (mask == nullptr) {
      alloc_.Free(data, bytes);
      return page::NoMemory(sizeof(RowMask));
    }
    b.SetF16(new (mask) RowMask);
  }
  if (!shape_.hollow) {
    if (b.data != nullptr) std::memcpy(data, b.data, b.bytes);
    std::memset(data + b.bytes, 0, bytes - b.bytes);  // a row never written reads as zeros
  }
  alloc_.Free(b.data, b.bytes);
  b.data = data;
  b.bytes = static_cast<std::uint32_t>(bytes);
  return Status::Ok();
}

bool Stream::Written(const Page& p, Side side, std::uint32_t row) const {
  const Block& b = p.side(side);
  if (b.data == nullptr) return false;
  return b.coded() || b.written()->test(row);
}

bool Stream::SideComplete(const Page& p, Side side) const {
  const Block& b = p.side(side);
  if (b.data == nullptr) return false;
  return b.coded() || b.written()->contains(p.live);
}

// --- rows ---------------------------------------------------------------------------------------

bool Stream::Find(std::uint32_t cell, Where& where) const {
  const std::uint32_t id = index_.Find(cell);
  if (id == CellIndex::kNone || id >= pages_.size() || !pages_[id]) return false;
  const Page& p = *pages_[id];
  if (p.cells == nullptr) {
    if (cell < p.first_cell || cell - p.first_cell >= p.rows) return false;
    where = {id, cell - p.first_cell};
    return p.live.test(where.row);
  }
  for (std::uint32_t r = p.rows; r-- > 0;) {
    if (p.cells[r] == cell && p.live.test(r)) {
      where = {id, r};
      return true;
    }
  }
  return false;
}

void Stream::Kill(Where where) {
  Page& p = *pages_[where.page];
  const std::uint32_t cell = p.cell(where.row);
  ForgetZero(cell);
  p.live.reset(where.row);
  if (p.single()) pruned_->holes = true;
  if (p.state == State::kPruned) {
    for (std::uint32_t h = 0; h < shape_.n_head_kv; ++h)
      if (Where entry; FindEntry(h, cell, entry)) Kill(entry);
  }
  died_ = died_ || IsCodedForGood(p);
  if (p.live.count() == 0 && p.state != State::kOpen) FreePage(where.page);
}

void Stream::ForgetZero(std::uint32_t cell) {
  if (!ZeroPending(cell)) return;
  zero_k_[cell] = false;
  n_zero_k_--;
}

void Stream::PopDead() {
  for (const Run& run : runs_) {
    if (!IsOpen(run)) continue;
    Page& p = *pages_[run.page];
    while (p.rows > 0 && !p.live.test(p.rows - 1u)) {
      p.rows--;
      for (Side side : {Side::kK, Side::kV}) {
        Block& b = p.side(side);
        if (b.data == nullptr) continue;
        std::memset(page::F16Row(b, shape_.n_embd(side), p.rows), 0,
                    shape_.n_embd(side) * sizeof(half_t));
        b.written()->reset(p.rows);
      }
    }
    if (p.rows == 0) FreePage(run.page);
  }
}

void Stream::DropFrom(std::uint32_t cell) {
  if (cells_end_ <= cell) return;
  for (std::uint32_t id = 0; id < pages_.size(); ++id) {
    for (std::uint32_t r = 0; pages_[id] != nullptr && r < pages_[id]->rows; ++r) {
      const Page& p = *pages_[id];
      if (!p.live.test(r) || p.cell(r) < cell) continue;
      std::erase(sinks_, p.cell(r));
      Kill({id, r});
    }
  }
  cells_end_ = cell;
  PopDead();
}

Result<Stream::Where> Stream::Append(std::uint32_t cell, const Sight* sight, std::size_t in_batch) {
  auto run = RunFor(cell, sight, in_batch);
  if (!run.ok()) return run.status();
  const std::uint32_t id = run.value()->page;
  Page& p = *pages_[id];
  const std::uint32_t row = p.rows;
  if (Status s = NoteCell(p, row, cell); !s.ok()) return s;
  for (Side side : {Side::kK, Side::kV}) {
    if (p.side(side).data == nullptr) continue;
    if (Status s = EnsureF16(p, side, row); !s.ok()) return s;
  }
  p.rows++;
  p.live.set(row);
  ForgetGone(id, row);
  if (Status s = SetShift(p, row, 0); !s.ok()) return s;  // whatever the rows before went through
  index_.Set(cell, id);
  cells_end_ = std::max(cells_end_, cell + 1);
  if (p.rows == p.capacity) {
    p.state = State::kSettled;
    unsealed_.push_back({id, run_});
  }
  return Where{id, row};
}

Result<half_t*> Stream::Place(Side side, std::uint32_t cell, const Sight* sight,
                              std::size_t in_batch) {
  const std::uint32_t n_embd = shape_.n_embd(side);
  if (side == Side::kK) ForgetZero(cell);
  Where at;
  bool found = Find(cell, at);
  if (found && pages_[at.page]->zero) {
    Kill(at);
    found = false;
  }
  const bool first = side == Side::kK && first_rows_ < shape_.n_sink;
  if (first) first_rows_++;
  if (found) {
    const Block& b = pages_[at.page]->side(side);
    const bool pruned = pages_[at.page]->state == State::kPruned;
    if (pruned || (b.data != nullptr && b.coded()) || (first && pages_[at.page]->pinned)) {
      // Coded already, or a sink before a page of its own: a new row takes its place and keeps the
      // other half.
      const Side other = side == Side::kK ? Side::kV : Side::kK;
      std::vector<half_t> keep;
      std::int32_t shift = 0;
      if (pruned && shape_.n_embd(other) != 0) {
        keep.resize(shape_.n_embd(other));
        ReadTurned(at.page, other, at.row, keep.data());
      } else if (shape_.n_embd(other) != 0 && Written(*pages_[at.page], other, at.row)) {
        keep.resize(shape_.n_embd(other));
        ReadRow(*pages_[at.page], other, at.row, keep.data());
        if (other == Side::kK) shift = pages_[at.page]->shift_of(at.row);
      }
      std::erase(sinks_, cell);
      Kill(at);
      auto fresh = Append(cell, sight, in_batch);
      if (!fresh.ok()) return fresh.status();
      at = fresh.value();
      if (!keep.empty()) {
        if (Status s = Write(other, cell, keep.data()); !s.ok()) return s;
        if (Status s = SetShift(*pages_[at.page], at.row, shift); !s.ok()) return s;
      }
    } else if (side == Side::kK) {
      NoteOverwritten(at.page);
    }
  } else {
    std::erase(sinks_, cell);
    auto fresh = Append(cell, sight, in_batch);
    if (!fresh.ok()) return fresh.status();
    at = fresh.value();
  }
  if (first) MarkSink(cell);
  Page& p = *pages_[at.page];
  if (Status s = EnsureF16(p, side, p.rows - 1u); !s.ok()) return s;
  if (side == Side::kK) {
    ForgetGone(at.page, at.row);
    if (Status s = SetShift(p, at.row, 0); !s.ok()) return s;
  }
  p.side(side).written()->set(at.row);
  return page::F16Row(p.side(side), n_embd, at.row);
}

Status Stream::AppendZero(std::uint32_t cell) {
  if (zero_ == CellIndex::kNone) {
    auto id = NewPage(shape_.page_size, true);
    if (!id.ok()) return id.status();
    zero_ = id.value();
    pages_[zero_]->zero = true;
  }
  const std::uint32_t id = zero_;
  Page& p = *pages_[id];
  if (Status s = NoteCell(p, p.rows, cell); !s.ok()) return s;
  p.live.set(p.rows++);
  index_.Set(cell, id);
  cells_end_ = std::max(cells_end_, cell + 1);
  if (p.rows == p.capacity) zero_ = CellIndex::kNone;
  return Status::Ok();
}

Status Stream::WriteZero(Side side, std::uint32_t cell) {
  Where at;
  if (!Find(cell, at) || pages_[at.page]->zero) return Status::Ok();
  const Page& p = *pages_[at.page];
  const auto written = [&](Side s) {
    return p.state == State::kPruned ? shape_.n_embd(s) != 0 : Written(p, s, at.row);
  };
  const bool k_zero = side == Side::kK || ZeroPending(cell) || !written(Side::kK);
  const bool v_zero = side == Side::kV || !written(Side::kV);
  if (k_zero && v_zero) {
    std::erase(sinks_, cell);
    Kill(at);
    PopDead();
    return AppendZero(cell);
  }
  if (side == Side::kK) {
    if (zero_k_.size() <= cell) zero_k_.resize(cell + 1u);
    n_zero_k_ += zero_k_[cell] ? 0 : 1;
    zero_k_[cell] = true;
    return Status::Ok();
  }
  const std::vector<half_t> zeros(shape_.n_embd(side), half_t{0});
  return Write(side, cell, zeros.data());
}

Status Stream::FlushZeros() {
  if (n_zero_k_ == 0) return Status::Ok();
  const std::vector<half_t> zeros(shape_.n_embd_k, half_t{0});
  for (std::uint32_t cell = 0; cell < zero_k_.size(); ++cell) {
    if (!zero_k_[cell]) continue;
    if (Status s = Write(Side::kK, cell, zeros.data()); !s.ok()) return s;
  }
  return Status::Ok();
}

Status Stream::Write(Side side, std::uint32_t cell, const half_t* row) {
  auto place = Place(side, cell);
  if (!place.ok()) return place.status();
  std::memcpy(place.value(), row, shape_.n_embd(side) * sizeof(half_t));
  if (side == Side::kK) NoteEvicted(cell, row);
  return Status::Ok();
}

void Stream::DecodeHead(const Block& b, Side side, std::uint32_t h, std::uint32_t row,
                        float* out) const {
  const codec::SideLayout::Head& head = b.layout()->heads[h];
  if (side == Side::kK) {
    codec::DecodeRowK(head.coding, head.shape, b.data + head.offset, shape_.mean_of(h), row, out);
  } else {
    codec::DecodeRowV(head.coding, head.shape, b.data + head.offset, shape_.v.hadamard, row, out);
  }
}

void Stream::ReadRow(const Page& p, Side side, std::uint32_t row, half_t* out) const {
  const Block& b = p.side(side);
  const std::uint32_t n_embd = shape_.n_embd(side);
  if (shape_.hollow) {
    std::memset(out, 0, n_embd * sizeof(half_t));
    return;
  }
  if (!b.coded() && !p.single()) {
    std::memcpy(out, page::F16Row(b, n_embd, row), n_embd * sizeof(half_t));
    return;
  }
  const std::uint32_t dim = shape_.dim(side);
  for (std::uint32_t h = 0; h < shape_.n_head_kv; ++h, out += dim) {
    if (Lacks(p, h)) {
      std::fill_n(out, dim, kEvicted);
    } else {
      ReadHead(p, side, h, row, out);
    }
  }
}

bool Stream::Read(Side side, std::uint32_t cell, half_t* row) const {
  Where at;
  const bool found = Find(cell, at);
  if (found && pages_[at.page]->state == State::kPruned) {
    ReadTurned(at.page, side, at.row, row);
    return true;
  }
  if (!found || !Written(*pages_[at.page], side, at.row) ||
      (side == Side::kK && ZeroPending(cell))) {
    std::memset(row, 0, shape_.n_embd(side) * sizeof(half_t));
    return found && (pages_[at.page]->zero || Written(*pages_[at.page], side, at.row));
  }
  ReadTurned(at.page, side, at.row, row);
  return true;
}

// --- sinks --------------------------------------------------------------------------------------

void Stream::MarkSink(std::uint32_t cell) {
  if (shape_.n_sink == 0) return;
  auto it = std::lower_bound(sinks_.begin(), sinks_.end(), cell);
  if (it == sinks_.end() || *it != cell) sinks_.insert(it, cell);
}

bool Stream::IsSink(std::uint32_t cell) const {
  return std::binary_search(sinks_.begin(), sinks_.end(), cell);
}

Status Stream::PinRow(std::uint32_t from_id, std::uint32_t row) {
  const Page& from = *pages_[from_id];
  if (pinned_ == CellIndex::kNone) {
    auto id = NewPage(kPinnedRows, true);
    if (!id.ok()) return id.status();
    pinned_ = id.value();
  }
  const std::uint32_t id = pinned_;
  Page& to = *pages_[id];
  const std::uint32_t cell = from.cell(row);
  const std::uint32_t at = to.rows;
  if (Status s = NoteCell(to, at, cell); !s.ok()) return s;
  for (Side side : {Side::kK, Side::kV}) {
    const bool written = Written(from, side, row);
    if (!written && to.side(side).data == nullptr) continue;
    if (Status s = EnsureF16(to, side, at); !s.ok()) return s;
    if (!written) continue;
    ReadRow(from, side, row, page::F16Row(to.side(side), shape_.n_embd(side), at));
    to.side(side).written()->set(at);
  }
  to.rows++;
  to.live.set(at);
  CopyGone(from_id, row, id, at);
  if (Status s = SetShift(to, at, from.shift_of(row)); !s.ok()) return s;
  index_.Set(cell, id);
  if (to.rows == to.capacity) pinned_ = CellIndex::kNone;
  return Status::Ok();
}

// The page's sinks go to a page that is never coded. May free the page.
Status Stream::MovePinned(std::uint32_t id) {
  for (std::uint32_t r = 0; r < pages_[id]->rows; ++r) {
    const Page& p = *pages_[id];
    if (!p.live.test(r) || !IsSink(p.cell(r))) continue;
    if (Status s = PinRow(id, r); !s.ok()) return s;
    const bool last = p.live.count() == 1;
    Kill({id, r});
    if (last) return Status::Ok();
  }
  return Status::Ok();
}

// --- copies and accounts ------------------------------------------------------------------------

void Stream::CopyFrom(const Stream& other, Status& status) {
  Clear();
  auto copy = [&](const Block& from, Block& to) {
    if (from.data == nullptr) return true;
    to = from;
    if (from.coded()) {  // never changed in place
      alloc_.Share(from.data);
      return true;
    }
    to.SetF16(nullptr);
    to.data = alloc_.Allocate(from.bytes);
    if (to.data == nullptr) return false;
    std::memcpy(to.data, from.data, from.bytes);
    if (from.written() == nullptr) return true;
    std::uint8_t* mask = alloc_.Allocate(sizeof(RowMask));
    if (mask == nullptr) return false;
    to.SetF16(new (mask) RowMask(*from.written()));
    return true;
  };
  auto copy_numbers = [&]<class T>(const T* from, T*& to, const Page& p) {
    if (from == nullptr) return true;
    to = NewRowNumbers<T>(p);
    if (to != nullptr) std::copy_n(from, p.capacity, to);
    return to != nullptr;
  };
  pages_.resize(other.pages_.size());
  for (std::uint32_t id = 0; id < pages_.size(); ++id) {
    if (!other.pages_[id]) {
      free_.push_back(id);
      continue;
    }
    const Page& from = *other.pages_[id];
    pages_[id] = std::make_unique<Page>(from);
    Page& p = *pages_[id];
    p.k = p.v = {};
    p.cells = nullptr;
    p.shifts = nullptr;
    bool ok = copy(from.k, p.k) && copy(from.v, p.v) && copy_numbers(from.cells, p.cells, p) &&
              copy_numbers(from.shifts, p.shifts, p);
    if (!ok) {
      Clear();
      status = page::NoMemory(from.k.bytes + from.v.bytes);
      return;
    }
    for (std::uint32_t r = 0; r < p.rows && !p.single(); ++r)
      if (p.live.test(r)) index_.Set(p.cell(r), id);
  }
  if (other.pruned_ != nullptr) pruned_ = std::make_unique<Pruned>(*other.pruned_);
  unsealed_ = other.unsealed_;
  sinks_ = other.sinks_;
  runs_ = other.runs_;
  run_ = other.run_;
  clock_ = other.clock_;
  pinned_ = other.pinned_;
  zero_ = other.zero_;
  cells_end_ = other.cells_end_;
  died_ = other.died_;
  zero_k_ = other.zero_k_;
  n_zero_k_ = other.n_zero_k_;
  first_rows_ = other.first_rows_;
}

StreamBytes Stream::bytes() const {
  StreamBytes out;
  for (const auto& ptr : pages_) {
    if (!ptr) continue;
    const Page& p = *ptr;
    const std::uint64_t live = p.live.count();
    if (p.zero || p.state == State::kPruned) {
      out.n_pruned += !p.zero;
      out.live_rows += p.zero ? 0 : live;
      out.index += sizeof(Page) + (p.cells ? p.capacity * sizeof(std::uint32_t) : 0);
      continue;
    }
    out.live_rows += p.single() ? 0 : live;
    out.dead_rows += p.single() ? 0 : p.rows - live;
    out.n_open += p.state == State::kOpen;
    out.n_settled += p.state == State::kSettled;
    out.n_sealed += p.state == State::kSealed;
    out.n_demoted += p.state == State::kDemoted;
    out.index += sizeof(Page) + (p.cells ? p.capacity * sizeof(std::uint32_t) : 0) +
                 (p.shifts ? p.capacity * sizeof(std::int32_t) : 0);
    for (Side side : {Side::kK, Side::kV}) {
      const Block& b = p.side(side);
      if (b.data == nullptr) continue;
      const int s = static_cast<int>(side);
      std::uint64_t useful = 0;
      std::uint64_t* early = p.pinned                     ? &out.sinks
                             : p.state == State::kOpen    ? &out.filling
                             : p.state == State::kSettled ? &out.window
                                                          : nullptr;
      if (!b.coded()) {
        useful = live * RowElements(p, side) * 2;
        out.open[s] += useful;
        if (early != nullptr) *early += useful;
      } else {
        // What several streams own is counted once, by parts.
        const std::uint32_t owners = alloc_.owners(b.data);
        const std::uint64_t codes =
            std::uint64_t{b.layout()->bytes - b.layout()->scales} * live / p.capacity / owners;
        const std::uint64_t scales = b.layout()->scales / owners;
        out.coded[s] += codes;
        out.scales[s] += scales;
        if (early != nullptr) *early += codes + scales;
        out.slack += b.bytes / owners - codes - scales;
        continue;
      }
      out.slack += b.bytes - useful;
      out.index += b.written() != nullptr ? sizeof(RowMask) : 0;
    }
  }
  out.index += index_.bytes() + zero_k_.capacity() / 8 + pages_.capacity() * sizeof(void*) +
               (free_.capacity() + sinks_.capacity()) * sizeof(std::uint32_t) +
               unsealed_.capacity() * sizeof(Unsealed) + runs_.capacity() * sizeof(Run);
  if (pruned_ != nullptr) {
    for (const auto& [id, heads] : pruned_->gone)
      out.index += sizeof(id) + sizeof(heads) + heads.capacity() * sizeof(RowMask);
    for (const auto& cells : pruned_->at) out.index += cells.capacity() * sizeof(std::uint32_t);
    out.index += sizeof(Pruned) + pruned_->notes.capacity() * sizeof(Pruned::Note);
  }
  return out;
}

}  // namespace kvtamp::store
