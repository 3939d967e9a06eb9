// The integer stage with 16-bit multiply-adds of pairs, for instruction sets without 8-bit dot
// products (and NEON); see dots-inl.h. Per-target header.
#if defined(KVTAMP_ATTENTION_DOTS_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_DOTS_PAIRS_INL_H_
#undef KVTAMP_ATTENTION_DOTS_PAIRS_INL_H_
#else
#define KVTAMP_ATTENTION_DOTS_PAIRS_INL_H_
#endif

#include <algorithm>

#include "attention/fold-inl.h"
#include "attention/unit.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

KVTAMP_BEFORE_VNNI();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_AVX3_DL
namespace pairs {

template <class D32>
using D16Of = hn::Repartition<std::int16_t, D32>;
template <class D32>
using DU16Of = hn::Repartition<std::uint16_t, D32>;

// Sums of both halves where the instruction set keeps them apart (NEON); x86 uses only `a`.
template <class D32>
struct PairSum {
  hn::Vec<D32> a, b;
  HWY_INLINE PairSum() {}  // an implicit one would lack the target's attributes
  HWY_INLINE void Clear(D32 d) { a = b = hn::Zero(d); }
  HWY_INLINE void Add(D32 d, hn::Vec<DU16Of<D32>> x, std::int32_t pair) {
    const D16Of<D32> d16;
    a = hn::ReorderWidenMulAccumulate(d, hn::BitCast(d16, x), hn::BitCast(d16, hn::Set(d, pair)), a,
                                      b);
  }
  HWY_INLINE hn::Vec<D32> Total() const { return hn::RearrangeToOddPlusEven(a, b); }
};

template <int kHeads, class D32>
HWY_INLINE void KDots8(D32 d, const std::uint8_t* codes, std::uint32_t rows, std::uint32_t dim,
                       const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                       std::int32_t* const* out) {
  const DU16Of<D32> du16;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  const auto byte = hn::Set(du16, 0xFF);
  for (std::uint32_t t = 0; t < rows; t += lanes) {
    PairSum<D32> acc[kHeads];
    for (int h = 0; h < kHeads; ++h) acc[h].Clear(d);
    const std::uint8_t* p = codes + t * 4;
    for (std::uint32_t c = 0; c < dim; c += 4, p += rows * 4) {
      const auto x = hn::LoadU(du16, reinterpret_cast<const std::uint16_t*>(p));
      hwy::Prefetch(p + ahead);
      const auto even = hn::And(x, byte), odd = hn::ShiftRight<8>(x);
      for (int h = 0; h < kHeads; ++h) {
        const auto* u = reinterpret_cast<const std::int32_t*>(folded[h]) + c;
        acc[h].Add(d, even, u[0]);
        acc[h].Add(d, odd, u[1]);
      }
    }
    for (int h = 0; h < kHeads; ++h) hn::StoreU(acc[h].Total(), d, out[h] + t);
  }
}

template <int kHeads, class D32>
HWY_INLINE void KDots4(D32 d, const std::uint8_t* codes, std::uint32_t rows, std::uint32_t dim,
                       const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                       std::int32_t* const* out) {
  const DU16Of<D32> du16;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  const std::uint32_t half = std::min(32u, rows) / 2;
  const auto nibble = hn::Set(du16, 15);
  for (std::uint32_t chunk = 0; chunk < rows; chunk += 2 * half) {
    for (std::uint32_t t = 0; t < half; t += lanes) {
      PairSum<D32> lower[kHeads], upper[kHeads];
      for (int h = 0; h < kHeads; ++h) {
        lower[h].Clear(d);
        upper[h].Clear(d);
      }
      const std::uint8_t* p = codes + chunk * 2 + t * 4;
      for (std::uint32_t c = 0; c < dim; c += 4, p += rows * 2) {
        const auto x = hn::LoadU(du16, reinterpret_cast<const std::uint16_t*>(p));
        hwy::Prefetch(p + ahead);
        const auto even0 = hn::And(x, nibble), odd0 = hn::And(hn::ShiftRight<8>(x), nibble);
        const auto even1 = hn::And(hn::ShiftRight<4>(x), nibble), odd1 = hn::ShiftRight<12>(x);
        for (int h = 0; h < kHeads; ++h) {
          const auto* u = reinterpret_cast<const std::int32_t*>(folded[h]) + c;
          lower[h].Add(d, even0, u[0]);
          lower[h].Add(d, odd0, u[1]);
          upper[h].Add(d, even1, u[0]);
          upper[h].Add(d, odd1, u[1]);
        }
      }
      for (int h = 0; h < kHeads; ++h) {
        hn::StoreU(lower[h].Total(), d, out[h] + chunk + t);
        hn::StoreU(upper[h].Total(), d, out[h] + chunk + half + t);
      }
    }
  }
}

template <int kHeads>
HWY_NOINLINE void KDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t rows,
                        std::uint32_t dim, const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                        std::int32_t* const* out) {
  const hn::ScalableTag<std::int32_t> d;
  if (coding != codec::Coding::kKInt4) {
    KDots8<kHeads>(d, codes, rows, dim, folded, ahead, out);
  } else if (hn::Lanes(d) <= 8 || rows >= 32) {
    KDots4<kHeads>(d, codes, rows, dim, folded, ahead, out);
  } else {  // a page of 16 has only 8 tokens side by side
    KDots4<kHeads>(hn::CappedTag<std::int32_t, 8>(), codes, rows, dim, folded, ahead, out);
  }
}

