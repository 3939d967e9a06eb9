// Codes of few bits to bytes, once for all query rows: K's planes to one byte a code, V's trellis
// to levels. Per-target header.
#if defined(KVTAMP_ATTENTION_UNPACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_UNPACK_INL_H_
#undef KVTAMP_ATTENTION_UNPACK_INL_H_
#else
#define KVTAMP_ATTENTION_UNPACK_INL_H_
#endif

#include <cstring>
#include <utility>

#include "attention/fold-inl.h"
#include "attention/grid-inl.h"
#include "codec/layout.h"
#include "cpu/convert.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

HWY_INLINE bool HasRows(const codec::SideLayout* layout, std::uint32_t head) {
  return layout != nullptr && layout->heads[head].coding == codec::Coding::kRows;
}

// A page of one head, kRows, as f16 rows [page.rows][dim] in the model's own basis.
HWY_NOINLINE void KHalves(const Layer& layer, const Page& page, std::uint32_t head, half_t* out) {
  const codec::SideLayout::Head& block = page.k_layout->heads[head];
  HWY_ALIGN float row[codec::kMaxDim];
  for (std::uint32_t r = 0; r < page.rows; ++r) {
    codec::DecodeRowK(
        block.coding, block.shape, page.k + block.offset,
        layer.k_mean == nullptr ? nullptr : layer.k_mean + std::size_t{head} * layer.dim_k, r, row);
    cpu::FloatToHalf(row, out + std::size_t{r} * layer.dim_k, layer.dim_k);
  }
}
HWY_NOINLINE void VHalves(const Layer& layer, const Page& page, std::uint32_t head, half_t* out) {
  const codec::SideLayout::Head& block = page.v_layout->heads[head];
  HWY_ALIGN float row[codec::kMaxDim];
  for (std::uint32_t r = 0; r < page.rows; ++r) {
    codec::DecodeRowV(block.coding, block.shape, page.v + block.offset, layer.v_hadamard, r, row);
    cpu::FloatToHalf(row, out + std::size_t{r} * layer.dim_v, layer.dim_v);
  }
}

// A page of one head, kKPlanes, ready to be multiplied.
struct KPlanes {
  codec::Planes* planes;
  std::uint8_t* codes;  // [entries / 4][rows][4]
  Entries entries;
  float* factor;        // [entries] PlaneFactors, where asked for
  std::uint8_t* width;  // [dim up to 32] bits of each channel

  KPlanes() = default;
  KPlanes(Arena& arena, const Layer& layer) {
    const std::uint32_t n = MaxEntries(layer);
    planes = arena.Take<codec::Planes>(1);
    codes = arena.Take<std::uint8_t>(std::size_t{n} * layer.page_size);
    entries.channel = arena.Take<std::uint16_t>(n);
    entries.above = arena.Take<std::int16_t>(n);
    entries.half = arena.Take<std::int16_t>(n);
    entries.twice_mid = arena.Take<std::int16_t>(n);
    factor = arena.Take<float>(n);
    width = arena.Take<std::uint8_t>(RoundUp(layer.dim_k, 32));
  }
  // Three planes a channel, and a few that are cut in two.
  static std::uint32_t MaxEntries(const Layer& layer) { return RoundUp(3 * layer.dim_k + 16, 32); }
  std::uint32_t n() const { return planes->total(); }
  std::uint32_t n_padded() const { return RoundUp(n(), 32); }
};

// A code comes to lie at the top of four bits: as many bits of a query's product then mean as much
// in every plane, and rounding all of a query to one step costs the wide channels nothing.
template <int kBits>
inline constexpr int kUp = 4 - kBits;

#if HWY_TARGET != HWY_SCALAR
template <int kLeft, class V>
HWY_INLINE V Shifted(V x) {
  if constexpr (kLeft > 0) return hn::ShiftLeft<kLeft>(x);
  if constexpr (kLeft < 0) return hn::ShiftRight<-kLeft>(x);
  return x;
}

