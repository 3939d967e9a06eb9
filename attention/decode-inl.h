// Decode: a few query rows against a run of pages, on the codes themselves. Per-target header.
//
// Per page: mask -> scores of all rows -> running softmax -> weighted sum of V. Everything a page
// needs is done before the next is touched, so it is read from memory once.
#if defined(KVTAMP_ATTENTION_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_DECODE_INL_H_
#undef KVTAMP_ATTENTION_DECODE_INL_H_
#else
#define KVTAMP_ATTENTION_DECODE_INL_H_
#endif

#include "attention/dots-inl.h"
#include "attention/f16-inl.h"
#include "attention/grid-inl.h"
#include "attention/softmax-inl.h"
#include "attention/unit.h"
#include "attention/unpack-inl.h"

KVTAMP_BEFORE_VNNI();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::uint32_t kHeadsAtOnce = 4;  // rows that share one pass over a page

struct DecodeScratchLayout {
  float* q;            // [rows, dim_k up to 16], times the scale
  float* q_mean;       // [rows] q . mean
  float* slope;        // [rows]
  float* max;          // [rows]
  float* sum;          // [rows, 16] by lane
  float* acc;          // [rows, dim_v up to 16], model's basis
  float* acc_rotated;  // the same, rotated basis
  float* score;        // [rows, kMaxPageSize], then weights
  float* mask;         // [rows, kMaxPageSize] what to add, by token (or row)
  half_t* mask_row;    // [kMaxPageSize]
  float* grid;  // K: scale (planes: unit) and centre, [2, dim_k up to 16]; V: scales, [groups,
                // kMaxPageSize]
  std::uint8_t* folded;  // [kHeadsAtOnce]
  std::int32_t* ints;    // [kHeadsAtOnce, kMaxPageSize]
  std::size_t folded_stride;
  KPlanes planes;
  std::int32_t* by_channel;  // [kHeadsAtOnce, dim_k up to 64]
  std::int8_t* levels;       // of V's trellis
  half_t* halves;            // a page of kRows, decoded

  DecodeScratchLayout(Arena& arena, const Layer& layer, std::uint32_t rows) {
    const std::uint32_t dk = RoundUp(layer.dim_k, 16), dv = RoundUp(layer.dim_v, 16);
    q = arena.Take<float>(std::size_t{rows} * dk);
    q_mean = arena.Take<float>(rows);
    slope = arena.Take<float>(rows);
    max = arena.Take<float>(rows);
    sum = arena.Take<float>(std::size_t{rows} * 16);
    acc = arena.Take<float>(std::size_t{rows} * dv);
    acc_rotated = arena.Take<float>(std::size_t{rows} * dv);
    score = arena.Take<float>(std::size_t{rows} * codec::kMaxPageSize);
    mask = arena.Take<float>(std::size_t{rows} * codec::kMaxPageSize);
    mask_row = arena.Take<half_t>(codec::kMaxPageSize);
    grid = arena.Take<float>(std::max<std::size_t>(2 * dk, codec::kMaxPageSize));
    const std::uint32_t entries = KPlanes::MaxEntries(layer);
    folded_stride = FoldedBytes(std::max(entries, codec::kMaxPageSize));
    folded = arena.Take<std::uint8_t>(kHeadsAtOnce * folded_stride);
    ints = arena.Take<std::int32_t>(kHeadsAtOnce * codec::kMaxPageSize);
    planes = KPlanes(arena, layer);
    by_channel = arena.Take<std::int32_t>(std::size_t{kHeadsAtOnce} * RoundUp(layer.dim_k, 64));
    levels = arena.Take<std::int8_t>(std::size_t{dv} * layer.page_size);
    halves = arena.Take<half_t>(std::size_t{std::max(dk, dv)} * layer.page_size);
  }
};

// The rows of a unit that see something of the current page.
struct Active {
  std::uint32_t n = 0;
  std::uint8_t row[kMaxDecodeRows];
  const float* mask[kMaxDecodeRows];  // null: all padded rows open
};

