#include "cpu/highway.h"  // first

#include "cpu/convert.h"

#include <bit>
#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/convert.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/half-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvtamp::cpu {
namespace HWY_NAMESPACE {

void ToFloat(const half_t* in, float* out, std::size_t n) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<std::uint16_t, decltype(d)> dh;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(HalfToFloatV(d, hn::LoadU(dh, in + i)), d, out + i);
  }
  for (; i < n; ++i) out[i] = kvtamp::HalfToFloat(in[i]);
}

std::size_t ToHalf(const float* in, half_t* out, std::size_t n) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<std::uint16_t, decltype(d)> dh;
  const std::size_t lanes = hn::Lanes(d);
  const auto abs_mask = hn::Set(di, 0x7FFFFFFF);
  const auto max = hn::Set(d, 65504.0f);
  std::size_t changed = 0, i = 0;
  for (; i + lanes <= n; i += lanes) {
    auto x = hn::LoadU(d, in + i);
    const auto abs = hn::And(hn::BitCast(di, x), abs_mask);
    const auto bad = hn::Gt(abs, hn::Set(di, 0x477FEFFF));  // would round to infinity, or is NaN
    if (HWY_UNLIKELY(!hn::AllFalse(di, bad))) {
      changed += hn::CountTrue(di, bad);
      const auto nan = hn::RebindMask(d, hn::Gt(abs, hn::Set(di, 0x7F800000)));
      x = hn::IfThenZeroElse(nan, x);
    }
    x = hn::Min(hn::Max(x, hn::Neg(max)), max);
    hn::StoreU(FloatToHalfV(d, x), dh, out + i);
  }
  for (; i < n; ++i) {
    const half_t h = kvtamp::FloatToHalf(in[i]);
    const bool nan = (h & 0x7FFFu) > 0x7C00u, inf = (h & 0x7FFFu) == 0x7C00u;
    out[i] = nan ? half_t{0} : inf ? static_cast<half_t>(h - 1) : h;
    changed += nan || inf;
  }
  return changed;
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtamp::cpu {

HWY_EXPORT(ToFloat);
HWY_EXPORT(ToHalf);

void HalfToFloat(const half_t* in, float* out, std::size_t n) {
  HWY_DYNAMIC_DISPATCH(ToFloat)(in, out, n);
}

std::size_t FloatToHalf(const float* in, half_t* out, std::size_t n) {
  return HWY_DYNAMIC_DISPATCH(ToHalf)(in, out, n);
}

}  // namespace kvtamp::cpu
#endif  // HWY_ONCE
