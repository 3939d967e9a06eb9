// V encoder: 16 tokens at a time, transposed so that tokens lie in the lanes. Per-target header.
//
// The search of kVLm4 is a table: a row of VCosts holds the error of one magnitude under all
// sixteen candidate scales, so that a group of 64 costs 64 loads and additions of sixteen lanes.
#if defined(KVTAMP_CODEC_ENCODE_V_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_CODEC_ENCODE_V_INL_H_
#undef KVTAMP_CODEC_ENCODE_V_INL_H_
#else
#define KVTAMP_CODEC_ENCODE_V_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "codec/encode_vector-inl.h"

#if HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace kvtamp::codec {
namespace HWY_NAMESPACE {

using DV = hn::CappedTag<float, 16>;
using DVI = hn::RebindToSigned<DV>;
using VV = hn::Vec<DV>;

inline constexpr std::uint32_t kTokens = 16;

struct VBlock {
  alignas(64) float x[kMaxDim * kTokens];                // [dim][tokens]
  alignas(64) std::uint16_t scratch[kMaxDim * kTokens];  // halves, rows of VCosts, levels
  alignas(64) std::uint8_t code[kMaxDim * kTokens];
  alignas(64) float inverse[kTokens];  // of the scales of one group
};

// 8 rows of 8 halves -> 8 columns of 8, each column at out + column * kTokens.
HWY_INLINE void Transpose8x8(const half_t* const* row, std::uint32_t channel, std::uint16_t* out) {
  const hn::Full128<std::uint16_t> d;
  const hn::Full128<std::uint32_t> d32;
  const hn::Full128<std::uint64_t> d64;
  hn::Vec<decltype(d)> r[8];
  for (int i = 0; i < 8; ++i) r[i] = hn::LoadU(d, row[i] + channel);
  hn::Vec<decltype(d32)> pair[2][4];  // channels 0…3 and 4…7 of rows 2i, 2i+1
  for (int i = 0; i < 4; ++i) {
    pair[0][i] = hn::BitCast(d32, hn::InterleaveLower(d, r[2 * i], r[2 * i + 1]));
    pair[1][i] = hn::BitCast(d32, hn::InterleaveUpper(d, r[2 * i], r[2 * i + 1]));
  }
  for (int upper = 0; upper < 2; ++upper) {
    const auto* p = pair[upper];
    std::uint16_t* to = out + upper * 4 * kTokens;
    const auto put = [&](int column, auto first_rows, auto last_rows) {
      const auto a = hn::BitCast(d64, first_rows), b = hn::BitCast(d64, last_rows);
      hn::Store(hn::BitCast(d, hn::InterleaveLower(d64, a, b)), d, to + column * kTokens);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(d64, a, b)), d, to + (column + 1) * kTokens);
    };
    put(0, hn::InterleaveLower(d32, p[0], p[1]), hn::InterleaveLower(d32, p[2], p[3]));
    put(2, hn::InterleaveUpper(d32, p[0], p[1]), hn::InterleaveUpper(d32, p[2], p[3]));
  }
}

HWY_INLINE void LoadV(const half_t* const* row, std::uint32_t dim, float factor, VBlock& b) {
  for (std::uint32_t c = 0; c < dim; c += 8) {
    Transpose8x8(row, c, b.scratch + c * kTokens);
    Transpose8x8(row + 8, c, b.scratch + c * kTokens + 8);
  }
  const DV d;
  const hn::Rebind<std::uint16_t, DV> dh;
  for (std::uint32_t i = 0; i < dim * kTokens; i += static_cast<std::uint32_t>(hn::Lanes(d))) {
    hn::Store(hn::Mul(FiniteFromHalf(d, hn::Load(dh, b.scratch + i)), hn::Set(d, factor)), d,
              b.x + i);
  }
}

// kRadix channels, `stride` apart, of every token.
template <int kRadix>
HWY_INLINE void Butterfly(float* x, std::uint32_t stride) {
  const DV d;
  for (std::uint32_t j = 0; j < kTokens; j += static_cast<std::uint32_t>(hn::Lanes(d))) {
    VV v[kRadix];
    for (int i = 0; i < kRadix; ++i) v[i] = hn::Load(d, x + i * stride * kTokens + j);
    for (int h = 1; h < kRadix; h *= 2) {
      for (int i = 0; i < kRadix; ++i) {
        if ((i & h) != 0) continue;
        const VV a = v[i], b = v[i + h];
        v[i] = hn::Add(a, b);
        v[i + h] = hn::Sub(a, b);
      }
    }
    for (int i = 0; i < kRadix; ++i) hn::Store(v[i], d, x + i * stride * kTokens + j);
  }
}

