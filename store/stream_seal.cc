// Pages that change their format: sealing, coding again, and compaction.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/convert.h"
#include "store/stream.h"

namespace kvtamp::store {

using codec::Side;
using page::Block;
using page::CellIndex;
using page::Page;
using page::State;

bool Stream::IsFinal(const Page& p, Side side) const {
  return shape_.n_embd(side) == 0 ||
         (SideComplete(p, side) && p.side(side).layout() == shape_.final_of(side));
}

Status Stream::CollectSeals(std::vector<SealTask>& tasks, std::vector<std::uint32_t>& packs) {
  if (shape_.n_head_kv == 0) return Status::Ok();
  SettleIdle();
  if (pruned_ != nullptr)
    for (const auto& [id, heads] : pruned_->gone)
      if (IsCodedForGood(*pages_[id])) packs.push_back(id);
  if (unsealed_.empty()) {
    if (!packs.empty() && !WorthPacking(packs)) packs.clear();
    return Status::Ok();
  }
  // Each run has a recent window of its own, as long as it is not idle.
  std::array<std::size_t, kMaxRuns> newer = {};
  for (std::size_t i = 0; i < runs_.size(); ++i)
    if (IsOpen(runs_[i])) newer[i] = pages_[runs_[i].page]->rows;
  struct Turn {
    std::uint32_t page;
    bool due;  // out of the recent window
  };
  const auto wanted = [&](const Turn& turn, Side side) -> const codec::SideLayout* {
    const Block& b = pages_[turn.page]->side(side);
    const codec::SideLayout* to = turn.due ? shape_.final_of(side) : shape_.window_of(side);
    const bool ready = b.data != nullptr && SideComplete(*pages_[turn.page], side);
    return ready && b.layout() != to ? to : nullptr;
  };
  const auto is_final = [&](const Turn& turn) {
    const Page& p = *pages_[turn.page];
    return turn.due && IsFinal(p, Side::kK) && IsFinal(p, Side::kV);
  };
  std::vector<Turn> turns;  // of the pages to do something about, latest first; mostly none
  for (std::size_t i = unsealed_.size(); i-- > 0;) {
    const Unsealed& u = unsealed_[i];
    const Turn turn{u.page, newer[u.run] >= shape_.residual_length || IsIdle(runs_[u.run])};
    newer[u.run] += pages_[u.page]->rows;
    if (wanted(turn, Side::kK) != nullptr || wanted(turn, Side::kV) != nullptr || is_final(turn))
      turns.push_back(turn);
  }
  // Pages that lost entries go to pages of one head each from their f16 rows, if that is worth it.
  const auto to_pack = [&](const Turn& turn) {
    const Page* p = pages_[turn.page].get();
    return p != nullptr && turn.due && GoneOf(turn.page) != nullptr && SideComplete(*p, Side::kK) &&
           (shape_.n_embd_v == 0 || SideComplete(*p, Side::kV));
  };
  for (std::size_t i = turns.size(); i-- > 0;)
    if (to_pack(turns[i])) packs.push_back(turns[i].page);
  const bool pack = !packs.empty() && WorthPacking(packs);
  packs.clear();
  if (pack)
    for (const auto& [id, heads] : pruned_->gone)
      if (IsCodedForGood(*pages_[id])) packs.push_back(id);
  for (std::size_t i = turns.size(); i-- > 0;) {
    const Turn& turn = turns[i];
    const std::uint32_t id = turn.page;
    if (wanted(turn, Side::kK) != nullptr || wanted(turn, Side::kV) != nullptr) {
      if (Status s = MovePinned(id); !s.ok()) return s;
    }
    if (!pages_[id]) continue;
    Page& p = *pages_[id];
    if (pack && to_pack(turn)) {
      packs.push_back(id);
      continue;
    }
    for (Side side : {Side::kK, Side::kV}) {
      const codec::SideLayout* to = wanted(turn, side);
      if (to == nullptr) continue;
      std::uint8_t* coded = alloc_.Allocate(to->bytes);
      if (coded == nullptr) return page::NoMemory(to->bytes);
      tasks.push_back({id, side, to, coded});
    }
    // A format of f16 has nothing to encode: the page is as final as it gets.
    if (is_final(turn)) {
      p.state = State::kSealed;
      NotUnsealed(id);
    }
  }
  return Status::Ok();
}

void Stream::NotUnsealed(std::uint32_t id) {
  std::erase_if(unsealed_, [&](const Unsealed& u) { return u.page == id; });
}

void Stream::EncodeRows(Side side, const codec::SideLayout::Head& to, std::uint32_t head,
                        const codec::EncodeInput& rows, std::uint8_t* out) const {
  codec::EncodeInput in = rows;
  if (side == Side::kV) {
    codec::EncodeV(to.coding, to.shape, in, shape_.v.hadamard, out + to.offset);
    return;
  }
  // Where values lie in keys, q alone does not say what a channel is worth.
  if (!shape_.k_weight.empty() && shape_.v_in_k == 0)
    in.weight = shape_.k_weight.data() + std::size_t{head} * to.shape.dim;
  codec::EncodeK(to.coding, to.shape, in, shape_.mean_of(head), out + to.offset);
}

void Stream::EncodeHead(const SealTask& task, std::uint32_t head) const {
  if (shape_.hollow) return;
  const Page& p = *pages_[task.page];
  const Block& b = p.side(task.side);
  const codec::SideLayout::Head& to = task.to->heads[head];
  if (to.bytes == 0) return;
  const std::uint32_t stride = RowElements(p, task.side), dim = to.shape.dim;
  if (p.state == State::kDemoted) {  // some heads stay as they are
    const codec::SideLayout::Head& from = b.layout()->heads[head];
    if (from.coding == to.coding && from.shape == to.shape) {
      std::memcpy(task.coded + to.offset, b.data + from.offset, to.bytes);
      return;
    }
  }
  const page::RowMask valid = HeldRows(task.page, head);
  if (!b.coded()) {
    const half_t* rows = page::F16Row(b, stride, 0) + (p.single() ? 0 : std::size_t{head} * dim);
    EncodeRows(task.side, to, head, {rows, stride, valid.word}, task.coded);
    return;
  }
  std::vector<half_t> rows(std::size_t{p.capacity} * dim);
  float x[codec::kMaxDim];
  for (std::uint32_t r = 0; r < p.rows; ++r) {
    if (!valid.test(r)) continue;
    DecodeHead(b, task.side, head, r, x);
    cpu::FloatToHalf(x, rows.data() + std::size_t{r} * dim, dim);
  }
  EncodeRows(task.side, to, head, {rows.data(), dim, valid.word}, task.coded);
}

void Stream::FinishSeal(const SealTask& task) {
  Page& p = *pages_[task.page];
  Block& b = p.side(task.side);
  FreeBlock(b);
  b.data = task.coded;
  b.SetCoded(task.to);
  b.bytes = std::max(task.to->bytes, 1u);  // that of no head at all is there, too
  if (IsFinal(p, Side::kK) && IsFinal(p, Side::kV)) {
    p.state = State::kSealed;
    NotUnsealed(task.page);
  }
}

std::vector<float> Stream::MeanKey(std::uint32_t id) const {
  const Page& p = *pages_[id];
  struct Channel {
    double sum = 0;
    float lo = 0, hi = 0;
  };
  std::vector<Channel> channels(shape_.n_embd_k);
  std::vector<half_t> row(shape_.n_embd_k);
  std::uint32_t n = 0;
  for (std::uint32_t r = 0; r < p.rows; ++r) {
    if (!p.live.test(r)) continue;
    ReadRow(p, Side::kK, r, row.data());
    for (std::uint32_t c = 0; c < shape_.n_embd_k; ++c) {
      const float x = HalfToFloat(row[c]);
      channels[c].sum += x;
      channels[c].lo = n == 0 ? x : std::min(channels[c].lo, x);
      channels[c].hi = n == 0 ? x : std::max(channels[c].hi, x);
    }
    n++;
  }
  std::vector<float> mean(shape_.n_embd_k, 0.0f);
  for (std::uint32_t c = 0; c < shape_.n_embd_k && n > 0; ++c) {
    // To about the range of the page: near enough for the codes, and the same again when it is
    // taken from rows that were decoded, as in a saved state that another cache restores. Exact in
    // f16.
    const Channel& ch = channels[c];
    const float range = ch.hi - ch.lo, exact = static_cast<float>(ch.sum / n);
    const float step = range > 0 ? std::exp2(std::ceil(std::log2(range))) : 0.0f;
    mean[c] = HalfToFloat(FloatToHalf(step > 0 ? std::nearbyint(exact / step) * step : exact));
  }
  return mean;
}

Status Stream::RecodeK(Page& p, const std::vector<half_t>& rows) {
  if (!p.k.coded()) {
    for (std::uint32_t r = 0; r < p.rows; ++r) {
      if (!p.live.test(r) || !Written(p, Side::kK, r)) continue;
      const std::uint32_t n = RowElements(p, Side::kK);
      std::memcpy(page::F16Row(p.k, n, r),
                  rows.data() + std::size_t{r} * shape_.n_embd_k + (p.single() ? p.head * n : 0),
                  n * sizeof(half_t));
    }
    FreeShifts(p);
    p.shift = 0;
    return Status::Ok();
  }
  std::uint8_t* coded = alloc_.Allocate(p.k.bytes);  // the old bytes may have other owners
  if (coded == nullptr) return page::NoMemory(p.k.bytes);
  for (std::uint32_t h = 0; h < shape_.n_head_kv; ++h) {
    const codec::SideLayout::Head& to = p.k.layout()->heads[h];
    if (to.bytes == 0) continue;
    EncodeRows(Side::kK, to, h,
               {rows.data() + std::size_t{h} * to.shape.dim, shape_.n_embd_k, p.live.word}, coded);
  }
  alloc_.Free(p.k.data, p.k.bytes);
  p.k.data = coded;
  FreeShifts(p);
  p.shift = 0;
  return Status::Ok();
}

// --- compaction ---------------------------------------------------------------------------------

Status Stream::Compact() {
  if (!died_) return Status::Ok();
  died_ = false;
  std::uint32_t first = CellIndex::kNone;
  for (std::uint32_t id = 0; id < pages_.size(); ++id) {
    const Page* p = pages_[id].get();
    if (p == nullptr || p->pinned) continue;
    if (!IsCodedForGood(*p)) continue;
    if (p->single() || GoneOf(id) != nullptr) continue;  // Pack's
    if (p->live.count() * 2u > p->capacity) continue;
    if (first == CellIndex::kNone) {
      first = id;
    } else {
      if (Status s = CompactInto(first, id); !s.ok()) return s;
      first = CellIndex::kNone;
    }
  }
  return Status::Ok();
}

Status Stream::CompactInto(std::uint32_t a, std::uint32_t b) {
  auto fresh = NewPage(shape_.page_size, false);
  if (!fresh.ok()) return fresh.status();
  const std::uint32_t id = fresh.value();
  for (std::uint32_t from : {a, b}) {
    const Page& old = *pages_[from];
    Page& p = *pages_[id];
    for (std::uint32_t r = 0; r < old.rows; ++r) {
      if (!old.live.test(r)) continue;
      const std::uint32_t row = p.rows;
      if (Status s = NoteCell(p, row, old.cell(r)); !s.ok()) return s;
      for (Side side : {Side::kK, Side::kV}) {
        if (!Written(old, side, r)) continue;
        if (Status s = EnsureF16(p, side, p.capacity - 1u); !s.ok()) return s;
        ReadRow(old, side, r, page::F16Row(p.side(side), shape_.n_embd(side), row));
        p.side(side).written()->set(row);
      }
      p.live.set(row);
      p.rows++;
      for (std::uint32_t h = 0; h < shape_.n_head_kv; ++h)
        if (Lacks(old, h)) SetGone(id, h, row);
      if (Status s = SetShift(p, row, old.shift_of(r)); !s.ok()) return s;
    }
  }
  Page& p = *pages_[id];
  for (std::uint32_t r = 0; r < p.rows; ++r) index_.Set(p.cell(r), id);
  if (shape_.prunes) NotePage(id, Pruned::Note(pruned_->notes[a]));
  FreePage(a);
  FreePage(b);
  p.state = State::kSettled;
  unsealed_.insert(unsealed_.begin(), {id, 0});
  std::vector<SealTask> tasks;
  for (Side side : {Side::kK, Side::kV}) {
    const codec::SideLayout* to = shape_.final_of(side);
    if (p.side(side).data == nullptr || to == nullptr) continue;
    std::uint8_t* coded = alloc_.Allocate(to->bytes);
    if (coded == nullptr) return page::NoMemory(to->bytes);
    tasks.push_back({id, side, to, coded});
  }
  for (const SealTask& t : tasks) {
    for (std::uint32_t h = 0; h < shape_.n_head_kv; ++h) EncodeHead(t, h);
    FinishSeal(t);
  }
  if (tasks.empty()) {  // an f16 store has nothing to encode
    p.state = State::kSealed;
    NotUnsealed(id);
  }
  return Status::Ok();
}

}  // namespace kvtamp::store