// Bytes from a side of a page to the same place of the next page; 0 if that is not of the same
// kind.
HWY_INLINE std::ptrdiff_t AheadK(const Page& page, const Page* next) {
  return next == nullptr || next->k == nullptr || next->k_layout != page.k_layout
             ? 0
             : next->k - page.k;
}
HWY_INLINE std::ptrdiff_t AheadV(const Page& page, const Page* next) {
  return next == nullptr || next->v == nullptr || next->v_layout != page.v_layout
             ? 0
             : next->v - page.v;
}

HWY_INLINE void PrefetchBytes(const std::uint8_t* p, std::size_t n) {
  for (std::size_t i = 0; i < n; i += 64) hwy::Prefetch(p + i);
}

template <int kHeads>
HWY_INLINE void ScoreCoded(const Layer& layer, const Page& page, codec::Coding coding,
                           const std::uint8_t* k, std::ptrdiff_t ahead,
                           const DecodeScratchLayout& s, const std::uint8_t* rows) {
  const std::uint32_t dk = RoundUp(layer.dim_k, 16);
  const float* q[kHeads];
  std::uint8_t* folded[kHeads];
  std::int32_t* ints[kHeads];
  for (int h = 0; h < kHeads; ++h) {
    q[h] = s.q + std::size_t{rows[h]} * dk;
    folded[h] = s.folded + h * s.folded_stride;
    ints[h] = s.ints + h * codec::kMaxPageSize;
  }
  float step[4], centre[4];
  std::int32_t sum[4];
  float mid;
  if (coding == codec::Coding::kKPlanes) {
    FoldEntries<kHeads>(q, s.grid, s.grid + dk, dk, s.planes.entries, s.planes.n_padded(),
                        s.by_channel, folded, step, centre, sum);
    KDots<kHeads>(codec::Coding::kKPlanes, s.planes.codes, layer.page_size, s.planes.n(), folded, 0,
                  ints);
    mid = 0.5f;
  } else {
    Fold<kHeads, true>(q, s.grid, s.grid + dk, dk, folded, step, centre, sum);
    KDots<kHeads>(coding, k + 2 * layer.dim_k, layer.page_size, layer.dim_k, folded, ahead, ints);
    mid = MidCode(coding);
  }
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<std::int32_t> di;
  for (int h = 0; h < kHeads; ++h) {
    // Centred at the mid code: what rounding took from q's part in the constant term stays exact.
    const auto base =
        hn::Set(d, centre[h] + s.q_mean[rows[h]] - step[h] * mid * static_cast<float>(sum[h]));
    const auto factor = hn::Set(d, step[h]);
    float* out = s.score + std::size_t{rows[h]} * codec::kMaxPageSize;
    for (std::uint32_t t = 0; t < page.rows; t += static_cast<std::uint32_t>(hn::Lanes(d))) {
      hn::Store(hn::MulAdd(hn::ConvertTo(d, hn::Load(di, ints[h] + t)), factor, base), d, out + t);
    }
  }
}

