// Viterbi's algorithm of trellis.h with windows in the lanes. Per-target header.
#if defined(KVTAMP_CODEC_ENCODE_TRELLIS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_CODEC_ENCODE_TRELLIS_INL_H_
#undef KVTAMP_CODEC_ENCODE_TRELLIS_INL_H_
#else
#define KVTAMP_CODEC_ENCODE_TRELLIS_INL_H_
#endif

#include <algorithm>
#include <iterator>
#include <vector>

#include "codec/encode.h"
#include "codec/layout.h"
#include "codec/trellis.h"
#include "hwy/highway.h"

#if HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace kvtamp::codec {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Least costs before a value, and how to give each of eight of them to the windows that follow it.
struct TrellisState {
  alignas(64) std::uint16_t m[128 + 64];
  alignas(64) std::uint16_t before[128 + 64];
  alignas(64) std::uint8_t spread[6][8][32];  // [b][first] bytes of entry first + (lane >> b)
};

// Costs of vector r of windows, from the least costs before.
template <int b, class D>
HWY_INLINE hn::Vec<D> TrellisCost(D d, const TrellisState& s, const std::uint16_t* errors,
                                  std::size_t r) {
  const hn::Repartition<std::uint8_t, D> d8;
  const std::size_t w = r * hn::Lanes(d), q = w >> b;
  const auto block = hn::BitCast(d8, hn::LoadDup128(d, s.before + q / 8 * 8));
  const auto m = hn::TableLookupBytes(block, hn::Load(d8, s.spread[b][q % 8]));
  return hn::SaturatedAdd(hn::BitCast(d, m), hn::Load(d, errors + w));
}

// One value whose window took in b bits, and the choice for the next, which takes in `next`: no
// cost is ever stored.
template <int b, int next>
HWY_INLINE void TrellisStepOf(TrellisState& s, const std::uint16_t* errors, bool normalise,
                              std::uint8_t* back) {
  constexpr std::size_t kM = 256 >> next;
  const hn::CappedTag<std::uint16_t, (kM < 16 ? kM : 16)> d;
  const hn::Rebind<std::uint8_t, decltype(d)> d8;
  const std::size_t lanes = hn::Lanes(d);
  std::copy_n(s.m, 256 >> b, s.before);
  auto least = hn::Set(d, 65535);
  for (std::size_t q = 0; q < kM; q += lanes) {
    auto best = TrellisCost<b>(d, s, errors, q / lanes);
    auto from = hn::Zero(d);
    for (std::size_t j = 1; j < std::size_t{1} << next; ++j) {
      const auto c = TrellisCost<b>(d, s, errors, (q + j * kM) / lanes);
      const auto less = hn::Min(best, c);
      const auto same = hn::Eq(less, best);
      from = hn::IfThenElse(same, from, hn::Set(d, static_cast<std::uint16_t>(j)));
      best = less;
    }
    hn::Store(best, d, s.m + q);
    least = hn::Min(least, best);
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(hn::RebindToSigned<decltype(d)>(), from)), d8,
               back + q);
  }
  if (!normalise) return;
  alignas(64) std::uint16_t each[16];
  hn::Store(least, d, each);
  const auto sub = hn::Set(d, *std::min_element(each, each + lanes));
  for (std::size_t q = 0; q < kM; q += lanes)
    hn::Store(hn::Sub(hn::Load(d, s.m + q), sub), d, s.m + q);
}

template <int b>
HWY_INLINE void TrellisStepTo(std::uint32_t next, TrellisState& s, const std::uint16_t* errors,
                              bool normalise, std::uint8_t* back) {
  if (next == b) return TrellisStepOf<b, b>(s, errors, normalise, back);
  if constexpr (b > 1) {
    if (next < b) return TrellisStepOf<b, b - 1>(s, errors, normalise, back);
  }
  if constexpr (b < 5) return TrellisStepOf<b, b + 1>(s, errors, normalise, back);
}

#if HWY_TARGET <= HWY_AVX3

// The same with all costs in registers, which the way through memory takes nearly twice as long
// for. Up to three new bits.
struct TrellisRegisters {
  using D = hn::FixedTag<std::uint16_t, 32>;
  using V = hn::Vec<D>;
  V cost[8];

  struct Least {
    V m, from;
  };
  static HWY_INLINE Least Of(Least a, Least b) {
    const V m = hn::Min(a.m, b.m);
    return {m, hn::IfThenElse(hn::Eq(m, a.m), a.from, b.from)};
  }
  // The least of 2^b costs, those of every `stride`th vector from `first` on.
  template <int b>
  HWY_INLINE Least LeastOf(int first, int stride, int j = 0) const {
    if constexpr (b == 0) {
      return {cost[first + j * stride], hn::Set(D(), static_cast<std::uint16_t>(j))};
    } else {
      return Of(LeastOf<b - 1>(first, stride, j),
                LeastOf<b - 1>(first, stride, j + (1 << (b - 1))));
    }
  }

  template <int b>
  HWY_INLINE void Step(const std::uint16_t* errors, bool normalise, std::uint8_t* back) {
    const D d;
    const hn::Rebind<std::uint8_t, D> d8;
    constexpr int kVectors = 8 >> b;  // of m
    V m[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Least least = LeastOf<b>(v, kVectors);
      m[v] = least.m;
      hn::StoreU(hn::TruncateTo(d8, least.from), d8, back + v * 32);
    }
    if (normalise) {
      V least = m[0];
      for (int v = 1; v < kVectors; ++v) least = hn::Min(least, m[v]);
      alignas(64) std::uint16_t each[32];
      hn::Store(least, d, each);
      const V sub = hn::Set(d, *std::min_element(each, each + 32));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) m[v] = hn::Sub(m[v], sub);
    }
    const V lane = hn::ShiftRight<b>(hn::Iota(d, 0));
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) {
      const int at = 32 * r >> b;  // of m
      const V index = hn::Add(lane, hn::Set(d, static_cast<std::uint16_t>(at % 32)));
      const V spread{_mm512_permutexvar_epi16(index.raw, m[at / 32].raw)};
      cost[r] = hn::SaturatedAdd(spread, hn::Load(d, errors + 32 * r));
    }
  }
};