// Without the norm, which LoadV applies.
HWY_INLINE void HadamardTokens(float* x, std::uint32_t dim) {
  const std::uint32_t block = dim & (0u - dim);
  std::uint32_t stride = 1;
  const auto pass = [&](auto radix) {
    for (std::uint32_t c = 0; c < dim; c += radix() * stride) {
      for (std::uint32_t i = c; i < c + stride; ++i) Butterfly<radix()>(x + i * kTokens, stride);
    }
    stride *= radix();
  };
  while (stride * 8 <= block) pass(std::integral_constant<std::uint32_t, 8>());
  if (stride * 4 <= block) pass(std::integral_constant<std::uint32_t, 4>());
  if (stride * 2 <= block) pass(std::integral_constant<std::uint32_t, 2>());
}

HWY_INLINE VV MaxAbs(const float* x, std::uint32_t n) {
  const DV d;
  VV max = hn::Zero(d);
  for (std::uint32_t c = 0; c < n; ++c) max = hn::Max(max, hn::Abs(hn::Load(d, x + c * kTokens)));
  return max;
}

// row[c][token]: where in VCosts the costs of this magnitude start.
HWY_INLINE void CostRows(const float* x, std::uint32_t n, VV factor, std::uint16_t* row) {
  const DV d;
  const hn::Rebind<std::uint16_t, DV> d16;
  for (std::uint32_t c = 0; c < n; ++c) {
    const auto t = hn::Mul(hn::Abs(hn::Load(d, x + c * kTokens)), factor);
    const auto u = RoundInt(d, hn::Min(t, hn::Set(d, 255.0f)));
    static_assert(kVCandidates == 16);
    hn::Store(hn::DemoteTo(d16, hn::ShiftLeft<4>(u)), d16, row + c * kTokens);
  }
}

// Costs of all candidates for a few tokens, summed over a group: sums[token][candidate].
HWY_INLINE void SumCosts(const std::uint16_t* row, std::uint32_t n, std::uint16_t* sums) {
  constexpr int kAtOnce = 4;
  const hn::CappedTag<std::uint16_t, kVCandidates> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int kVectors = kVCandidates / static_cast<int>(hn::MaxLanes(d));
  const int lanes = static_cast<int>(hn::Lanes(d));
  const std::uint16_t* costs = VCostTable().cost[0];
  for (std::uint32_t t = 0; t < kTokens; t += kAtOnce) {
    V sum[kAtOnce][kVectors];
    for (auto& token : sum) {
      for (V& v : token) v = hn::Zero(d);
    }
    for (std::uint32_t c = 0; c < n; ++c) {
      for (int i = 0; i < kAtOnce; ++i) {
        const std::uint16_t* cost = costs + row[c * kTokens + t + static_cast<std::uint32_t>(i)];
        for (int v = 0; v < kVectors; ++v) {
          sum[i][v] = hn::SaturatedAdd(sum[i][v], hn::Load(d, cost + v * lanes));
        }
      }
    }
    for (int i = 0; i < kAtOnce; ++i) {
      std::uint16_t* to = sums + (t + static_cast<std::uint32_t>(i)) * kVCandidates;
      for (int v = 0; v < kVectors; ++v) hn::Store(sum[i][v], d, to + v * lanes);
    }
  }
}

// best[token]: the first candidate of least cost.
HWY_INLINE void BestCandidates(const std::uint16_t* sums, std::uint16_t* best) {
  alignas(64) std::uint16_t by_candidate[kVCandidates * kTokens];
  const half_t* row[kTokens];
  for (std::uint32_t t = 0; t < kTokens; ++t) row[t] = sums + t * kVCandidates;
  for (std::uint32_t c = 0; c < kVCandidates; c += 8) {
    Transpose8x8(row, c, by_candidate + c * kTokens);
    Transpose8x8(row + 8, c, by_candidate + c * kTokens + 8);
  }
  const hn::CappedTag<std::uint16_t, kTokens> d;
  for (std::uint32_t t = 0; t < kTokens; t += static_cast<std::uint32_t>(hn::Lanes(d))) {
    auto least = hn::Load(d, by_candidate + t);
    auto index = hn::Zero(d);
    for (std::uint32_t c = 1; c < kVCandidates; ++c) {
      const auto less = hn::Min(least, hn::Load(d, by_candidate + c * kTokens + t));
      const auto same = hn::Eq(less, least);
      index = hn::IfThenElse(same, index, hn::Set(d, static_cast<std::uint16_t>(c)));
      least = less;
    }
    hn::Store(index, d, best + t);
  }
}

