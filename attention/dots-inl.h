// Exact integer arithmetic on the codes of a page: folding a float vector with the page's scales into
// 15-bit integers, K's dot products and V's weighted sums. Per-target header.
//
// A folded vector takes 16 bytes for every 4 elements x0 ... x3:
//   avx512_vnni  x = 256 h + l: h0 ... h3, l0 ... l3, 8 bytes unused. K: signed (codes are the unsigned
//                side of the instruction); V: unsigned
//   scalar       int32 each
//   others       (x0, x2), (x1, x3) as pairs of int16, 8 bytes unused: even and odd bytes of a lane of
//                codes, widened, meet their factors in one multiply-add of pairs
#if defined(KVTAMP_ATTENTION_DOTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_DOTS_INL_H_
#undef KVTAMP_ATTENTION_DOTS_INL_H_
#else
#define KVTAMP_ATTENTION_DOTS_INL_H_
#endif

#include <cstring>

#include "attention/grid-inl.h"
#include "attention/unit.h"
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

// K: 255 * 14592 * 576 < 2^31. V: 127 * 32767 * 128 < 2^31, and a signed 16-bit factor holds it.
inline constexpr float kMaxFoldedK = 14592.0f;
inline constexpr float kMaxFoldedV = 32767.0f;

HWY_INLINE constexpr std::size_t FoldedBytes(std::size_t n) { return 4 * n; }

// To the nearest integer. Highway's own also mends values beyond int32, which there are none of here.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> ToInt(D, hn::Vec<D> x) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  return hn::Vec<hn::RebindToSigned<D>>{_mm512_cvtps_epi32(x.raw)};
#else
  return hn::NearestInt(x);
#endif
}

template <bool kSigned>
HWY_INLINE void StoreFolded(hn::Vec<hn::ScalableTag<std::int32_t>> x, std::size_t i, std::uint8_t* out) {
  const hn::ScalableTag<std::int32_t> di;
  auto* to = reinterpret_cast<std::int32_t*>(out) + i;
#if HWY_TARGET == HWY_AVX3_DL
  const __m512i split = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1));
  __m512i y = x.raw;
  if (kSigned) {  // l is to be the signed low byte, and h what then is left
    y = _mm512_shuffle_epi8(_mm512_add_epi32(y, _mm512_set1_epi32(128)), split);
    y = _mm512_xor_si512(y, _mm512_broadcast_i32x4(_mm_setr_epi32(0, static_cast<int>(0x80808080), 0, 0)));
  } else {
    y = _mm512_shuffle_epi8(y, split);
  }
  hn::Store(hn::Vec<decltype(di)>{y}, di, to);
#elif HWY_TARGET == HWY_SCALAR
  hn::Store(x, di, to);
#else
  const auto low = hn::And(x, hn::Set(di, 0xFFFF));
  hn::Store(hn::Or(low, hn::ShiftLeft<16>(hn::Shuffle1032(x))), di, to);
#endif
}

// For each head: a[h][i] * b[i], i < n (a multiple of 16), as integers of at most `limit` in magnitude;
// the vector is step[h] times those. For K also dot[h] = a[h] . centre and the sum of the integers.
template <int kHeads, bool kIsK>
HWY_INLINE void Fold(const float* const* a, const float* b, const float* centre, std::size_t n,
                     std::uint8_t* const* out, float* step, float* dot, std::int32_t* sum) {
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
      StoreFolded<kIsK>(x, i, out[h]);
    }
  }
  if (kIsK) Reduce4<kHeads>(di, SumOp(), sums, sum);
}

// Bytes of V's codes for 16 channels of a page.
HWY_INLINE std::size_t BlockBytes(codec::Coding coding, std::uint32_t rows) {
  return std::size_t{rows} * (coding == codec::Coding::kVInt8 ? 16 : 8);
}

// Blocks of 16 channels that VDots may do at once.
inline constexpr std::uint32_t kBlocksAtOnce = 2;

// What each of the three versions below defines:
//   KDots  out[h][rows] = sum over channels of code * u[h]
//   VDots  out[h][n_blocks * 16] = sum over tokens of level * w[h]; n_blocks <= kBlocksAtOnce

// ------------------------------------------------------------------ plain

#if HWY_TARGET == HWY_SCALAR

