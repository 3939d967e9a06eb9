#include "policy/scores/keydiff.h"

namespace kvtamp::policy {

UnitRows Normalise(const Rows& rows) {
  UnitRows unit;
  unit.x.resize(std::size_t{rows.n} * rows.dim);
  unit.finite.resize(rows.n);
  unit.sum.resize(rows.dim);
  for (std::uint32_t i = 0; i < rows.n; ++i) {
    const std::span<float> x = std::span(unit.x).subspan(std::size_t{i} * rows.dim, rows.dim);
    rows.Load(i, x.data());
    double squares = 0;
    for (float value : x) squares += double{value} * value;
    unit.finite[i] = std::isfinite(squares) ? 1 : 0;
    const double scale = squares > 0 ? 1 / std::sqrt(squares) : 0;
    for (std::uint32_t c = 0; c < rows.dim; ++c) {
      x[c] = scale == 0 ? 0.0f : static_cast<float>(x[c] * scale);
      unit.sum[c] += x[c];
    }
  }
  return unit;
}

void KeyDiff(const Head& head, std::span<float> score) {
  const UnitRows unit = Normalise(head.k);
  double squares = 0;
  for (double c : unit.sum) squares += c * c;
  const double scale = squares > 0 ? 1 / std::sqrt(squares) : 0;
  for (std::uint32_t i = 0; i < head.n; ++i) {
    const float* k = unit.x.data() + std::size_t{i} * head.k.dim;
    double dot = 0;
    for (std::uint32_t c = 0; c < head.k.dim; ++c) dot += k[c] * unit.sum[c];
    score[i] = unit.finite[i] != 0 ? FiniteOrWorst(-dot * scale) : kWorst;
  }
}

}  // namespace kvtamp::policy
