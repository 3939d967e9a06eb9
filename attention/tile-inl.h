// Prefill: one page of one head to float tiles. Per-target header.
//   K coded  panels [token / 16][channel][16 tokens]
//   K f16    rows   [token][channel], the way they lie
//   V        panels [channel / 16][token][16 channels], in the page's basis
// Tokens of a tile may come from several pages: this one has `cols` of its `tokens`, from `t0` on,
// the first `used` of them with rows. cols: a multiple of 16, and of 32 if pages have 32 rows or
// more.
#if defined(KVTAMP_ATTENTION_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_TILE_INL_H_
#undef KVTAMP_ATTENTION_TILE_INL_H_
#else
#define KVTAMP_ATTENTION_TILE_INL_H_
#endif

#include <cstring>

#include "attention/grid-inl.h"
#include "attention/softmax-inl.h"
#include "attention/unit.h"
#include "attention/unpack-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Byte kByte of each 32-bit lane, the low or the high nibble of it, as float.
template <int kShift, class D>
HWY_INLINE hn::Vec<D> Field(D d, hn::Vec<hn::RebindToUnsigned<D>> x,
                            hn::Vec<hn::RebindToUnsigned<D>> mask) {
  return hn::ConvertTo(
      d, hn::BitCast(hn::RebindToSigned<D>(), hn::And(hn::ShiftRight<kShift>(x), mask)));
}

template <class D>
HWY_INLINE void StoreChannels(D d, hn::Vec<D> x, const float* scale, const float* offset,
                              std::uint32_t c, float* panel, std::uint32_t t) {
  hn::StoreU(hn::MulAdd(x, hn::Set(d, scale[c]), hn::Set(d, offset[c])), d, panel + c * 16 + t);
}

// 32-bit lanes of four codes; D has at most 8 lanes if rows is 16.
template <class D>
HWY_INLINE void KTileInt4(D d, const std::uint8_t* codes, std::uint32_t rows, std::uint32_t cols,
                          std::uint32_t dim, const float* scale, const float* offset, float* tile) {
  const hn::RebindToUnsigned<D> du;
  const std::uint32_t half = std::min(32u, rows) / 2,
                      lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  const auto nibble = hn::Set(du, 15u);
  for (std::uint32_t chunk = 0; chunk < cols; chunk += 2 * half) {
    for (std::uint32_t t = 0; t < half; t += lanes) {
      const std::uint32_t t1 = chunk + t, t2 = chunk + half + t;
      float* lower = tile + std::size_t{t1 / 16} * dim * 16;
      float* upper = tile + std::size_t{t2 / 16} * dim * 16;
      const std::uint8_t* p = codes + chunk * 2 + t * 4;
      for (std::uint32_t c = 0; c < dim; c += 4, p += rows * 2) {
        const auto x = hn::LoadU(du, reinterpret_cast<const std::uint32_t*>(p));
        StoreChannels(d, Field<0>(d, x, nibble), scale, offset, c, lower, t1 % 16);
        StoreChannels(d, Field<8>(d, x, nibble), scale, offset, c + 1, lower, t1 % 16);
        StoreChannels(d, Field<16>(d, x, nibble), scale, offset, c + 2, lower, t1 % 16);
        StoreChannels(d, Field<24>(d, x, nibble), scale, offset, c + 3, lower, t1 % 16);
        StoreChannels(d, Field<4>(d, x, nibble), scale, offset, c, upper, t2 % 16);
        StoreChannels(d, Field<12>(d, x, nibble), scale, offset, c + 1, upper, t2 % 16);
        StoreChannels(d, Field<20>(d, x, nibble), scale, offset, c + 2, upper, t2 % 16);
        StoreChannels(d, Field<28>(d, x, nibble), scale, offset, c + 3, upper, t2 % 16);
      }
    }
  }
}

