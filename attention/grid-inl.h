// A page's scales as floats, and small vector helpers. Per-target header.
#if defined(KVTAMP_ATTENTION_GRID_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_GRID_INL_H_
#undef KVTAMP_ATTENTION_GRID_INL_H_
#else
#define KVTAMP_ATTENTION_GRID_INL_H_
#endif

#include <cmath>

#include "attention/unit.h"
#include "codec/layout.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Bits of a code, where all channels have the same.
HWY_INLINE std::uint32_t KBits(codec::Coding coding) {
  return coding == codec::Coding::kKInt8 ? 8 : 4;
}
HWY_INLINE float MidCode(codec::Coding coding) {
  return coding == codec::Coding::kKInt8 ? 127.5f : 7.5f;
}

// table[i], i < 16. Scales are powers of two times one of few mantissas: looking up those and
// adding to the exponent gives the codec's 256-entry tables bit for bit, without a gather.
template <class D>
HWY_INLINE hn::Vec<D> Lookup16(D d, const float* table, hn::Vec<hn::RebindToSigned<D>> i) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  return hn::TableLookupLanes(hn::LoadU(d, table), hn::IndicesFromVec(d, i));
#elif HWY_TARGET == HWY_AVX2
  const hn::RebindToSigned<D> di;
  const auto seven = hn::Set(di, 7);
  const auto index = hn::IndicesFromVec(d, hn::And(i, seven));
  return hn::IfThenElse(hn::RebindMask(d, hn::Gt(i, seven)),
                        hn::TableLookupLanes(hn::LoadU(d, table + 8), index),
                        hn::TableLookupLanes(hn::LoadU(d, table), index));
#else
  return hn::GatherIndex(d, table, i);
#endif
}

// table[i].
class GatherTable {
 public:
  using D = hn::ScalableTag<float>;
  HWY_INLINE explicit GatherTable(const float* table) : table_(table) {}
  HWY_INLINE hn::Vec<D> operator()(hn::Vec<hn::RebindToSigned<D>> i) const {
    return hn::GatherIndex(D(), table_, i);
  }

 private:
  const float* table_;
};

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
// The same of up to 2^kBits entries by look-ups in registers: a gather takes several times as long.
// What lies beyond the `n` that there are is 0.
template <int kBits>
class FloatTable {
 public:
  using D = GatherTable::D;
  HWY_INLINE explicit FloatTable(const float* table, std::size_t n = 1 << kBits) {
    for (std::size_t i = 0; i < kVecs; ++i)
      t_[i] = i * 16 < n ? _mm512_loadu_ps(table + i * 16) : _mm512_setzero_ps();
  }
  HWY_INLINE hn::Vec<D> operator()(hn::Vec<hn::RebindToSigned<D>> i) const {
    return hn::Vec<D>{Find<kVecs>(t_, i.raw)};
  }

 private:
  static constexpr std::size_t kVecs = (1 << kBits) / 16;
  template <std::size_t kN>
  static HWY_INLINE __m512 Find(const __m512* t, __m512i index) {
    if constexpr (kN == 2) {
      return _mm512_permutex2var_ps(t[0], index, t[1]);
    } else {
      const __mmask16 upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(kN * 8));
      return _mm512_mask_blend_ps(upper, Find<kN / 2>(t, index), Find<kN / 2>(t + kN / 2, index));
    }
  }
  __m512 t_[kVecs];
};
using ByteIndexTable = FloatTable<8>;
#else
using ByteIndexTable = GatherTable;
#endif

// f(the fastest table of n entries).
template <class F>
HWY_INLINE void WithTable(const float* table, std::size_t n, F&& f) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  if (n <= 64) return f(FloatTable<6>(table, n));
  if (n <= 128) return f(FloatTable<7>(table, n));
#endif
  (void)n;
  f(GatherTable(table));
}

// Widths of a page of planes, a byte each, zeros up to the next multiple of 32.
HWY_INLINE void KWidths(const std::uint8_t* page, std::uint32_t dim, std::uint8_t* width) {
  std::uint32_t c = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::CappedTag<std::uint8_t, 16> d;
  const hn::Repartition<std::uint16_t, decltype(d)> d16;
  const auto low = hn::Set(d, 15), most = hn::Set(d, 8);
  for (; c + 32 <= dim; c += 32) {
    const auto two = hn::LoadU(d, page + 2 * dim + c / 2);
    const auto even = hn::Min(hn::And(two, low), most);
    const auto odd =
        hn::Min(hn::And(hn::BitCast(d, hn::ShiftRight<4>(hn::BitCast(d16, two))), low), most);
    hn::StoreU(hn::InterleaveLower(d, even, odd), d, width + c);
    hn::StoreU(hn::InterleaveUpper(d, even, odd), d, width + c + 16);
  }
#endif
  for (; c < dim; ++c)
    width[c] = static_cast<std::uint8_t>(std::min(8u, codec::KWidth(page, dim, c)));
  for (; c % 32 != 0; ++c) width[c] = 0;
}

