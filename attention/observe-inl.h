// Attention that each cell gets from a few query rows; see observe.h. Per-target header.
#if defined(KVTAMP_ATTENTION_OBSERVE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_OBSERVE_INL_H_
#undef KVTAMP_ATTENTION_OBSERVE_INL_H_
#else
#define KVTAMP_ATTENTION_OBSERVE_INL_H_
#endif

#include <cmath>

#include "attention/decode-inl.h"

KVTAMP_BEFORE_VNNI();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// The unit's scores: rows `slots` apart, pages one after the other, each padded to 16; -inf where
// the row sees nothing. s.max: the largest of each row.
HWY_INLINE void AllScores(const Unit& unit, const DecodeScratchLayout& s, float* scores,
                          std::size_t slots) {
  const float* turn = nullptr;
  BeginRows(unit, s);
  Active active;
  std::size_t at = 0;
  for (std::uint32_t i = unit.page0; i < unit.page1; ++i) {
    const Page& page = unit.job->pages[i];
    const std::uint32_t padded = RoundUp(page.rows, 16);
    for (std::uint32_t r = 0; r < unit.rows; ++r)
      std::fill_n(scores + r * slots + at, padded, kNegInf);
    if (BeginPage(unit, page, s, turn, active)) {
      const Page* next = i + 1 < unit.page1 ? &unit.job->pages[i + 1] : nullptr;
      Scores(*unit.layer, page, next, unit.head_kv, s, active);
    }
    for (std::uint32_t a = 0; a < active.n; ++a) {
      const std::uint32_t r = active.row[a];
      const float* score = s.score + std::size_t{r} * codec::kMaxPageSize;
      const auto max = MaskScores(*unit.params, s, r, active.mask[a], padded);
      s.max[r] = std::max(s.max[r], hn::GetLane(hn::MaxOfLanes(hn::ScalableTag<float>(), max)));
      std::copy_n(score, padded, scores + r * slots + at);
    }
    at += padded;
  }
}

// scores: [rows][slots] scratch.
void ObserveUnit(const Unit& unit, std::uint8_t* scratch, float* scores, std::size_t slots,
                 float* mass) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  Arena arena(scratch);
  const DecodeScratchLayout s(arena, *unit.layer, unit.rows);
  AllScores(unit, s, scores, slots);
  const float* sinks = unit.params->sinks;
  float* total = scores;  // over the first row
  for (std::uint32_t r = 0; r < unit.rows; ++r) {
    float* row = scores + r * slots;
    const float sink = sinks == nullptr ? kNegInf : sinks[unit.head(r)];
    const float max = std::max(s.max[r], sink);
    const auto top = hn::Set(d, s.max[r] == kNegInf ? 0.0f : max);  // not -inf - -inf
    auto sum = hn::Zero(d);
    for (std::size_t i = 0; i < slots; i += lanes) {
      const auto p = Exp(d, hn::Sub(hn::Load(d, row + i), top));
      sum = hn::Add(sum, p);
      hn::Store(p, d, row + i);
    }
    const float all =
        hn::GetLane(hn::SumOfLanes(d, sum)) + (sink == kNegInf ? 0.0f : std::exp(sink - max));
    const auto inverse = hn::Set(d, all > 0 ? 1.0f / all : 0.0f);
    for (std::size_t i = 0; i < slots; i += lanes) {
      const auto p = hn::Mul(hn::Load(d, row + i), inverse);
      hn::Store(r == 0 ? p : hn::Add(hn::Load(d, total + i), p), d, total + i);
    }
  }
  for (std::uint32_t i = unit.page0; i < unit.page1; ++i) {
    const Page& page = unit.job->pages[i];
    const OpenRows open = Holds(page, unit.head_kv) ? OpenRowsOf(page, unit.job->n_kv) : OpenRows();
    for (std::uint32_t t = 0; t < page.rows; ++t) {
      if (!open.test(t)) continue;
      mass[page.cells == nullptr ? page.first_cell + t : page.cells[t]] += total[t];
    }
    total += RoundUp(page.rows, 16);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
