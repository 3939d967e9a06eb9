// binary16 <-> float in vectors, equal to base/half.h bit for bit. Per-target header.
#if defined(KVTAMP_CPU_HALF_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_CPU_HALF_INL_H_
#undef KVTAMP_CPU_HALF_INL_H_
#else
#define KVTAMP_CPU_HALF_INL_H_
#endif

#include "base/half.h"
#include "hwy/highway.h"

// Highway's own conversions are hardware on these and exact; its emulations elsewhere lose
// infinities.
#undef KVTAMP_HARDWARE_HALF
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || \
    HWY_TARGET == HWY_NEON
#define KVTAMP_HARDWARE_HALF 1
#else
#define KVTAMP_HARDWARE_HALF 0
#endif

HWY_BEFORE_NAMESPACE();
namespace kvtamp::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// D: float tag. h: as many uint16 lanes.
template <class D, class VH = hn::Vec<hn::Rebind<std::uint16_t, D>>>
HWY_INLINE hn::Vec<D> HalfToFloatV(D d, VH h) {
#if KVTAMP_HARDWARE_HALF
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), h));
#else
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto x = hn::PromoteTo(du, h);
  const auto sign = hn::ShiftLeft<16>(hn::And(x, hn::Set(du, 0x8000u)));
  const auto abs = hn::And(x, hn::Set(du, 0x7FFFu));
  const auto exp = hn::And(x, hn::Set(du, 0x7C00u));
  const auto normal = hn::Add(hn::ShiftLeft<13>(abs), hn::Set(du, 112u << 23));
  const auto special = hn::Or(hn::ShiftLeft<13>(abs), hn::Set(du, 0x7F800000u));
  const auto tiny =
      hn::BitCast(du, hn::Mul(hn::ConvertTo(d, hn::BitCast(di, abs)), hn::Set(d, 0x1p-24f)));
  auto r = hn::IfThenElse(hn::Eq(exp, hn::Set(du, 0x7C00u)), special, normal);
  r = hn::IfThenElse(hn::Eq(exp, hn::Zero(du)), tiny, r);
  return hn::BitCast(d, hn::Or(r, sign));
#endif
}

// f must be finite and at most 65504 in magnitude: the caller clamps.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<std::uint16_t, D>> FloatToHalfV([[maybe_unused]] D d, hn::Vec<D> f) {
  const hn::Rebind<std::uint16_t, D> du16;
#if KVTAMP_HARDWARE_HALF
  return hn::BitCast(du16, hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), f));
#else
  const hn::RebindToUnsigned<D> du;
  const auto x = hn::BitCast(du, f);
  const auto sign = hn::And(hn::ShiftRight<16>(x), hn::Set(du, 0x8000u));
  const auto abs = hn::And(x, hn::Set(du, 0x7FFFFFFFu));
  const auto odd = hn::And(hn::ShiftRight<13>(abs), hn::Set(du, 1u));
  const auto normal = hn::ShiftRight<13>(
      hn::Sub(hn::Add(hn::Add(abs, hn::Set(du, 0xFFFu)), odd), hn::Set(du, 0x38000000u)));
  const auto tiny =  // as in base/half.h: the adder rounds at 2^-24
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, abs), hn::Set(d, 0.5f))),
              hn::Set(du, 0x3F000000u));
  const hn::RebindToSigned<D> di;
  const auto is_tiny = hn::Lt(hn::BitCast(di, abs), hn::Set(di, 0x38800000));
  const auto r = hn::IfThenElse(hn::RebindMask(du, is_tiny), tiny, normal);
  return hn::TruncateTo(du16, hn::Or(r, sign));
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
