// Viterbi's algorithm of trellis.h with windows in the lanes. Per-target header.
#if defined(KVTAMP_CODEC_ENCODE_TRELLIS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_CODEC_ENCODE_TRELLIS_INL_H_
#undef KVTAMP_CODEC_ENCODE_TRELLIS_INL_H_
#else
#define KVTAMP_CODEC_ENCODE_TRELLIS_INL_H_
#endif

#include <algorithm>

#include "codec/encode.h"
#include "codec/layout.h"
#include "codec/trellis.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvtamp::codec {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

struct TrellisState {
  alignas(64) std::uint16_t cost[256];
  alignas(64) std::uint16_t m[128 + 64];
  alignas(64) std::int16_t level[256];
  alignas(64) std::uint8_t spread[6][64];  // [b] bytes of m[lane >> b]
};

// One value whose window takes in b new bits.
template <int b>
HWY_INLINE void TrellisStepOf(TrellisState& s, std::int16_t target, bool normalise,
                              std::uint8_t* back) {
  constexpr std::size_t kM = 256 >> b;
  {
    const hn::CappedTag<std::uint16_t, kM> d;
    const hn::Rebind<std::uint8_t, decltype(d)> d8;
    const std::size_t lanes = hn::Lanes(d);
    auto least = hn::Set(d, 65535);
    for (std::size_t q = 0; q < kM; q += lanes) {
      auto best = hn::Load(d, s.cost + q);
      auto from = hn::Zero(d);
      for (std::size_t j = 1; j < std::size_t{1} << b; ++j) {
        const auto c = hn::Load(d, s.cost + q + j * kM);
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
    if (normalise) {
      alignas(64) std::uint16_t each[kM];
      hn::Store(least, d, each);
      const auto sub = hn::Set(d, *std::min_element(each, each + lanes));
      for (std::size_t q = 0; q < kM; q += lanes)
        hn::Store(hn::Sub(hn::Load(d, s.m + q), sub), d, s.m + q);
    }
  }
  // Eight entries of m, those of 128 bits, have to serve a whole vector.
  const hn::CappedTag<std::uint16_t, b == 1 ? 16 : 64> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Repartition<std::uint8_t, decltype(d)> d8;
  const std::size_t lanes = hn::Lanes(d);
  const auto spread = hn::Load(d8, s.spread[b]);
  const auto x = hn::Set(di, target), cap = hn::Set(di, std::int16_t{kTrellisErrorCap});
  const bool none = target == kNoTarget;
  for (std::size_t w = 0; w < 256; w += lanes) {
    const auto block = hn::LoadDup128(d, s.m + (w >> b));
    auto cost = hn::BitCast(d, hn::TableLookupBytes(hn::BitCast(d8, block), spread));
    if (!none) {
      const auto error = hn::Min(hn::Abs(hn::Sub(x, hn::Load(di, s.level + w))), cap);
      cost = hn::SaturatedAdd(cost, hn::BitCast(d, hn::Mul(error, error)));
    }
    hn::Store(cost, d, s.cost + w);
  }
}

void SearchTrellis(const PageShape& shape, TrellisScratch& t) {
  const std::uint32_t steps = TrellisSteps(shape), n = steps * kTrellisLanes;
  t.window.resize(n);
  t.back.resize(std::size_t{n} * 128);
  TrellisState s;
  std::fill_n(s.cost, 256, std::uint16_t{65535});
  s.cost[0] = 0;
  const std::int8_t* levels = TrellisLevels(shape.rate8);
  std::copy_n(levels, 256, s.level);
  for (int b = 1; b <= 5; ++b) {
    for (int lane = 0; lane < 32; ++lane) {
      s.spread[b][2 * lane] = static_cast<std::uint8_t>(2 * (lane >> b) % 16);
      s.spread[b][2 * lane + 1] = static_cast<std::uint8_t>(s.spread[b][2 * lane] + 1);
    }
  }
  std::uint32_t i = 0;
  for (std::uint32_t lane = 0; lane < kTrellisLanes; ++lane) {
    for (std::uint32_t step = 0; step < steps; ++step, ++i) {
      const std::uint32_t b = TrellisBits(shape.rate8, step);
      std::uint8_t* back = t.back.data() + std::size_t{i} * 128;
      const bool normalise = i % kTrellisNormalise == 0;
      switch (b) {
        case 1:
          TrellisStepOf<1>(s, t.target[i], normalise, back);
          break;
        case 2:
          TrellisStepOf<2>(s, t.target[i], normalise, back);
          break;
        case 3:
          TrellisStepOf<3>(s, t.target[i], normalise, back);
          break;
        case 4:
          TrellisStepOf<4>(s, t.target[i], normalise, back);
          break;
        default:
          TrellisStepOf<5>(s, t.target[i], normalise, back);
      }
    }
  }
  std::uint32_t w = static_cast<std::uint32_t>(std::min_element(s.cost, s.cost + 256) - s.cost);
  for (std::uint32_t lane = kTrellisLanes; lane-- > 0;) {
    for (std::uint32_t step = steps; step-- > 0;) {
      --i;
      t.window[i] = static_cast<std::uint8_t>(w);
      const std::uint32_t b = TrellisBits(shape.rate8, step);
      const std::uint32_t q = w >> b;
      w = q + t.back[std::size_t{i} * 128 + q] * (256u >> b);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::codec
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
