// K encoder: channels in the lanes, and the search in 16-bit integers. Per-target header.
//
// A channel's values are stored once as x16, its half range being kSpan. A candidate (k, z) is then
// a factor and an offset: u = x16 * factor + offset counts code steps in fixed point, codes are the
// half-integers of it, and what is left is the error. Nothing here depends on the instruction set:
// the float part uses single correctly rounded operations and no fused ones.
#if defined(KVTAMP_CODEC_ENCODE_K_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_CODEC_ENCODE_K_INL_H_
#undef KVTAMP_CODEC_ENCODE_K_INL_H_
#else
#define KVTAMP_CODEC_ENCODE_K_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <limits>

#include "codec/encode_vector-inl.h"

#if HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace kvtamp::codec {
namespace HWY_NAMESPACE {

using D16 = hn::CappedTag<std::int16_t, 32>;
using DK = hn::RepartitionToWide<D16>;  // int32, half as many channels
using DKF = hn::RebindToFloat<DK>;
using DKHalf = hn::Rebind<std::int16_t, DK>;
using V16 = hn::Vec<D16>;

inline constexpr std::uint32_t kChannels = 32;  // of a block at most
inline constexpr float kSpan = 28000.0f;

// Code steps in fixed point: all 2^bits of them fill half of an int16_t, so that data may lie
// outside.
template <int kBits>
struct Fixed {
  static constexpr int kFraction = 15 - kBits;
  static constexpr std::int16_t kOne = 1 << kFraction;
  static constexpr std::int16_t kHalfRange = 16384;
  static constexpr float kLevels = (1 << kBits) - 1;
  static constexpr float kSteps = 1 << kBits;
};

struct KBlock {
  alignas(64) std::int16_t x16[kMaxPageSize * kChannels];  // [valid rows][lanes]
  alignas(64) float x[kMaxPageSize * kChannels];           // the same, without the mean
  alignas(64) float centre[kChannels], half[kChannels], error[kChannels];
  alignas(64) std::int32_t covering[kChannels], k[kChannels], z[kChannels];
  std::uint32_t n = 0;  // valid rows
};

struct KSource {
  const half_t* rows;
  std::size_t stride;
  const std::uint8_t* valid;  // [n] row numbers
  std::uint32_t n;
};

// x, centre, half.
HWY_INLINE void LoadK(const KSource& in, const float* mean, KBlock& b) {
  const DKF d;
  const hn::Rebind<std::uint16_t, DKF> dh;
  const std::size_t lanes = hn::Lanes(D16());
  b.n = in.n;
  for (std::size_t j = 0; j < lanes; j += hn::Lanes(d)) {
    const auto m = mean == nullptr ? hn::Zero(d) : hn::LoadU(d, mean + j);
    auto lo = hn::Set(d, std::numeric_limits<float>::max());
    auto hi = hn::Neg(lo);
    for (std::uint32_t i = 0; i < in.n; ++i) {
      const auto raw = hn::LoadU(dh, in.rows + in.valid[i] * in.stride + j);
      const auto x = hn::Sub(FiniteFromHalf(d, raw), m);
      lo = hn::Min(lo, x);
      hi = hn::Max(hi, x);
      hn::Store(x, d, b.x + i * lanes + j);
    }
    const auto half = hn::Set(d, 0.5f);
    hn::Store(hn::Mul(hn::Add(lo, hi), half), d, b.centre + j);
    hn::Store(hn::Mul(hn::Sub(hi, lo), half), d, b.half + j);
  }
}

// Everything that follows from one (k, z) of one channel, in vectors of DKF.
template <int kBits>
struct KGrid {
  using F = Fixed<kBits>;
  using VF = hn::Vec<DKF>;
  using VI = hn::Vec<DK>;
  static HWY_INLINE VI Index(VF scale) {
    return IndexUp(DKF(), scale, 16.0f, 6.0f + kBits, kKIndexSlack);
  }
  static HWY_INLINE VF Scale(VI k) { return hn::GatherIndex(DKF(), KScaleTable(kBits), k); }
  static HWY_INLINE VF Factor(VI z) {
    const DK di;
    return hn::GatherIndex(DKF(), KMinFactorTable(), hn::And(z, hn::Set(di, 255)));
  }
  static HWY_INLINE VI ClampIndex(VI k) {
    const DK di;
    return hn::Min(hn::Max(k, hn::Zero(di)), hn::Set(di, 255));
  }
  static HWY_INLINE VI ClampZ(VI z) {
    const DK di;
    return hn::Min(hn::Max(z, hn::Set(di, -128)), hn::Set(di, 127));
  }
  static HWY_INLINE VF Min(VF scale, VF factor) {
    return hn::Mul(hn::Mul(factor, scale), hn::Set(DKF(), F::kSteps));
  }
  // The minimum that puts the middle of the codes nearest to the middle of the data; for data that
  // does not spread over two codes, one code.
  static HWY_INLINE VI NearestZ(VF centre, VF half, VF scale) {
    const DKF d;
    const auto middle = hn::Add(centre, hn::Min(half, hn::Mul(scale, hn::Set(d, 0.5f))));
    const auto f = hn::Div(middle, hn::Mul(scale, hn::Set(d, F::kSteps)));
    const auto z = hn::Mul(hn::Set(d, kMinWidth),
                           Asinh(d, hn::Mul(f, hn::Set(d, 1.0f / (kMinWidth * kMinStep)))));
    return ClampZ(RoundInt(d, z));
  }
  static HWY_INLINE VI Least(VF centre) {
    return Index(hn::Mul(hn::Abs(centre), hn::Set(DKF(), 1.0f / (kMinReach * F::kSteps))));
  }
  static HWY_INLINE VI Covering(VF centre, VF half) {
    const DKF d;
    const auto k = hn::Max(Least(centre), Index(hn::Mul(half, hn::Set(d, 2.0f / F::kLevels))));
    const auto scale = Scale(k);
    const auto min = Min(scale, Factor(NearestZ(centre, half, scale)));
    const auto middle = hn::Add(min, hn::Mul(scale, hn::Set(d, F::kLevels / 2)));
    const auto reach = hn::Add(half, hn::Abs(hn::Sub(middle, centre)));
    return hn::Max(k, Index(hn::Mul(reach, hn::Set(d, 2.0f / F::kSteps))));
  }
  static HWY_INLINE VI AlwaysCovering(VF centre, VF half, VI covering) {
    const DKF d;
    const auto gap = hn::Max(hn::Mul(Scale(covering), hn::Set(d, kMinStep * F::kSteps)),
                             hn::Mul(hn::Abs(centre), hn::Set(d, 1.0f / kMinWidth)));
    const auto span = hn::Add(hn::Add(half, half), gap);
    return hn::Max(Least(centre), Index(hn::Mul(span, hn::Set(d, 1.0f / F::kLevels))));
  }
  // Values beyond what any scale can hold saturate.
  static HWY_INLINE VF FixedHalf(VF half) {
    const DKF d;
    const float most = KScaleTable(kBits)[255] * F::kSteps * 0.625f;
    return hn::Max(hn::Min(half, hn::Set(d, most)), hn::Set(d, 1e-30f));
  }
  static HWY_INLINE hn::Vec<DKHalf> FixedFactor(VF half, VF scale) {
    const DKF d;
    const auto f = hn::Mul(hn::Div(FixedHalf(half), scale), hn::Set(d, F::kOne * 32768.0f / kSpan));
    return hn::DemoteTo(DKHalf(), RoundInt(d, hn::Min(f, hn::Set(d, 32767.0f))));
  }
  static HWY_INLINE hn::Vec<DKHalf> FixedOffset(VF centre, VF scale, VF factor) {
    const DKF d;
    const auto above = hn::Sub(hn::Div(centre, scale), hn::Mul(factor, hn::Set(d, F::kSteps)));
    const auto steps = hn::Mul(hn::Sub(above, hn::Set(d, F::kLevels / 2)), hn::Set(d, F::kOne));
    const auto most = hn::Set(d, 32000.0f);
    return hn::DemoteTo(DKHalf(), RoundInt(d, hn::Min(hn::Max(steps, hn::Neg(most)), most)));
  }
};

template <int kBits>
HWY_INLINE void ToFixed(KBlock& b) {
  const DKF d;
  const std::size_t lanes = hn::Lanes(D16());
  for (std::size_t j = 0; j < lanes; j += hn::Lanes(d)) {
    const auto half = hn::Load(d, b.half + j), centre = hn::Load(d, b.centre + j);
    hn::Store(KGrid<kBits>::Covering(centre, half), DK(), b.covering + j);
    hn::Store(hn::Set(d, std::numeric_limits<float>::infinity()), d, b.error + j);
    const auto scale = hn::Div(hn::Set(d, kSpan), KGrid<kBits>::FixedHalf(half));
    for (std::uint32_t i = 0; i < b.n; ++i) {
      const auto x = hn::Mul(hn::Sub(hn::Load(d, b.x + i * lanes + j), centre), scale);
      hn::Store(hn::DemoteTo(DKHalf(), RoundInt(d, x)), DKHalf(), b.x16 + i * lanes + j);
    }
  }
}

// u: position in code steps. Returns the middle of the step it falls into, or of the nearest one.
template <int kBits>
HWY_INLINE V16 NearestCode(V16 u) {
  using F = Fixed<kBits>;
  const D16 d;
  const V16 inside = hn::Min(hn::Max(u, hn::Set(d, std::int16_t{-F::kHalfRange})),
                             hn::Set(d, std::int16_t{F::kHalfRange - 1}));
  return hn::Or(hn::And(inside, hn::Set(d, static_cast<std::int16_t>(-F::kOne))),
                hn::Set(d, std::int16_t{F::kOne / 2}));
}

// The square of an error in fixed point, about 43 on average for data inside the range: half a step
// is 2048 at every width.
template <int kBits>
HWY_INLINE V16 Square(V16 error) {
  const D16 d;
  V16 scaled = error;
  if constexpr (kBits == 4) {
    scaled = hn::SaturatedAdd(error, error);
  } else if constexpr (kBits < 3) {
    scaled = hn::ShiftRight<3 - kBits>(error);
  } else if constexpr (kBits > 4) {
    const V16 most = hn::Set(d, std::int16_t{32767 >> (kBits - 3)});
    scaled = hn::ShiftLeft<kBits - 3>(hn::Min(hn::Abs(error), most));
  }
  return hn::MulFixedPoint15(scaled, scaled);
}

// Sums of squared errors over the rows, for several offsets under one factor.
template <int kBits, int kCount>
HWY_INLINE void SumErrors(const KBlock& b, V16 factor, const V16* offset, V16* sum) {
  const D16 d;
  const hn::RebindToUnsigned<D16> du;
  const std::size_t lanes = hn::Lanes(d);
  for (int s = 0; s < kCount; ++s) sum[s] = hn::Zero(d);
  for (std::uint32_t i = 0; i < b.n; ++i) {
    const V16 scaled = hn::MulFixedPoint15(hn::Load(d, b.x16 + i * lanes), factor);
    for (int s = 0; s < kCount; ++s) {
      const V16 u = hn::SaturatedAdd(scaled, offset[s]);
      const V16 square = Square<kBits>(hn::SaturatedSub(u, NearestCode<kBits>(u)));
      sum[s] = hn::BitCast(d, hn::SaturatedAdd(hn::BitCast(du, sum[s]), hn::BitCast(du, square)));
    }
  }
}

// k: [lanes]. Keeps what is better than the best so far.
template <int kBits, int kCount>
HWY_INLINE void Try(KBlock& b, const std::int32_t* k, int unit) {
  using Grid = KGrid<kBits>;
  const D16 d16;
  const DKF d;
  const DK di;
  const std::size_t lanes = hn::Lanes(d16), part = hn::Lanes(d);
  hn::Vec<DKHalf> factors[2], offsets[kCount][2];
  alignas(64) std::int32_t z[kCount][kChannels];
  for (std::size_t p = 0; p < 2; ++p) {
    const auto centre = hn::Load(d, b.centre + p * part);
    const auto scale = Grid::Scale(hn::Load(di, k + p * part));
    const auto half = hn::Load(d, b.half + p * part);
    const auto nearest = Grid::NearestZ(centre, half, scale);
    factors[p] = Grid::FixedFactor(half, scale);
    for (int s = 0; s < kCount; ++s) {
      const auto zs = Grid::ClampZ(hn::Add(nearest, hn::Set(di, kShifts[s] * unit)));
      hn::Store(zs, di, z[s] + p * part);
      offsets[s][p] = Grid::FixedOffset(centre, scale, Grid::Factor(zs));
    }
  }
  V16 offset[kCount], sum[kCount];
  for (int s = 0; s < kCount; ++s) offset[s] = hn::Combine(d16, offsets[s][1], offsets[s][0]);
  SumErrors<kBits, kCount>(b, hn::Combine(d16, factors[1], factors[0]), offset, sum);
  alignas(64) std::uint16_t sums[kChannels];
  for (int s = 0; s < kCount; ++s) {
    const hn::RebindToUnsigned<D16> du;
    hn::Store(hn::BitCast(du, sum[s]), du, sums);
    for (std::size_t j = 0; j < lanes; j += part) {
      const auto ks = hn::Load(di, k + j);
      const auto scale = Grid::Scale(ks);
      const auto steps =
          hn::ConvertTo(d, hn::PromoteTo(di, hn::Load(hn::Rebind<std::uint16_t, DK>(), sums + j)));
      const auto error = hn::Mul(steps, hn::Mul(scale, scale));
      const auto better = hn::Lt(error, hn::Load(d, b.error + j));
      const auto better_i = hn::RebindMask(di, better);
      hn::Store(hn::IfThenElse(better, error, hn::Load(d, b.error + j)), d, b.error + j);
      hn::Store(hn::IfThenElse(better_i, ks, hn::Load(di, b.k + j)), di, b.k + j);
      hn::Store(hn::IfThenElse(better_i, hn::Load(di, z[s] + j), hn::Load(di, b.z + j)), di,
                b.z + j);
    }
  }
}

template <int kBits>
HWY_INLINE void SearchK(KBlock& b) {
  using Grid = KGrid<kBits>;
  const DK di;
  const DKF d;
  const std::size_t lanes = hn::Lanes(D16());
  alignas(64) std::int32_t k[kChannels];
  for (const KCandidate& candidate : KCandidates(kBits)) {
    for (std::size_t j = 0; j < lanes; j += hn::Lanes(di)) {
      const auto index = hn::Add(hn::Load(di, b.covering + j), hn::Set(di, candidate.dk));
      hn::Store(Grid::ClampIndex(index), di, k + j);
    }
    if (candidate.shifts == 1) {
      Try<kBits, 1>(b, k, 1);
    } else {
      Try<kBits, 3>(b, k, candidate.unit);
    }
  }
  for (std::size_t j = 0; j < lanes; j += hn::Lanes(di)) {
    const auto index = Grid::AlwaysCovering(hn::Load(d, b.centre + j), hn::Load(d, b.half + j),
                                            hn::Load(di, b.covering + j));
    hn::Store(index, di, k + j);
  }
  Try<kBits, 1>(b, k, 1);
}

// codes: [rows][lanes], zero in rows that are not valid.
template <int kBits>
HWY_INLINE void CodesOf(const KBlock& b, const std::uint8_t* valid, std::uint8_t* codes) {
  using Grid = KGrid<kBits>;
  const D16 d16;
  const DKF d;
  const DK di;
  const hn::Rebind<std::uint8_t, D16> d8;
  const std::size_t lanes = hn::Lanes(d16), part = hn::Lanes(d);
  hn::Vec<DKHalf> factors[2], offsets[2];
  for (std::size_t p = 0; p < 2; ++p) {
    const auto scale = Grid::Scale(hn::Load(di, b.k + p * part));
    factors[p] = Grid::FixedFactor(hn::Load(d, b.half + p * part), scale);
    offsets[p] = Grid::FixedOffset(hn::Load(d, b.centre + p * part), scale,
                                   Grid::Factor(hn::Load(di, b.z + p * part)));
  }
  const V16 factor = hn::Combine(d16, factors[1], factors[0]);
  const V16 offset = hn::Combine(d16, offsets[1], offsets[0]);
  for (std::uint32_t i = 0; i < b.n; ++i) {
    const V16 scaled = hn::MulFixedPoint15(hn::Load(d16, b.x16 + i * lanes), factor);
    const V16 middle = NearestCode<kBits>(hn::SaturatedAdd(scaled, offset));
    const V16 code = hn::ShiftRight<Fixed<kBits>::kFraction>(
        hn::Add(middle, hn::Set(d16, Fixed<kBits>::kHalfRange)));
    hn::Store(hn::DemoteTo(d8, code), d8, codes + valid[i] * lanes);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::codec
HWY_AFTER_NAMESPACE();
#endif

#endif  // per-target guard
