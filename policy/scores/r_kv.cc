#include "policy/scores/r_kv.h"

#include <vector>

#include "policy/scores/keydiff.h"
#include "policy/scores/pool.h"

namespace kvtamp::policy {
namespace {

double Dot(const float* a, const float* b, std::uint32_t dim) {
  float sum = 0;
  for (std::uint32_t c = 0; c < dim; ++c) sum += a[c] * b[c];
  return sum;
}

// Takes the term of key i off the n_retain newest keys that look like it.
void RetainNewest(const UnitRows& unit, std::uint32_t dim, std::uint32_t i,
                  const RKvOptions& options, std::vector<double>& sums) {
  std::uint32_t found = 0;
  for (std::size_t j = sums.size(); j-- > 0 && found < options.n_retain;) {
    if (j == i) continue;
    const double cosine = Dot(unit.x.data() + std::size_t{i} * dim, unit.x.data() + j * dim, dim);
    if (cosine <= options.threshold) continue;
    sums[j] -= cosine;
    ++found;
  }
}

}  // namespace

void Redundancy(const Head& head, const RKvOptions& options, std::span<float> redundancy) {
  const std::uint32_t n = head.n, dim = head.k.dim;
  const UnitRows unit = Normalise(head.k);
  std::vector<double> sums(n);
  for (std::uint32_t i = 0; i < n; ++i) {
    const float* k = unit.x.data() + std::size_t{i} * dim;
    for (std::uint32_t c = 0; c < dim; ++c) sums[i] += k[c] * (unit.sum[c] - k[c]);
  }
  for (std::uint32_t i = 0; i < n; ++i) RetainNewest(unit, dim, i, options, sums);
  double total = 0;  // means of cosines: exp() needs no maximum taken off
  for (std::uint32_t i = 0; i < n; ++i) {
    sums[i] = unit.finite[i] != 0 ? std::exp(sums[i] / n) : 0;
    total += sums[i];
  }
  for (std::uint32_t i = 0; i < n; ++i) {
    redundancy[i] = total > 0 ? static_cast<float>(sums[i] / total) : 0;
  }
}

void RKv(const Head& head, std::uint32_t window_queries, const RKvOptions& options,
         std::span<float> score) {
  std::vector<float> redundancy(head.n);
  Redundancy(head, options, redundancy);
  for (std::uint32_t i = 0; i < head.n; ++i) {
    score[i] = head.attention_window[i] / static_cast<float>(window_queries);
  }
  Smooth(Pool::kMax, options.kernel, score);
  for (std::uint32_t i = 0; i < head.n; ++i) {
    const bool finite = redundancy[i] > 0;
    const double mixed =
        double{options.lambda} * score[i] - (1 - double{options.lambda}) * redundancy[i];
    score[i] = finite ? FiniteOrWorst(mixed) : kWorst;
  }
  KeepWindow(options.window, score);
}

}  // namespace kvtamp::policy