// Pieces of kBytes bytes, each of which holds 8 / kBits times as many codes.
template <int kBits, std::size_t kBytes>
HWY_INLINE void UnpackPieces(const std::uint8_t* from, std::size_t n, std::uint8_t* out) {
  const hn::CappedTag<std::uint8_t, kBytes> d;
  const hn::Repartition<std::uint16_t, decltype(d)> d16;
  const auto mask = hn::Set(d, static_cast<std::uint8_t>(((1 << kBits) - 1) << kUp<kBits>));
  for (std::size_t piece = 0; piece < n; ++piece, from += kBytes, out += kBytes * (8 / kBits)) {
    for (std::size_t i = 0; i < kBytes; i += hn::Lanes(d)) {
      const auto x = hn::BitCast(d16, hn::LoadU(d, from + i));
      const auto put = [&]<int... k>(std::integer_sequence<int, k...>) HWY_ATTR {
        (hn::StoreU(hn::And(hn::BitCast(d, Shifted<kUp<kBits> - k * kBits>(x)), mask), d,
                    out + k * kBytes + i),
         ...);
      };
      put(std::make_integer_sequence<int, 8 / kBits>());
    }
  }
}
#endif

template <int kBits>
HWY_INLINE void UnpackList(const std::uint8_t* from, std::size_t bytes, std::uint32_t rows,
                           std::uint8_t* out) {
  const std::uint32_t piece = std::min(rows, 128u / kBits) * kBits / 2;
#if HWY_TARGET == HWY_SCALAR
  for (std::size_t p = 0; p < bytes; p += piece, out += piece * (8 / kBits)) {
    for (std::uint32_t i = 0; i < piece * (8 / kBits); ++i)
      out[i] = ((from[p + i % piece] >> (i / piece * kBits)) & ((1 << kBits) - 1)) << kUp<kBits>;
  }
#else
  switch (piece) {
    case 64:
      return UnpackPieces<kBits, 64>(from, bytes / 64, out);
    case 32:
      return UnpackPieces<kBits, 32>(from, bytes / 32, out);
    case 16:
      return UnpackPieces<kBits, 16>(from, bytes / 16, out);
    default:
      return UnpackPieces<kBits, 8>(from, bytes / 8, out);
  }
#endif
}

#if HWY_TARGET == HWY_AVX3_DL
// codec::PlanesOf for up to 256 channels, 32 at once.
HWY_INLINE void PackedPlanesOf(const std::uint8_t* width, const codec::PageShape& shape,
                               codec::Planes& planes) {
  codec::PlaneLists<std::uint8_t> lists;
  const auto append = [&](int list, std::uint64_t mask, __m512i channel, __m512i above) HWY_ATTR {
    std::uint32_t& n = lists.n[list];
    _mm512_storeu_si512(lists.channel[list] + n, _mm512_maskz_compress_epi8(mask, channel));
    _mm512_storeu_si512(lists.above[list] + n, _mm512_maskz_compress_epi8(mask, above));
    n += static_cast<std::uint32_t>(__builtin_popcountll(mask));
  };
  const auto byte = [](int x) HWY_ATTR { return _mm256_set1_epi8(static_cast<char>(x)); };
  const __m256i iota = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,
                                        17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
  for (std::uint32_t c = 0; c < shape.dim; c += 32) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(width + c));
    const __m256i channel = _mm256_add_epi8(iota, byte(static_cast<int>(c)));
    // Of 8 bits there are two planes of 4: a place for each channel's second behind its first.
    const __m512i twice = _mm512_or_si512(_mm512_cvtepu8_epi16(channel),
                                          _mm512_slli_epi16(_mm512_cvtepu8_epi16(channel), 8));
    const std::uint64_t first = _mm256_cmpge_epu8_mask(w, byte(4));
    const std::uint64_t second = _mm256_cmpeq_epi8_mask(w, byte(8));
    append(0, _pdep_u64(first, 0x5555'5555'5555'5555u) | _pdep_u64(second, 0xAAAA'AAAA'AAAA'AAAAu),
           twice, _mm512_set1_epi16(4 << 8));
    append(1, _mm256_test_epi8_mask(w, byte(2)), _mm512_zextsi256_si512(channel),
           _mm512_zextsi256_si512(_mm256_and_si256(w, byte(4))));
    append(2, _mm256_test_epi8_mask(w, byte(1)), _mm512_zextsi256_si512(channel),
           _mm512_zextsi256_si512(_mm256_and_si256(w, byte(6))));
  }
  codec::CutPlanes(lists, shape, planes);
}
#endif

