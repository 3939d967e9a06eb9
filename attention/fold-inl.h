// Folding: a float vector times a page's scales, as integers of 15 bits and one step. Per-target
// header.
//
// A folded vector, for every 4 elements x0 ... x3:
//   avx512_vnni  x = 256 h + l: h0 ... h3, l0 ... l3, 8 bytes. K: signed (codes are the unsigned
//                side of the instruction); V: unsigned
//   neon_dotprod, neon_i8mm  h0 ... h7, l0 ... l7 for every 8 elements, all signed
//   scalar       int32 each
//   others       (x0, x2), (x1, x3) as pairs of int16, then 8 bytes unused: even and odd bytes of a
//   lane
//                of codes, widened, meet their factors in one multiply-add of pairs
#if defined(KVTAMP_ATTENTION_FOLD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_FOLD_INL_H_
#undef KVTAMP_ATTENTION_FOLD_INL_H_
#else
#define KVTAMP_ATTENTION_FOLD_INL_H_
#endif

#include "attention/grid-inl.h"
#include "attention/unit.h"
#include "cpu/cpu.h"
#include "hwy/highway.h"

// Highway's AVX3_DL asks for this feature when it looks at the processor, but not of the compiler.
#undef KVTAMP_BEFORE_VNNI
#if HWY_TARGET == HWY_AVX3_DL
#define KVTAMP_BEFORE_VNNI() \
  HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni") static_assert(true, "")
#else
#define KVTAMP_BEFORE_VNNI() HWY_BEFORE_NAMESPACE()
#endif

KVTAMP_BEFORE_VNNI();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// K: 255 * 14592 * 576 < 2^31; 15 * 14592 * 1744 for entries. V: 127 * 32639 * 128 < 2^31, and both
// a signed 16-bit factor and two signed bytes (127 * 256 + 127) hold it.
inline constexpr float kMaxFoldedK = 14592.0f;
inline constexpr float kMaxFoldedV = 32639.0f;

HWY_INLINE constexpr std::size_t FoldedBytes(std::size_t n) {
  return (HWY_TARGET == HWY_AVX3_DL ? 2 : 4) * n;
}

// Bytes of V's codes for 16 channels of a page.
HWY_INLINE std::size_t BlockBytes(codec::Coding coding, std::uint32_t rows) {
  return std::size_t{rows} * (coding == codec::Coding::kVInt8 ? 16 : 8);
}

// Blocks of 16 channels that VDots may do at once.
inline constexpr std::uint32_t kBlocksAtOnce = 2;

// To the nearest integer. Highway's own also mends values beyond int32, which there are none of
// here.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> ToInt(D, hn::Vec<D> x) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  return hn::Vec<hn::RebindToSigned<D>>{_mm512_cvtps_epi32(x.raw)};
#else
  return hn::NearestInt(x);
#endif
}

// Whether the folded vector is to be signed bytes: on Arm it is chosen within a target.
HWY_INLINE bool FoldsToBytes() {
#if KVTAMP_ARM_DOTS && HWY_TARGET == HWY_NEON
  return cpu::ActiveArmDots() != cpu::ArmDots::kNone;
#else
  return false;
#endif
}

// `bytes`: FoldsToBytes().
template <bool kSigned>
HWY_INLINE void StoreFolded(hn::Vec<hn::ScalableTag<std::int32_t>> x, std::size_t i, bool bytes,
                            std::uint8_t* out) {
  const hn::ScalableTag<std::int32_t> di;
#if KVTAMP_ARM_DOTS && HWY_TARGET == HWY_NEON
  if (bytes) {  // l is the signed low byte, h what then is left
    const uint8x8_t split = vcreate_u8(0x0C0804000D090501), sign = vcreate_u8(0x8080808000000000);
    const uint8x16_t y = vreinterpretq_u8_s32(vaddq_s32(x.raw, vdupq_n_s32(128)));
    const uint32x2_t z = vreinterpret_u32_u8(veor_u8(vqtbl1_u8(y, split), sign));
    auto* at = reinterpret_cast<std::uint32_t*>(out + i / 8 * 16 + i % 8);
    vst1_lane_u32(at, z, 0);
    vst1_lane_u32(at + 2, z, 1);
    return;
  }
#endif
  (void)bytes;
#if HWY_TARGET == HWY_AVX3_DL
  const __m512i split = _mm512_broadcast_i32x4(
      _mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1));
  __m512i y = x.raw;
  if (kSigned) {  // l is to be the signed low byte, and h what then is left
    y = _mm512_shuffle_epi8(_mm512_add_epi32(y, _mm512_set1_epi32(128)), split);
    y = _mm512_xor_si512(
        y, _mm512_broadcast_i32x4(_mm_setr_epi32(0, static_cast<int>(0x80808080), 0, 0)));
  } else {
    y = _mm512_shuffle_epi8(y, split);
  }
  y = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 0, 2, 4, 6), y);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * 2), _mm512_castsi512_si256(y));
