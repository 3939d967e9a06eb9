// Prefill: many query rows against a run of pages. A page is decoded once, to float, for all of
// them; then small matrix products with the queries as lanes, strip by strip. Per-target header.
#if defined(KVTAMP_ATTENTION_PREFILL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_PREFILL_INL_H_
#undef KVTAMP_ATTENTION_PREFILL_INL_H_
#else
#define KVTAMP_ATTENTION_PREFILL_INL_H_
#endif

#include "attention/gemm-inl.h"
#include "attention/softmax-inl.h"
#include "attention/tile-inl.h"
#include "attention/unit.h"

HWY_BEFORE_NAMESPACE();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::uint32_t kMaxTile = codec::kMaxPageSize;
inline constexpr std::uint32_t kMaxTilePages = kMaxTile / 16;

HWY_INLINE std::uint32_t StripLanes() {
  return kGemmVecs * static_cast<std::uint32_t>(hn::Lanes(hn::ScalableTag<float>()));
}

// S = StripLanes(); a strip's last vectors are left out where the unit has no rows for them.
struct PrefillScratchLayout {
  float* q;                 // [strips][dim_k][S], times the scale
  float* acc;               // [strips][dim_v up to 16][S], model's basis
  float* acc_rotated;       // the same, rotated basis
  float* max;               // [strips][S]
  float* sum;               // [strips][S]
  float* slope;             // [strips][S]
  float* score;             // [kMaxTile][S], then weights
  float* mask;              // [kMaxTile][S] what to add
  float* k;                 // tile, see tile-inl.h
  float* v;                 // tile
  float* grid;              // of one page
  std::uint16_t* mask_of;   // [rows] the row of the mask it looks at, the unit's first being 0
  std::uint16_t* first_of;  // [mask rows] the first query row that looks at it
  std::uint32_t n_masks = 0;
  MaskClass* classes;  // [mask rows][kMaxTilePages]
  half_t* mask_row;    // [kMaxPageSize]
  KPlanes planes;
  std::int8_t* levels;  // of V's trellis
  half_t* halves;       // a page of kRows, decoded

  PrefillScratchLayout(Arena& arena, const Layer& layer, std::uint32_t rows) {
    const std::uint32_t lanes = RoundUp(rows, StripLanes());
    const std::uint32_t dk = RoundUp(layer.dim_k, 16), dv = RoundUp(layer.dim_v, 16);
    q = arena.Take<float>(std::size_t{lanes} * dk);
    acc = arena.Take<float>(std::size_t{lanes} * dv);
    acc_rotated = arena.Take<float>(std::size_t{lanes} * dv);
    max = arena.Take<float>(lanes);
    sum = arena.Take<float>(lanes);
    slope = arena.Take<float>(lanes);
    score = arena.Take<float>(std::size_t{kMaxTile} * StripLanes());
    mask = arena.Take<float>(std::size_t{kMaxTile} * StripLanes());
    k = arena.Take<float>(std::size_t{kMaxTile} * dk);
    v = arena.Take<float>(std::size_t{kMaxTile} * dv);
    grid = arena.Take<float>(
        std::max<std::size_t>(2 * dk, std::size_t{layer.dim_v / layer.v_group} * layer.page_size));
    mask_of = arena.Take<std::uint16_t>(rows);
    first_of = arena.Take<std::uint16_t>(rows + 1);
    classes = arena.Take<MaskClass>(std::size_t{rows} * kMaxTilePages);
    mask_row = arena.Take<half_t>(codec::kMaxPageSize);
    planes = KPlanes(arena, layer);
    levels = arena.Take<std::int8_t>(std::size_t{dv} * layer.page_size);
    halves = arena.Take<half_t>(std::size_t{std::max(dk, dv)} * layer.page_size);
  }
};

