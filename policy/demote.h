// The precision of every page of every head: f16 → 8 → 4 → 2 bits → gone, by score, under one byte
// budget. A page's entries share a format, so the unit is one page of one head.
//
// What is minimised is the sum over units of mass * error, mass being what the scores of its
// entries add up to and error the relative error of the precision. Each unit has a few precisions
// and one is taken: a multiple-choice knapsack. Only precisions on the lower convex hull of (bytes,
// error) can be in an optimal relaxed plan, and along a hull the gain per byte falls; so all steps
// of all units are taken in the order of gain per byte while there is room (Sinha and Zoltners,
// 1979). That is a greedy pass over one sort and not a search for a Lagrange multiplier, because
// the pass passes through the same plans, needs no tolerance, orders ties, and shows the step that
// no longer fits. Bytes left then go to the best single steps that do fit, also off the hull. The
// result is optimal where that first step ends exactly at the budget, else no further from it than
// the gain of that one step, and Plan::bound says how far at most.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace kvtamp::policy {

// What one unit costs at one precision. `error` is relative to losing it: 0 exact, 1 gone.
struct Precision {
  std::uint32_t bytes = 0;
  float error = 0;
};
// Precisions from the most exact to the least (often {0, 1}: gone): bytes fall, errors do not, and
// are finite and 0 or more.
using PrecisionTable = std::span<const Precision>;

// One page of one head.
struct Unit {
  float mass = 0;  // 0 or more; what is not counts as 0, and gets bytes that no other can use
  std::uint32_t table = 0;
  // The precisions allowed, [first, last] of its table: `first` is what it has now, since what was
  // rounded away does not come back; last = first pins it.
  std::uint8_t first = 0, last = 0;
};

struct Plan {
  std::vector<std::uint8_t> precision;  // [units]
  std::uint64_t bytes = 0;              // at most the budget
  double distortion = 0;                // sum of mass * error
  double bound = 0;                     // no plan within the budget has less
};

// Costs s log s for s = units * precisions. Invalid for tables or units as they must not be;
// kOutOfMemory when the budget does not hold even the last precision of each.
Result<Plan> PlanPrecisions(std::span<const PrecisionTable> tables, std::span<const Unit> units,
                            std::uint64_t budget);

// [ceil(n / page_size)] (page_size: at least 1) the masses of the pages of a head: sums of the
// scores of page_size entries, those that are not finite left out. Where scores can be negative the
// least finite one counts as 0.
std::vector<float> PageMasses(std::span<const float> scores, std::uint32_t page_size);

}  // namespace kvtamp::policy