// k.factor, of codes at the top of four bits: unit[channel] / 2^(4 + above).
HWY_INLINE void PlaneFactors(const float* unit, std::uint32_t dim, const KPlanes& k) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<std::uint16_t, decltype(d)> du16;
  const hn::Rebind<std::int16_t, decltype(d)> di16;
  const auto sixteenth = hn::Set(d, 1.0f / 16);
  WithTable(unit, dim, [&](const auto& table) HWY_ATTR {
    for (std::size_t e = 0; e < k.n_padded(); e += hn::Lanes(d)) {
      const auto x =
          hn::Mul(table(hn::PromoteTo(di, hn::Load(du16, k.entries.channel + e))), sixteenth);
      const auto above = hn::PromoteTo(di, hn::Load(di16, k.entries.above + e));
      // 0 stays 0.
      const auto y = TimesPowerOf2(d, x, hn::Neg(above));
      hn::Store(hn::IfThenZeroElse(hn::Eq(x, hn::Zero(d)), y), d, k.factor + e);
    }
  });
}

// k.width: from KPlanesGrid.
HWY_NOINLINE void UnpackK(const codec::PageShape& shape, const std::uint8_t* page,
                          const KPlanes& k) {
#if HWY_TARGET == HWY_AVX3_DL
  if (shape.dim <= 256) {
    PackedPlanesOf(k.width, shape, *k.planes);
  } else {
    codec::PlanesOf(page, shape, *k.planes);
  }
#else
  codec::PlanesOf(page, shape, *k.planes);
#endif
  const std::uint8_t* from = page + 2 * shape.dim + shape.dim / 2;
  std::uint8_t* out = k.codes;
  const auto list = [&]<int kBits>(std::integral_constant<int, kBits>, std::uint32_t n) {
    const std::size_t bytes = std::size_t{n} * shape.rows * kBits / 8;
    UnpackList<kBits>(from, bytes, shape.rows, out);
    from += bytes;
    out += std::size_t{n} * shape.rows;
  };
  list(std::integral_constant<int, 4>(), k.planes->n[0]);
  list(std::integral_constant<int, 2>(), k.planes->n[1]);
  list(std::integral_constant<int, 1>(), k.planes->n[2]);
  const std::uint32_t n = k.n(), padded = k.n_padded();
  const Entries& entries = k.entries;
  std::copy_n(k.planes->channel, n, entries.channel);
  std::fill(entries.channel + n, entries.channel + padded, std::uint16_t{0});
  std::fill(k.planes->above + n, k.planes->above + padded, std::uint8_t{0});
  const hn::ScalableTag<std::int16_t> d16;
  const hn::Rebind<std::uint8_t, decltype(d16)> du8;
  const auto one = hn::Set(d16, 1);
  for (std::uint32_t e = 0; e < padded; e += static_cast<std::uint32_t>(hn::Lanes(d16))) {
    const auto above = hn::PromoteTo(d16, hn::LoadU(du8, k.planes->above + e));
    hn::Store(above, d16, entries.above + e);
    hn::Store(hn::ShiftRight<1>(one << above), d16, entries.half + e);
  }
  std::int16_t* mid = entries.twice_mid;
  mid = std::fill_n(mid, k.planes->n[0], std::int16_t{15});
  mid = std::fill_n(mid, k.planes->n[1], std::int16_t{3 << kUp<2>});
  mid = std::fill_n(mid, k.planes->n[2], std::int16_t{1 << kUp<1>});
  std::fill(mid, entries.twice_mid + padded, std::int16_t{0});
}

// table[index] of each byte.
#if HWY_TARGET != HWY_SCALAR
template <class D8>
class ByteTable {
 public:
  using V = hn::Vec<D8>;
#if HWY_TARGET == HWY_AVX3_DL
  HWY_INLINE explicit ByteTable(const std::int8_t* table) {
    for (int i = 0; i < 4; ++i) t_[i] = _mm512_loadu_si512(table + i * 64);
  }
  HWY_INLINE V operator()(V index) const {
    const __m512i low = _mm512_permutex2var_epi8(t_[0], index.raw, t_[1]);
    const __m512i high = _mm512_permutex2var_epi8(t_[2], index.raw, t_[3]);
    return V{_mm512_mask_blend_epi8(_mm512_movepi8_mask(index.raw), low, high)};
  }