// Tokens that are decoded and multiplied together: one page, or several small ones of like layout.
struct Tile {
  struct Part {
    const Page* page;
    OpenRows open;
    std::uint32_t t0, cols;
  };
  Part parts[kMaxTilePages];
  std::uint32_t n_parts = 0, tokens = 0;
  std::uint64_t open[kMaxTile / 64] = {};  // bit per token
  bool k_rows = false, v_rotated = false;
  const float* turn = nullptr;

  bool token_open(std::uint32_t t) const { return (open[t / 64] >> (t % 64) & 1) != 0; }
};

// Heads of a token share its row of the mask, unless heads have their own.
HWY_INLINE void IndexMasks(const Unit& unit, PrefillScratchLayout& s) {
  for (std::uint32_t r = 0; r < unit.rows; ++r) {
    if (r == 0 || unit.job->mask_head_stride != 0 || unit.token(r) != unit.token(r - 1)) {
      s.first_of[s.n_masks++] = static_cast<std::uint16_t>(r);
    }
    s.mask_of[r] = static_cast<std::uint16_t>(s.n_masks - 1);
  }
  s.first_of[s.n_masks] = static_cast<std::uint16_t>(unit.rows);
}

HWY_INLINE const half_t* MaskOf(const Unit& unit, std::uint32_t r, const Tile::Part& part,
                                half_t* tmp) {
  const Job& job = *unit.job;
  return MaskRow(
      *part.page, part.open,
      job.mask + unit.token(r) * job.mask_tok_stride + unit.head(r) * job.mask_head_stride, tmp);
}

// Classes of the part for all mask rows; false if nobody sees anything.
HWY_INLINE bool ClassifyPart(const Unit& unit, const Tile::Part& part, std::uint32_t index,
                             const PrefillScratchLayout& s) {
  if (part.open.count == 0) return false;
  bool any = false;
  for (std::uint32_t m = 0; m < s.n_masks; ++m) {
    const MaskClass c =
        unit.job->mask == nullptr
            ? MaskClass::kOpen
            : Classify(*part.page, part.open, MaskOf(unit, s.first_of[m], part, s.mask_row));
    s.classes[m * kMaxTilePages + index] = c;
    any = any || c != MaskClass::kShut;
  }
  return any;
}

// Takes pages from `i` on that fit together, skipping those that nobody sees. Returns the next
// page.
HWY_INLINE std::uint32_t FillTile(const Unit& unit, std::uint32_t i, const PrefillScratchLayout& s,
                                  Tile& tile) {
  const Layer& layer = *unit.layer;
  const std::uint32_t capacity = std::max(64u, layer.page_size);
  for (; i < unit.page1; ++i) {
    const Page& page = unit.job->pages[i];
    if (!Holds(page, unit.head_kv)) continue;
    Tile::Part part{&page, OpenRowsOf(page, unit.job->n_kv), tile.tokens,
                    RoundUp(page.rows, std::min(32u, layer.page_size))};
    if (part.cols == 0) continue;
    const bool k_rows =
        page.k != nullptr && (page.k_layout == nullptr || HasRows(page.k_layout, unit.head_kv));
    const bool v_rotated = !layer.v_in_k && page.v != nullptr && page.v_layout != nullptr &&
                           layer.v_hadamard && !HasRows(page.v_layout, unit.head_kv);
    if (tile.n_parts > 0 &&
        (tile.tokens + part.cols > capacity || k_rows != tile.k_rows ||
         v_rotated != tile.v_rotated || page.turn != tile.turn || tile.n_parts == kMaxTilePages)) {
      break;
    }
    if (!ClassifyPart(unit, part, tile.n_parts, s)) continue;
    tile.k_rows = k_rows;
    tile.v_rotated = v_rotated;
    tile.turn = page.turn;
    for (std::uint32_t t = 0; t < part.cols; ++t) {
      const std::uint32_t at = part.t0 + t;
      if (part.open.test(t)) tile.open[at / 64] |= std::uint64_t{1} << (at % 64);
    }
    tile.tokens += part.cols;
    tile.parts[tile.n_parts++] = part;
  }
  return i;
}