// Scale indices of one group for the kLm4 coding, to scales[token].
HWY_INLINE void SearchLm4(VBlock& b, const float* x, std::uint32_t n, std::uint8_t* scales) {
  const DV d;
  const DVI di;
  alignas(64) float max[kTokens];
  alignas(64) std::int32_t top[kTokens];
  for (std::uint32_t j = 0; j < kTokens; j += static_cast<std::uint32_t>(hn::Lanes(d))) {
    const VV m = MaxAbs(x + j, n);
    hn::Store(m, d, max + j);
    const auto covering =
        hn::Max(IndexUp(d, hn::Mul(m, hn::Set(d, 1.0f / 127)), 12.0f, 17.0f, 0.0f), hn::Set(di, 1));
    hn::Store(hn::Add(covering, hn::Set(di, 1)), di, top + j);
    const VV scale = hn::GatherIndex(d, VScaleTable(), covering);
    CostRows(x + j, n, hn::Div(hn::Set(d, 2.0f), scale), b.scratch + j);
  }
  alignas(64) std::uint16_t sums[kTokens * kVCandidates], best[kTokens];
  SumCosts(b.scratch, n, sums);
  BestCandidates(sums, best);
  for (std::uint32_t t = 0; t < kTokens; ++t) {
    // Nearer to zero than to the least level of the least scale.
    const bool zero = max[t] < 3 * VScaleTable()[1];
    const int k = zero ? 0 : std::clamp(top[t] - best[t], 1, 255);
    scales[t] = static_cast<std::uint8_t>(k);
    b.inverse[t] = zero ? 0.0f : 1.0f / VScaleTable()[k];
  }
}

HWY_INLINE VV Int8Error(const float* x, std::uint32_t n, VV scale) {
  const DV d;
  const VV inverse = hn::Div(hn::Set(d, 1.0f), scale), most = hn::Set(d, 127.0f);
  VV sum = hn::Zero(d);
  for (std::uint32_t c = 0; c < n; ++c) {
    const VV t = hn::Mul(hn::Abs(hn::Load(d, x + c * kTokens)), inverse);
    const VV level = hn::ConvertTo(d, RoundInt(d, hn::Min(t, most)));
    const VV error = hn::Sub(t, level);
    sum = hn::Add(sum, hn::Mul(error, error));
  }
  return hn::Mul(sum, hn::Mul(scale, scale));
}

HWY_INLINE void SearchInt8(VBlock& b, const float* x, std::uint32_t n, std::uint8_t* scales) {
  const DV d;
  const DVI di;
  const hn::Rebind<std::uint8_t, DV> d8;
  for (std::uint32_t j = 0; j < kTokens; j += static_cast<std::uint32_t>(hn::Lanes(d))) {
    const VV max = MaxAbs(x + j, n);
    const auto covering = IndexUp(d, hn::Mul(max, hn::Set(d, 1.0f / 127.5f)), 12.0f, 17.0f, 0.0f);
    auto best = hn::Set(di, 1);
    VV least = hn::Set(d, std::numeric_limits<float>::infinity());
    for (int i = kVInt8Reach; i >= -kVInt8Reach; --i) {
      const auto k =
          hn::Min(hn::Max(hn::Add(covering, hn::Set(di, i)), hn::Set(di, 1)), hn::Set(di, 255));
      const VV error = Int8Error(x + j, n, hn::GatherIndex(d, VScaleTable(), k));
      const auto better = hn::Lt(error, least);
      best = hn::IfThenElse(hn::RebindMask(di, better), k, best);
      least = hn::IfThenElse(better, error, least);
    }
    const auto zero = hn::Lt(max, hn::Set(d, 0.5f * VScaleTable()[1]));
    best = hn::IfThenZeroElse(hn::RebindMask(di, zero), best);
    hn::StoreU(hn::DemoteTo(d8, best), d8, scales + j);
    const VV inverse = hn::Div(hn::Set(d, 1.0f), hn::GatherIndex(d, VScaleTable(), best));
    hn::Store(hn::IfThenZeroElse(zero, inverse), d, b.inverse + j);
  }
}