 private:
  __m512i t_[4];
#elif HWY_TARGET == HWY_NEON && HWY_ARCH_ARM_A64
  HWY_INLINE explicit ByteTable(const std::int8_t* table) {
    for (int i = 0; i < 4; ++i) t_[i] = vld1q_s8_x4(table + i * 64);
  }
  HWY_INLINE V operator()(V index) const {
    const uint8x16_t i = vreinterpretq_u8_s8(index.raw);
    // What lies beyond a table of 64 leaves the byte as it is.
    int8x16_t x = vqtbl4q_s8(t_[0], i);
    x = vqtbx4q_s8(x, t_[1], veorq_u8(i, vdupq_n_u8(0x40)));
    x = vqtbx4q_s8(x, t_[2], veorq_u8(i, vdupq_n_u8(0x80)));
    return V{vqtbx4q_s8(x, t_[3], veorq_u8(i, vdupq_n_u8(0xC0)))};
  }

 private:
  int8x16x4_t t_[4];
#else
  HWY_INLINE explicit ByteTable(const std::int8_t* table) : table_(table) {}
  HWY_INLINE V operator()(V index) const {
    const D8 d;
    const hn::Repartition<std::uint16_t, D8> d16;
    const auto i16 = hn::BitCast(d16, index);
    const V low = hn::And(index, hn::Set(d, 15));
    // The bits above choose among sixteen tables of sixteen, two by two.
    const V bit4 = hn::BitCast(d, hn::ShiftLeft<3>(i16)),
            bit5 = hn::BitCast(d, hn::ShiftLeft<2>(i16)),
            bit6 = hn::BitCast(d, hn::ShiftLeft<1>(i16));
    const auto two = [&](int t) HWY_ATTR {
      return Choose(bit4, hn::TableLookupBytes(hn::LoadDup128(d, table_ + t * 16 + 16), low),
                    hn::TableLookupBytes(hn::LoadDup128(d, table_ + t * 16), low));
    };
    const auto four = [&](int t) HWY_ATTR { return Choose(bit5, two(t + 2), two(t)); };
    const V lower = Choose(bit6, four(4), four(0));
    return Choose(index, Choose(bit6, four(12), four(8)), lower);
  }

 private:
  static HWY_INLINE V Choose(V sign, V yes, V no) {
#if HWY_TARGET == HWY_AVX2
    return V{_mm256_blendv_epi8(no.raw, yes.raw, sign.raw)};
#else
    return hn::IfThenElse(hn::Lt(sign, hn::Zero(D8())), yes, no);
#endif
  }
  const std::int8_t* table_;
#endif
};
#endif

// out: as kVInt8's codes, [dim up to 16, / 16][rows / 4][16][4].
HWY_NOINLINE void UnpackV(const codec::PageShape& shape, const std::uint8_t* codes,
                          std::int8_t* out) {
  constexpr std::uint32_t kLanes = codec::kTrellisLanes;
  const std::uint32_t steps = codec::TrellisSteps(shape), rate8 = shape.rate8;
  std::uint8_t before[kLanes];  // a lane's bits go on where those of the lane before end
  before[0] = 0;
  std::memcpy(before + 1, codes + (steps * rate8 / 64 - 1) * kLanes, kLanes - 1);
  const std::int8_t* levels = codec::TrellisLevels(rate8);
#if HWY_TARGET != HWY_SCALAR
  const hn::CappedTag<std::int8_t, kLanes> d;
  const hn::Repartition<std::uint16_t, decltype(d)> d16;
  const ByteTable<decltype(d)> table(levels);
#endif
  for (std::uint32_t s = 0; s < steps; ++s, out += kLanes) {
    const std::uint32_t end = codec::TrellisEnd(rate8, s), at = (end - 1) / 8, used = end - 8 * at;
    const std::uint8_t* now = codes + at * kLanes;
    const std::uint8_t* last = at == 0 ? before : now - kLanes;
#if HWY_TARGET == HWY_SCALAR
    for (std::uint32_t i = 0; i < kLanes; ++i)
      out[i] = levels[((last[i] << used) | (now[i] >> (8 - used))) & 255];
#else
    const auto keep = hn::Set(d, static_cast<std::int8_t>(0xFF << used));
    for (std::uint32_t i = 0; i < kLanes; i += static_cast<std::uint32_t>(hn::Lanes(d))) {
      const auto p = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(last + i));
      const auto n = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(now + i));
      const auto window = hn::Or(
          hn::And(hn::BitCast(d, hn::ShiftLeftSame(p, static_cast<int>(used))), keep),
          hn::AndNot(keep, hn::BitCast(d, hn::ShiftRightSame(n, static_cast<int>(8 - used)))));
      hn::StoreU(table(window), d, out + i);
    }
#endif
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