#elif HWY_TARGET == HWY_SCALAR
  hn::Store(x, di, reinterpret_cast<std::int32_t*>(out) + i);
#else
  const auto low = hn::And(x, hn::Set(di, 0xFFFF));
  hn::Store(hn::Or(low, hn::ShiftLeft<16>(hn::Shuffle1032(x))), di,
            reinterpret_cast<std::int32_t*>(out) + i);
#endif
}

// For each head: a[h][i] * b[i], i < n (a multiple of 16), as integers of at most `limit` in
// magnitude, a vector of them at a time to store(h, i, integers); the vector is step[h] times
// those. For K also dot[h] = a[h] . centre and the sum of the integers.
template <int kHeads, bool kIsK, class Store>
HWY_INLINE void FoldTo(const float* const* a, const float* b, const float* centre, std::size_t n,
                       float* step, float* dot, std::int32_t* sum, const Store& store) {
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<std::int32_t> di;
  const std::size_t lanes = hn::Lanes(d);
  const float limit = kIsK ? kMaxFoldedK : kMaxFoldedV;
  hn::Vec<decltype(d)> max[kHeads], dots[kHeads];
  for (int h = 0; h < kHeads; ++h) max[h] = dots[h] = hn::Zero(d);
  for (std::size_t i = 0; i < n; i += lanes) {
    const auto scale = hn::Load(d, b + i);
    const auto mid = kIsK ? hn::Load(d, centre + i) : scale;
    for (int h = 0; h < kHeads; ++h) {
      const auto x = hn::Load(d, a[h] + i);
      const auto y = hn::Mul(x, scale);
      max[h] = hn::Max(max[h], kIsK ? hn::Abs(y) : y);
      if (kIsK) dots[h] = hn::MulAdd(x, mid, dots[h]);
    }
  }
  float top[4];
  Reduce4<kHeads>(d, MaxOp(), max, top);
  if (kIsK) Reduce4<kHeads>(d, SumOp(), dots, dot);
  hn::Vec<decltype(d)> inverse[kHeads];
  for (int h = 0; h < kHeads; ++h) {
    // Below this the reciprocal would not be finite; nothing so small can matter.
    const bool some = top[h] > 1e-30f;
    inverse[h] = hn::Set(d, some ? limit / top[h] : 0.0f);
    step[h] = some ? top[h] * (1.0f / limit) : 0.0f;
  }
  hn::Vec<decltype(di)> sums[kHeads];
  for (int h = 0; h < kHeads; ++h) sums[h] = hn::Zero(di);
  for (std::size_t i = 0; i < n; i += lanes) {
    const auto scale = hn::Load(d, b + i);
    for (int h = 0; h < kHeads; ++h) {
      // Two roundings on every instruction set: the integers must not depend on it.
      const auto x = ToInt(d, hn::Mul(hn::Mul(hn::Load(d, a[h] + i), scale), inverse[h]));
      if (kIsK) sums[h] = hn::Add(sums[h], x);
      store(h, i, x);
    }
  }
  if (kIsK) Reduce4<kHeads>(di, SumOp(), sums, sum);
}

// The same, as a folded vector.
template <int kHeads, bool kIsK>
HWY_INLINE void Fold(const float* const* a, const float* b, const float* centre, std::size_t n,
                     std::uint8_t* const* out, float* step, float* dot, std::int32_t* sum) {
  const bool bytes = FoldsToBytes();
  FoldTo<kHeads, kIsK>(a, b, centre, n, step, dot, sum,
                       [&](int h, std::size_t i, hn::Vec<hn::ScalableTag<std::int32_t>> x)
                           HWY_ATTR { StoreFolded<kIsK>(x, i, bytes, out[h]); });
}

// The planes of a page as they are met by a folded query, padded to a multiple of 32 by such as add
// nothing.
struct Entries {
  std::uint16_t* channel;
  std::int16_t* above;      // codec::Planes::above
  std::int16_t* half;       // what rounds a shift to the right by that
  std::int16_t* twice_mid;  // twice the middle of the plane's codes
};

#if HWY_TARGET == HWY_AVX3_DL
inline constexpr std::size_t kMaxWordDim = 256;

// 32 words of a table of 64 * kPairs, by index.
template <int kPairs>
HWY_INLINE __m512i FindWords(const __m512i* table, __m512i index) {
  if constexpr (kPairs == 1) {
    return _mm512_permutex2var_epi16(table[0], index, table[1]);
  } else {
    const __mmask32 upper = _mm512_test_epi16_mask(index, _mm512_set1_epi16(kPairs * 32));
    return _mm512_mask_blend_epi16(upper, FindWords<kPairs / 2>(table, index),
                                   FindWords<kPairs / 2>(table + kPairs, index));
  }
}