HWY_INLINE void Scores(const Layer& layer, const Page& page, const Page* next,
                       std::uint32_t head_kv, const DecodeScratchLayout& s, const Active& active) {
  const std::uint32_t dk = RoundUp(layer.dim_k, 16);
  if (page.k == nullptr) {
    for (std::uint32_t i = 0; i < active.n; ++i) {
      std::fill_n(s.score + std::size_t{active.row[i]} * codec::kMaxPageSize,
                  RoundUp(page.rows, 16), 0.0f);
    }
    return;
  }
  const std::uint8_t* k = page.k;
  const bool rows = HasRows(page.k_layout, head_kv);
  const bool coded = page.k_layout != nullptr && !rows;
  codec::Coding coding = codec::Coding::kF16;
  std::ptrdiff_t ahead = rows ? 0 : AheadK(page, next);
  std::size_t stride = layer.dim_k;
  if (rows) {
    KHalves(layer, page, head_kv, s.halves);
    k = reinterpret_cast<const std::uint8_t*>(s.halves);
  } else if (coded) {
    const codec::SideLayout::Head& block = page.k_layout->heads[head_kv];
    coding = block.coding;
    k += block.offset;
    if (coding == codec::Coding::kKPlanes) {
      PrefetchBytes(k + ahead, block.bytes);
      KPlanesGrid(k, layer.dim_k, s.planes.width, s.grid, s.grid + dk);
      UnpackK(block.shape, k, s.planes);
    } else {
      KGrid(coding, k, layer.dim_k, s.grid, s.grid + dk);
      PrefetchBytes(k + ahead, block.scales);
    }
  } else {
    const HalfRows own = HalfRowsOf(page, k, layer.n_head_kv, head_kv, layer.dim_k);
    k = reinterpret_cast<const std::uint8_t*>(own.at);
    stride = own.stride;
  }
  for (std::uint32_t i = 0; i < active.n; i += kHeadsAtOnce) {
    const std::uint8_t* active_rows = active.row + i;
    if (coded) {
      switch (std::min(kHeadsAtOnce, active.n - i)) {
        case 1:
          ScoreCoded<1>(layer, page, coding, k, ahead, s, active_rows);
          break;
        case 2:
          ScoreCoded<2>(layer, page, coding, k, ahead, s, active_rows);
          break;
        case 3:
          ScoreCoded<3>(layer, page, coding, k, ahead, s, active_rows);
          break;
        default:
          ScoreCoded<4>(layer, page, coding, k, ahead, s, active_rows);
      }
    } else {
      const float* q[kHeadsAtOnce];
      float* out[kHeadsAtOnce];
      const std::uint32_t n = std::min(kHeadsAtOnce, active.n - i);
      for (std::uint32_t h = 0; h < n; ++h) {
        q[h] = s.q + std::size_t{active_rows[h]} * dk;
        out[h] = s.score + std::size_t{active_rows[h]} * codec::kMaxPageSize;
      }
      F16Scores(reinterpret_cast<const half_t*>(k), stride, layer.dim_k, page.rows, n, q,
                ahead / std::ptrdiff_t{sizeof(half_t)}, out);
    }
    ahead = 0;  // once is enough
  }
}

// Scores as they enter the softmax, in place: capped, biased, -inf where the mask is. Returns the
// largest of each lane.
HWY_INLINE hn::Vec<hn::ScalableTag<float>> MaskScores(const Params& params,
                                                      const DecodeScratchLayout& s, std::uint32_t r,
                                                      const float* mask, std::uint32_t padded) {
  const hn::ScalableTag<float> d;
  float* score = s.score + std::size_t{r} * codec::kMaxPageSize;
  const auto neg_inf = hn::Set(d, kNegInf), cap = hn::Set(d, params.softcap);
  const auto slope = hn::Set(d, s.slope[r]);
  auto max = neg_inf;
  for (std::uint32_t t = 0; t < padded; t += static_cast<std::uint32_t>(hn::Lanes(d))) {
    auto x = hn::Load(d, score + t);
    if (params.softcap != 0) x = SoftCap(d, x, cap);
    if (mask != nullptr) {  // selects, since a dead row's score may be NaN
      const auto m = hn::Load(d, mask + t);
      x = hn::IfThenElse(hn::Eq(m, neg_inf), neg_inf, hn::MulAdd(slope, m, x));
    }
    hn::Store(x, d, score + t);
    max = hn::Max(max, x);
  }
  return max;
}

// Scores to weights, in place; running maximum and sum; rescales what was accumulated if the
// maximum moved. Weights of rows that are not attended are 0, up to the page size.
HWY_INLINE void Softmax(const Layer& layer, const Params& params, const Page& page,
                        const DecodeScratchLayout& s, std::uint32_t r, const float* mask) {
  const hn::ScalableTag<float> d;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  const std::uint32_t padded = RoundUp(page.rows, 16);
  float* score = s.score + std::size_t{r} * codec::kMaxPageSize;
  const auto max = MaskScores(params, s, r, mask, padded);
  auto top = hn::Set(d, s.max[r]);
  float* sums = s.sum + std::size_t{r} * 16;
  if (!hn::AllFalse(d, hn::Gt(max, top))) {  // rare after the first pages
    const float page_max = hn::GetLane(hn::MaxOfLanes(d, max));
    const float factor = s.max[r] == kNegInf ? 0.0f : std::exp(s.max[r] - page_max);
    s.max[r] = page_max;
    top = hn::Set(d, page_max);
    const std::uint32_t dv = RoundUp(layer.dim_v, 16);
    ScaleBy(sums, 16, factor);
    ScaleBy(s.acc + std::size_t{r} * dv, dv, factor);
    if (layer.v_hadamard) ScaleBy(s.acc_rotated + std::size_t{r} * dv, dv, factor);
  }
  if (s.max[r] == kNegInf) top = hn::Zero(d);  // nothing yet: all weights 0, not exp(-inf - -inf)
  auto sum = hn::Load(d, sums);
  for (std::uint32_t t = 0; t < padded; t += lanes) {
    const auto p = Exp(d, hn::Sub(hn::Load(d, score + t), top));
    sum = hn::Add(sum, p);
    hn::Store(p, d, score + t);
  }
  hn::Store(sum, d, sums);
  std::fill(score + padded, score + layer.page_size, 0.0f);
}

