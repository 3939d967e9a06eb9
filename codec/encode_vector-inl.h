// Vector helpers of the two encoders. Per-target header.
//
// All arithmetic is in single IEEE operations, so every instruction set gives the same bits and a
// page the same bytes; the file that includes this is compiled without contraction to fused ones.
#if defined(KVTAMP_CODEC_ENCODE_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_CODEC_ENCODE_VECTOR_INL_H_
#undef KVTAMP_CODEC_ENCODE_VECTOR_INL_H_
#else
#define KVTAMP_CODEC_ENCODE_VECTOR_INL_H_
#endif

#include "codec/encode.h"
#include "cpu/half-inl.h"
#include "hwy/highway.h"

#if HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace kvtamp::codec {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Zero instead of infinities and NaN.
template <class D, class VH>
HWY_INLINE hn::Vec<D> FiniteFromHalf(D d, VH h) {
  const auto x = cpu::HWY_NAMESPACE::HalfToFloatV(d, h);
  return hn::IfThenElseZero(hn::Le(hn::Abs(x), hn::Set(d, 65504.0f)), x);
}

// To the nearest integer, ties to even, for |x| < 2^22; larger ones keep their sign and size.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> RoundInt(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto magic = hn::Set(d, 12582912.0f);  // 1.5 * 2^23: the sum's last bit is worth 1
  return hn::Sub(hn::BitCast(di, hn::Add(x, magic)), hn::BitCast(di, magic));
}

// For x > 0 and normal; within 1e-5.
template <class D>
HWY_INLINE hn::Vec<D> Log2(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(di, x);
  const auto exponent = hn::Sub(hn::ShiftRight<23>(bits), hn::Set(di, 127));
  const auto one = hn::Set(di, 0x3F800000);
  const auto mantissa = hn::BitCast(d, hn::Or(hn::And(bits, hn::Set(di, 0x007FFFFF)), one));
  const auto t = hn::Sub(mantissa, hn::Set(d, 1.0f));
  auto p = hn::Set(d, -0.033822047f);
  p = hn::Add(hn::Mul(p, t), hn::Set(d, 0.14447110f));
  p = hn::Add(hn::Mul(p, t), hn::Set(d, -0.30163801f));
  p = hn::Add(hn::Mul(p, t), hn::Set(d, 0.46865888f));
  p = hn::Add(hn::Mul(p, t), hn::Set(d, -0.72035877f));
  p = hn::Add(hn::Mul(p, t), hn::Set(d, 1.44268147f));
  return hn::Add(hn::ConvertTo(d, exponent), hn::Mul(p, t));
}

template <class D>
HWY_INLINE hn::Vec<D> Asinh(D d, hn::Vec<D> x) {
  const auto a = hn::Abs(x);
  const auto root = hn::Sqrt(hn::Add(hn::Mul(a, a), hn::Set(d, 1.0f)));
  const auto y = hn::Mul(Log2(d, hn::Add(a, root)), hn::Set(d, 0.69314718f));
  return hn::CopySign(y, x);
}

// The least index, 0 to 255, of a logarithmic grid of `steps` per octave whose value is at least x.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> IndexUp(D d, hn::Vec<D> x, float steps, float origin,
                                                  float slack) {
  const auto octave = hn::Add(Log2(d, hn::Max(x, hn::Set(d, 1e-30f))), hn::Set(d, origin));
  const auto index = hn::Ceil(hn::Sub(hn::Mul(octave, hn::Set(d, steps)), hn::Set(d, slack)));
  const hn::RebindToSigned<D> di;
  return hn::ConvertTo(di, hn::Min(hn::Max(index, hn::Zero(d)), hn::Set(d, 255.0f)));
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::codec
HWY_AFTER_NAMESPACE();
#endif

#endif  // per-target guard