// x: [kHeads][stride] by channel, as words.
template <int kHeads, int kPairs>
HWY_INLINE void FoldEntryWords(const Entries& e, std::size_t n, const std::int16_t* x,
                               std::size_t stride, std::uint8_t* const* out, std::int32_t* sum) {
  const hn::ScalableTag<std::int32_t> di;
  __m512i table[kHeads][2 * kPairs];
  hn::Vec<decltype(di)> sums[kHeads];
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < 2 * kPairs; ++i)
      table[h][i] = _mm512_load_si512(x + static_cast<std::size_t>(h) * stride +
                                      static_cast<std::size_t>(i) * 32);
    sums[h] = hn::Zero(di);
  }
  const __m512i split =
      _mm512_broadcast_i32x4(_mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
  const __m512i sign = _mm512_set1_epi64(static_cast<long long>(0x8080808000000000));
  for (std::size_t i = 0; i < n; i += 32) {
    const __m512i channel = _mm512_load_si512(e.channel + i),
                  above = _mm512_load_si512(e.above + i), half = _mm512_load_si512(e.half + i),
                  mid = _mm512_load_si512(e.twice_mid + i);
    for (int h = 0; h < kHeads; ++h) {
      const __m512i u =
          _mm512_srav_epi16(_mm512_add_epi16(FindWords<kPairs>(table[h], channel), half), above);
      sums[h].raw = _mm512_dpwssd_epi32(sums[h].raw, u, mid);
      // As in StoreFolded.
      const __m512i bytes = _mm512_shuffle_epi8(_mm512_add_epi16(u, _mm512_set1_epi16(128)), split);
      _mm512_store_si512(out[h] + i * 2, _mm512_xor_si512(bytes, sign));
    }
  }
  Reduce4<kHeads>(di, SumOp(), sums, sum);
}
#endif

// Folds K's planes: for each head x_c = a[h][c] * unit[c] as integers, and of each entry what its
// plane is of that, x_c / 2^above. The vector of entries is step[h] times those. dot[h] = a[h] .
// centre; sum[h]: of the entries' integers times twice_mid. dim is a multiple of 16, n of 32;
// by_channel: [kHeads][dim up to 64] scratch.
template <int kHeads>
HWY_INLINE void FoldEntries(const float* const* a, const float* unit, const float* centre,
                            std::size_t dim, const Entries& entries, std::size_t n,
                            std::int32_t* by_channel, std::uint8_t* const* out, float* step,
                            float* dot, std::int32_t* sum) {
  const hn::ScalableTag<std::int32_t> di;
  const std::size_t lanes = hn::Lanes(di), stride = RoundUp(static_cast<std::uint32_t>(dim), 64);
#if HWY_TARGET == HWY_AVX3_DL
  const bool words = dim <= kMaxWordDim;
  auto* as_words = reinterpret_cast<std::int16_t*>(by_channel);
#endif
  FoldTo<kHeads, true>(a, unit, centre, dim, step, dot, sum,
                       [&](int h, std::size_t c, hn::Vec<decltype(di)> x) HWY_ATTR {
                         const std::size_t at = static_cast<std::size_t>(h) * stride + c;
#if HWY_TARGET == HWY_AVX3_DL
                         if (words) {
                           _mm256_storeu_si256(reinterpret_cast<__m256i*>(as_words + at),
                                               _mm512_cvtepi32_epi16(x.raw));
                           return;
                         }
#endif
                         hn::Store(x, di, by_channel + at);
                       });
  // A code at the top of four bits is a sixteenth of the channel's range.
  for (int h = 0; h < kHeads; ++h) step[h] *= 1.0f / 16;
#if HWY_TARGET == HWY_AVX3_DL
  if (dim <= 64) return FoldEntryWords<kHeads, 1>(entries, n, as_words, stride, out, sum);
  if (dim <= 128) return FoldEntryWords<kHeads, 2>(entries, n, as_words, stride, out, sum);
  if (words) return FoldEntryWords<kHeads, 4>(entries, n, as_words, stride, out, sum);
#endif
  const hn::Rebind<std::uint16_t, decltype(di)> du16;
  const hn::Rebind<std::int16_t, decltype(di)> di16;
  hn::Vec<decltype(di)> sums[kHeads];
  for (int h = 0; h < kHeads; ++h) sums[h] = hn::Zero(di);
  const bool bytes = FoldsToBytes();
  for (std::size_t i = 0; i < n; i += lanes) {
    const auto channel = hn::PromoteTo(di, hn::Load(du16, entries.channel + i));
    const auto above = hn::PromoteTo(di, hn::Load(di16, entries.above + i));
    const auto half = hn::PromoteTo(di, hn::Load(di16, entries.half + i));
    const auto mid = hn::PromoteTo(di, hn::Load(di16, entries.twice_mid + i));
    for (int h = 0; h < kHeads; ++h) {
      const auto x =
          hn::GatherIndex(di, by_channel + static_cast<std::size_t>(h) * stride, channel);
      const auto u = hn::Add(x, half) >> above;
      sums[h] = hn::Add(sums[h], hn::Mul(u, mid));
      StoreFolded<true>(u, i, bytes, out[h]);
    }
  }
  Reduce4<kHeads>(di, SumOp(), sums, sum);
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
