#include "attention/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "codec/codec.h"

namespace kvtamp::attention {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Such rows are f16 to whoever reads them (codec/rows.h), and so they are attended.
void AsRead(codec::Coding coding, std::uint32_t dim, float* row) {
  if (coding != codec::Coding::kRows) return;
  for (std::uint32_t c = 0; c < dim; ++c) row[c] = HalfToFloat(FloatToHalf(row[c]));
}

void RowOfK(const Layer& layer, const Page& page, std::uint32_t head, std::uint32_t row,
            float* out) {
  const std::uint32_t dim = layer.dim_k;
  if (page.k == nullptr) {
    std::fill_n(out, dim, 0.0f);
  } else if (page.k_layout == nullptr) {
    const auto* rows = reinterpret_cast<const half_t*>(page.k);
    const std::size_t at = page.alone ? row : std::size_t{row} * layer.n_head_kv + head;
    for (std::uint32_t c = 0; c < dim; ++c) out[c] = HalfToFloat(rows[at * dim + c]);
  } else {
    const codec::SideLayout::Head& block = page.k_layout->heads[head];
    codec::DecodeRowK(block.coding, block.shape, page.k + block.offset,
                      layer.k_mean == nullptr ? nullptr : layer.k_mean + head * dim, row, out);
    AsRead(block.coding, dim, out);
  }
  if (page.turn == nullptr) return;
  for (std::uint32_t i = 0; i < layer.turn.pairs; ++i) {
    const std::uint32_t a = layer.turn.first + (layer.turn.neox ? i : 2 * i);
    const std::uint32_t b = a + (layer.turn.neox ? layer.turn.pairs : 1);
    const double cos = page.turn[2 * i], sin = page.turn[2 * i + 1], x = out[a], y = out[b];
    out[a] = static_cast<float>(cos * x - sin * y);
    out[b] = static_cast<float>(sin * x + cos * y);
  }
}

void RowOfV(const Layer& layer, const Page& page, std::uint32_t head, std::uint32_t row,
            float* out) {
  const std::uint32_t dim = layer.dim_v;
  if (layer.v_in_k) {
    std::vector<float> key(layer.dim_k);
    RowOfK(layer, page, head, row, key.data());
    std::copy_n(key.begin(), dim, out);
  } else if (page.v == nullptr) {
    std::fill_n(out, dim, 0.0f);
  } else if (page.v_layout == nullptr) {
    const auto* rows = reinterpret_cast<const half_t*>(page.v);
    const std::size_t at = page.alone ? row : std::size_t{row} * layer.n_head_kv + head;
    for (std::uint32_t c = 0; c < dim; ++c) out[c] = HalfToFloat(rows[at * dim + c]);
  } else {
    const codec::SideLayout::Head& block = page.v_layout->heads[head];
    codec::DecodeRowV(block.coding, block.shape, page.v + block.offset, layer.v_hadamard, row, out);
    AsRead(block.coding, dim, out);
  }
}

// ALiBi: geometric over the largest power of two of heads, the others in between.
double SlopeOf(std::uint32_t head, const Params& params) {
  if (params.max_bias <= 0) return 1;
  const double n = std::exp2(std::floor(std::log2(params.n_head)));
  return head < n ? std::exp2(-params.max_bias / n * (head + 1))
                  : std::exp2(-params.max_bias / 2 / n * (2 * (head - n) + 1));
}

// The rows of one job and KV head that may be attended at all.
struct Rows {
  std::vector<std::uint32_t> cells;
  std::vector<float> k, v;  // [cells, dim]
};

Rows RowsOf(const Layer& layer, const Job& job, std::uint32_t head_kv) {
  Rows rows;
  for (const Page& page : job.pages) {
    if (page.head != kAllHeads && page.head != head_kv) continue;
    if (page.k_layout != nullptr && page.k_layout->heads[head_kv].bytes == 0) continue;
    for (std::uint32_t row = 0; row < page.rows; ++row) {
      const std::uint32_t cell = page.cells != nullptr ? page.cells[row] : page.first_cell + row;
      if (cell >= job.n_kv ||
          (page.live != nullptr && (page.live[row / 64] >> (row % 64) & 1) == 0))
        continue;
      rows.cells.push_back(cell);
      rows.k.resize(rows.cells.size() * layer.dim_k);
      rows.v.resize(rows.cells.size() * layer.dim_v);
      RowOfK(layer, page, head_kv, row, rows.k.data() + rows.k.size() - layer.dim_k);
      RowOfV(layer, page, head_kv, row, rows.v.data() + rows.v.size() - layer.dim_v);
    }
  }
  return rows;
}

// The softmax weight of each row for one query; less than 1 in all where there are sinks.
std::vector<double> Weights(const Layer& layer, const Job& job, const Params& params,
                            std::uint32_t token, std::uint32_t head, const Rows& rows) {
  const float* q = job.q + token * job.q_tok_stride + head * job.q_head_stride;
  const double slope = SlopeOf(head, params);
  const double sink = params.sinks != nullptr ? params.sinks[head] : -kInf;
  std::vector<double> weights(rows.cells.size(), -kInf);
  double max = sink, sum = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    double bias = 0;
    if (job.mask != nullptr) {
      bias =
          slope *
          HalfToFloat(
              job.mask[token * job.mask_tok_stride + head * job.mask_head_stride + rows.cells[i]]);
    }
    if (bias == -kInf) continue;
    double s = 0;
    for (std::uint32_t c = 0; c < layer.dim_k; ++c) s += double{q[c]} * rows.k[i * layer.dim_k + c];
    s *= params.scale;
    if (params.softcap != 0) s = params.softcap * std::tanh(s / params.softcap);
    weights[i] = s + bias;
    max = std::max(max, weights[i]);
  }
  if (sink != -kInf) sum += std::exp(sink - max);
  for (double& w : weights) {
    w = w == -kInf ? 0 : std::exp(w - max);
    sum += w;
  }
  for (double& w : weights) w = sum > 0 ? w / sum : 0;
  return weights;
}