// A head's coded V: its scales, and codes of kVInt8 or kVLm4.
struct VCodes {
  const std::uint8_t* scales;
  codec::Coding coding;
  const std::uint8_t* codes;
};

template <int kHeads>
HWY_INLINE void AccumulateCoded(const Layer& layer, const VCodes& v, std::ptrdiff_t ahead,
                                float* acc, const DecodeScratchLayout& s,
                                const std::uint8_t* rows) {
  const std::uint32_t dv = RoundUp(layer.dim_v, 16), group = layer.v_group,
                      page_size = layer.page_size;
  const float* p[kHeads];
  std::uint8_t* folded[kHeads];
  std::int32_t* ints[kHeads];
  for (int h = 0; h < kHeads; ++h) {
    p[h] = s.score + std::size_t{rows[h]} * codec::kMaxPageSize;
    folded[h] = s.folded + h * s.folded_stride;
    ints[h] = s.ints + h * codec::kMaxPageSize;
  }
  const std::size_t block_bytes = BlockBytes(v.coding, page_size);
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<std::int32_t> di;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  for (std::uint32_t g = 0; g < layer.dim_v / group; ++g) {
    VGrid(v.scales + g * page_size, page_size, s.grid);
    float step[4];
    Fold<kHeads, false>(p, s.grid, nullptr, page_size, folded, step, nullptr, nullptr);
    const std::uint32_t first = g * group, end = first + group, end_block = (end + 15) / 16;
    for (std::uint32_t block = first / 16; block < end_block; block += kBlocksAtOnce) {
      const std::uint32_t n = std::min(kBlocksAtOnce, end_block - block), c0 = block * 16,
                          c1 = c0 + n * 16;
      VDots<kHeads>(v.coding, v.codes + block * block_bytes, n, page_size, folded, ahead, ints);
      for (int h = 0; h < kHeads; ++h) {
        float* out = acc + std::size_t{rows[h]} * dv;
        if (first <= c0 && c1 <= end) {
          const auto factor = hn::Set(d, step[h]);
          for (std::uint32_t c = 0; c < n * 16; c += lanes) {
            const auto x = hn::ConvertTo(d, hn::Load(di, ints[h] + c));
            hn::Store(hn::MulAdd(x, factor, hn::Load(d, out + c0 + c)), d, out + c0 + c);
          }
        } else {  // a block straddles two groups, or ends the head
          for (std::uint32_t c = std::max(first, c0); c < std::min(end, c1); ++c) {
            out[c] += step[h] * static_cast<float>(ints[h][c - c0]);
          }
        }
      }
    }
  }
}

