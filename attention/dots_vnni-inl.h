// The integer stage with vpdpbusd, 64 products an instruction; see dots-inl.h. Per-target header.
#if defined(KVTAMP_ATTENTION_DOTS_VNNI_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_DOTS_VNNI_INL_H_
#undef KVTAMP_ATTENTION_DOTS_VNNI_INL_H_
#else
#define KVTAMP_ATTENTION_DOTS_VNNI_INL_H_
#endif

#include <cstring>

#include "attention/fold-inl.h"
#include "attention/unit.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

KVTAMP_BEFORE_VNNI();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX3_DL

// sum += x · u, by fours; x unsigned. GCC 12 moves every sum to another register and back around
// its own builtin, two instructions for one, and runs out of registers.
HWY_INLINE void Dot(__m512i& sum, __m512i x, __m512i u) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(u));
}

// The high (kPart 0) or low (1) bytes of the four elements from i on.
template <int kPart>
HWY_INLINE __m512i Broadcast4(const std::uint8_t* folded, std::uint32_t i) {
  std::int32_t x;
  std::memcpy(&x, folded + i * 2 + kPart * 4, 4);
  return _mm512_set1_epi32(x);
}

// 16 tokens x 4 channels a vector; kVecs vectors of tokens at once.
template <int kHeads, int kVecs>
HWY_INLINE void KDots8(const std::uint8_t* codes, std::uint32_t rows, std::uint32_t dim,
                       const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                       std::int32_t* const* out) {
  for (std::uint32_t t = 0; t < rows; t += 16 * kVecs) {
    __m512i high[kHeads][kVecs], low[kHeads][kVecs];
    for (int h = 0; h < kHeads; ++h) {
      for (int v = 0; v < kVecs; ++v) high[h][v] = low[h][v] = _mm512_setzero_si512();
    }
    const std::uint8_t* p = codes + t * 4;
    for (std::uint32_t c = 0; c < dim; c += 4, p += rows * 4) {
      __m512i x[kVecs];
      for (int v = 0; v < kVecs; ++v) {
        x[v] = _mm512_loadu_si512(p + v * 64);
        hwy::Prefetch(p + v * 64 + ahead);
      }
      for (int h = 0; h < kHeads; ++h) {
        const __m512i uh = Broadcast4<0>(folded[h], c), ul = Broadcast4<1>(folded[h], c);
        for (int v = 0; v < kVecs; ++v) {
          Dot(high[h][v], x[v], uh);
          Dot(low[h][v], x[v], ul);
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
                       const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                       std::int32_t* const* out) {
  const __m512i nibble = _mm512_set1_epi8(15);
  for (std::uint32_t t = 0; t < rows; t += 32) {
    __m512i high[kHeads][2], low[kHeads][2];
    for (int h = 0; h < kHeads; ++h) {
      for (int v = 0; v < 2; ++v) high[h][v] = low[h][v] = _mm512_setzero_si512();
    }
    const std::uint8_t* p = codes + t * 2;
    for (std::uint32_t c = 0; c < dim; c += 4, p += rows * 2) {
      const __m512i both = _mm512_loadu_si512(p);
      hwy::Prefetch(p + ahead);
      const __m512i x0 = _mm512_and_si512(both, nibble);
      const __m512i x1 = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
      for (int h = 0; h < kHeads; ++h) {
        const __m512i uh = Broadcast4<0>(folded[h], c), ul = Broadcast4<1>(folded[h], c);
        Dot(high[h][0], x0, uh);
        Dot(high[h][1], x1, uh);
        Dot(low[h][0], x0, ul);
        Dot(low[h][1], x1, ul);
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
HWY_INLINE void KDots4Rows16(const std::uint8_t* codes, std::uint32_t dim,
                             const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                             std::int32_t* const* out) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i spread[2] = {_mm512_set_epi32(2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0),
                             _mm512_set_epi32(3, 3, 3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1)};
  __m512i acc[kHeads][2][2];
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < 2; ++v) acc[h][0][v] = acc[h][1][v] = _mm512_setzero_si512();
  }
  for (std::uint32_t c = 0; c < dim; c += 8) {
    const __m512i both = _mm512_loadu_si512(codes + c * 8);
    hwy::Prefetch(codes + c * 8 + ahead);
    const __m512i x0 = _mm512_and_si512(both, nibble);
    const __m512i x1 = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    for (int h = 0; h < kHeads; ++h) {
      for (int part = 0; part < 2; ++part) {
        const __m512i u = _mm512_permutexvar_epi32(
            spread[part], _mm512_castsi128_si512(_mm_loadu_si128(
                              reinterpret_cast<const __m128i*>(folded[h] + c * 2))));
        Dot(acc[h][part][0], x0, u);
        Dot(acc[h][part][1], x1, u);
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < 2; ++v) {
      const __m512i s = _mm512_add_epi32(_mm512_slli_epi32(acc[h][0][v], 8), acc[h][1][v]);
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(out[h] + v * 8),
          _mm256_add_epi32(_mm512_castsi512_si256(s), _mm512_extracti64x4_epi64(s, 1)));
    }
  }
}

template <int kHeads>
HWY_NOINLINE void KDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t rows,
                        std::uint32_t dim, const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                        std::int32_t* const* out) {
  if (coding != codec::Coding::kKInt4) {
    if (rows % 32 == 0) {
      KDots8<kHeads, 2>(codes, rows, dim, folded, ahead, out);
    } else {
      KDots8<kHeads, 1>(codes, rows, dim, folded, ahead, out);
    }
  } else if (rows % 32 == 0) {
    KDots4<kHeads>(codes, rows, dim, folded, ahead, out);
  } else {
    KDots4Rows16<kHeads>(codes, dim, folded, ahead, out);
  }
}

// kBlocks blocks of 16 channels, `block_bytes` apart, that share their weights.
template <int kHeads, int kBlocks>
HWY_INLINE void VDotsOf(codec::Coding coding, const std::uint8_t* codes, std::size_t block_bytes,
                        std::uint32_t rows, const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                        std::int32_t* const* out) {
  __m512i high[kHeads][kBlocks], low[kHeads][kBlocks];
  for (int h = 0; h < kHeads; ++h) {
    for (int b = 0; b < kBlocks; ++b) high[h][b] = low[h][b] = _mm512_setzero_si512();
  }
  if (coding == codec::Coding::kVInt8) {
    for (std::uint32_t t = 0; t < rows; t += 4) {
      __m512i x[kBlocks];
      for (int b = 0; b < kBlocks; ++b) {
        x[b] = _mm512_loadu_si512(codes + b * block_bytes + t * 16);
        hwy::Prefetch(codes + b * block_bytes + t * 16 + ahead);
      }
      for (int h = 0; h < kHeads; ++h) {
        const __m512i wh = Broadcast4<0>(folded[h], t), wl = Broadcast4<1>(folded[h], t);
        for (int b = 0; b < kBlocks; ++b) {
          Dot(high[h][b], wh, x[b]);
          Dot(low[h][b], wl, x[b]);
        }
      }
    }
  } else {
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i levels = _mm512_broadcast_i32x4(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(codec::kLm4Levels)));
    for (std::uint32_t t = 0; t < rows; t += 8) {
      __m512i x[kBlocks][2];
      for (int b = 0; b < kBlocks; ++b) {
        const __m512i both = _mm512_loadu_si512(codes + b * block_bytes + t * 8);
        hwy::Prefetch(codes + b * block_bytes + t * 8 + ahead);
        x[b][0] = _mm512_shuffle_epi8(levels, _mm512_and_si512(both, nibble));
        x[b][1] = _mm512_shuffle_epi8(levels, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
      }
      for (int h = 0; h < kHeads; ++h) {
        for (int q = 0; q < 2; ++q) {
          const __m512i wh = Broadcast4<0>(folded[h], t + q * 4),
                        wl = Broadcast4<1>(folded[h], t + q * 4);
          for (int b = 0; b < kBlocks; ++b) {
            Dot(high[h][b], wh, x[b][q]);
            Dot(low[h][b], wl, x[b][q]);
          }
        }
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int b = 0; b < kBlocks; ++b) {
      _mm512_storeu_si512(out[h] + b * 16,
                          _mm512_add_epi32(_mm512_slli_epi32(high[h][b], 8), low[h][b]));
    }
  }
}

template <int kHeads>
HWY_NOINLINE void VDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t n_blocks,
                        std::uint32_t rows, const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                        std::int32_t* const* out) {
  const std::size_t block_bytes = BlockBytes(coding, rows);
  if (n_blocks == 2) {
    VDotsOf<kHeads, 2>(coding, codes, block_bytes, rows, folded, ahead, out);
  } else {
    VDotsOf<kHeads, 1>(coding, codes, block_bytes, rows, folded, ahead, out);
  }
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
