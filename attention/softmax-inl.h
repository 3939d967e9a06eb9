// exp and tanh for softmax, and the gathered mask. Per-target header.
#if defined(KVTAMP_ATTENTION_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_SOFTMAX_INL_H_
#undef KVTAMP_ATTENTION_SOFTMAX_INL_H_
#else
#define KVTAMP_ATTENTION_SOFTMAX_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/unit.h"
#include "cpu/half-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// e^x for x <= 0 (up to 88 in truth), about 1e-7 relative; below -86 it is 0, and for NaN too.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V lowest = hn::Set(d, -86.0f);
  const auto live = hn::Ge(x, lowest);
  x = hn::Max(x, lowest);
  const auto n = hn::NearestInt(hn::Mul(x, hn::Set(d, 1.44269504088896341f)));
  const V nf = hn::ConvertTo(d, n);
  V r = hn::NegMulAdd(nf, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(nf, hn::Set(d, -2.12194440e-4f), r);
  V p = hn::Set(d, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  p = hn::MulAdd(p, hn::Mul(r, r), hn::Add(r, hn::Set(d, 1.0f)));
  const V e = hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(n)));
  return hn::IfThenElseZero(live, e);
}

// c * tanh(x): absolute error a few 1e-7 of c, which is what a score needs.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V SoftCap(D d, V x, V c) {
  const V one = hn::Set(d, 1.0f);
  const V e = Exp(d, hn::Mul(hn::Abs(x), hn::Set(d, -2.0f)));
  return hn::CopySign(hn::Mul(c, hn::Div(hn::Sub(one, e), hn::Add(one, e))), x);
}

enum class MaskClass : std::uint8_t { kShut, kOpen, kMixed };

// The mask of the page's rows for one token and head, as halves in row order: a pointer into the
// mask where cells are one run, else gathered into tmp[kMaxPageSize]. Only open rows are valid.
HWY_INLINE const half_t* MaskRow(const Page& page, const OpenRows& open, const half_t* mask,
                                 half_t* tmp) {
  if (page.cells == nullptr) return mask + page.first_cell;
  for (std::uint32_t w = 0; w * 64 < page.rows; ++w) {
    for (std::uint64_t left = open.bits[w]; left != 0; left &= left - 1) {
      const std::uint32_t r = w * 64 + static_cast<std::uint32_t>(__builtin_ctzll(left));
      tmp[r] = mask[page.cells[r]];
    }
  }
  return tmp;
}

// Over the open rows alone. Reads only open rows.
HWY_INLINE MaskClass Classify(const Page& page, const OpenRows& open, const half_t* m) {
  const hn::ScalableTag<std::uint16_t> d;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  bool all_open = true, all_shut = true;
  std::uint32_t r = 0;
  if (open.count == page.rows) {
    const auto inf = hn::Set(d, 0xFC00);
    for (; r + lanes <= page.rows; r += lanes) {
      const auto v = hn::LoadU(d, m + r);
      all_open = all_open && hn::AllTrue(d, hn::Eq(v, hn::Zero(d)));
      all_shut = all_shut && hn::AllTrue(d, hn::Eq(v, inf));
      if (!all_open && !all_shut) return MaskClass::kMixed;
    }
  }
  for (; r < page.rows; ++r) {
    if (!open.test(r)) continue;
    all_open = all_open && m[r] == 0;
    all_shut = all_shut && m[r] == 0xFC00;
    if (!all_open && !all_shut) return MaskClass::kMixed;
  }
  return all_shut ? MaskClass::kShut : MaskClass::kOpen;
}

// out[RoundUp(rows, 16)]: what to add to each row's score; -inf where it is not attended.
HWY_INLINE void MaskToFloat(const OpenRows& open, const half_t* m, std::uint32_t padded,
                            float* out) {
  if (m == nullptr && open.first()) {
    std::fill(std::fill_n(out, open.count, 0.0f), out + padded, kNegInf);
    return;
  }
  for (std::uint32_t r = 0; r < padded; ++r) {
    out[r] = !open.test(r) ? kNegInf : m == nullptr ? 0.0f : HalfToFloat(m[r]);
  }
}

// 8 or more elements of a row, halves to floats: the last vector of a row whose length is no
// multiple of the vector must not read on, the next row may be unmapped. `left` is a multiple of 8.
template <class D>
HWY_INLINE hn::Vec<D> LoadHalves(D d, const half_t* p, std::size_t left) {
  const hn::Rebind<std::uint16_t, D> dh;
  if (hn::Lanes(d) > 8 && HWY_UNLIKELY(left < hn::Lanes(d))) {
    return cpu::HWY_NAMESPACE::HalfToFloatV(d, hn::MaskedLoad(hn::FirstN(dh, left), dh, p));
  }
  return cpu::HWY_NAMESPACE::HalfToFloatV(d, hn::LoadU(dh, p));
}

// The same, infinities and NaN as 0.
template <class D>
HWY_INLINE hn::Vec<D> LoadFiniteHalves(D d, const half_t* p, std::size_t left) {
  const hn::Rebind<std::uint16_t, D> dh;
  auto h = hn::Zero(dh);
  if (hn::Lanes(d) > 8 && HWY_UNLIKELY(left < hn::Lanes(d))) {
    h = hn::MaskedLoad(hn::FirstN(dh, left), dh, p);
  } else {
    h = hn::LoadU(dh, p);
  }
  const auto exp = hn::Set(dh, 0x7C00);
  return cpu::HWY_NAMESPACE::HalfToFloatV(d, hn::IfThenZeroElse(hn::Eq(hn::And(h, exp), exp), h));
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