// False where some value takes in more than three bits.
inline bool SearchTrellisInRegisters(const PageShape& shape, TrellisScratch& t,
                                     std::uint16_t* cost) {
  if (shape.rate8 > 24) return false;
  const TrellisErrors& errors = TrellisErrorsOf(shape.rate8);
  const TrellisRegisters::D d;
  TrellisRegisters s;
  for (auto& v : s.cost) v = hn::Set(d, 65535);
  s.cost[0] = hn::IfThenElse(hn::FirstN(d, 1), hn::Zero(d), s.cost[0]);
  const std::uint32_t steps = TrellisSteps(shape), stride = TrellisBackStride(shape.rate8);
  std::uint32_t i = 0;
  for (std::uint32_t lane = 0; lane < kTrellisLanes; ++lane) {
    for (std::uint32_t step = 0; step < steps; ++step, ++i) {
      const std::uint16_t* error = errors.of(t.target[i]);
      std::uint8_t* back = t.back.data() + std::size_t{i} * stride;
      const bool normalise = i % kTrellisNormalise == 0;
      switch (TrellisBits(shape.rate8, step)) {
        case 1:
          s.Step<1>(error, normalise, back);
          break;
        case 2:
          s.Step<2>(error, normalise, back);
          break;
        default:
          s.Step<3>(error, normalise, back);
      }
    }
  }
  for (int r = 0; r < 8; ++r) hn::Store(s.cost[r], d, cost + 32 * r);
  return true;
}

#else

inline bool SearchTrellisInRegisters(const PageShape&, TrellisScratch&, std::uint16_t*) {
  return false;  // there are too few
}

#endif

inline void SearchTrellisInMemory(const PageShape& shape, TrellisScratch& t, std::uint16_t* cost) {
  const TrellisErrors& errors = TrellisErrorsOf(shape.rate8);
  const std::uint32_t steps = TrellisSteps(shape), stride = TrellisBackStride(shape.rate8);
  const std::uint32_t n = steps * kTrellisLanes;
  TrellisState s;
  for (int b = 1; b <= 5; ++b)
    for (int first = 0; first < 8; ++first)
      for (int byte = 0; byte < 32; ++byte) {
        const int entry = first + (byte / 2 >> b);
        s.spread[b][first][byte] = static_cast<std::uint8_t>(2 * entry % 16 + byte % 2);
      }
  // Before the first value: in window 0.
  std::fill_n(s.m, std::size(s.m), std::uint16_t{65535});
  s.m[0] = 0;
  std::fill_n(t.back.data(), stride, std::uint8_t{0});
  std::vector<std::uint8_t> bits(steps + 1);
  for (std::uint32_t step = 0; step <= steps; ++step)
    bits[step] = static_cast<std::uint8_t>(TrellisBits(shape.rate8, step % steps));
  std::uint32_t step = 0;
  for (std::uint32_t i = 0; i + 1 < n; ++i) {
    const std::uint16_t* error = errors.of(t.target[i]);
    std::uint8_t* back = t.back.data() + std::size_t{i + 1} * stride;
    const bool normalise = (i + 1) % kTrellisNormalise == 0;
    const std::uint32_t b = bits[step], next = bits[step + 1];
    step = step + 1 == steps ? 0 : step + 1;
    switch (b) {
      case 1:
        TrellisStepTo<1>(next, s, error, normalise, back);
        break;
      case 2:
        TrellisStepTo<2>(next, s, error, normalise, back);
        break;
      case 3:
        TrellisStepTo<3>(next, s, error, normalise, back);
        break;
      case 4:
        TrellisStepTo<4>(next, s, error, normalise, back);
        break;
      default:
        TrellisStepTo<5>(next, s, error, normalise, back);
    }
  }
  const std::uint16_t* error = errors.of(t.target[n - 1]);
  for (std::uint32_t w = 0; w < 256; ++w)
    cost[w] = static_cast<std::uint16_t>(std::min(65535, s.m[w >> bits[steps - 1]] + error[w]));
}

void SearchTrellis(const PageShape& shape, TrellisScratch& t) {
  const std::uint32_t steps = TrellisSteps(shape), n = steps * kTrellisLanes;
  const std::uint32_t stride = TrellisBackStride(shape.rate8);
  t.window.resize(n);
  t.back.resize(std::size_t{n} * stride);
  alignas(64) std::uint16_t cost[256];
  if (!SearchTrellisInRegisters(shape, t, cost)) SearchTrellisInMemory(shape, t, cost);
  std::uint32_t i = n;
  std::uint32_t w = static_cast<std::uint32_t>(std::min_element(cost, cost + 256) - cost);
  for (std::uint32_t lane = kTrellisLanes; lane-- > 0;) {
    for (std::uint32_t step = steps; step-- > 0;) {
      --i;
      t.window[i] = static_cast<std::uint8_t>(w);
      const std::uint32_t b = TrellisBits(shape.rate8, step);
      const std::uint32_t q = w >> b;
      w = q + t.back[std::size_t{i} * stride + q] * (256u >> b);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::codec
HWY_AFTER_NAMESPACE();
#endif

#endif  // per-target guard
