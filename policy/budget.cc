#include "policy/budget.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "policy/select.h"

namespace kvtamp::policy {
namespace {

std::uint64_t Sum(std::span<const std::uint32_t> x) {
  return std::accumulate(x.begin(), x.end(), std::uint64_t{0});
}

// The largest multiplier of the weights whose clamped parts do not pass `total`.
double Multiplier(std::span<const double> weights, std::span<const std::uint32_t> low,
                  std::span<const std::uint32_t> high, std::uint64_t total) {
  const auto sum = [&](double lambda) {
    double parts = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      parts += std::clamp<double>(lambda * weights[i], low[i], high[i]);
    }
    return parts;
  };
  double below = 0, above = 1;
  for (int i = 0; i < 64 && sum(above) <= static_cast<double>(total); ++i) above *= 2;
  for (int i = 0; i < 200; ++i) {
    const double middle = (below + above) / 2;
    (sum(middle) <= static_cast<double>(total) ? below : above) = middle;
  }
  return below;
}

std::uint32_t Floor(const HeadEntries& head) {
  const auto n = std::count_if(head.is_protected.begin(), head.is_protected.end(),
                               [](std::uint8_t p) { return p != 0; });
  return std::max(static_cast<std::uint32_t>(n), std::min(head.n, 1u));
}

// Weights by layer of what is shared beyond the floors: an arithmetic series whose mean is the mean
// layer's share, cut where its first layer has no more entries to keep.
std::vector<double> Pyramid(std::uint32_t n_layers, double mean, double room, double beta) {
  double last = mean / beta, first = 2 * mean - last;
  if (first > room) {
    first = std::max(room, mean);
    last = 2 * mean - first;
  }
  std::vector<double> weights(n_layers, mean);
  for (std::uint32_t il = 0; il < n_layers && n_layers > 1; ++il) {
    weights[il] = first + (last - first) * il / (n_layers - 1);
  }
  return weights;
}

std::vector<std::uint32_t> PyramidShares(const BudgetOptions& options, std::uint32_t n_layers,
                                         std::span<const std::uint32_t> low,
                                         std::span<const std::uint32_t> high, std::uint64_t total) {
  const std::size_t n_heads = low.size() / n_layers;
  std::vector<std::uint32_t> none(low.size()), room(low.size());
  for (std::size_t i = 0; i < low.size(); ++i) room[i] = high[i] - low[i];
  std::uint64_t layer_room = Sum(room);  // of the layer that has least
  for (std::uint32_t il = 0; il < n_layers; ++il) {
    layer_room = std::min(layer_room, Sum(std::span(room).subspan(il * n_heads, n_heads)));
  }
  const std::uint64_t excess = total - Sum(low);
  const auto by_layer = Pyramid(n_layers, static_cast<double>(excess) / n_layers,
                                static_cast<double>(layer_room), options.beta);
  std::vector<double> weights(low.size());
  for (std::size_t i = 0; i < low.size(); ++i) weights[i] = by_layer[i / n_heads];
  std::vector<std::uint32_t> keep = Apportion(weights, none, room, excess);
  for (std::size_t i = 0; i < low.size(); ++i) keep[i] += low[i];
  return keep;
}

// An entry that competes with those of other heads.
struct Rival {
  float score;
  std::uint32_t index, head;
  bool operator<(const Rival& other) const {  // better first
    if (score != other.score) return score > other.score;
    return index != other.index ? index > other.index : head < other.head;
  }
};

// Entries of a head beyond its `safe` ones: its protected and its best.
void AddRivals(const HeadEntries& head, std::uint32_t h, std::uint32_t safe,
               std::vector<Rival>& rivals) {
  std::vector<std::uint8_t> taken(head.n);
  if (safe > 0) {
    for (std::uint32_t i : SelectKept(head.scores, head.is_protected, safe)) taken[i] = 1;
  }
  for (std::uint32_t i = 0; i < head.n; ++i) {
    if (taken[i] == 0) rivals.push_back({FiniteOrWorst(head.scores[i]), i, h});
  }
}

void ShareByScore(std::span<const HeadEntries> heads, double alpha,
                  std::span<const std::uint32_t> low, std::span<std::uint32_t> keep) {
  const std::uint64_t total = Sum(keep);
  const std::size_t n_heads = heads.size();
  std::vector<std::uint32_t> safe(n_heads);
  const double share =
      std::floor(alpha * static_cast<double>(total) / static_cast<double>(n_heads));
  for (std::size_t h = 0; h < n_heads; ++h) {
    safe[h] = std::min(heads[h].n, std::max(low[h], static_cast<std::uint32_t>(share)));
  }
  if (Sum(safe) > total) {  // one head's protected entries left no room for the others' safeguard
    safe = Apportion(std::vector<double>(n_heads, 1), low, safe, total);
  }
  std::vector<Rival> rivals;
  for (std::uint32_t h = 0; h < n_heads; ++h) AddRivals(heads[h], h, safe[h], rivals);
  const auto end = rivals.begin() + static_cast<std::ptrdiff_t>(total - Sum(safe));
  std::nth_element(rivals.begin(), end, rivals.end());
  std::copy(safe.begin(), safe.end(), keep.begin());
  for (auto rival = rivals.begin(); rival != end; ++rival) keep[rival->head]++;
}

Status Check(const BudgetOptions& o, std::uint32_t n_layers, std::span<const HeadEntries> heads) {
  if (!(o.keep_ratio > 0 && o.keep_ratio <= 1)) {
    return Status::Invalid("keep_ratio must be above 0 and at most 1");
  }
  if (!(o.beta >= 1 && std::isfinite(o.beta))) return Status::Invalid("beta must be at least 1");
  if (!(o.alpha_safeguard >= 0 && o.alpha_safeguard <= 1)) {
    return Status::Invalid("alpha_safeguard must be from 0 to 1");
  }
  if (n_layers == 0 || heads.size() % n_layers != 0) {
    return Status::Invalid("each layer must have the same number of heads");
  }
  for (const HeadEntries& head : heads) {
    if (!head.is_protected.empty() && head.is_protected.size() != head.n) {
      return Status::Invalid("there must be a protection for each entry");
    }
    if (o.ada && head.scores.size() != head.n) {
      return Status::Invalid("adakv needs a score for each entry");
    }
  }
  return Status::Ok();
}

}  // namespace