template <int kHeads>
HWY_INLINE void KDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t rows, std::uint32_t dim,
                      const std::uint8_t* const* folded, std::int32_t* const* out) {
  const std::uint32_t chunk = std::min(32u, rows);
  for (int h = 0; h < kHeads; ++h) {
    const auto* u = reinterpret_cast<const std::int32_t*>(folded[h]);
    std::fill_n(out[h], rows, 0);
    for (std::uint32_t g = 0; g < dim / 4; ++g) {
      for (std::uint32_t t = 0; t < rows; ++t) {
        for (std::uint32_t j = 0; j < 4; ++j) {
          std::uint32_t code;
          if (coding == codec::Coding::kKInt8) {
            code = codes[(g * rows + t) * 4 + j];
          } else {
            const std::uint32_t r = t % chunk;
            code = codes[g * rows * 2 + t / chunk * chunk * 2 + r % (chunk / 2) * 4 + j];
            code = r < chunk / 2 ? code & 15 : code >> 4;
          }
          out[h][t] += static_cast<std::int32_t>(code) * u[g * 4 + j];
        }
      }
    }
  }
}

template <int kHeads>
HWY_INLINE void VDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t n_blocks, std::uint32_t rows,
                      const std::uint8_t* const* folded, std::int32_t* const* out) {
  const std::size_t block_bytes = BlockBytes(coding, rows);
  for (int h = 0; h < kHeads; ++h) {
    const auto* w = reinterpret_cast<const std::int32_t*>(folded[h]);
    std::fill_n(out[h], n_blocks * 16, 0);
    for (std::uint32_t t = 0; t < rows; ++t) {
      for (std::uint32_t c = 0; c < n_blocks * 16; ++c) {
        const std::uint8_t* block = codes + c / 16 * block_bytes + c % 16 * 4 + t % 4;
        std::int32_t level;
        if (coding == codec::Coding::kVInt8) {
          level = static_cast<std::int8_t>(block[t / 4 * 64]);
        } else {
          const std::uint32_t code = block[t / 8 * 64];
          level = codec::kLm4Levels[t / 4 % 2 == 0 ? code & 15 : code >> 4];
        }
        out[h][c] += level * w[t];
      }
    }
  }
}

// ------------------------------------------------------------------ vpdpbusd

#elif HWY_TARGET == HWY_AVX3_DL

// The high (kPart 0) or low (1) bytes of the four elements from i on.
template <int kPart>
HWY_INLINE __m512i Broadcast4(const std::uint8_t* folded, std::uint32_t i) {
  std::int32_t x;
  std::memcpy(&x, folded + i * 4 + kPart * 4, 4);
  return _mm512_set1_epi32(x);
}

