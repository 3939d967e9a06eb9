// C[m, n] (+)= sum over k of A(m, k) * B[k, n], for tiles in cache. Query rows are the lanes (n),
// so K and V, whichever way they lie, only ever are broadcast. Per-target header.
#if defined(KVTAMP_ATTENTION_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_GEMM_INL_H_
#undef KVTAMP_ATTENTION_GEMM_INL_H_
#else
#define KVTAMP_ATTENTION_GEMM_INL_H_
#endif

#include "attention/unit.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_CAP_GE512 || HWY_TARGET == HWY_NEON
inline constexpr int kGemmRows = 8;  // 8 * 3 accumulators of 32 registers
#else
inline constexpr int kGemmRows = 4;  // 4 * 3 of 16
#endif
inline constexpr int kGemmVecs = 3;

// How A lies. Panels: 16 of m side by side, [m / 16][k][16]; rows: [m][k].
enum class ALayout { kPanels, kRows };

// n = kVecs vectors; m: a multiple of 8. `a_stride`: of a panel, or of a row. B and C: `ld` apart.
template <int kVecs, ALayout kLayout, bool kAdd>
HWY_NOINLINE void Gemm(const float* HWY_RESTRICT a, std::size_t a_stride,
                       const float* HWY_RESTRICT b, std::size_t ld, std::uint32_t m,
                       std::uint32_t k, float* HWY_RESTRICT c) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  for (std::uint32_t i = 0; i < m; i += kGemmRows) {
    hn::Vec<decltype(d)> acc[kGemmRows][kVecs];
    float* out = c + i * ld;
#pragma GCC unroll 8
    for (int r = 0; r < kGemmRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        acc[r][v] = kAdd ? hn::Load(d, out + r * ld + v * lanes) : hn::Zero(d);
      }
    }
    const float* from =
        kLayout == ALayout::kPanels ? a + i / 16 * a_stride + i % 16 : a + i * a_stride;
    const float* row = b;
    const float* const end = b + k * ld;
    for (; row != end; row += ld, from += kLayout == ALayout::kPanels ? 16 : 1) {
      hn::Vec<decltype(d)> x[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) x[v] = hn::Load(d, row + v * lanes);
#pragma GCC unroll 8
      for (int r = 0; r < kGemmRows; ++r) {
        const auto y = hn::Set(d, kLayout == ALayout::kPanels ? from[r] : from[r * a_stride]);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) acc[r][v] = hn::MulAdd(y, x[v], acc[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kGemmRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) hn::Store(acc[r][v], d, out + r * ld + v * lanes);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
