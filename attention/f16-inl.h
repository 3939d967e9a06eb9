// Decode on pages that are still f16: the heads of a group share each row's loads and conversions.
// Per-target header.
#if defined(KVTAMP_ATTENTION_F16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_F16_INL_H_
#undef KVTAMP_ATTENTION_F16_INL_H_
#else
#define KVTAMP_ATTENTION_F16_INL_H_
#endif

#include "attention/grid-inl.h"
#include "attention/softmax-inl.h"
#include "attention/unit.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#undef KVTAMP_MANY_REGISTERS
#if HWY_CAP_GE512 || HWY_TARGET == HWY_NEON
#define KVTAMP_MANY_REGISTERS 1
#else
#define KVTAMP_MANY_REGISTERS 0
#endif
// kHeads * this many accumulators, of 32 registers or of 16.
inline constexpr int kF16Ways = KVTAMP_MANY_REGISTERS ? 4 : 2;

template <int kHeads, int kRows>
HWY_INLINE void F16ScoreRows(const half_t* k, std::size_t stride, std::uint32_t dim,
                             const float* const* q, std::uint32_t t, std::ptrdiff_t ahead,
                             float* const* out) {
  const hn::ScalableTag<float> d;
  hn::Vec<decltype(d)> acc[kHeads][kRows];
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kRows; ++i) acc[h][i] = hn::Zero(d);
  }
  for (std::uint32_t c = 0; c < dim; c += static_cast<std::uint32_t>(hn::Lanes(d))) {
    hn::Vec<decltype(d)> x[kRows];
    for (int i = 0; i < kRows; ++i) {
      const half_t* from = k + (t + i) * stride + c;
      x[i] = LoadHalves(d, from, dim - c);
      hwy::Prefetch(from + ahead);
    }
    for (int h = 0; h < kHeads; ++h) {
      const auto qv = hn::Load(d, q[h] + c);
      for (int i = 0; i < kRows; ++i) acc[h][i] = hn::MulAdd(x[i], qv, acc[h][i]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    float sum[4];
    Reduce4<kRows>(d, SumOp(), acc[h], sum);
    for (int i = 0; i < kRows; ++i) out[h][t + i] = sum[i];
  }
}

template <int kHeads>
HWY_NOINLINE void F16ScoresOf(const half_t* k, std::size_t stride, std::uint32_t dim,
                              std::uint32_t rows, const float* const* q, std::ptrdiff_t ahead,
                              float* const* out) {
  std::uint32_t t = 0;
  for (; t + kF16Ways <= rows; t += kF16Ways)
    F16ScoreRows<kHeads, kF16Ways>(k, stride, dim, q, t, ahead, out);
  for (; t < rows; ++t) F16ScoreRows<kHeads, 1>(k, stride, dim, q, t, ahead, out);
}

// `ahead`: elements to the next page, which is fetched meanwhile.
// out[h][t] = q[h] . row t. q: [dim up to 16], zero-padded.
HWY_INLINE void F16Scores(const half_t* k, std::size_t stride, std::uint32_t dim,
                          std::uint32_t rows, std::uint32_t heads, const float* const* q,
                          std::ptrdiff_t ahead, float* const* out) {
  switch (heads) {
    case 1:
      return F16ScoresOf<1>(k, stride, dim, rows, q, ahead, out);
    case 2:
      return F16ScoresOf<2>(k, stride, dim, rows, q, ahead, out);
    case 3:
      return F16ScoresOf<3>(k, stride, dim, rows, q, ahead, out);
    default:
      return F16ScoresOf<4>(k, stride, dim, rows, q, ahead, out);
  }
}

template <int kHeads, int kVecs, bool kFinite>
HWY_INLINE void F16AccumulateColumns(const half_t* v, std::size_t stride, std::uint32_t dim,
                                     std::uint32_t c, const std::uint8_t* rows,
                                     std::uint32_t n_rows, const float* const* p,
                                     std::ptrdiff_t ahead, float* const* acc) {
  const hn::ScalableTag<float> d;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  hn::Vec<decltype(d)> sum[kHeads][kVecs];
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kVecs; ++i) sum[h][i] = hn::Load(d, acc[h] + c + i * lanes);
  }
  for (std::uint32_t j = 0; j < n_rows; ++j) {
    const std::uint32_t t = rows[j];
    hn::Vec<decltype(d)> x[kVecs];
    for (int i = 0; i < kVecs; ++i) {
      const half_t* from = v + t * stride + c + i * lanes;
      hwy::Prefetch(from + ahead);
      x[i] = kFinite ? LoadFiniteHalves(d, from, dim - c - i * lanes)
                     : LoadHalves(d, from, dim - c - i * lanes);
    }
    for (int h = 0; h < kHeads; ++h) {
      const auto w = hn::Set(d, p[h][t]);
      for (int i = 0; i < kVecs; ++i) sum[h][i] = hn::MulAdd(x[i], w, sum[h][i]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kVecs; ++i) hn::Store(sum[h][i], d, acc[h] + c + i * lanes);
  }
}

template <int kHeads, bool kFinite>
HWY_NOINLINE void F16AccumulateOf(const half_t* v, std::size_t stride, std::uint32_t dim,
                                  std::uint32_t rows, const float* const* p, std::ptrdiff_t ahead,
                                  float* const* acc) {
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(hn::ScalableTag<float>()));
  // A row that nobody attends is not touched: it may hold anything, and 0 times NaN is NaN.
  std::uint8_t used[codec::kMaxPageSize];
  std::uint32_t n = 0;
  for (std::uint32_t t = 0; t < rows; ++t) {
    bool any = false;
    for (int h = 0; h < kHeads; ++h) any = any || p[h][t] != 0.0f;
    used[n] = static_cast<std::uint8_t>(t);
    n += any;
  }
  std::uint32_t c = 0;
  for (; c + kF16Ways * lanes <= dim; c += kF16Ways * lanes) {
    F16AccumulateColumns<kHeads, kF16Ways, kFinite>(v, stride, dim, c, used, n, p, ahead, acc);
  }
  for (; c < dim; c += lanes)
    F16AccumulateColumns<kHeads, 1, kFinite>(v, stride, dim, c, used, n, p, ahead, acc);
}

// acc[h][dim] += sum over rows of p[h][t] * row t. masks_differ: a row one head attends may be
// anything to another that does not.
HWY_INLINE void F16Accumulate(const half_t* v, std::size_t stride, std::uint32_t dim,
                              std::uint32_t rows, std::uint32_t heads, const float* const* p,
                              std::ptrdiff_t ahead, float* const* acc, bool masks_differ) {
  if (masks_differ) {
    switch (heads) {
      case 1:
        return F16AccumulateOf<1, true>(v, stride, dim, rows, p, ahead, acc);
      case 2:
        return F16AccumulateOf<2, true>(v, stride, dim, rows, p, ahead, acc);
      case 3:
        return F16AccumulateOf<3, true>(v, stride, dim, rows, p, ahead, acc);
      default:
        return F16AccumulateOf<4, true>(v, stride, dim, rows, p, ahead, acc);
    }
  }
  switch (heads) {
    case 1:
      return F16AccumulateOf<1, false>(v, stride, dim, rows, p, ahead, acc);
    case 2:
      return F16AccumulateOf<2, false>(v, stride, dim, rows, p, ahead, acc);
    case 3:
      return F16AccumulateOf<3, false>(v, stride, dim, rows, p, ahead, acc);
    default:
      return F16AccumulateOf<4, false>(v, stride, dim, rows, p, ahead, acc);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