// 16 tokens x 4 channels a vector; kVecs vectors of tokens at once.
template <int kHeads, int kVecs>
HWY_INLINE void KDots8(const std::uint8_t* codes, std::uint32_t rows, std::uint32_t dim,
                       const std::uint8_t* const* folded, std::int32_t* const* out) {
  for (std::uint32_t t = 0; t < rows; t += 16 * kVecs) {
    __m512i high[kHeads][kVecs], low[kHeads][kVecs];
    for (int h = 0; h < kHeads; ++h) {
      for (int v = 0; v < kVecs; ++v) high[h][v] = low[h][v] = _mm512_setzero_si512();
    }
    const std::uint8_t* p = codes + t * 4;
    for (std::uint32_t c = 0; c < dim; c += 4, p += rows * 4) {
      __m512i x[kVecs];
      for (int v = 0; v < kVecs; ++v) x[v] = _mm512_loadu_si512(p + v * 64);
      for (int h = 0; h < kHeads; ++h) {
        const __m512i uh = Broadcast4<0>(folded[h], c), ul = Broadcast4<1>(folded[h], c);
        for (int v = 0; v < kVecs; ++v) {
          high[h][v] = _mm512_dpbusd_epi32(high[h][v], x[v], uh);
          low[h][v] = _mm512_dpbusd_epi32(low[h][v], x[v], ul);
        }
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      for (int v = 0; v < kVecs; ++v) {
        _mm512_storeu_si512(out[h] + t + v * 16,
                            _mm512_add_epi32(_mm512_slli_epi32(high[h][v], 8), low[h][v]));
      }
    }
  }
}

// rows >= 32: a vector holds tokens 0-15 of the chunk in its low nibbles, 16-31 in its high ones.
template <int kHeads>
HWY_INLINE void KDots4(const std::uint8_t* codes, std::uint32_t rows, std::uint32_t dim,
                       const std::uint8_t* const* folded, std::int32_t* const* out) {
  const __m512i nibble = _mm512_set1_epi8(15);
  for (std::uint32_t t = 0; t < rows; t += 32) {
    __m512i high[kHeads][2], low[kHeads][2];
    for (int h = 0; h < kHeads; ++h) {
      for (int v = 0; v < 2; ++v) high[h][v] = low[h][v] = _mm512_setzero_si512();
    }
    const std::uint8_t* p = codes + t * 2;
    for (std::uint32_t c = 0; c < dim; c += 4, p += rows * 2) {
      const __m512i both = _mm512_loadu_si512(p);
      const __m512i x0 = _mm512_and_si512(both, nibble);
      const __m512i x1 = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
      for (int h = 0; h < kHeads; ++h) {
        const __m512i uh = Broadcast4<0>(folded[h], c), ul = Broadcast4<1>(folded[h], c);
        high[h][0] = _mm512_dpbusd_epi32(high[h][0], x0, uh);
        high[h][1] = _mm512_dpbusd_epi32(high[h][1], x1, uh);
        low[h][0] = _mm512_dpbusd_epi32(low[h][0], x0, ul);
        low[h][1] = _mm512_dpbusd_epi32(low[h][1], x1, ul);
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      for (int v = 0; v < 2; ++v) {
        _mm512_storeu_si512(out[h] + t + v * 16,
                            _mm512_add_epi32(_mm512_slli_epi32(high[h][v], 8), low[h][v]));
      }
    }
  }
}

// 16 rows: a vector holds two channel groups, tokens 0-7 in the low nibbles, 8-15 in the high ones.
template <int kHeads>
HWY_INLINE void KDots4Rows16(const std::uint8_t* codes, std::uint32_t dim, const std::uint8_t* const* folded,
                             std::int32_t* const* out) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i spread[2] = {_mm512_set_epi32(4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0),
                             _mm512_set_epi32(5, 5, 5, 5, 5, 5, 5, 5, 1, 1, 1, 1, 1, 1, 1, 1)};
  __m512i acc[kHeads][2][2];
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < 2; ++v) acc[h][0][v] = acc[h][1][v] = _mm512_setzero_si512();
  }
  for (std::uint32_t c = 0; c < dim; c += 8) {
    const __m512i both = _mm512_loadu_si512(codes + c * 8);
    const __m512i x0 = _mm512_and_si512(both, nibble);
    const __m512i x1 = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    for (int h = 0; h < kHeads; ++h) {
      for (int part = 0; part < 2; ++part) {
        const __m512i u = _mm512_permutexvar_epi32(
            spread[part], _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(folded[h] + c * 4))));
        acc[h][part][0] = _mm512_dpbusd_epi32(acc[h][part][0], x0, u);
        acc[h][part][1] = _mm512_dpbusd_epi32(acc[h][part][1], x1, u);
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < 2; ++v) {
      const __m512i s = _mm512_add_epi32(_mm512_slli_epi32(acc[h][0][v], 8), acc[h][1][v]);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[h] + v * 8),
                          _mm256_add_epi32(_mm512_castsi512_si256(s), _mm512_extracti64x4_epi64(s, 1)));
    }
  }
}

template <int kHeads>
HWY_NOINLINE void KDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t rows, std::uint32_t dim,
                        const std::uint8_t* const* folded, std::int32_t* const* out) {
  if (coding == codec::Coding::kKInt8) {
    if (rows % 32 == 0) {
      KDots8<kHeads, 2>(codes, rows, dim, folded, out);
    } else {
      KDots8<kHeads, 1>(codes, rows, dim, folded, out);
    }
  } else if (rows % 32 == 0) {
    KDots4<kHeads>(codes, rows, dim, folded, out);
  } else {
    KDots4Rows16<kHeads>(codes, dim, folded, out);
  }
}

// kBlocks blocks of 16 channels, `block_bytes` apart, that share their weights.
template <int kHeads, int kBlocks>
HWY_INLINE void VDotsOf(codec::Coding coding, const std::uint8_t* codes, std::size_t block_bytes,
                        std::uint32_t rows, const std::uint8_t* const* folded, std::int32_t* const* out) {
  __m512i high[kHeads][kBlocks], low[kHeads][kBlocks];
  for (int h = 0; h < kHeads; ++h) {
    for (int b = 0; b < kBlocks; ++b) high[h][b] = low[h][b] = _mm512_setzero_si512();
  }
  if (coding == codec::Coding::kVInt8) {
    for (std::uint32_t t = 0; t < rows; t += 4) {
      __m512i x[kBlocks];
      for (int b = 0; b < kBlocks; ++b) x[b] = _mm512_loadu_si512(codes + b * block_bytes + t * 16);
      for (int h = 0; h < kHeads; ++h) {
        const __m512i wh = Broadcast4<0>(folded[h], t), wl = Broadcast4<1>(folded[h], t);
        for (int b = 0; b < kBlocks; ++b) {
          high[h][b] = _mm512_dpbusd_epi32(high[h][b], wh, x[b]);
          low[h][b] = _mm512_dpbusd_epi32(low[h][b], wl, x[b]);
        }
      }
    }
  } else {
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i levels =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codec::kLm4Levels)));
    for (std::uint32_t t = 0; t < rows; t += 8) {
      __m512i x[kBlocks][2];
      for (int b = 0; b < kBlocks; ++b) {
        const __m512i both = _mm512_loadu_si512(codes + b * block_bytes + t * 8);
        x[b][0] = _mm512_shuffle_epi8(levels, _mm512_and_si512(both, nibble));
        x[b][1] = _mm512_shuffle_epi8(levels, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
      }
      for (int h = 0; h < kHeads; ++h) {
        for (int q = 0; q < 2; ++q) {
          const __m512i wh = Broadcast4<0>(folded[h], t + q * 4), wl = Broadcast4<1>(folded[h], t + q * 4);
          for (int b = 0; b < kBlocks; ++b) {
            high[h][b] = _mm512_dpbusd_epi32(high[h][b], wh, x[b][q]);
            low[h][b] = _mm512_dpbusd_epi32(low[h][b], wl, x[b][q]);
          }
        }
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int b = 0; b < kBlocks; ++b) {
      _mm512_storeu_si512(out[h] + b * 16, _mm512_add_epi32(_mm512_slli_epi32(high[h][b], 8), low[h][b]));
    }
  }
}