HWY_INLINE void DecodeTile(const Unit& unit, const Tile& tile, const PrefillScratchLayout& s) {
  const Layer& layer = *unit.layer;
  const std::uint32_t dk = layer.dim_k, dv = layer.dim_v, rows = layer.page_size;
  const float* mean =
      layer.k_mean == nullptr ? nullptr : layer.k_mean + std::size_t{unit.head_kv} * dk;
  for (std::uint32_t i = 0; i < tile.n_parts; ++i) {
    const Tile::Part& part = tile.parts[i];
    const Page& page = *part.page;
    HalfRows keys = HalfRowsOf(page, page.k, layer.n_head_kv, unit.head_kv, dk);
    if (page.k != nullptr && HasRows(page.k_layout, unit.head_kv)) {
      KHalves(layer, page, unit.head_kv, s.halves);
      keys = {s.halves, dk};
    }
    float* k = s.k + std::size_t{part.t0} * (tile.k_rows ? RoundUp(dk, 16) : dk);
    if (page.k == nullptr) {
      std::fill_n(k, std::size_t{part.cols} * dk, 0.0f);
    } else if (tile.k_rows) {
      KTileF16(keys.at, keys.stride, page.rows, part.cols, dk, k);
    } else {
      const codec::SideLayout::Head& block = page.k_layout->heads[unit.head_kv];
      const std::uint8_t* from = page.k + block.offset;
      if (block.coding == codec::Coding::kKPlanes) {
        KTilePlanes(block.shape, from, mean, part.cols, s.grid, s.planes, k);
      } else {
        KTileCoded(block.coding, from, mean, rows, part.cols, dk, s.grid, k);
      }
    }
    if (layer.v_in_k) {
      if (tile.k_rows)  // else the K tile serves
        VTileF16(keys.at, keys.stride, page.rows, part.cols, dv, s.v, tile.tokens, part.t0);
    } else if (page.v == nullptr) {
      for (std::uint32_t c = 0; c < dv; c += 16) {
        std::fill_n(s.v + (std::size_t{c / 16} * tile.tokens + part.t0) * 16, part.cols * 16, 0.0f);
      }
    } else if (HasRows(page.v_layout, unit.head_kv)) {
      VHalves(layer, page, unit.head_kv, s.halves);
      VTileF16(s.halves, dv, page.rows, part.cols, dv, s.v, tile.tokens, part.t0);
    } else if (page.v_layout == nullptr) {
      const HalfRows values = HalfRowsOf(page, page.v, layer.n_head_kv, unit.head_kv, dv);
      VTileF16(values.at, values.stride, page.rows, part.cols, dv, s.v, tile.tokens, part.t0);
    } else {
      const codec::SideLayout::Head& block = page.v_layout->heads[unit.head_kv];
      const std::uint8_t* from = page.v + block.offset;
      const std::uint8_t* codes = from + block.scales;
      codec::Coding coding = block.coding;
      if (coding == codec::Coding::kVTrellis) {
        UnpackV(block.shape, codes, s.levels);
        codes = reinterpret_cast<const std::uint8_t*>(s.levels);
        coding = codec::Coding::kVInt8;
      }
      VTileCoded(coding, from, codes, rows, part.cols, dv, layer.v_group, s.grid, s.v, tile.tokens,
                 part.t0);
    }
  }
}

