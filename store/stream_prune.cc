// Entries that go by head: which are gone, and pages of one head each for what stays.
#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "store/stream.h"

namespace kvtamp::store {

using codec::Side;
using page::CellIndex;
using page::Page;
using page::RowMask;
using page::State;

namespace {

constexpr std::uint32_t kNowhere = UINT32_MAX;

// A single page with more holes than this is packed anew where that saves a page.
bool IsThin(const Page& p) { return p.live.count() * 4u <= p.capacity * 3u; }

}  // namespace

// --- which entries there are --------------------------------------------------------------------

const std::vector<RowMask>* Stream::GoneOf(std::uint32_t id) const {
  if (pruned_ == nullptr) return nullptr;
  const auto it = pruned_->gone.find(id);
  return it == pruned_->gone.end() ? nullptr : &it->second;
}

void Stream::SetGone(std::uint32_t id, std::uint32_t head, std::uint32_t row) {
  if (pruned_ == nullptr) pruned_ = std::make_unique<Pruned>();
  std::vector<RowMask>& heads = pruned_->gone[id];
  heads.resize(shape_.n_head_kv);
  heads[head].set(row);
}

void Stream::ForgetGone(std::uint32_t id, std::uint32_t row) {
  if (pruned_ == nullptr) return;
  const auto it = pruned_->gone.find(id);
  if (it == pruned_->gone.end()) return;
  bool any = false;
  for (RowMask& gone : it->second) {
    gone.reset(row);
    any = any || gone.count() != 0;
  }
  if (!any) pruned_->gone.erase(it);
}

void Stream::CopyGone(std::uint32_t from, std::uint32_t row, std::uint32_t to, std::uint32_t at) {
  if (GoneOf(from) == nullptr) return;
  for (std::uint32_t h = 0; h < shape_.n_head_kv; ++h)
    if ((*GoneOf(from))[h].test(row)) SetGone(to, h, at);
}

RowMask Stream::HeldRows(std::uint32_t id, std::uint32_t head) const {
  const Page& p = *pages_[id];
  if (p.state == State::kPruned || Lacks(p, head)) return {};
  RowMask held = p.live;
  if (const std::vector<RowMask>* gone = GoneOf(id))
    for (std::uint32_t w = 0; w < page::kMaskWords; ++w) held.word[w] &= ~(*gone)[head].word[w];
  return held;
}

bool Stream::FindEntry(std::uint32_t head, std::uint32_t cell, Where& where) const {
  auto& at = pruned_->at;
  if (at.empty()) {
    at.resize(shape_.n_head_kv);
    for (auto& cells : at) cells.assign(cells_end_, kNowhere);
    for (std::uint32_t id = 0; id < pages_.size(); ++id) {
      const Page* p = pages_[id].get();
      if (p == nullptr || !p->single()) continue;
      for (std::uint32_t r = 0; r < p->rows; ++r)
        if (p->live.test(r)) at[p->head][p->cell(r)] = id * page::kMaxRows + r;
    }
  }
  const std::uint32_t n = cell < at[head].size() ? at[head][cell] : kNowhere;
  where = {n / page::kMaxRows, n % page::kMaxRows};
  if (n == kNowhere || where.page >= pages_.size() || pages_[where.page] == nullptr) return false;
  const Page& p = *pages_[where.page];
  return p.single() && p.head == head && where.row < p.rows && p.live.test(where.row) &&
         p.cell(where.row) == cell;
}

bool Stream::Evict(std::uint32_t head, std::uint32_t cell) {
  Where at;
  if (!Find(cell, at)) return false;
  const Page& p = *pages_[at.page];
  if (p.state == State::kPruned) {
    if (!FindEntry(head, cell, at)) return false;
    Kill(at);
    return true;
  }
  if (p.pinned || IsSink(cell) || ZeroPending(cell) || !Holds(at.page, head, at.row)) return false;
  SetGone(at.page, head, at.row);
  return true;
}

void Stream::NoteEvicted(std::uint32_t cell, const half_t* row) {
  const std::uint32_t n = shape_.n_head_kv, dim = n == 0 ? 0 : shape_.dim(Side::kK);
  for (std::uint32_t h = 0; h < n; ++h) {
    if (!IsEvicted({row + std::size_t{h} * dim, dim})) continue;
    Where at;
    if (Find(cell, at)) SetGone(at.page, h, at.row);
  }
}

bool Stream::CountEntries(std::span<std::uint64_t> kept, std::span<std::uint64_t> demoted) const {
  for (std::uint32_t id = 0; id < pages_.size(); ++id) {
    const Page* p = pages_[id].get();
    if (p == nullptr || p->zero) continue;
    for (std::uint32_t h = 0; h < kept.size(); ++h) {
      const std::uint32_t n = HeldRows(id, h).count();
      kept[h] += n;
      if (p->state == State::kDemoted && LevelOf(id, h) != 0) demoted[h] += n;
    }
  }
  return pruned_ != nullptr;
}

void Stream::NoteAllEvicted() {
  for (const auto& p : pages_) {
    if (p == nullptr || p->k.data == nullptr || p->k.coded()) continue;
    for (std::uint32_t r = 0; r < p->rows; ++r)
      if (p->live.test(r) && Written(*p, Side::kK, r))
        NoteEvicted(p->cell(r), page::F16Row(p->k, shape_.n_embd_k, r));
  }
}

void Stream::NotePage(std::uint32_t id, const Pruned::Note& note) {
  if (pruned_ == nullptr) pruned_ = std::make_unique<Pruned>();
  if (pruned_->notes.size() <= id) pruned_->notes.resize(id + 1u);
  pruned_->notes[id] = note;
}

std::vector<Stream::RunEntries> Stream::Entries() const {
  if (pruned_ == nullptr) return {};
  std::map<std::uint32_t, std::map<std::uint64_t, std::uint32_t>> runs;  // order -> page
  for (std::uint32_t id = 0; id < std::min(pages_.size(), pruned_->notes.size()); ++id) {
    const Page* p = pages_[id].get();
    if (p == nullptr || p->pinned || p->single()) continue;
    runs[pruned_->notes[id].run].emplace(pruned_->notes[id].order, id);
  }
  std::vector<RunEntries> all;
  for (const auto& [serial, pages] : runs) {
    RunEntries& run = all.emplace_back();
    run.heads.resize(shape_.n_head_kv);
    for (const auto& [order, id] : pages) {
      const Page& p = *pages_[id];
      if (IsCodedForGood(p) && p.k.coded() && (shape_.n_embd_v == 0 || p.v.coded()) &&
          GoneOf(id) == nullptr)
        run.pages.push_back(id);
      for (std::uint32_t r = 0; r < p.rows; ++r, ++run.next_position) {
        if (!p.live.test(r)) continue;
        run.rows++;
        const std::uint32_t cell = p.cell(r);
        const bool whole =
            p.state == State::kPruned ||
            (Written(p, Side::kK, r) && (shape_.n_embd_v == 0 || Written(p, Side::kV, r)));
        const bool stays = !whole || IsSink(cell) || ZeroPending(cell);
        for (std::uint32_t h = 0; h < shape_.n_head_kv; ++h) {
          Where at{id, r};
          if (p.state == State::kPruned ? FindEntry(h, cell, at) : Holds(id, h, r))
            run.heads[h].push_back({cell, run.next_position, stays, at.page, at.row});
        }
      }
    }
  }
  return all;
}

// --- reading ------------------------------------------------------------------------------------

void Stream::ReadHead(const Page& p, Side side, std::uint32_t head, std::uint32_t row,
                      half_t* out) const {
  const page::Block& b = p.side(side);
  const std::uint32_t dim = shape_.dim(side);
  if (!b.coded()) {
    const half_t* from = page::F16Row(b, RowElements(p, side), row);
    std::memcpy(out, from + (p.single() ? 0 : std::size_t{head} * dim), dim * sizeof(half_t));
    return;
  }
  float x[codec::kMaxDim];
  DecodeHead(b, side, head, row, x);
  for (std::uint32_t c = 0; c < dim; ++c) out[c] = FloatToHalf(x[c]);
}

void Stream::ReadEntry(Side side, std::uint32_t head, const Entry& entry, half_t* out) const {
  const Page& p = *pages_[entry.page];
  if (!Written(p, side, entry.row)) {
    std::fill_n(out, shape_.dim(side), half_t{0});
    return;
  }
  ReadHead(p, side, head, entry.row, out);
  const std::int32_t shift = p.shift_of(entry.row);
  if (side == Side::kK && shift != 0) TurnHead(shift, out);
}

void Stream::ReadTurned(std::uint32_t id, Side side, std::uint32_t row, half_t* out) const {
  const Page& p = *pages_[id];
  const std::uint32_t n = shape_.n_head_kv;
  if (p.state == State::kPruned) {
    for (std::uint32_t h = 0; h < n; ++h, out += shape_.dim(side)) {
      Where at;
      if (!FindEntry(h, p.cell(row), at)) {
        std::fill_n(out, shape_.dim(side), kEvicted);
        continue;
      }
      ReadHead(*pages_[at.page], side, h, at.row, out);
      const std::int32_t shift = pages_[at.page]->shift_of(at.row);
      if (side == Side::kK && shift != 0) TurnHead(shift, out);
    }
    return;
  }
  ReadRow(p, side, row, out);
  if (side == Side::kK) TurnRow(p.shift_of(row), out);
  if (GoneOf(id) == nullptr && p.state != State::kDemoted) return;
  for (std::uint32_t h = 0; h < n; ++h, out += shape_.dim(side))
    if (!Holds(id, h, row)) std::fill_n(out, shape_.dim(side), kEvicted);
}

// --- fewer bits ---------------------------------------------------------------------------------

const codec::SideLayout* LayerShape::layout_of(Side s, const Levels& levels) {
  const int i = static_cast<int>(s);
  if (ladder[i].empty()) return nullptr;
  for (const auto& m : mixed)
    if (m->levels == levels) return &m->layout[i];
  Mixed& m = *mixed.emplace_back(std::make_unique<Mixed>());
  m.levels = levels;
  for (int side = 0; side < 2; ++side) {
    for (std::uint32_t h = 0; h < n_head_kv && !ladder[side].empty(); ++h) {
      if (levels[h] != kGone) {
        const codec::SideLayout::Head& head = ladder[side][levels[h]][h];
        m.layout[side].Add(head.coding, head.shape);
      } else {
        const codec::SideLayout::Head& head = ladder[side][0][h];
        m.layout[side].heads.push_back({head.coding, head.shape, 0, 0, 0});
      }
    }
  }
  return &m.layout[i];
}

const LayerShape::Levels* LayerShape::LevelsOf(const codec::SideLayout* k) const {
  for (const auto& m : mixed)
    if (&m->layout[0] == k) return &m->levels;
  return nullptr;
}

std::uint8_t Stream::LevelOf(std::uint32_t id, std::uint32_t head) const {
  const LayerShape::Levels* levels = shape_.LevelsOf(pages_[id]->k.layout());
  return levels == nullptr ? std::uint8_t{0} : (*levels)[head];
}

Status Stream::Demote(std::uint32_t id, const LayerShape::Levels& levels,
                      std::vector<SealTask>& tasks) {
  for (Side side : {Side::kK, Side::kV}) {
    if (shape_.n_embd(side) == 0) continue;
    const codec::SideLayout* to = shape_.layout_of(side, levels);
    // Not even a byte where no head is left: the block says that there is none.
    std::uint8_t* coded = alloc_.Allocate(std::max(to->bytes, 1u));
    if (coded == nullptr) return page::NoMemory(to->bytes);
    tasks.push_back({id, side, to, coded});
  }
  pages_[id]->state = State::kDemoted;
  return Status::Ok();
}

// --- packing ------------------------------------------------------------------------------------

// What is left of the pages fills half a page of each head, or there are so many that they cost
// more than a page that is not full. Until then their entries would only be coded again and again.
bool Stream::WorthPacking(std::span<const std::uint32_t> ids) const {
  constexpr std::size_t kManyPages = 4;
  std::size_t n = 0;
  for (std::uint32_t id : ids)
    for (std::uint32_t h = 0; h < shape_.n_head_kv; ++h) n += HeldRows(id, h).count();
  return ids.size() >= kManyPages || n * 2 >= std::size_t{shape_.n_head_kv} * shape_.page_size;
}

std::vector<std::uint32_t> Stream::ThinPages(std::uint32_t head, std::size_t n) const {
  std::vector<std::uint32_t> thin;
  std::size_t entries = n;
  for (std::uint32_t id = 0; id < pages_.size(); ++id) {
    const Page* p = pages_[id].get();
    if (p == nullptr || p->head != head || !IsThin(*p)) continue;
    thin.push_back(id);
    entries += p->live.count();
  }
  const auto pages = [&](std::size_t x) { return (x + shape_.page_size - 1) / shape_.page_size; };
  if (pages(entries) >= pages(n) + thin.size()) thin.clear();
  return thin;
}

Status Stream::PackHead(std::uint32_t head, std::span<const Where> entries,
                        std::vector<SealTask>& tasks) {
  while (!entries.empty()) {
    const std::size_t n = std::min<std::size_t>(entries.size(), shape_.page_size);
    auto fresh = NewPage(shape_.page_size, false);
    if (!fresh.ok()) return fresh.status();
    const std::uint32_t id = fresh.value();
    Page& p = *pages_[id];
    p.head = static_cast<std::uint16_t>(head);
    p.state = State::kSealed;
    for (std::uint32_t i = 0; i < n; ++i) {
      const Where& at = entries[i];
      const Page& from = *pages_[at.page];
      if (Status s = NoteCell(p, i, from.cell(at.row)); !s.ok()) return s;
      for (Side side : {Side::kK, Side::kV}) {
        if (shape_.n_embd(side) == 0) continue;
        if (Status s = EnsureF16(p, side, p.capacity - 1u); !s.ok()) return s;
        ReadHead(from, side, head, at.row, page::F16Row(p.side(side), shape_.dim(side), i));
        p.side(side).written()->set(i);
      }
      p.rows++;
      p.live.set(i);
      if (Status s = SetShift(p, i, from.shift_of(at.row)); !s.ok()) return s;
    }
    LayerShape::Levels levels(shape_.n_head_kv, LayerShape::kGone);
    levels[head] = 0;
    for (Side side : {Side::kK, Side::kV}) {
      const codec::SideLayout* to = shape_.layout_of(side, levels);
      if (p.side(side).data == nullptr || to == nullptr) continue;  // f16 for good
      std::uint8_t* coded = alloc_.Allocate(to->bytes);
      if (coded == nullptr) return page::NoMemory(to->bytes);
      tasks.push_back({id, side, to, coded});
    }
    entries = entries.subspan(n);
  }
  return Status::Ok();
}

Status Stream::Pack(std::span<const std::uint32_t> ids, std::vector<SealTask>& tasks) {
  if (pruned_ == nullptr || (ids.empty() && !pruned_->holes)) return Status::Ok();
  std::vector<Where> entries;
  for (std::uint32_t h = 0; h < shape_.n_head_kv; ++h) {
    std::size_t n = 0;
    for (std::uint32_t id : ids) n += HeldRows(id, h).count();
    std::vector<std::uint32_t> from = ThinPages(h, n);
    const std::size_t n_thin = from.size();
    from.insert(from.end(), ids.begin(), ids.end());
    entries.clear();
    for (std::uint32_t id : from) {
      const RowMask held = HeldRows(id, h);
      for (std::uint32_t r = 0; r < pages_[id]->rows; ++r)
        if (held.test(r)) entries.push_back({id, r});
    }
    if (Status s = PackHead(h, entries, tasks); !s.ok()) return s;
    for (std::size_t i = 0; i < n_thin; ++i) FreePage(from[i]);
  }
  for (std::uint32_t id : ids) {
    Page& p = *pages_[id];
    FreeBlock(p.k);
    FreeBlock(p.v);
    FreeShifts(p);
    p.shift = 0;
    p.state = State::kPruned;
    NotUnsealed(id);
    pruned_->gone.erase(id);
  }
  pruned_->holes = false;
  pruned_->at = {};
  return Status::Ok();
}

}  // namespace kvtamp::store