template <class D>
HWY_INLINE hn::Vec<D> TimesPowerOf2(D d, hn::Vec<D> x, hn::Vec<hn::RebindToSigned<D>> n) {
  const hn::RebindToSigned<D> di;
  return hn::BitCast(d, hn::Add(hn::BitCast(di, x), hn::ShiftLeft<23>(n)));
}

// scale[dim] and centre[dim] = min + scale * mid code. Both are written up to the next multiple of
// 16, with finite values: the bytes read there are others of the same page.
HWY_INLINE void KGrid(codec::Coding coding, const std::uint8_t* page, std::uint32_t dim,
                      float* scale, float* centre) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<std::uint8_t, decltype(d)> du8;
  const float* table = codec::KScaleTable(KBits(coding));
  const ByteIndexTable factors(codec::KMinFactorTable());
  const auto levels = hn::Set(d, coding == codec::Coding::kKInt8 ? 256.0f : 16.0f);
  const auto mid = hn::Set(d, MidCode(coding));
  const auto low = hn::Set(di, 15);
  for (std::uint32_t c = 0; c < RoundUp(dim, 16); c += static_cast<std::uint32_t>(hn::Lanes(d))) {
    const auto k = hn::PromoteTo(di, hn::LoadU(du8, page + c));
    const auto s = TimesPowerOf2(d, Lookup16(d, table, hn::And(k, low)), hn::ShiftRight<4>(k));
    const auto factor = factors(hn::PromoteTo(di, hn::LoadU(du8, page + dim + c)));
    hn::Store(s, d, scale + c);
    hn::Store(hn::Mul(s, hn::MulAdd(factor, levels, mid)), d, centre + c);
  }
}

// The same where each channel has its own width. unit[dim]: the scale times 2^width, which does not
// depend on the width; 0 where that is 0. width: [dim up to the next multiple of 32], written as
// well.
HWY_INLINE void KPlanesGrid(const std::uint8_t* page, std::uint32_t dim, std::uint8_t* width,
                            float* unit, float* centre) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<std::uint8_t, decltype(d)> du8;
  const float* table = codec::KScaleTable(0);
  const ByteIndexTable factors(codec::KMinFactorTable());
  KWidths(page, dim, width);
  const auto low = hn::Set(di, 15);
  const auto half = hn::Set(d, 0.5f);
  for (std::uint32_t c = 0; c < RoundUp(dim, 16); c += static_cast<std::uint32_t>(hn::Lanes(d))) {
    const auto k = hn::PromoteTo(di, hn::LoadU(du8, page + c));
    const auto w = hn::PromoteTo(di, hn::LoadU(du8, width + c));
    const auto u = TimesPowerOf2(d, Lookup16(d, table, hn::And(k, low)), hn::ShiftRight<4>(k));
    const auto scale = TimesPowerOf2(d, u, hn::Neg(w));
    const auto factor = factors(hn::PromoteTo(di, hn::LoadU(du8, page + dim + c)));
    hn::Store(hn::IfThenZeroElse(hn::RebindMask(d, hn::Eq(w, hn::Zero(di))), u), d, unit + c);
    // min + scale * (2^width - 1) / 2
    hn::Store(hn::MulAdd(u, hn::Add(factor, half), hn::Neg(hn::Mul(scale, half))), d, centre + c);
  }
}

// n scales, a multiple of 16. Index 0 is scale 0, so the octave to look up is the second.
HWY_INLINE void VGrid(const std::uint8_t* indices, std::uint32_t n, float* scale) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<std::uint8_t, decltype(d)> du8;
  const float* table = codec::VScaleTable();
  for (std::uint32_t t = 0; t < n; t += static_cast<std::uint32_t>(hn::Lanes(d))) {
    const auto k = hn::PromoteTo(di, hn::LoadU(du8, indices + t));
    // k / 12 by two shifts and adds less than a multiplication takes: (171 k) >> 11, exact below
    // 256.
    const auto e =
        hn::ShiftRight<11>(hn::Add(hn::Add(hn::ShiftLeft<7>(k), hn::ShiftLeft<5>(k)),
                                   hn::Add(hn::ShiftLeft<3>(k), hn::Add(hn::Add(k, k), k))));
    const auto r = hn::Sub(k, hn::Add(hn::ShiftLeft<3>(e), hn::ShiftLeft<2>(e)));
    const auto x = TimesPowerOf2(d, Lookup16(d, table + 12, r), hn::Sub(e, hn::Set(di, 1)));
    hn::Store(hn::IfThenZeroElse(hn::RebindMask(d, hn::Eq(k, hn::Zero(di))), x), d, scale + t);
  }
}