// Says whether the weighted sum went to the rotated basis.
HWY_INLINE bool Accumulate(const Layer& layer, const Page& page, const Page* next,
                           std::uint32_t head_kv, bool masks_differ, const DecodeScratchLayout& s,
                           const Active& active) {
  if (page.v == nullptr) return false;
  const std::uint32_t dv = RoundUp(layer.dim_v, 16);
  const bool halves = HasRows(page.v_layout, head_kv);
  const bool coded = page.v_layout != nullptr && !halves;
  std::ptrdiff_t ahead = halves ? 0 : AheadV(page, next);
  VCodes codes{};
  HalfRows f16 = HalfRowsOf(page, page.v, layer.n_head_kv, head_kv, layer.dim_v);
  if (halves) {
    VHalves(layer, page, head_kv, s.halves);
    f16 = {s.halves, layer.dim_v};
  } else if (coded) {
    const codec::SideLayout::Head& block = page.v_layout->heads[head_kv];
    const std::uint8_t* v = page.v + block.offset;
    codes = {v, block.coding, v + block.scales};
    if (block.coding == codec::Coding::kVTrellis) {
      PrefetchBytes(v + ahead, block.bytes);
      UnpackV(block.shape, codes.codes, s.levels);
      codes.coding = codec::Coding::kVInt8;
      codes.codes = reinterpret_cast<const std::uint8_t*>(s.levels);
      ahead = 0;
    } else {
      PrefetchBytes(v + ahead, block.scales);
    }
  }
  for (std::uint32_t i = 0; i < active.n; i += kHeadsAtOnce) {
    const std::uint8_t* rows = active.row + i;
    const std::uint32_t n = std::min(kHeadsAtOnce, active.n - i);
    if (coded) {
      float* acc = layer.v_hadamard ? s.acc_rotated : s.acc;
      switch (n) {
        case 1:
          AccumulateCoded<1>(layer, codes, ahead, acc, s, rows);
          break;
        case 2:
          AccumulateCoded<2>(layer, codes, ahead, acc, s, rows);
          break;
        case 3:
          AccumulateCoded<3>(layer, codes, ahead, acc, s, rows);
          break;
        default:
          AccumulateCoded<4>(layer, codes, ahead, acc, s, rows);
      }
    } else {
      const float* p[kHeadsAtOnce];
      float* acc[kHeadsAtOnce];
      for (std::uint32_t h = 0; h < n; ++h) {
        p[h] = s.score + std::size_t{rows[h]} * codec::kMaxPageSize;
        acc[h] = s.acc + std::size_t{rows[h]} * dv;
      }
      F16Accumulate(f16.at, f16.stride, layer.dim_v, page.rows, n, p,
                    ahead / std::ptrdiff_t{sizeof(half_t)}, acc, masks_differ);
    }
    ahead = 0;  // once is enough
  }
  return coded && layer.v_hadamard;
}

// Which rows of the unit see something of the page, and their masks as floats where one is needed.
HWY_INLINE void FindActive(const Unit& unit, const Page& page, const OpenRows& open,
                           const DecodeScratchLayout& s, Active& active) {
  const Job& job = *unit.job;
  const std::uint32_t padded = RoundUp(page.rows, 16);
  const bool holes = open.count != padded;
  active.n = 0;
  MaskClass cls = MaskClass::kOpen;
  const float* mask = nullptr;
  for (std::uint32_t r = 0; r < unit.rows; ++r) {
    // A token's heads share the mask unless it has heads of its own.
    const bool again = r > 0 && job.mask_head_stride == 0 && unit.token(r) == unit.token(r - 1);
    if (!again && (job.mask != nullptr || r == 0)) {
      const half_t* m = nullptr;
      if (job.mask != nullptr) {
        m = MaskRow(
            page, open,
            job.mask + unit.token(r) * job.mask_tok_stride + unit.head(r) * job.mask_head_stride,
            s.mask_row);
        cls = Classify(page, open, m);
      }
      mask = nullptr;
      if (cls == MaskClass::kMixed || (cls == MaskClass::kOpen && holes)) {
        float* f = s.mask + std::size_t{r} * codec::kMaxPageSize;
        MaskToFloat(open, cls == MaskClass::kMixed ? m : nullptr, padded, f);
        mask = f;
      }
    }
    if (cls == MaskClass::kShut) continue;
    active.row[active.n] = static_cast<std::uint8_t>(r);
    active.mask[active.n++] = mask;
  }
}