template <int kHeads>
HWY_NOINLINE void VDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t n_blocks,
                        std::uint32_t rows, const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                        std::int32_t* const* out) {
  const hn::ScalableTag<std::int32_t> d;
  using D = decltype(d);
  const D16Of<D> d16;
  const DU16Of<D> du16;
  const hn::Repartition<std::int8_t, D> d8;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  const auto levels = hn::LoadDup128(d8, codec::kLm4Levels);
  const auto nibble = hn::Set(d8, 15);
  const bool int8 = coding == codec::Coding::kVInt8;
  for (std::uint32_t c = 0; c < n_blocks * 16; c += lanes) {
    const auto* from = reinterpret_cast<const std::int8_t*>(
        codes + c / 16 * BlockBytes(coding, rows) + c % 16 * 4);
    PairSum<D> acc[kHeads];
    for (int h = 0; h < kHeads; ++h) acc[h].Clear(d);
    for (std::uint32_t t = 0; t < rows; t += 8) {
      hn::Vec<decltype(d16)> x[2];
      hwy::Prefetch(from + t * (int8 ? 16 : 8) + ahead);
      if (int8) {
        x[0] = hn::BitCast(d16, hn::LoadU(d8, from + t * 16));
        x[1] = hn::BitCast(d16, hn::LoadU(d8, from + t * 16 + 64));
      } else {
        const auto both = hn::LoadU(d8, from + t * 8);
        const auto upper = hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(du16, both)));
        x[0] = hn::BitCast(d16, hn::TableLookupBytes(levels, hn::And(both, nibble)));
        x[1] = hn::BitCast(d16, hn::TableLookupBytes(levels, hn::And(upper, nibble)));
      }
      for (int q = 0; q < 2; ++q) {
        const auto even = hn::BitCast(du16, hn::ShiftRight<8>(hn::ShiftLeft<8>(x[q])));
        const auto odd = hn::BitCast(du16, hn::ShiftRight<8>(x[q]));
        for (int h = 0; h < kHeads; ++h) {
          const auto* w = reinterpret_cast<const std::int32_t*>(folded[h]) + t + q * 4;
          acc[h].Add(d, even, w[0]);
          acc[h].Add(d, odd, w[1]);
        }
      }
    }
    for (int h = 0; h < kHeads; ++h) hn::StoreU(acc[h].Total(), d, out[h] + c);
  }
}

}  // namespace pairs
#if !KVTAMP_ARM_DOTS  // there dots_arm-inl.h chooses
using pairs::KDots;
using pairs::VDots;
#endif
#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
