// How far one model's next-token distributions are from another's: the figures of llama-perplexity
// (perplexity, KL divergence, change of the true token's probability, same top token), in double
// and from full-precision logits. Pure.
#pragma once

#include <span>
#include <vector>

namespace kvtamp::tool {

// One scored position.
struct Score {
  double nll = 0;       // -log p(true token), tested
  double nll_base = 0;  // the same, base
  double kld = 0;       // KL(base || tested) over the whole vocabulary
  double dp = 0;        // p(true token), tested minus base
  bool same_top = false;
};

// `base`, `tested`: logits, [n_vocab]. Equal logits give exactly 0.
Score ScoreLogits(std::span<const float> base, std::span<const float> tested, int token);

// se = standard error, positions taken as independent (they are not, so the true error is larger).
struct Divergence {
  std::size_t n = 0;
  double ppl = 0, ppl_se = 0;
  double ppl_base = 0, ppl_base_se = 0;
  double ppl_ratio = 0, ppl_ratio_se = 0;
  double kld_mean = 0, kld_se = 0;
  double kld_median = 0, kld_p99 = 0, kld_p999 = 0, kld_max = 0;
  double rms_dp = 0, rms_dp_se = 0;
  double same_top_p = 0, same_top_p_se = 0;
};
Divergence Summarize(std::span<const Score> scores);

// Linear between neighbours; `sorted` is not empty.
double Quantile(const std::vector<double>& sorted, double q);

}  // namespace kvtamp::tool
