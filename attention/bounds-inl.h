// How large q·k can be over the keys of a page, from its scales alone. Per-target header.
#if defined(KVTAMP_ATTENTION_BOUNDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_BOUNDS_INL_H_
#undef KVTAMP_ATTENTION_BOUNDS_INL_H_
#else
#define KVTAMP_ATTENTION_BOUNDS_INL_H_
#endif

#include <cmath>
#include <limits>

#include "attention/decode-inl.h"

KVTAMP_BEFORE_VNNI();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

// s.grid: [dim] from a channel's centre to its outermost code, then [dim] the centres. False where
// a page has no scales.
HWY_INLINE bool PageReach(const Layer& layer, const Page& page, std::uint32_t head_kv,
                          const DecodeScratchLayout& s) {
  const std::uint32_t dk = RoundUp(layer.dim_k, 16);
  if (page.k == nullptr || page.k_layout == nullptr || HasRows(page.k_layout, head_kv))
    return false;
  const codec::SideLayout::Head& block = page.k_layout->heads[head_kv];
  const std::uint8_t* k = page.k + block.offset;
  if (block.coding != codec::Coding::kKPlanes) {
    KGrid(block.coding, k, layer.dim_k, s.grid, s.grid + dk);
    const float mid = MidCode(block.coding);
    for (std::uint32_t c = 0; c < dk; ++c) s.grid[c] *= mid;
    return true;
  }
  KPlanesGrid(k, layer.dim_k, s.planes.width, s.grid, s.grid + dk);
  for (std::uint32_t c = 0; c < dk; ++c)
    s.grid[c] *= 0.5f - 0.5f / static_cast<float>(1u << s.planes.width[c]);
  return true;
}

// bounds[r * stride + page] for the unit's rows and pages: +inf where nothing is known, -inf where
// the row sees nothing of the page.
void BoundUnit(const Unit& unit, std::uint8_t* scratch, float* bounds, std::size_t stride) {
  const Layer& layer = *unit.layer;
  const std::uint32_t dk = RoundUp(layer.dim_k, 16);
  const float softcap = unit.params->softcap;
  Arena arena(scratch);
  const DecodeScratchLayout s(arena, layer, unit.rows);
  const float* turn = nullptr;
  PrepareQueries(unit, turn, s);
  const hn::ScalableTag<float> d;
  Active active;
  for (std::uint32_t i = unit.page0; i < unit.page1; ++i) {
    const Page& page = unit.job->pages[i];
    for (std::uint32_t r = 0; r < unit.rows; ++r) bounds[r * stride + i] = kNegInf;
    if (!BeginPage(unit, page, s, turn, active)) continue;
    const bool known = PageReach(layer, page, unit.head_kv, s);
    for (std::uint32_t a = 0; a < active.n; ++a) {
      const std::uint32_t r = active.row[a];
      float& bound = bounds[r * stride + i];
      bound = std::numeric_limits<float>::infinity();
      if (!known) continue;
      const float* q = s.q + std::size_t{r} * dk;
      auto sum = hn::Zero(d);
      for (std::uint32_t c = 0; c < dk; c += static_cast<std::uint32_t>(hn::Lanes(d))) {
        const auto x = hn::Load(d, q + c);
        sum = hn::MulAdd(x, hn::Load(d, s.grid + dk + c), sum);
        sum = hn::MulAdd(hn::Abs(x), hn::Load(d, s.grid + c), sum);
      }
      bound = hn::GetLane(hn::SumOfLanes(d, sum)) + s.q_mean[r];
      if (softcap != 0) bound = softcap * std::tanh(bound);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