template <int kHeads>
HWY_NOINLINE void VDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t n_blocks, std::uint32_t rows,
                        const std::uint8_t* const* folded, std::int32_t* const* out) {
  const std::size_t block_bytes = BlockBytes(coding, rows);
  if (n_blocks == 2) {
    VDotsOf<kHeads, 2>(coding, codes, block_bytes, rows, folded, out);
  } else {
    VDotsOf<kHeads, 1>(coding, codes, block_bytes, rows, folded, out);
  }
}

// ------------------------------------------------------------------ 16-bit multiply-add of pairs

#else

template <class D32>
using D16Of = hn::Repartition<std::int16_t, D32>;
template <class D32>
using DU16Of = hn::Repartition<std::uint16_t, D32>;

// Sums of both halves where the instruction set keeps them apart (NEON); x86 uses only `a`.
template <class D32>
struct PairSum {
  hn::Vec<D32> a, b;
  HWY_INLINE void Clear(D32 d) { a = b = hn::Zero(d); }
  HWY_INLINE void Add(D32 d, hn::Vec<DU16Of<D32>> x, std::int32_t pair) {
    const D16Of<D32> d16;
    a = hn::ReorderWidenMulAccumulate(d, hn::BitCast(d16, x), hn::BitCast(d16, hn::Set(d, pair)), a, b);
  }
  HWY_INLINE hn::Vec<D32> Total() const { return hn::RearrangeToOddPlusEven(a, b); }
};

template <int kHeads, class D32>
HWY_INLINE void KDots8(D32 d, const std::uint8_t* codes, std::uint32_t rows, std::uint32_t dim,
                       const std::uint8_t* const* folded, std::int32_t* const* out) {
  const DU16Of<D32> du16;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  const auto byte = hn::Set(du16, 0xFF);
  for (std::uint32_t t = 0; t < rows; t += lanes) {
    PairSum<D32> acc[kHeads];
    for (int h = 0; h < kHeads; ++h) acc[h].Clear(d);
    const std::uint8_t* p = codes + t * 4;
    for (std::uint32_t c = 0; c < dim; c += 4, p += rows * 4) {
      const auto x = hn::LoadU(du16, reinterpret_cast<const std::uint16_t*>(p));
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
                       const std::uint8_t* const* folded, std::int32_t* const* out) {
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
HWY_NOINLINE void KDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t rows, std::uint32_t dim,
                        const std::uint8_t* const* folded, std::int32_t* const* out) {
  const hn::ScalableTag<std::int32_t> d;
  if (coding == codec::Coding::kKInt8) {
    KDots8<kHeads>(d, codes, rows, dim, folded, out);
  } else if (hn::Lanes(d) <= 8 || rows >= 32) {
    KDots4<kHeads>(d, codes, rows, dim, folded, out);
  } else {  // a page of 16 has only 8 tokens side by side
    KDots4<kHeads>(hn::CappedTag<std::int32_t, 8>(), codes, rows, dim, folded, out);
  }
}

template <int kHeads>
HWY_NOINLINE void VDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t n_blocks, std::uint32_t rows,
                        const std::uint8_t* const* folded, std::int32_t* const* out) {
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
    const auto* from = reinterpret_cast<const std::int8_t*>(codes + c / 16 * BlockBytes(coding, rows) + c % 16 * 4);
    PairSum<D> acc[kHeads];
    for (int h = 0; h < kHeads; ++h) acc[h].Clear(d);
    for (std::uint32_t t = 0; t < rows; t += 8) {
      hn::Vec<decltype(d16)> x[2];
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

#endif  // HWY_TARGET

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
