// How many entries each KV head of each layer keeps.
//
//   BUDGET = "uniform" | "pyramidkv" | "adakv" | "pyramidkv+adakv"
//
// uniform: each head the same number. pyramidkv (PyramidKV, arXiv:2406.02069): what is left after
// the protected entries falls evenly from the first layer to the last, which gets 1 / beta of the
// mean. adakv (Ada-KV, arXiv:2407.11550): a layer's entries go to its heads as the best of all of
// them together do, each head being safe of alpha_safeguard times its equal share. (That is
// kvpress's reading of the safeguard; the paper's mixes both shares.)
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kvtamp::policy {

struct BudgetOptions {
  double keep_ratio = 1;          // of all entries, above 0 and up to 1
  std::uint32_t target_size = 0;  // entries of a head, on average; 0: by keep_ratio
  bool pyramid = false;
  bool ada = false;
  double beta = 20;              // at least 1, which is uniform
  double alpha_safeguard = 0.2;  // 0 to 1, which is uniform
};
// Sets pyramid and ada.
Status ParseBudget(std::string_view name, BudgetOptions& options);
std::string BudgetName(const BudgetOptions& options);

// What a head has now. Its scores are to be comparable with those of other heads (PolicyInfo::
// attention) for `ada`, the only one that looks at them.
struct HeadEntries {
  std::uint32_t n = 0;
  std::span<const float> scores;               // [n], or empty
  std::span<const std::uint8_t> is_protected;  // [n], or empty for none
};

struct Budget {
  std::vector<std::uint32_t> keep;  // [n_layers * n_heads]
  double asked = 0;                 // entries, before rounding
  // The sum of keep: `asked` rounded down, but no less than what is protected, nor than one of each
  // head that has entries; raised: by how many that made it more.
  std::uint64_t total = 0, raised = 0;
};

// heads: [n_layers, n_heads]. Each head keeps from its protected entries (at least 1, if it has
// any) to all it has. Invalid for options out of range, or sizes that do not fit. Costs the number
// of entries for `ada`, else that of heads, times its logarithm.
Result<Budget> Allocate(const BudgetOptions& options, std::uint32_t n_layers,
                        std::span<const HeadEntries> heads);

// Parts that add up to `total` exactly, in proportion to `weights` (0 or more) as far as low[i] and
// high[i] let them. What rounding leaves goes to the largest fractions, of equal ones to the first.
// `total` is first brought between the sums of low and of high. All the same size.
std::vector<std::uint32_t> Apportion(std::span<const double> weights,
                                     std::span<const std::uint32_t> low,
                                     std::span<const std::uint32_t> high, std::uint64_t total);

}  // namespace kvtamp::policy
