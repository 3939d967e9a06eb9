#include "policy/demote.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace kvtamp::policy {
namespace {

// So that what is worth nothing is served last, but is served: bytes nobody else wants are its.
constexpr double kLeastMass = 1e-30;

double MassOf(const Unit& unit) {
  return std::isfinite(unit.mass) ? std::max(double{unit.mass}, kLeastMass) : kLeastMass;
}

// From one precision of a unit to a more exact one.
struct Step {
  std::uint32_t unit;
  std::uint8_t from, to;
  std::uint32_t bytes;
  double gain;  // distortion it takes away
  double rate;  // gain per byte

  bool operator<(const Step& other) const {  // the higher rate first
    if (rate != other.rate) return rate > other.rate;
    return unit != other.unit ? unit < other.unit : from > other.from;
  }
};

Step StepOf(PrecisionTable table, const Unit& unit, std::uint32_t index, std::uint8_t from,
            std::uint8_t to) {
  const std::uint32_t bytes = table[to].bytes - table[from].bytes;
  const double gain = MassOf(unit) * (double{table[from].error} - table[to].error);
  return {index, from, to, bytes, gain, gain / bytes};
}

// The steps along the unit's hull, from its last precision on.
void AddHull(PrecisionTable table, const Unit& unit, std::uint32_t index,
             std::vector<Step>& steps) {
  std::uint8_t at = unit.last;
  double before = std::numeric_limits<double>::infinity();
  while (at > unit.first) {
    Step best = StepOf(table, unit, index, at, static_cast<std::uint8_t>(at - 1));
    for (int to = at - 2; to >= unit.first; --to) {
      const Step step = StepOf(table, unit, index, at, static_cast<std::uint8_t>(to));
      if (step.rate >= best.rate) best = step;
    }
    if (best.gain <= 0) return;                        // nothing to gain with more bytes
    best.rate = before = std::min(before, best.rate);  // rounding must not swap steps of one line
    steps.push_back(best);
    at = best.to;
  }
}

Status Check(std::span<const PrecisionTable> tables, std::span<const Unit> units) {
  for (const PrecisionTable table : tables) {
    for (std::size_t i = 0; i < table.size(); ++i) {
      if (!(std::isfinite(table[i].error) && table[i].error >= 0)) {
        return Status::Invalid("errors of precisions must be finite and 0 or more");
      }
      if (i > 0 && (table[i].bytes >= table[i - 1].bytes || table[i].error < table[i - 1].error)) {
        return Status::Invalid("precisions must go from the most exact to the least");
      }
    }
  }
  for (const Unit& unit : units) {
    if (unit.table >= tables.size() || unit.first > unit.last ||
        unit.last >= tables[unit.table].size()) {
      return Status::Invalid("a page may only have precisions of its table");
    }
  }
  return Status::Ok();
}

class Planner {
 public:
  Planner(std::span<const PrecisionTable> tables, std::span<const Unit> units, std::uint64_t budget)
      : tables_(tables), units_(units), budget_(budget) {
    for (const Unit& unit : units_) {
      plan_.precision.push_back(unit.last);
      plan_.bytes += tables_[unit.table][unit.last].bytes;
    }
  }

  std::uint64_t least_bytes() const { return plan_.bytes; }

  Plan Run() {
    std::vector<Step> steps;
    for (std::uint32_t i = 0; i < units_.size(); ++i) {
      AddHull(tables_[units_[i].table], units_[i], i, steps);
    }
    std::sort(steps.begin(), steps.end());
    for (const Step& step : steps) {
      if (step.bytes <= left()) {
        // A step whose predecessor did not fit has no ground to start from.
        if (plan_.precision[step.unit] == step.from) Take(step);
      } else if (!cut_) {
        cut_ = true;
        plan_.bound = Distortion() - step.gain * static_cast<double>(left()) / step.bytes;
      }
    }
    for (const Step& step : steps) FillUp(step.unit);
    plan_.distortion = Distortion();
    if (!cut_) plan_.bound = plan_.distortion;
    return std::move(plan_);
  }

 private:
  std::uint64_t left() const { return budget_ - plan_.bytes; }

  void Take(const Step& step) {
    plan_.precision[step.unit] = step.to;
    plan_.bytes += step.bytes;
  }

  // Off the hull: the best of what still fits.
  void FillUp(std::uint32_t index) {
    const Unit& unit = units_[index];
    const PrecisionTable table = tables_[unit.table];
    for (std::uint8_t to = unit.first; to < plan_.precision[index]; ++to) {
      const Step step = StepOf(table, unit, index, plan_.precision[index], to);
      if (step.bytes <= left() && step.gain > 0) return Take(step);
    }
  }

  double Distortion() const {
    double sum = 0;
    for (std::size_t i = 0; i < units_.size(); ++i) {
      sum += MassOf(units_[i]) * tables_[units_[i].table][plan_.precision[i]].error;
    }
    return sum;
  }

  std::span<const PrecisionTable> tables_;
  std::span<const Unit> units_;
  std::uint64_t budget_;
  Plan plan_;
  bool cut_ = false;
};

}  // namespace

Result<Plan> PlanPrecisions(std::span<const PrecisionTable> tables, std::span<const Unit> units,
                            std::uint64_t budget) {
  if (Status status = Check(tables, units); !status.ok()) return status;
  Planner planner(tables, units, budget);
  if (planner.least_bytes() > budget) {
    return Status::OutOfMemory("the pages need " + std::to_string(planner.least_bytes()) +
                               " bytes at the least precision allowed, the budget is " +
                               std::to_string(budget));
  }
  return planner.Run();
}

std::vector<float> PageMasses(std::span<const float> scores, std::uint32_t page_size) {
  double shift = 0;
  for (float s : scores) {
    if (std::isfinite(s)) shift = std::max(shift, -double{s});
  }
  std::vector<float> masses((scores.size() + page_size - 1) / page_size);
  for (std::size_t page = 0; page < masses.size(); ++page) {
    const std::size_t begin = page * page_size;
    double sum = 0;
    for (float s : scores.subspan(begin, std::min<std::size_t>(page_size, scores.size() - begin))) {
      if (std::isfinite(s)) sum += s + shift;
    }
    masses[page] = static_cast<float>(sum);
  }
  return masses;
}

}  // namespace kvtamp::policy