// mask[tokens][ld] for query rows [r0, r0 + n) if any of them needs one. kShut: none sees the tile.
HWY_INLINE MaskClass StripMask(const Unit& unit, const Tile& tile, std::uint32_t r0,
                               std::uint32_t n, std::size_t ld, const PrefillScratchLayout& s) {
  const std::uint32_t m0 = s.mask_of[r0], m1 = s.mask_of[r0 + n - 1];
  bool all_open = true, all_shut = true;
  for (std::uint32_t m = m0; m <= m1; ++m) {
    for (std::uint32_t i = 0; i < tile.n_parts; ++i) {
      const MaskClass c = s.classes[m * kMaxTilePages + i];
      all_open = all_open && c == MaskClass::kOpen;
      all_shut = all_shut && c == MaskClass::kShut;
    }
  }
  if (all_open) return MaskClass::kOpen;
  if (all_shut) return MaskClass::kShut;
  std::fill_n(s.mask, tile.tokens * ld, 0.0f);
  for (std::uint32_t i = 0; i < tile.n_parts; ++i) {
    const Tile::Part& part = tile.parts[i];
    for (std::uint32_t m = m0; m <= m1; ++m) {
      const MaskClass c = s.classes[m * kMaxTilePages + i];
      if (c == MaskClass::kOpen) continue;
      const std::uint32_t first = std::max<std::uint32_t>(s.first_of[m], r0);
      const std::uint32_t end = std::min<std::uint32_t>(s.first_of[m + 1], r0 + n);
      const half_t* halves =
          c == MaskClass::kMixed ? MaskOf(unit, first, part, s.mask_row) : nullptr;
      for (std::uint32_t t = 0; t < part.cols; ++t) {
        if (!part.open.test(t)) continue;
        const float x = halves == nullptr ? kNegInf : HalfToFloat(halves[t]);
        float* out = s.mask + (part.t0 + t) * ld;
        for (std::uint32_t r = first; r < end; ++r) out[r - r0] = x == kNegInf ? x : x * s.slope[r];
      }
    }
  }
  return MaskClass::kMixed;
}

// One vector of query rows: scores[tokens] to weights, `ld` apart. max and sum: of these lanes.
// True if what was accumulated before has to be multiplied by `factor`.
template <class D>
HWY_INLINE bool SoftmaxColumn(D d, const Tile& tile, float* score, const float* mask,
                              std::size_t ld, float softcap, float* max, float* sum,
                              float* factor) {
  const auto neg_inf = hn::Set(d, kNegInf);
  const auto old = hn::Load(d, max);
  auto top = old;
  for (std::uint32_t t = 0; t < tile.tokens; ++t) {
    if (!tile.token_open(t)) continue;
    float* at = score + t * ld;
    auto x = hn::Load(d, at);
    if (softcap != 0) x = SoftCap(d, x, hn::Set(d, softcap));
    if (mask != nullptr) {
      const auto m = hn::Load(d, mask + t * ld);
      x = hn::IfThenElse(hn::Eq(m, neg_inf), neg_inf, hn::Add(x, m));
    }
    if (softcap != 0 || mask != nullptr) hn::Store(x, d, at);
    top = hn::Max(top, x);
  }
  const auto shift = hn::IfThenZeroElse(hn::Eq(top, neg_inf), top);  // -inf - -inf is NaN
  auto total = hn::Zero(d);
  for (std::uint32_t t = 0; t < tile.tokens; ++t) {
    float* at = score + t * ld;
    auto p = hn::Zero(d);
    if (tile.token_open(t)) p = Exp(d, hn::Sub(hn::Load(d, at), shift));
    hn::Store(p, d, at);
    total = hn::Add(total, p);
  }
  const auto f = Exp(d, hn::Sub(old, shift));
  hn::Store(top, d, max);
  hn::Store(hn::MulAdd(hn::Load(d, sum), f, total), d, sum);
  hn::Store(f, d, factor);
  return !hn::AllTrue(d, hn::Eq(old, top));
}

HWY_INLINE void ScaleColumns(float* x, std::uint32_t n, std::size_t ld, const float* factor) {
  const hn::ScalableTag<float> d;
  for (std::uint32_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < ld; j += hn::Lanes(d)) {
      hn::Store(hn::Mul(hn::Load(d, x + i * ld + j), hn::Load(d, factor + j)), d, x + i * ld + j);
    }
  }
}

