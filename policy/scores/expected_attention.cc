#include "policy/scores/expected_attention.h"

#include <algorithm>

namespace kvtamp::policy {
namespace {

// Rᵀ k, so that a query's own coordinates meet it: pairs turned backwards.
void TurnBack(const Rope& rope, std::span<const Turn> turns, std::span<float> k) {
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const std::size_t a = rope.interleaved ? 2 * i : i;
    const std::size_t b = rope.interleaved ? 2 * i + 1 : i + turns.size();
    const double x = k[a], y = k[b];
    k[a] = static_cast<float>(turns[i].cos * x + turns[i].sin * y);
    k[b] = static_cast<float>(turns[i].cos * y - turns[i].sin * x);
  }
}

// The exponents of one entry, one for each query head.
void Exponents(const Queries& queries, std::span<const float> k, double scale, double* out) {
  for (std::uint32_t h = 0; h < queries.n_head; ++h) {
    const float* mean = queries.mean.data() + h * k.size();
    const float* variance = queries.variance.data() + h * k.size();
    double dot = 0, square = 0;
    for (std::size_t c = 0; c < k.size(); ++c) {
      dot += double{mean[c]} * k[c];
      square += double{variance[c]} * k[c] * k[c];
    }
    out[h] = scale * dot + scale * scale * square / 2;
  }
}

// Adds one query head's softmax over the entries, divided by `heads`; exponent: every heads-th
// value.
void AddSoftmax(std::span<const double> exponents, std::uint32_t h, std::uint32_t heads,
                std::vector<double>& attention) {
  double top = kWorst, total = 0;
  const auto at = [&](std::size_t i) { return exponents[i * heads + h]; };
  for (std::size_t i = 0; i < attention.size(); ++i) {
    if (std::isfinite(at(i))) top = std::max(top, at(i));
  }
  for (std::size_t i = 0; i < attention.size(); ++i) {
    if (std::isfinite(at(i))) total += std::exp(at(i) - top);
  }
  for (std::size_t i = 0; i < attention.size(); ++i) {
    // NaN and infinity make the entry's whole score the worst.
    attention[i] += std::isfinite(at(i)) ? std::exp(at(i) - top) / total / heads : kWorst;
  }
}

double Norm(std::span<const float> x) {
  double squares = 0;
  for (float value : x) squares += double{value} * value;
  return std::sqrt(squares);
}

}  // namespace

Turn MeanTurn(float angle, std::int32_t first, std::uint32_t n) {
  const double half = double{angle} / 2;
  const double middle = double{angle} * (first + (n - 1.0) / 2);
  // The sum of a geometric series of turns (Dirichlet's kernel).
  const double length = std::abs(half) < 1e-12 ? 1 : std::sin(n * half) / (n * std::sin(half));
  return {length * std::cos(middle), length * std::sin(middle)};
}

void ExpectedAttention(const Layer& layer, const Head& head,
                       const ExpectedAttentionOptions& options, std::span<float> score) {
  const std::uint32_t n_sink = std::min(options.n_sink, head.n), heads = head.queries.n_head;
  const double scale = layer.scale != 0 ? layer.scale : 1 / std::sqrt(double(head.k.dim));
  std::vector<Turn> turns;
  for (float angle : layer.rope.angle) {
    turns.push_back(MeanTurn(angle, layer.next_position, options.n_future));
  }
  std::vector<float> row(std::max(head.k.dim, head.v.dim));
  const std::span<float> k = std::span(row).first(head.k.dim);
  const auto norm = [&](const Rows& rows, std::uint32_t i) {
    rows.Load(i, row.data());
    return Norm(std::span(row).first(rows.dim));
  };
  std::vector<double> exponents(std::size_t{head.n - n_sink} * heads);
  for (std::uint32_t i = n_sink; i < head.n; ++i) {
    head.k.Load(i, k.data());
    TurnBack(layer.rope, turns, k);
    Exponents(head.queries, k, scale, &exponents[std::size_t{i - n_sink} * heads]);
  }
  std::vector<double> attention(head.n - n_sink);
  for (std::uint32_t h = 0; h < heads; ++h) AddSoftmax(exponents, h, heads, attention);
  float top = 0;
  for (std::uint32_t i = n_sink; i < head.n; ++i) {
    const double worth = attention[i - n_sink] + options.epsilon;
    score[i] = FiniteOrWorst(options.use_vnorm ? worth * norm(head.v, i) : worth);
    top = std::max(top, score[i]);
  }
  for (std::uint32_t i = 0; i < n_sink; ++i) {
    const double size = norm(head.k, i) + (options.use_vnorm ? norm(head.v, i) : 0);
    score[i] = std::isfinite(size) ? top : kWorst;
  }
}

}  // namespace kvtamp::policy
