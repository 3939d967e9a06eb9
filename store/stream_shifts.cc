// Keys that a context shift moved: how far, row by row, and turning them where they are read.
#include <algorithm>
#include <vector>

#include "store/stream.h"

namespace kvtamp::store {

using codec::Side;
using page::Page;

namespace {

// More distinct shifts than this and a page is coded again: attention passes over it once for each.
constexpr std::size_t kMaxTurnsOfPage = 4;

}  // namespace

void Stream::TurnRow(std::int32_t shift, half_t* row) const {
  if (shift == 0) return;
  for (std::uint32_t h = 0; h < shape_.n_head_kv; ++h, row += shape_.dim(Side::kK))
    TurnHead(shift, row);
}

void Stream::TurnHead(std::int32_t shift, half_t* row) const {
  const float* turn = shape_.turns.at(shift).data();
  const TurnShape& t = shape_.turn;
  for (std::uint32_t i = 0; i < t.pairs; ++i) {
    half_t &a = row[t.a(i)], &b = row[t.b(i)];
    const float x = HalfToFloat(a), y = HalfToFloat(b);
    a = FloatToHalf(turn[2 * i] * x - turn[2 * i + 1] * y);
    b = FloatToHalf(turn[2 * i + 1] * x + turn[2 * i] * y);
  }
}

void Stream::FreeShifts(Page& p) {
  alloc_.Free(reinterpret_cast<std::uint8_t*>(p.shifts), p.capacity * sizeof(std::int32_t));
  p.shifts = nullptr;
}

void Stream::MergeShifts(Page& p) {
  if (p.shifts == nullptr) return;
  bool any = false;
  std::int32_t one = 0;
  for (std::uint32_t r = 0; r < p.rows; ++r) {
    if (!p.live.test(r)) continue;
    if (any && p.shifts[r] != one) return;
    any = true;
    one = p.shifts[r];
  }
  FreeShifts(p);
  p.shift = one;
}

Status Stream::SetShift(Page& p, std::uint32_t row, std::int32_t shift) {
  if (p.shift_of(row) == shift) return Status::Ok();
  if (p.shifts == nullptr) {
    if (p.live.count() == 1 && p.live.test(row)) {
      p.shift = shift;
      return Status::Ok();
    }
    p.shifts = NewRowNumbers<std::int32_t>(p);
    if (p.shifts == nullptr) return page::NoMemory(p.capacity * sizeof(std::int32_t));
    std::fill_n(p.shifts, p.capacity, p.shift);
  }
  p.shifts[row] = shift;
  return Status::Ok();
}

std::int32_t Stream::DeltaOf(const Page& p, std::uint32_t row,
                             std::span<const std::int32_t> delta) const {
  const std::uint32_t cell = p.cell(row);
  return cell < delta.size() && Written(p, Side::kK, row) ? delta[cell] : 0;
}

Status Stream::ShiftK(std::span<const std::int32_t> delta) {
  for (const auto& ptr : pages_) {
    if (ptr == nullptr) continue;
    Page& p = *ptr;
    bool any = false, same = true, first = true;
    std::int32_t by = 0;
    for (std::uint32_t r = 0; r < p.rows; ++r) {
      if (!p.live.test(r)) continue;
      const std::int32_t d = DeltaOf(p, r, delta);
      any = any || d != 0;
      same = same && (first || d == by);
      first = false;
      by = d;
    }
    if (!any) continue;
    if (same && p.shifts == nullptr) {  // nearly always
      p.shift += by;
      continue;
    }
    for (std::uint32_t r = 0; r < p.rows; ++r) {
      if (!p.live.test(r)) continue;
      if (Status s = SetShift(p, r, p.shift_of(r) + DeltaOf(p, r, delta)); !s.ok()) return s;
    }
    MergeShifts(p);
  }
  return Status::Ok();
}

void Stream::AppendShifts(std::span<const std::int32_t> delta,
                          std::vector<std::int32_t>& shifts) const {
  for (const auto& p : pages_) {
    if (p == nullptr) continue;
    const std::size_t first = shifts.size();
    for (std::uint32_t r = 0; r < p->rows; ++r) {
      if (!p->live.test(r)) continue;
      const std::int32_t shift = p->shift_of(r) + DeltaOf(*p, r, delta);
      if (shifts.size() == first || shifts.back() != shift) shifts.push_back(shift);
    }
  }
}

Status Stream::SettleShifts() {
  std::vector<bool> settle;  // by cell
  for (const auto& p : pages_) {
    if (p == nullptr || p->shifts == nullptr) continue;
    std::vector<std::int32_t> distinct;
    for (std::uint32_t r = 0; r < p->rows; ++r)
      if (p->live.test(r)) distinct.push_back(p->shifts[r]);
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    if (distinct.size() <= kMaxTurnsOfPage) continue;
    for (std::uint32_t r = 0; r < p->rows; ++r) {
      if (!p->live.test(r)) continue;
      if (settle.size() <= p->cell(r)) settle.resize(p->cell(r) + 1u);
      settle[p->cell(r)] = true;
    }
  }
  if (settle.empty()) return Status::Ok();
  return RewriteK(
      [&](std::uint32_t cell, half_t*) { return cell < settle.size() && settle[cell]; });
}

}  // namespace kvtamp::store