void AttendRow(const Layer& layer, const Job& job, const Params& params, std::uint32_t token,
               std::uint32_t head, const Rows& rows) {
  const std::vector<double> weights = Weights(layer, job, params, token, head, rows);
  std::vector<double> out(layer.dim_v, 0.0);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0) continue;  // what is not attended may be NaN
    for (std::uint32_t c = 0; c < layer.dim_v; ++c)
      out[c] += weights[i] * rows.v[i * layer.dim_v + c];
  }
  float* to = job.out + token * job.out_tok_stride + head * job.out_head_stride;
  for (std::uint32_t c = 0; c < layer.dim_v; ++c) to[c] = static_cast<float>(out[c]);
}

}  // namespace

void AttendReference(const Layer& layer, std::span<const Job> jobs, const Params& params) {
  const std::uint32_t gqa = params.n_head / layer.n_head_kv;
  for (const Job& job : jobs) {
    for (std::uint32_t head_kv = 0; head_kv < layer.n_head_kv; ++head_kv) {
      const Rows rows = RowsOf(layer, job, head_kv);
      for (std::uint32_t token = 0; token < job.n_tok; ++token) {
        for (std::uint32_t head = head_kv * gqa; head < (head_kv + 1) * gqa; ++head) {
          AttendRow(layer, job, params, token, head, rows);
        }
      }
    }
  }
}

void ObserveReference(const Layer& layer, const Job& job, const Params& params,
                      std::uint32_t first_tok, std::uint32_t n_tok, double* mass,
                      std::size_t stride) {
  const std::uint32_t gqa = params.n_head / layer.n_head_kv;
  for (std::uint32_t head = 0; head < params.n_head; ++head) {
    const Rows rows = RowsOf(layer, job, head / gqa);
    for (std::uint32_t token = first_tok; token < first_tok + n_tok; ++token) {
      const std::vector<double> weights = Weights(layer, job, params, token, head, rows);
      for (std::size_t i = 0; i < weights.size(); ++i)
        mass[head / gqa * stride + rows.cells[i]] += weights[i];
    }
  }
}

}  // namespace kvtamp::attention