struct SumOp {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Add(a, b);
  }
};
struct MaxOp {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Max(a, b);
  }
};

#if HWY_TARGET != HWY_SCALAR
// Folds the blocks of 128 bits into one and stores its lanes.
template <class Op, class D>
HWY_INLINE void StoreBlocks(D d, Op op, hn::Vec<D> v, hn::TFromD<D>* out) {
  if constexpr (hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) > 16) {
    const hn::Half<D> dh;
    StoreBlocks(dh, op, op(hn::LowerHalf(dh, v), hn::UpperHalf(dh, v)), out);
  } else {
    hn::StoreU(v, d, out);
  }
}
#endif

// out[4]: v[i] over all its lanes, i < n; n <= 4. Cheaper together than each alone.
template <int n, class Op, class D>
HWY_INLINE void Reduce4(D d, Op op, const hn::Vec<D>* v, hn::TFromD<D>* out) {
#if HWY_TARGET == HWY_SCALAR
  (void)d;
  (void)op;
  for (int i = 0; i < n; ++i) out[i] = hn::GetLane(v[i]);
#else
  const hn::Repartition<std::uint64_t, D> d64;
  const auto zero = hn::Zero(d);
  const auto v1 = n > 1 ? v[1] : zero, v2 = n > 2 ? v[2] : zero, v3 = n > 3 ? v[3] : zero;
  const auto a = op(hn::InterleaveLower(d, v[0], v1), hn::InterleaveUpper(d, v[0], v1));
  const auto b = n > 2 ? op(hn::InterleaveLower(d, v2, v3), hn::InterleaveUpper(d, v2, v3)) : zero;
  const auto a64 = hn::BitCast(d64, a), b64 = hn::BitCast(d64, b);
  StoreBlocks(d, op,
              op(hn::BitCast(d, hn::InterleaveLower(d64, a64, b64)),
                 hn::BitCast(d, hn::InterleaveUpper(d64, a64, b64))),
              out);
#endif
}

HWY_INLINE void ScaleBy(float* x, std::size_t n, float factor) {
  const hn::ScalableTag<float> d;
  const auto f = hn::Set(d, factor);
  for (std::size_t i = 0; i < n; i += hn::Lanes(d))
    hn::Store(hn::Mul(hn::Load(d, x + i), f), d, x + i);
}

// codec::Hadamard on x[dim], then added to out.
HWY_INLINE void RotateInto(float* x, std::uint32_t dim, float* out) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d)), block = dim & (~dim + 1);
  if (block < lanes) {
    codec::Hadamard(x, dim);
    for (std::uint32_t c = 0; c < dim; ++c) out[c] += x[c];
    return;
  }
  for (std::uint32_t h = 1; h < lanes;
       h *= 2) {  // within a vector: x with lanes i ^ h, plus or minus x
    const auto lane = hn::Iota(di, 0), bit = hn::Set(di, static_cast<std::int32_t>(h));
    const auto partner = hn::IndicesFromVec(d, hn::Xor(lane, bit));
    const auto minus = hn::RebindMask(d, hn::Eq(hn::And(lane, bit), bit));
    for (std::uint32_t c = 0; c < dim; c += lanes) {
      const auto v = hn::Load(d, x + c);
      hn::Store(hn::Add(hn::TableLookupLanes(v, partner), hn::IfThenElse(minus, hn::Neg(v), v)), d,
                x + c);
    }
  }
  for (std::uint32_t h = lanes; h < block; h *= 2) {
    for (std::uint32_t c = 0; c < dim; c += lanes) {
      if ((c & h) != 0) continue;
      const auto a = hn::Load(d, x + c), b = hn::Load(d, x + c + h);
      hn::Store(hn::Add(a, b), d, x + c);
      hn::Store(hn::Sub(a, b), d, x + c + h);
    }
  }
  const auto norm = hn::Set(d, 1.0f / std::sqrt(static_cast<float>(block)));
  for (std::uint32_t c = 0; c < dim; c += lanes) {
    hn::Store(hn::MulAdd(hn::Load(d, x + c), norm, hn::Load(d, out + c)), d, out + c);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
