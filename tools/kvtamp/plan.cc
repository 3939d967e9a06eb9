#include "tools/kvtamp/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "control/stats.h"

namespace kvtamp::tool {
namespace {

constexpr const char* kLadder[] = {"k8v8",   "k4v8", "k8v4",     "k4v4",
                                   "k3.5v3", "k3v3", "k2.5v2.5", "k2v2"};

std::string SizeText(double bytes) {
  return control::BytesText(static_cast<std::uint64_t>(std::llround(bytes)));
}

std::string UsersText(std::uint64_t n) { return n == 1 ? "one user" : fmt::format("{} users", n); }

}  // namespace

std::span<const char* const> QualityLadder() { return kLadder; }

const char* SolvedName(Solved solved) {
  constexpr const char* kNames[] = {"budget_bytes", "n_ctx", "n_users", "cache_type", "nothing"};
  return kNames[static_cast<std::size_t>(solved)];
}

std::string Thousands(std::uint64_t n) {
  std::string text = std::to_string(n);
  for (std::size_t at = text.size(); at > 3;) text.insert(at -= 3, ",");
  return text;
}

// --- PlanType -----------------------------------------------------------------------------------

Result<PlanType> MakePlanType(const std::string& name, const control::Settings& settings,
                              const ModelLayout& layout, const Sharing& sharing) {
  Result<SizeCurve> curve = SizeCurve::Make(layout, settings, sharing);
  if (!curve.ok()) return curve.status();
  return PlanType{name, settings, std::move(curve.value()), layout.state_bytes};
}

double PlanType::Needed(std::uint64_t n_ctx, std::uint64_t n_users) const {
  return static_cast<double>(n_users) *
             (curve.Peak(n_ctx) + curve.Plain(n_ctx) + static_cast<double>(state_bytes)) +
         curve.InFlight();
}

std::uint64_t PlanType::LongestContext(std::uint64_t n_users, double budget) const {
  std::uint64_t fits = 0, does_not = kMaxContext / kCellsPad + 1;
  while (does_not - fits > 1) {
    const std::uint64_t n = fits + (does_not - fits) / 2;
    (Needed(n * kCellsPad, n_users) <= budget ? fits : does_not) = n;
  }
  return fits * kCellsPad;
}

std::uint64_t PlanType::MostUsers(std::uint64_t n_ctx, double budget) const {
  std::uint64_t fits = 0, does_not = kMaxUsers + 1;
  while (does_not - fits > 1) {
    const std::uint64_t n = fits + (does_not - fits) / 2;
    (Needed(n_ctx, n) <= budget ? fits : does_not) = n;
  }
  return fits;
}

// --- Solve --------------------------------------------------------------------------------------

namespace {

class Solver {
 public:
  Solver(const PlanQuestion& question, const ModelLayout& layout,
         const std::vector<PlanType>& types, std::size_t usual,
         const std::vector<std::size_t>& ladder)
      : q_(question),
        layout_(layout),
        types_(types),
        ladder_(question.type_chosen ? std::vector<std::size_t>{usual} : ladder),
        trained_(std::clamp<std::uint64_t>(
            (std::uint64_t{layout.n_ctx_train} + kCellsPad - 1) / kCellsPad * kCellsPad, kCellsPad,
            kMaxContext)) {
    a_.type = usual;
    a_.n_users = q_.n_users.value_or(1);
    a_.n_ctx = q_.n_ctx.value_or(trained_);
  }

  PlanAnswer Run() {
    if (!q_.budget) {
      a_.solved = Solved::kBudget;
    } else if (!q_.n_ctx) {
      SolveContext();
    } else {
      SolveType();
    }
    a_.needed = types_[a_.type].Needed(a_.n_ctx, a_.n_users);
    return a_;
  }

 private:
  double budget() const { return static_cast<double>(*q_.budget); }
  const std::string& name() const { return types_[a_.type].name; }

  // The best type in which so much fits, if any.
  std::optional<std::size_t> Best(std::uint64_t n_ctx, std::uint64_t n_users) const {
    for (const std::size_t i : ladder_)
      if (types_[i].Needed(n_ctx, n_users) <= budget()) return i;
    return std::nullopt;
  }

