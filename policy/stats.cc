#include "policy/stats.h"

#include <algorithm>

namespace kvtamp::policy {
namespace {

struct NamedNeed {
  Needs need;
  const char* name;
};

constexpr NamedNeed kNames[] = {
    {kPositions, "positions"},
    {kAttentionSum, "attention_sum"},
    {kAttentionRows, "attention_rows"},
    {kAttentionWindow, "attention_window"},
    {kAttentionLast, "attention_last"},
    {kAttentionMax, "attention_max"},
    {kK, "k"},
    {kV, "v"},
    {kQueries, "queries"},
};

bool Holds(const Rows& rows, std::uint32_t n) {
  return !rows.empty() && rows.n == n && rows.dim > 0 && rows.stride >= rows.dim;
}

bool Holds(const Layer& layer, const Head& head, Needs need) {
  const std::uint32_t n = head.n;
  switch (need) {
    case kPositions:
      return head.positions.size() == n;
    case kAttentionSum:
      return head.attention_sum.size() == n;
    case kAttentionRows:
      return head.attention_rows.size() == n;
    case kAttentionWindow:
      return head.attention_window.size() == n && layer.window_queries > 0;
    case kAttentionLast:
      return head.attention_last.size() == n;
    case kAttentionMax:
      return head.attention_max.size() == n;
    case kK:
      return Holds(head.k, n);
    case kV:
      return Holds(head.v, n);
    default: {
      const Queries& q = head.queries;
      const std::size_t size = std::size_t{q.n_head} * head.k.dim;
      return size > 0 && q.mean.size() == size && q.variance.size() == size &&
             2 * layer.rope.angle.size() <= head.k.dim;
    }
  }
}

}  // namespace

void Rows::Load(std::uint32_t row, float* out) const {
  if (f32 != nullptr) {
    std::copy_n(f32 + row * stride, dim, out);
    return;
  }
  const half_t* from = f16 + row * stride;
  for (std::uint32_t c = 0; c < dim; ++c) out[c] = HalfToFloat(from[c]);
}

std::string NeedNames(Needs needs) {
  std::string names;
  for (const NamedNeed& named : kNames) {
    if ((needs & named.need) == 0) continue;
    if (!names.empty()) names += ", ";
    names += named.name;
  }
  return names.empty() ? "nothing" : names;
}

Needs MissingNeed(const Layer& layer, const Head& head, Needs needs) {
  if (head.n == 0) return 0;
  for (const NamedNeed& named : kNames) {
    if ((needs & named.need) != 0 && !Holds(layer, head, named.need)) return named.need;
  }
  return 0;
}

}  // namespace kvtamp::policy