template <int kVecs>
HWY_NOINLINE void StripTile(const Unit& unit, const Tile& tile, std::uint32_t strip,
                            const float* mask, const PrefillScratchLayout& s) {
  const hn::ScalableTag<float> d;
  const Layer& layer = *unit.layer;
  const std::size_t lanes = hn::Lanes(d), ld = kVecs * lanes,
                    first = std::size_t{strip} * StripLanes();
  const std::uint32_t dk = layer.dim_k, dv = RoundUp(layer.dim_v, 16);
  const float* q = s.q + first * dk;
  if (tile.k_rows) {
    Gemm<kVecs, ALayout::kRows, false>(s.k, RoundUp(dk, 16), q, ld, tile.tokens, dk, s.score);
  } else {
    Gemm<kVecs, ALayout::kPanels, false>(s.k, std::size_t{dk} * 16, q, ld, tile.tokens, dk,
                                         s.score);
  }
  HWY_ALIGN float factor[kVecs * HWY_MAX_BYTES / sizeof(float)];
  bool moved = false;
  for (std::size_t j = 0; j < ld; j += lanes) {
    moved |= SoftmaxColumn(d, tile, s.score + j, mask == nullptr ? nullptr : mask + j, ld,
                           unit.params->softcap, s.max + first + j, s.sum + first + j, factor + j);
  }
  float* acc = s.acc + first * dv;
  float* acc_rotated = s.acc_rotated + first * dv;
  if (moved) {
    ScaleColumns(acc, layer.dim_v, ld, factor);
    if (layer.v_hadamard) ScaleColumns(acc_rotated, layer.dim_v, ld, factor);
  }
  if (layer.v_in_k && !tile.k_rows) {
    for (std::uint32_t t = 0; t < tile.tokens; t += 16) {  // a panel of K's tile is rows of V's
      Gemm<kVecs, ALayout::kRows, true>(s.k + std::size_t{t} * dk, 16, s.score + t * ld, ld,
                                        layer.dim_v, 16, acc);
    }
    return;
  }
  Gemm<kVecs, ALayout::kPanels, true>(s.v, std::size_t{tile.tokens} * 16, s.score, ld, layer.dim_v,
                                      tile.tokens, tile.v_rotated ? acc_rotated : acc);
}

// x[dim][ld], each column as codec::Hadamard would; added to out.
HWY_INLINE void RotateColumnsInto(float* x, std::uint32_t dim, std::size_t ld, float* out) {
  const hn::ScalableTag<float> d;
  const std::uint32_t block = dim & (~dim + 1);
  for (std::uint32_t h = 1; h < block; h *= 2) {
    for (std::uint32_t i = 0; i < dim; ++i) {
      if ((i & h) != 0) continue;
      for (std::size_t j = 0; j < ld; j += hn::Lanes(d)) {
        const auto a = hn::Load(d, x + i * ld + j), b = hn::Load(d, x + (i + h) * ld + j);
        hn::Store(hn::Add(a, b), d, x + i * ld + j);
        hn::Store(hn::Sub(a, b), d, x + (i + h) * ld + j);
      }
    }
  }
  const auto norm = hn::Set(d, 1.0f / std::sqrt(static_cast<float>(block)));
  for (std::size_t j = 0; j < dim * ld; j += hn::Lanes(d)) {
    hn::Store(hn::MulAdd(hn::Load(d, x + j), norm, hn::Load(d, out + j)), d, out + j);
  }
}

// Lanes of a strip: whole vectors of its rows.
HWY_INLINE std::uint32_t StripStride(const Unit& unit, std::uint32_t strip) {
  return RoundUp(std::min(StripLanes(), unit.rows - strip * StripLanes()),
                 static_cast<std::uint32_t>(hn::Lanes(hn::ScalableTag<float>())));
}