// tile: [cols / 16][dim][16].
HWY_NOINLINE void KTileCoded(codec::Coding coding, const std::uint8_t* page, const float* mean,
                             std::uint32_t rows, std::uint32_t cols, std::uint32_t dim, float* grid,
                             float* tile) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  float* scale = grid;
  float* offset = grid + RoundUp(dim, 16);
  KGrid(coding, page, dim, scale, offset);
  const float mid = MidCode(coding);
  for (std::uint32_t c = 0; c < dim; ++c)
    offset[c] += (mean != nullptr ? mean[c] : 0.0f) - mid * scale[c];
  const std::uint8_t* codes = page + 2 * dim;
  if (coding == codec::Coding::kKInt4) {
    if (rows >= 32 || lanes <= 8) {
      KTileInt4(d, codes, rows, cols, dim, scale, offset, tile);
    } else {
      KTileInt4(hn::CappedTag<float, 8>(), codes, rows, cols, dim, scale, offset, tile);
    }
    return;
  }
  const auto byte = hn::Set(du, 255u);
  for (std::uint32_t t = 0; t < cols; t += lanes) {
    float* panel = tile + std::size_t{t / 16} * dim * 16;
    const std::uint8_t* p = codes + t * 4;
    for (std::uint32_t c = 0; c < dim; c += 4, p += rows * 4) {
      const auto x = hn::LoadU(du, reinterpret_cast<const std::uint32_t*>(p));
      StoreChannels(d, Field<0>(d, x, byte), scale, offset, c, panel, t % 16);
      StoreChannels(d, Field<8>(d, x, byte), scale, offset, c + 1, panel, t % 16);
      StoreChannels(d, Field<16>(d, x, byte), scale, offset, c + 2, panel, t % 16);
      StoreChannels(d, Field<24>(d, x, byte), scale, offset, c + 3, panel, t % 16);
    }
  }
}

// The same of kKPlanes: each plane is added to its channel.
HWY_NOINLINE void KTilePlanes(const codec::PageShape& shape, const std::uint8_t* page,
                              const float* mean, std::uint32_t cols, float* grid,
                              const KPlanes& planes, float* tile) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d)), dim = shape.dim;
  float* unit = grid;
  float* centre = grid + RoundUp(dim, 16);
  KPlanesGrid(page, dim, planes.width, unit, centre);
  UnpackK(shape, page, planes);
  PlaneFactors(unit, dim, planes);
  for (std::uint32_t t = 0; t < cols; t += lanes) {
    float* panel = tile + std::size_t{t / 16} * dim * 16 + t % 16;
    for (std::uint32_t c = 0; c < dim; ++c)
      hn::StoreU(hn::Set(d, centre[c] + (mean != nullptr ? mean[c] : 0.0f)), d, panel + c * 16);
    const auto add = [&](std::uint32_t e, auto code) HWY_ATTR {
      float* at = panel + planes.entries.channel[e] * 16;
      const float f = planes.factor[e];
      // From the middle of the codes, as `centre` is.
      const auto x = hn::Sub(hn::ConvertTo(d, hn::BitCast(hn::RebindToSigned<decltype(d)>(), code)),
                             hn::Set(d, 0.5f * static_cast<float>(planes.entries.twice_mid[e])));
      hn::StoreU(hn::MulAdd(x, hn::Set(d, f), hn::LoadU(d, at)), d, at);
    };
    const auto byte = hn::Set(du, 255u);
    const std::uint8_t* p = planes.codes + t * 4;
    for (std::uint32_t e = 0; e < planes.n(); e += 4, p += shape.rows * 4) {
      const auto x = hn::LoadU(du, reinterpret_cast<const std::uint32_t*>(p));
      add(e, hn::And(x, byte));
      add(e + 1, hn::And(hn::ShiftRight<8>(x), byte));
      add(e + 2, hn::And(hn::ShiftRight<16>(x), byte));
      add(e + 3, hn::ShiftRight<24>(x));
    }
  }
}

// tile: [cols][dim up to 16]; rows past `used` become zeros.
HWY_NOINLINE void KTileF16(const half_t* k, std::size_t stride, std::uint32_t used,
                           std::uint32_t cols, std::uint32_t dim, float* tile) {
  const hn::ScalableTag<float> d;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d)), ld = RoundUp(dim, 16);
  for (std::uint32_t t = 0; t < used; ++t) {
    for (std::uint32_t c = 0; c < dim; c += lanes) {
      hn::Store(LoadHalves(d, k + t * stride + c, dim - c), d, tile + t * ld + c);
    }
  }
  std::fill(tile + used * ld, tile + cols * ld, 0.0f);
}

// Lane = channel: byte kByte of each 32-bit lane is the level of one token.
template <int kByte, class D>
HWY_INLINE void StoreToken(D d, hn::Vec<hn::RebindToSigned<D>> levels, hn::Vec<D> scale,
                           float* out) {
  const auto level = hn::ShiftRight<24>(hn::ShiftLeft<24 - 8 * kByte>(levels));
  hn::StoreU(hn::Mul(hn::ConvertTo(d, level), scale), d, out + kByte * 16);
}