// Codes of kVLm4: floor(2 x / scale) is exact at every boundary between levels, all of which lie at
// multiples of a half; its one's complement is the magnitude of a negative one.
HWY_INLINE void CodesLm4(VBlock& b, std::uint32_t first, std::uint32_t n) {
  const DV d;
  for (std::uint32_t j = 0; j < kTokens; j += static_cast<std::uint32_t>(hn::Lanes(d))) {
    const VV inverse = hn::Load(d, b.inverse + j);
    const VV factor = hn::Add(inverse, inverse);
    for (std::uint32_t c = first; c < first + n; ++c) {
      const VV t = hn::Mul(hn::Load(d, b.x + c * kTokens + j), factor);
      const VV clamped = hn::Min(hn::Max(t, hn::Set(d, -256.0f)), hn::Set(d, 255.0f));
      const auto shifted = hn::ConvertTo(DVI(), hn::Add(clamped, hn::Set(d, 256.0f)));
      const hn::Rebind<std::uint16_t, DV> d16;
      hn::Store(hn::DemoteTo(d16, shifted), d16, b.scratch + c * kTokens + j);
    }
  }
  // Each sixteenth of the magnitudes holds at most one boundary: its last magnitude below, and the
  // magnitude's code (less 8) there.
  alignas(16) static constexpr std::uint8_t kLast[16] = {255, 23,  255, 48,  74,  255, 101, 255,
                                                         132, 255, 170, 255, 255, 222, 255, 255};
  alignas(16) static constexpr std::uint8_t kCode[16] = {8,  8,  9,  9,  10, 11, 11, 12,
                                                         12, 13, 13, 14, 14, 14, 15, 15};
  const hn::CappedTag<std::int16_t, kTokens> d16;
  const hn::RebindToUnsigned<decltype(d16)> du16;
  const hn::Repartition<std::uint8_t, decltype(d16)> d8;
  const hn::Rebind<std::uint8_t, decltype(d16)> d8half;
  const auto last = hn::LoadDup128(d8, kLast), code = hn::LoadDup128(d8, kCode);
  const auto lookup = [&](auto table, auto index) {
    return hn::BitCast(d16, hn::TableLookupBytesOr0(table, hn::BitCast(d8, index)));
  };
  for (std::uint32_t i = first * kTokens; i < (first + n) * kTokens;
       i += static_cast<std::uint32_t>(hn::Lanes(d16))) {
    const auto shifted = hn::BitCast(d16, hn::Load(du16, b.scratch + i));
    const auto t = hn::Sub(shifted, hn::Set(d16, std::int16_t{256}));
    const auto sign = hn::ShiftRight<15>(t);
    const auto magnitude = hn::Xor(t, sign);
    // The upper byte looks up zero.
    const auto part = hn::Or(hn::ShiftRight<4>(magnitude), hn::Set(d16, std::int16_t{-0x8000}));
    const auto above = hn::VecFromMask(d16, hn::Gt(magnitude, lookup(last, part)));
    const auto positive = hn::Sub(lookup(code, part), above);
    const auto result = hn::Xor(positive, hn::And(sign, hn::Set(d16, std::int16_t{15})));
    hn::Store(hn::DemoteTo(d8half, result), d8half, b.code + i);
  }
}

HWY_INLINE void CodesInt8(VBlock& b, std::uint32_t first, std::uint32_t n) {
  const DV d;
  const hn::Rebind<std::int8_t, DV> d8;
  auto* codes = reinterpret_cast<std::int8_t*>(b.code);
  const VV most = hn::Set(d, 127.0f);
  for (std::uint32_t j = 0; j < kTokens; j += static_cast<std::uint32_t>(hn::Lanes(d))) {
    const VV inverse = hn::Load(d, b.inverse + j);
    for (std::uint32_t c = first; c < first + n; ++c) {
      const VV t = hn::Mul(hn::Load(d, b.x + c * kTokens + j), inverse);
      const auto level = RoundInt(d, hn::Min(hn::Max(t, hn::Neg(most)), most));
      hn::Store(hn::DemoteTo(d8, level), d8, codes + c * kTokens + j);
    }
  }
}

// Codes of 16 tokens from token t0 on into their places.
HWY_INLINE void PlaceV(Coding coding, const PageShape& shape, const VBlock& b, std::uint32_t t0,
                       std::uint8_t* codes) {
  const std::size_t block = shape.rows * (coding == Coding::kVInt8 ? 16 : 8);
  for (std::uint32_t c = 0; c < shape.dim; ++c) {
    const std::uint8_t* from = b.code + c * kTokens;
    std::uint8_t* to = codes + c / 16 * block + c % 16 * 4;
    if (coding == Coding::kVInt8) {
      for (std::uint32_t q = 0; q < 4; ++q) std::memcpy(to + (t0 / 4 + q) * 64, from + q * 4, 4);
      continue;
    }
    for (std::uint32_t q = 0; q < 2; ++q) {
      std::uint32_t low, high;
      std::memcpy(&low, from + q * 8, 4);
      std::memcpy(&high, from + q * 8 + 4, 4);
      low |= high << 4;
      std::memcpy(to + (t0 / 8 + q) * 64, &low, 4);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::codec
HWY_AFTER_NAMESPACE();
#endif

#endif  // per-target guard