  void SolveContext() {
    a_.solved = Solved::kContext;
    // All that the model was trained for: then the best type for it.
    if (layout_.n_ctx_train > 0 && Best(trained_, a_.n_users)) {
      a_.type = *Best(trained_, a_.n_users);
      a_.n_ctx = trained_;
      const std::uint64_t most = types_[a_.type].LongestContext(a_.n_users, budget());
      a_.why = fmt::format("The whole context that the model was trained for fits in {}.", name());
      if (most > a_.n_ctx && most < kMaxContext)
        a_.why += fmt::format(" The budget would do for {} tokens.", Thousands(most));
      if (most >= kMaxContext) a_.why += " The cache does not grow beyond its windows.";
      return;
    }
    a_.n_ctx = types_[a_.type].LongestContext(a_.n_users, budget());
    if (a_.n_ctx > 0) {
      a_.why = fmt::format("The longest context that fits in {}.", name());
      if (const std::uint64_t least = Longest(ladder_.back()); least > a_.n_ctx)
        a_.why += fmt::format(" In {} it would be {} tokens.", types_[ladder_.back()].name,
                              Thousands(least));
      return;
    }
    for (const std::size_t i : ladder_) {
      if (Longest(i) == 0) continue;
      a_.type = i;
      a_.n_ctx = Longest(i);
      a_.why = fmt::format("The best type of which a context fits at all is {}.", name());
      return;
    }
    a_.n_ctx = kCellsPad;
    NothingFits();
  }

  // Context and budget are given; users may be.
  void SolveType() {
    const bool users = q_.n_users.has_value();
    a_.solved = q_.type_chosen ? (users ? Solved::kNothing : Solved::kUsers)
                               : (users ? Solved::kType : Solved::kUsers);
    const auto best = Best(a_.n_ctx, a_.n_users);
    if (!best) return NothingFits();
    a_.type = *best;
    if (!users) a_.n_users = types_[a_.type].MostUsers(a_.n_ctx, budget());
    const std::string text =
        fmt::format("{} tokens for {}", Thousands(a_.n_ctx), UsersText(a_.n_users));
    a_.why = q_.type_chosen ? fmt::format("{} fit in {}.", text, name())
                            : fmt::format("The best type in which {} fit is {}.", text, name());
    if (!users && !q_.type_chosen && a_.type != ladder_.back()) {
      const PlanType& least = types_[ladder_.back()];
      a_.why += fmt::format(" In {} there would be room for {}.", least.name,
                            UsersText(least.MostUsers(a_.n_ctx, budget())));
    }
  }

  std::uint64_t Longest(std::size_t type) const {
    return types_[type].LongestContext(a_.n_users, budget());
  }

  void NothingFits() {
    a_.fits = false;
    a_.type = ladder_.back();
    const PlanType& least = types_[a_.type];
    a_.why = fmt::format("{} tokens for {} do not fit in {}: {} needs {}.", Thousands(a_.n_ctx),
                         UsersText(a_.n_users), SizeText(budget()),
                         ladder_.size() > 1 ? "even " + least.name : least.name,
                         SizeText(least.Needed(a_.n_ctx, a_.n_users)));
    std::vector<std::string> would;
    if (const std::uint64_t n = Longest(a_.type); n > 0 && n < a_.n_ctx)
      would.push_back(fmt::format("{} tokens", Thousands(n)));
    if (const std::uint64_t n = least.MostUsers(a_.n_ctx, budget()); n > 0 && n < a_.n_users)
      would.push_back(UsersText(n));
    if (q_.type_chosen) would.emplace_back("perhaps a smaller type (the table tells)");
    for (std::size_t i = 0; i < would.size(); ++i)
      a_.why += (i == 0 ? " What would fit: " : i + 1 == would.size() ? " or " : ", ") + would[i];
    if (!would.empty()) a_.why += ".";
  }

  const PlanQuestion& q_;
  const ModelLayout& layout_;
  const std::vector<PlanType>& types_;
  const std::vector<std::size_t> ladder_;
  const std::uint64_t trained_;
  PlanAnswer a_;
};

}  // namespace

PlanAnswer Solve(const PlanQuestion& question, const ModelLayout& layout,
                 const std::vector<PlanType>& types, std::size_t usual,
                 const std::vector<std::size_t>& ladder) {
  return Solver(question, layout, types, usual, ladder).Run();
}

}  // namespace kvtamp::tool