// The scale of token t for the lanes of one block: one group's, or each lane's own. Lanes beyond
// the head (its last block is padded) get any.
template <class D>
HWY_INLINE hn::Vec<D> TokenScale(D d, const float* scale, std::uint32_t t, std::uint32_t rows,
                                 std::uint32_t first, std::uint32_t group, std::uint32_t dim) {
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  const std::uint32_t g = std::min(first, dim - 1) / group;
  if (HWY_LIKELY(std::min(first + lanes, dim) <= (g + 1) * group))
    return hn::Set(d, scale[g * rows + t]);
  HWY_ALIGN float each[16];
  for (std::uint32_t i = 0; i < lanes; ++i)
    each[i] = first + i < dim ? scale[(first + i) / group * rows + t] : 0.0f;
  return hn::Load(d, each);
}

// grid: [dim / group, rows]. tile: panels of `tokens` tokens, this page's from t0 on.
HWY_NOINLINE void VTileCoded(codec::Coding coding, const std::uint8_t* page,
                             const std::uint8_t* codes, std::uint32_t rows, std::uint32_t cols,
                             std::uint32_t dim, std::uint32_t group, float* grid, float* tile,
                             std::uint32_t tokens, std::uint32_t t0) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  const std::uint32_t n_groups = dim / group;
  VGrid(page, n_groups * rows, grid);
  const bool int8 = coding == codec::Coding::kVInt8;
#if HWY_TARGET != HWY_SCALAR
  const hn::Repartition<std::int8_t, decltype(d)> d8;
  const hn::Repartition<std::uint16_t, decltype(d)> du16;
  const auto levels = hn::LoadDup128(d8, codec::kLm4Levels);
  const auto nibble = hn::Set(d8, 15);
#endif
  for (std::uint32_t b = 0; b * 16 < dim; ++b) {
    for (std::uint32_t c = 0; c < 16; c += lanes) {
      float* panel = tile + (std::size_t{b} * tokens + t0) * 16 + c;
      for (std::uint32_t t = 0; t < cols; t += 8) {
        hn::Vec<decltype(di)> x[2];
        if (int8) {
          const std::uint8_t* p = codes + std::size_t{b} * rows * 16 + t * 16 + c * 4;
          x[0] = hn::LoadU(di, reinterpret_cast<const std::int32_t*>(p));
          x[1] = hn::LoadU(di, reinterpret_cast<const std::int32_t*>(p + 64));
        } else {
          const std::uint8_t* p = codes + std::size_t{b} * rows * 8 + t * 8 + c * 4;
#if HWY_TARGET == HWY_SCALAR
          std::int8_t lower[4], upper[4];
          for (int j = 0; j < 4; ++j) {
            lower[j] = codec::kLm4Levels[p[j] & 15];
            upper[j] = codec::kLm4Levels[p[j] >> 4];
          }
          std::memcpy(&x[0], lower, 4);
          std::memcpy(&x[1], upper, 4);
#else
          const auto both = hn::LoadU(d8, reinterpret_cast<const std::int8_t*>(p));
          const auto upper = hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(du16, both)));
          x[0] = hn::BitCast(di, hn::TableLookupBytes(levels, hn::And(both, nibble)));
          x[1] = hn::BitCast(di, hn::TableLookupBytes(levels, hn::And(upper, nibble)));
#endif
        }
        for (std::uint32_t q = 0; q < 2; ++q) {
          float* out = panel + (t + q * 4) * 16;
          const std::uint32_t at = t + q * 4, first = b * 16 + c;
          StoreToken<0>(d, x[q], TokenScale(d, grid, at, rows, first, group, dim), out);
          StoreToken<1>(d, x[q], TokenScale(d, grid, at + 1, rows, first, group, dim), out);
          StoreToken<2>(d, x[q], TokenScale(d, grid, at + 2, rows, first, group, dim), out);
          StoreToken<3>(d, x[q], TokenScale(d, grid, at + 3, rows, first, group, dim), out);
        }
      }
    }
  }
}

// Infinities and NaN become 0: a row that some query masks may hold anything.
HWY_NOINLINE void VTileF16(const half_t* v, std::size_t stride, std::uint32_t used,
                           std::uint32_t cols, std::uint32_t dim, float* tile, std::uint32_t tokens,
                           std::uint32_t t0) {
  const hn::ScalableTag<float> d;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  for (std::uint32_t t = 0; t < cols; ++t) {
    for (std::uint32_t c = 0; c < dim; c += lanes) {
      const auto x = t < used ? LoadFiniteHalves(d, v + t * stride + c, dim - c) : hn::Zero(d);
      hn::Store(x, d, tile + (std::size_t{c / 16} * tokens + t0 + t) * 16 + c % 16);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
