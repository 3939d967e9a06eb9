// Any bytes as a coded page, of every coding and shape. Rows decode to finite numbers, and what is
// attended lies within the values attended: attention is a weighted mean, whatever the codes say.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "codec/codec.h"
#include "codec/layout.h"
#include "cpu/cpu.h"
#include "fuzz/bytes.h"
#include "fuzz/random.h"

namespace kvtamp::fuzz {
namespace {

using codec::Coding;

struct Side {
  codec::PageShape shape;
  Coding coding = Coding::kF16;
  std::vector<std::uint8_t> bytes;
  codec::SideLayout layout;
};

// The page's bytes are the input's, and where those end, what `r` gives.
Side MakeSide(Bytes& in, Random& r, std::uint32_t rows, std::uint32_t dim, bool is_v) {
  constexpr Coding kK[] = {Coding::kKInt8, Coding::kKInt4, Coding::kF16, Coding::kKPlanes};
  constexpr Coding kV[] = {Coding::kVInt8, Coding::kVLm4, Coding::kF16, Coding::kVTrellis};
  Side s;
  s.coding = is_v ? kV[in.Below(4)] : kK[in.Below(4)];
  s.shape = {rows, dim, 0};
  if (s.coding == Coding::kKPlanes) s.shape.budget = 4 * (1 + in.Below(2 * dim));
  if (s.coding == Coding::kVTrellis)
    s.shape.rate8 = codec::TrellisRate8(rows, dim, 100 + in.Below(400));
  if (is_v) {
    s.shape.group = 1 + in.Below(dim);
    while (dim % s.shape.group != 0) --s.shape.group;
  }
  if (s.coding == Coding::kF16) {  // finite halves: the model's own numbers
    s.bytes.resize(std::size_t{rows} * dim * 2);
    for (std::size_t i = 0; i < s.bytes.size(); i += 2) {
      const half_t h = FloatToHalf(r.Normal());
      s.bytes[i] = static_cast<std::uint8_t>(h);
      s.bytes[i + 1] = static_cast<std::uint8_t>(h >> 8);
    }
    return s;
  }
  s.layout.Add(s.coding, s.shape);
  s.bytes.resize(s.layout.bytes);
  for (std::uint8_t& b : s.bytes) b = in.empty() ? static_cast<std::uint8_t>(r.Next()) : in.U8();
  return s;
}

void RowOf(const Side& s, bool is_v, const float* mean, bool hadamard, std::uint32_t row,
           float* out) {
  if (s.coding == Coding::kF16) {
    const auto* h =
        reinterpret_cast<const half_t*>(s.bytes.data()) + std::size_t{row} * s.shape.dim;
    for (std::uint32_t c = 0; c < s.shape.dim; ++c) out[c] = HalfToFloat(h[c]);
  } else if (is_v) {
    codec::DecodeRowV(s.coding, s.shape, s.bytes.data(), hadamard, row, out);
  } else {
    codec::DecodeRowK(s.coding, s.shape, s.bytes.data(), mean, row, out);
  }
}

void Run(Bytes in) {
  const auto isas = cpu::AvailableIsas();
  const bool forced = cpu::ForceIsa(isas[in.Below(static_cast<std::uint32_t>(isas.size()))]).ok();
  Require(forced, "an instruction set that is available cannot be forced");
  const std::uint32_t page_size = 16u << in.Below(4);
  const std::uint32_t dim_k = 32 + 8 * in.Below(69), dim_v = 32 + 8 * in.Below(69);
  const bool hadamard = in.Flag(), causal = in.Flag(), run = in.Flag(), turned = in.Flag();
  const std::uint32_t gqa = 1 + in.Below(8), n_tok = 1 + in.Below(in.Flag() ? 40 : 3);
  const std::uint32_t rows = 1 + in.Below(page_size);
  Random r(in.U16());
  const Side k = MakeSide(in, r, page_size, dim_k, false);
  const Side v = MakeSide(in, r, page_size, dim_v, true);

  std::vector<float> mean(dim_k), row(std::max(dim_k, dim_v)), cos_sin;
  for (float& m : mean) m = r.Normal();
  std::vector<std::uint32_t> cells(page_size);
  for (std::uint32_t i = 0; i < page_size; ++i) cells[i] = run ? i : page_size - 1 - i;
  std::vector<std::uint64_t> live(2);
  for (auto& w : live) w = r.Next() | r.Next();
  attention::Layer layer;
  layer.n_head_kv = 1;
  layer.dim_k = dim_k;
  layer.dim_v = dim_v;
  layer.page_size = page_size;
  layer.v_group = std::max(1u, v.shape.group);
  layer.v_hadamard = hadamard;
  layer.k_mean = mean.data();
  layer.turn.pairs = turned ? dim_k / 4 : 0u;
  layer.turn.neox = r.Chance(0.5);
  for (std::uint32_t i = 0; i < layer.turn.pairs; ++i) {
    const float angle = r.Normal();
    cos_sin.push_back(std::cos(angle));
    cos_sin.push_back(std::sin(angle));
  }

  std::vector<float> largest(dim_v, 0.0f);
  float largest_of_all = 0;
  for (std::uint32_t i = 0; i < page_size; ++i) {
    RowOf(k, false, mean.data(), false, i, row.data());
    for (std::uint32_t c = 0; c < dim_k; ++c) Require(std::isfinite(row[c]), "a key is not finite");
    RowOf(v, true, nullptr, hadamard, i, row.data());
    for (std::uint32_t c = 0; c < dim_v; ++c) {
      Require(std::isfinite(row[c]), "a value is not finite");
      if (i >= rows || (live[i / 64] >> (i % 64) & 1) == 0) continue;
      largest[c] = std::max(largest[c], std::abs(row[c]));
      largest_of_all = std::max(largest_of_all, largest[c]);
    }
  }

  std::vector<float> q(std::size_t{n_tok} * gqa * dim_k),
      out(std::size_t{n_tok} * gqa * dim_v, NAN);
  for (float& x : q) x = r.Normal();
  constexpr half_t kShut = 0xFC00;
  std::vector<half_t> mask(std::size_t{n_tok} * page_size, 0);
  for (std::uint32_t t = 0; t < n_tok; ++t)
    for (std::uint32_t c = 0; c < page_size; ++c)
      if (causal ? c > t : r.Chance(0.3)) mask[std::size_t{t} * page_size + c] = kShut;
  if (n_tok > 1)
    std::fill_n(mask.begin() + page_size, page_size, kShut);  // a row that sees nothing

  attention::Page page;
  page.k = k.bytes.data();
  page.v = v.bytes.data();
  page.live = live.data();
  page.cells = run ? nullptr : cells.data();
  page.rows = rows;
  page.turn = cos_sin.empty() ? nullptr : cos_sin.data();
  page.k_layout = k.coding == Coding::kF16 ? nullptr : &k.layout;
  page.v_layout = v.coding == Coding::kF16 ? nullptr : &v.layout;
  attention::Job job;
  job.pages = std::span(&page, 1);
  job.q = q.data();
  job.q_tok_stride = std::size_t{gqa} * dim_k;
  job.q_head_stride = dim_k;
  job.out = out.data();
  job.out_tok_stride = std::size_t{gqa} * dim_v;
  job.out_head_stride = dim_v;
  job.mask = mask.data();
  job.mask_tok_stride = page_size;
  job.n_tok = n_tok;
  job.n_kv = page_size;
  attention::Params params;
  params.n_head = gqa;
  params.scale = 1.0f / std::sqrt(static_cast<float>(dim_k));
  params.softcap = r.Chance(0.3) ? 30.0f : 0.0f;
  attention::Workspace workspace;
  SerialExecutor executor;
  Require(attention::Attend(layer, std::span(&job, 1), params, workspace, executor).ok(),
          "attention over a page that is well formed fails");
  for (std::size_t i = 0; i < out.size(); ++i) {
    Require(std::isfinite(out[i]), "attention is not finite");
    // p is rounded to 15 bits, and a rotation spreads the error over the head.
    Require(std::abs(out[i]) <= largest[i % dim_v] * 1.001f + largest_of_all * 0.01f,
            "attention leaves the values it is a mean of");
    if (n_tok > 1 && i / (std::size_t{gqa} * dim_v) == 1)
      Require(out[i] == 0, "a query that sees nothing does not give nought");
  }
}

}  // namespace
}  // namespace kvtamp::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvtamp::fuzz::Run({data, size});
  return 0;
}
