#include "tools/kvtamp/divergence.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace kvtamp::tool {
namespace {

struct Mean {
  double value = 0;
  double se = 0;
};

Mean MeanOf(double sum, double sum_of_squares, double n) {
  const double mean = sum / n;
  const double variance = sum_of_squares / n - mean * mean;
  return {mean, n > 1 && variance > 0 ? std::sqrt(variance / (n - 1)) : 0};
}

}  // namespace

double Quantile(const std::vector<double>& sorted, double q) {
  const double at = q * static_cast<double>(sorted.size() - 1);
  const auto i = static_cast<std::size_t>(at);
  const double part = at - static_cast<double>(i);
  return (1 - part) * sorted[i] + part * sorted[std::min(i + 1, sorted.size() - 1)];
}

Score ScoreLogits(std::span<const float> base, std::span<const float> tested, int token) {
  const std::size_t n = base.size();
  const auto top_base = std::max_element(base.begin(), base.end());
  const auto top = std::max_element(tested.begin(), tested.end());
  const float max_base = *top_base;
  const float max = *top;
  double sum_base = 0, sum = 0, weighted = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const float x = base[i] - max_base;
    const float y = tested[i] - max;
    const double e = std::exp(x);
    sum_base += e;
    sum += std::exp(y);
    weighted += e * (static_cast<double>(x) - static_cast<double>(y));
  }
  const double lse_base = std::log(sum_base);
  const double lse = std::log(sum);
  const auto t = static_cast<std::size_t>(token);

  Score score;
  score.nll_base = lse_base - static_cast<double>(base[t] - max_base);
  score.nll = lse - static_cast<double>(tested[t] - max);
  score.kld = weighted / sum_base - lse_base + lse;
  score.dp = std::exp(-score.nll) - std::exp(-score.nll_base);
  score.same_top = top - tested.begin() == top_base - base.begin();
  return score;
}

Divergence Summarize(std::span<const Score> scores) {
  Divergence d;
  d.n = scores.size();
  if (scores.empty()) return d;
  const auto n = static_cast<double>(scores.size());
  double nll = 0, nll2 = 0, base = 0, base2 = 0, both = 0, kld = 0, kld2 = 0, dp2 = 0, dp4 = 0,
         same = 0;
  std::vector<double> klds;
  klds.reserve(scores.size());
  for (const Score& s : scores) {
    nll += s.nll;
    nll2 += s.nll * s.nll;
    base += s.nll_base;
    base2 += s.nll_base * s.nll_base;
    const double log_ratio = s.nll - s.nll_base;
    both += log_ratio * log_ratio;
    kld += s.kld;
    kld2 += s.kld * s.kld;
    dp2 += s.dp * s.dp;
    dp4 += s.dp * s.dp * s.dp * s.dp;
    same += s.same_top ? 1 : 0;
    klds.push_back(s.kld);
  }
  const Mean log_ppl = MeanOf(nll, nll2, n);
  d.ppl = std::exp(log_ppl.value);
  d.ppl_se = d.ppl * log_ppl.se;
  const Mean log_base = MeanOf(base, base2, n);
  d.ppl_base = std::exp(log_base.value);
  d.ppl_base_se = d.ppl_base * log_base.se;
  const Mean log_ratio = MeanOf(nll - base, both, n);
  d.ppl_ratio = std::exp(log_ratio.value);
  d.ppl_ratio_se = d.ppl_ratio * log_ratio.se;
  const Mean mean_kld = MeanOf(kld, kld2, n);
  d.kld_mean = mean_kld.value;
  d.kld_se = mean_kld.se;
  const Mean square = MeanOf(dp2, dp4, n);
  d.rms_dp = std::sqrt(square.value);
  d.rms_dp_se = d.rms_dp > 0 ? 0.5 / d.rms_dp * square.se : 0;
  d.same_top_p = same / n;
  d.same_top_p_se = n > 1 ? std::sqrt(d.same_top_p * (1 - d.same_top_p) / (n - 1)) : 0;
  std::sort(klds.begin(), klds.end());
  d.kld_median = Quantile(klds, 0.5);
  d.kld_p99 = Quantile(klds, 0.99);
  d.kld_p999 = Quantile(klds, 0.999);
  d.kld_max = klds.back();
  return d;
}

}  // namespace kvtamp::tool