// Queries for tiles of one turn.
HWY_INLINE void PrepareColumns(const Unit& unit, const float* turn, const PrefillScratchLayout& s) {
  const Layer& layer = *unit.layer;
  const Params& params = *unit.params;
  const std::uint32_t strip_lanes = StripLanes();
  const float scale = params.softcap != 0 ? params.scale / params.softcap : params.scale;
  for (std::uint32_t r = 0; r < unit.rows; ++r) {
    const std::uint32_t strip = r / strip_lanes;
    float* q = s.q + std::size_t{strip} * strip_lanes * layer.dim_k + r % strip_lanes;
    TurnedQuery(layer, turn, unit.q(r), scale, q, StripStride(unit, strip));
  }
}

void PrefillUnit(const Unit& unit, std::uint8_t* scratch, float* result) {
  const Layer& layer = *unit.layer;
  const Params& params = *unit.params;
  const std::uint32_t dk = layer.dim_k, dv = RoundUp(layer.dim_v, 16);
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(hn::ScalableTag<float>()));
  const std::uint32_t strip_lanes = StripLanes(),
                      strips = (unit.rows + strip_lanes - 1) / strip_lanes;
  Arena arena(scratch);
  PrefillScratchLayout s(arena, layer, unit.rows);
  IndexMasks(unit, s);

  std::fill_n(s.q, std::size_t{strips} * strip_lanes * dk, 0.0f);
  std::fill_n(s.acc, std::size_t{strips} * strip_lanes * dv, 0.0f);
  std::fill_n(s.acc_rotated, std::size_t{strips} * strip_lanes * dv, 0.0f);
  std::fill_n(s.max, strips * strip_lanes, kNegInf);
  std::fill_n(s.sum, strips * strip_lanes, 0.0f);
  const auto stride = [&](std::uint32_t strip) { return StripStride(unit, strip); };
  const float* turn = nullptr;
  PrepareColumns(unit, turn, s);
  for (std::uint32_t r = 0; r < unit.rows; ++r)
    s.slope[r] = Slope(unit.head(r), params.n_head, params.max_bias);

  for (std::uint32_t i = unit.page0; i < unit.page1;) {
    Tile tile;
    i = FillTile(unit, i, s, tile);
    if (tile.n_parts == 0) break;
    if (tile.turn != turn) PrepareColumns(unit, turn = tile.turn, s);
    DecodeTile(unit, tile, s);
    for (std::uint32_t strip = 0; strip < strips; ++strip) {
      const std::uint32_t r0 = strip * strip_lanes, n = std::min(strip_lanes, unit.rows - r0);
      const MaskClass c = StripMask(unit, tile, r0, n, stride(strip), s);
      if (c == MaskClass::kShut) continue;
      const float* mask = c == MaskClass::kMixed ? s.mask : nullptr;
      switch (stride(strip) / lanes) {
        case 1:
          StripTile<1>(unit, tile, strip, mask, s);
          break;
        case 2:
          StripTile<2>(unit, tile, strip, mask, s);
          break;
        default:
          StripTile<3>(unit, tile, strip, mask, s);
      }
    }
  }

  for (std::uint32_t strip = 0; strip < strips; ++strip) {
    const std::size_t first = std::size_t{strip} * strip_lanes, ld = stride(strip);
    float* acc = s.acc + first * dv;
    if (layer.v_hadamard) RotateColumnsInto(s.acc_rotated + first * dv, layer.dim_v, ld, acc);
    for (std::uint32_t r = 0; r < std::min(strip_lanes, unit.rows - strip * strip_lanes); ++r) {
      const Partial out{result + (first + r) * PartialStride(layer)};
      out.max() = s.max[first + r];
      out.sum() = s.sum[first + r];
      for (std::uint32_t c = 0; c < layer.dim_v; ++c) out.acc()[c] = acc[c * ld + r];
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