Status ParseBudget(std::string_view name, BudgetOptions& options) {
  for (const bool pyramid : {false, true}) {
    for (const bool ada : {false, true}) {
      BudgetOptions named = options;
      named.pyramid = pyramid;
      named.ada = ada;
      if (name != BudgetName(named)) continue;
      options = named;
      return Status::Ok();
    }
  }
  return Status::Invalid("unknown budget \"" + std::string(name) +
                         "\"; there are uniform, pyramidkv, adakv and pyramidkv+adakv");
}

std::string BudgetName(const BudgetOptions& options) {
  if (!options.pyramid) return options.ada ? "adakv" : "uniform";
  return options.ada ? "pyramidkv+adakv" : "pyramidkv";
}

std::vector<std::uint32_t> Apportion(std::span<const double> weights,
                                     std::span<const std::uint32_t> low,
                                     std::span<const std::uint32_t> high, std::uint64_t total) {
  const std::size_t n = weights.size();
  total = std::clamp(total, Sum(low), Sum(high));
  // A weight of 0 still takes what no other has room for.
  const double most = n == 0 ? 0 : *std::max_element(weights.begin(), weights.end());
  std::vector<double> positive(n);
  for (std::size_t i = 0; i < n; ++i) {
    positive[i] = most > 0 ? std::max(weights[i] / most, 1e-9) : 1;
  }
  const double lambda = Multiplier(positive, low, high, total);
  std::vector<std::uint32_t> parts(n);
  std::vector<double> fractions(n);
  std::vector<std::size_t> order(n);
  for (std::size_t i = 0; i < n; ++i) {
    const double part = std::clamp<double>(lambda * positive[i], low[i], high[i]);
    parts[i] = static_cast<std::uint32_t>(part);
    // Parts that are equal but for rounding are not to be ordered by it.
    fractions[i] = std::round((part - parts[i]) * 1e6);
    order[i] = i;
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return fractions[a] > fractions[b]; });
  // What is left is the sum of the fractions: fewer than there are parts with one, which have room.
  const std::uint64_t left = total - Sum(parts);
  for (std::uint64_t i = 0; i < left; ++i) parts[order[i]]++;
  return parts;
}

Result<Budget> Allocate(const BudgetOptions& options, std::uint32_t n_layers,
                        std::span<const HeadEntries> heads) {
  if (Status status = Check(options, n_layers, heads); !status.ok()) return status;
  std::vector<std::uint32_t> low, high;
  for (const HeadEntries& head : heads) {
    low.push_back(Floor(head));
    high.push_back(head.n);
  }
  Budget budget;
  budget.asked = options.target_size > 0
                     ? static_cast<double>(options.target_size) * static_cast<double>(heads.size())
                     : options.keep_ratio * static_cast<double>(Sum(high));
  // 0.29 * 100 is a little less than 29.
  const auto rounded = static_cast<std::uint64_t>(budget.asked * (1 + 1e-12));
  budget.total = std::min(std::max(rounded, Sum(low)), Sum(high));
  budget.raised = budget.total - std::min(budget.total, rounded);
  budget.keep = options.pyramid
                    ? PyramidShares(options, n_layers, low, high, budget.total)
                    : Apportion(std::vector<double>(heads.size(), 1), low, high, budget.total);
  const std::size_t n_heads = heads.size() / n_layers;
  for (std::size_t i = 0; options.ada && i < heads.size(); i += n_heads) {
    ShareByScore(heads.subspan(i, n_heads), options.alpha_safeguard,
                 std::span(low).subspan(i, n_heads), std::span(budget.keep).subspan(i, n_heads));
  }
  return budget;
}

}  // namespace kvtamp::policy
