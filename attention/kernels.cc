#include "cpu/highway.h"  // first

#include "attention/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "attention/bounds-inl.h"
#include "attention/decode-inl.h"
#include "attention/observe-inl.h"
#include "attention/prefill-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

std::uint32_t PrefillLanesOf() { return StripLanes(); }

std::size_t DecodeScratchOf(const Layer& layer, std::uint32_t rows) {
  Arena arena(nullptr);
  const DecodeScratchLayout layout(arena, layer, rows);
  (void)layout;
  return arena.used();
}

std::size_t PrefillScratchOf(const Layer& layer, std::uint32_t rows) {
  Arena arena(nullptr);
  const PrefillScratchLayout layout(arena, layer, rows);
  (void)layout;
  return arena.used();
}

void FinishRow(float* partials, std::size_t stride, std::uint32_t n, const float* sink,
               std::uint32_t dim_v, float* out) {
  const hn::ScalableTag<float> d;
  const Partial first{partials};
  float max = sink != nullptr ? *sink : kNegInf;
  for (std::uint32_t i = 0; i < n; ++i) max = std::max(max, Partial{partials + i * stride}.max());
  float sum = sink != nullptr && *sink != kNegInf ? std::exp(*sink - max) : 0.0f;
  for (std::uint32_t i = 0; i < n; ++i) {
    const Partial part{partials + i * stride};
    const float factor = part.max() == kNegInf ? 0.0f : std::exp(part.max() - max);
    sum += part.sum() * factor;
    const auto f = hn::Set(d, factor);
    for (std::uint32_t c = 0; c < dim_v; c += static_cast<std::uint32_t>(hn::Lanes(d))) {
      const auto x = hn::Mul(hn::Load(d, part.acc() + c), f);
      hn::Store(i == 0 ? x : hn::Add(hn::Load(d, first.acc() + c), x), d, first.acc() + c);
    }
  }
  const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
  for (std::uint32_t c = 0; c < dim_v; ++c) out[c] = first.acc()[c] * inverse;
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

KVTAMP_BEFORE_VNNI();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

void GridOf(codec::Coding coding, const codec::PageShape& shape, const std::uint8_t* page,
            float* scale, float* centre) {
  if (coding == codec::Coding::kKPlanes) {
    std::uint8_t width[codec::kMaxDim];
    KPlanesGrid(page, shape.dim, width, scale, centre);
    for (std::uint32_t c = 0; c < shape.dim; ++c)
      scale[c] = std::ldexp(scale[c], -static_cast<int>(width[c]));
  } else if (coding == codec::Coding::kKInt8 || coding == codec::Coding::kKInt4) {
    KGrid(coding, page, shape.dim, scale, centre);
  } else {
    VGrid(page, shape.dim / shape.group * shape.rows, scale);
  }
}

void KPlanesIntegersOf(const codec::PageShape& shape, const std::uint8_t* page, const float* q,
                       IntegerStage& stage) {
  Layer layer;
  layer.dim_k = shape.dim;
  layer.page_size = shape.rows;
  const std::uint32_t entries = KPlanes::MaxEntries(layer), dim = RoundUp(shape.dim, 16);
  Workspace workspace;
  Arena arena(workspace.Get(std::size_t{entries} * shape.rows + 48 * entries + (1 << 16)));
  const KPlanes planes(arena, layer);
  float* grid = arena.Take<float>(2 * dim);
  float* padded = arena.Take<float>(dim);
  auto* by_channel = arena.Take<std::int32_t>(RoundUp(dim, 64));
  std::uint8_t* in[] = {arena.Take<std::uint8_t>(FoldedBytes(entries))};
  std::fill_n(padded, dim, 0.0f);
  std::copy_n(q, shape.dim, padded);
  KPlanesGrid(page, shape.dim, planes.width, grid, grid + dim);
  UnpackK(shape, page, planes);
  const float* from[] = {padded};
  std::int32_t* out[] = {stage.out};
  float step[4], dot[4];
  std::int32_t sum[4];
  FoldEntries<1>(from, grid, grid + dim, dim, planes.entries, planes.n_padded(), by_channel, in,
                 step, dot, sum);
  stage.step = step[0];
  stage.sum = sum[0];
  KDots<1>(codec::Coding::kKPlanes, planes.codes, shape.rows, planes.n(), in, 0, out);
}

void KIntegersOf(codec::Coding coding, const codec::PageShape& shape, const std::uint8_t* page,
                 const float* q, IntegerStage& stage) {
  if (coding == codec::Coding::kKPlanes) return KPlanesIntegersOf(shape, page, q, stage);
  HWY_ALIGN float grid[2 * codec::kMaxDim];
  HWY_ALIGN float padded[codec::kMaxDim] = {};
  HWY_ALIGN std::uint8_t folded[FoldedBytes(codec::kMaxDim)];
  const std::uint32_t dim = RoundUp(shape.dim, 16);
  std::copy_n(q, shape.dim, padded);
  KGrid(coding, page, shape.dim, grid, grid + dim);
  const float* from[] = {padded};
  std::uint8_t* in[] = {folded};
  std::int32_t* out[] = {stage.out};
  float step[4], dot[4];
  std::int32_t sum[4];
  Fold<1, true>(from, grid, grid + dim, dim, in, step, dot, sum);
  stage.step = step[0];
  stage.sum = sum[0];
  KDots<1>(coding, page + 2 * shape.dim, shape.rows, shape.dim, in, 0, out);
}

void VIntegersOf(codec::Coding coding, const codec::PageShape& shape, const std::uint8_t* page,
                 std::uint32_t first_channel, const float* p, IntegerStage& stage) {
  HWY_ALIGN float grid[codec::kMaxPageSize], weights[codec::kMaxPageSize];
  HWY_ALIGN std::uint8_t folded[FoldedBytes(codec::kMaxPageSize)];
  std::copy_n(p, shape.rows, weights);
  VGrid(page + first_channel / shape.group * shape.rows, shape.rows, grid);
  const float* from[] = {weights};
  std::uint8_t* in[] = {folded};
  std::int32_t* out[] = {stage.out};
  float step[4];
  Fold<1, false>(from, grid, nullptr, shape.rows, in, step, nullptr, nullptr);
  stage.step = step[0];
  const std::uint8_t* codes = page + shape.dim / shape.group * shape.rows;
  VDots<1>(coding, codes + first_channel / 16 * BlockBytes(coding, shape.rows), 1, shape.rows, in,
           0, out);
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtamp::attention {

HWY_EXPORT(PrefillLanesOf);
HWY_EXPORT(DecodeScratchOf);
HWY_EXPORT(PrefillScratchOf);
HWY_EXPORT(BoundUnit);
HWY_EXPORT(DecodeUnit);
HWY_EXPORT(ObserveUnit);
HWY_EXPORT(PrefillUnit);
HWY_EXPORT(FinishRow);
HWY_EXPORT(GridOf);
HWY_EXPORT(KIntegersOf);
HWY_EXPORT(VIntegersOf);

std::uint32_t PrefillLanes() { return HWY_DYNAMIC_DISPATCH(PrefillLanesOf)(); }

std::size_t DecodeScratch(const Layer& layer, std::uint32_t rows) {
  return HWY_DYNAMIC_DISPATCH(DecodeScratchOf)(layer, rows);
}

std::size_t PrefillScratch(const Layer& layer, std::uint32_t rows) {
  return HWY_DYNAMIC_DISPATCH(PrefillScratchOf)(layer, rows);
}

void RunDecode(const Unit& unit, std::uint8_t* scratch, float* result) {
  HWY_DYNAMIC_DISPATCH(DecodeUnit)(unit, scratch, result);
}

void RunBounds(const Unit& unit, std::uint8_t* scratch, float* bounds, std::size_t stride) {
  HWY_DYNAMIC_DISPATCH(BoundUnit)(unit, scratch, bounds, stride);
}

void RunObserve(const Unit& unit, std::uint8_t* scratch, float* scores, std::size_t slots,
                float* mass) {
  HWY_DYNAMIC_DISPATCH(ObserveUnit)(unit, scratch, scores, slots, mass);
}

void RunPrefill(const Unit& unit, std::uint8_t* scratch, float* result) {
  HWY_DYNAMIC_DISPATCH(PrefillUnit)(unit, scratch, result);
}

void Finish(float* partials, std::size_t stride, std::uint32_t n, const float* sink,
            std::uint32_t dim_v, float* out) {
  HWY_DYNAMIC_DISPATCH(FinishRow)(partials, stride, n, sink, dim_v, out);
}

void Grid(codec::Coding coding, const codec::PageShape& shape, const std::uint8_t* page,
          float* scale, float* centre) {
  HWY_DYNAMIC_DISPATCH(GridOf)(coding, shape, page, scale, centre);
}

void KIntegers(codec::Coding coding, const codec::PageShape& shape, const std::uint8_t* page,
               const float* q, IntegerStage& stage) {
  HWY_DYNAMIC_DISPATCH(KIntegersOf)(coding, shape, page, q, stage);
}

void VIntegers(codec::Coding coding, const codec::PageShape& shape, const std::uint8_t* page,
               std::uint32_t first_channel, const float* p, IntegerStage& stage) {
  HWY_DYNAMIC_DISPATCH(VIntegersOf)(coding, shape, page, first_channel, p, stage);
}

}  // namespace kvtamp::attention
#endif  // HWY_ONCE