// Queries for pages of one turn.
HWY_INLINE void PrepareQueries(const Unit& unit, const float* turn, const DecodeScratchLayout& s) {
  const Layer& layer = *unit.layer;
  const Params& params = *unit.params;
  const std::uint32_t dk = RoundUp(layer.dim_k, 16);
  const float scale = params.softcap != 0 ? params.scale / params.softcap : params.scale;
  for (std::uint32_t r = 0; r < unit.rows; ++r) {
    float* q = s.q + std::size_t{r} * dk;
    TurnedQuery(layer, turn, unit.q(r), scale, q, 1);
    std::fill(q + layer.dim_k, q + dk, 0.0f);
    s.q_mean[r] = 0;
    if (layer.k_mean != nullptr) {
      const float* mean = layer.k_mean + std::size_t{unit.head_kv} * layer.dim_k;
      double sum = 0;
      for (std::uint32_t c = 0; c < layer.dim_k; c += 8) {  // eight chains: one alone is slow
        float part[8];
        for (std::uint32_t i = 0; i < 8; ++i) part[i] = q[c + i] * mean[c + i];
        sum += ((part[0] + part[1]) + (part[2] + part[3])) +
               ((part[4] + part[5]) + (part[6] + part[7]));
      }
      s.q_mean[r] = static_cast<float>(sum);
    }
  }
}

// A unit's rows before its first page.
HWY_INLINE void BeginRows(const Unit& unit, const DecodeScratchLayout& s) {
  PrepareQueries(unit, nullptr, s);
  for (std::uint32_t r = 0; r < unit.rows; ++r) {
    s.slope[r] = Slope(unit.head(r), unit.params->n_head, unit.params->max_bias);
    s.max[r] = kNegInf;
  }
}

// Finds who sees something of the page, and turns the queries as its keys are, if `turn` is
// another. False: nobody does.
HWY_INLINE bool BeginPage(const Unit& unit, const Page& page, const DecodeScratchLayout& s,
                          const float*& turn, Active& active) {
  active.n = 0;
  if (!Holds(page, unit.head_kv)) return false;
  const OpenRows open = OpenRowsOf(page, unit.job->n_kv);
  if (open.count != 0) FindActive(unit, page, open, s, active);
  if (active.n == 0) return false;
  if (page.turn != turn) PrepareQueries(unit, turn = page.turn, s);
  return true;
}

void DecodeUnit(const Unit& unit, std::uint8_t* scratch, float* result) {
  const Layer& layer = *unit.layer;
  const Params& params = *unit.params;
  const std::uint32_t dv = RoundUp(layer.dim_v, 16);
  Arena arena(scratch);
  const DecodeScratchLayout s(arena, layer, unit.rows);
  const float* turn = nullptr;
  BeginRows(unit, s);
  std::fill_n(s.sum, unit.rows * 16, 0.0f);
  std::fill_n(s.acc, unit.rows * dv, 0.0f);
  std::fill_n(s.acc_rotated, unit.rows * dv, 0.0f);

  const bool masks_differ =
      unit.job->mask_head_stride != 0 || unit.token(0) != unit.token(unit.rows - 1);
  Active active;
  bool rotated = false;
  const auto attend = [&](std::uint32_t i, std::uint32_t next_page) {
    const Page& page = unit.job->pages[i];
    if (!BeginPage(unit, page, s, turn, active)) return;
    const Page* next = next_page < unit.page1 ? &unit.job->pages[next_page] : nullptr;
    Scores(layer, page, next, unit.head_kv, s, active);
    for (std::uint32_t a = 0; a < active.n; ++a)
      Softmax(layer, params, page, s, active.row[a], active.mask[a]);
    rotated |= Accumulate(layer, page, next, unit.head_kv, masks_differ, s, active);
  };
  if (unit.choice == nullptr) {
    for (std::uint32_t i = unit.page0; i < unit.page1; ++i) attend(i, i + 1);
  } else {
    const auto from = [&](std::uint32_t i) {
      while (i < unit.page1 && !unit.choice->reads(i)) ++i;
      return i;
    };
    for (std::uint32_t i = from(unit.page0); i < unit.page1;) {
      const std::uint32_t next = from(i + 1);
      attend(i, next);
      i = next;
    }
  }

  for (std::uint32_t r = 0; r < unit.rows; ++r) {
    const Partial out{result + std::size_t{r} * PartialStride(layer)};
    out.max() = s.max[r];
    out.sum() = 0;
    for (std::uint32_t i = 0; i < 16; ++i) out.sum() += s.sum[std::size_t{r} * 16 + i];
    float* acc = s.acc + std::size_t{r} * dv;
    if (rotated) RotateInto(s.acc_rotated + std::size_t{r} * dv, layer.dim_v, acc);
    std::copy_n(acc, dv, out.acc());
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
