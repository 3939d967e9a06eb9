// What fits: contexts, users and bytes for each type of the cache, from the curves of a filled
// store. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "control/settings.h"
#include "tools/kvtamp/layout.h"
#include "tools/kvtamp/stored_size.h"

namespace kvtamp::tool {

// Short names from the best to the smallest, by what they lose (docs/quality.md; the two of 6 bits by
// their size). It begins where
// no loss can be seen: f16 would take twice the bytes for nothing.
std::span<const char* const> QualityLadder();

inline constexpr std::uint32_t kMaxUsers = 256;  // the host's most sequences

// One type of the cache, and what it takes.
struct PlanType {
  std::string name;
  control::Settings settings;
  SizeCurve curve;
  std::uint64_t state_bytes = 0;  // of each user, beside the cache

  // Bytes that must be there for so many users of so many tokens each: at the worst moment, with
  // what the host keeps as it is.
  double Needed(std::uint64_t n_ctx, std::uint64_t n_users) const;
  // Tokens of each, a multiple of kCellsPad; 0: none fits. kMaxContext: all do.
  std::uint64_t LongestContext(std::uint64_t n_users, double budget) const;
  // Up to kMaxUsers.
  std::uint64_t MostUsers(std::uint64_t n_ctx, double budget) const;
};
Result<PlanType> MakePlanType(const std::string& name, const control::Settings& settings,
                              const ModelLayout& layout, const Sharing& sharing);

struct PlanQuestion {
  std::optional<std::uint64_t> n_ctx = {}, n_users = {}, budget = {};
  std::uint64_t n_ctx_asked = 0;  // n_ctx before it was padded as the host pads it
  bool type_chosen = false;       // by the user: types[chosen] it is
};

enum class Solved { kBudget, kContext, kUsers, kType, kNothing };
const char* SolvedName(
    Solved solved);  // "budget_bytes", "n_ctx", "n_users", "cache_type", "nothing"

struct PlanAnswer {
  Solved solved = Solved::kNothing;
  std::size_t type = 0;  // index
  std::uint64_t n_ctx = 0, n_users = 1;
  bool fits = true;  // false: in the budget given; type, n_ctx and n_users are then as asked
  double needed = 0;
  std::string why;  // how it was found, or what would fit: sentences
};

// Not asked for and not to be solved are taken: one user, the context the model was trained for.
// `types`: `usual` is the index of the type that is taken where nothing else decides; `ladder` are
// indices from the best down.
PlanAnswer Solve(const PlanQuestion& question, const ModelLayout& layout,
                 const std::vector<PlanType>& types, std::size_t usual,
                 const std::vector<std::size_t>& ladder);

// "32,768"
std::string Thousands(std::uint64_t n);

}  // namespace kvtamp::tool
