#include "policy/select.h"

#include <algorithm>

namespace kvtamp::policy {
namespace {

// The positions [begin, end); empty where end <= begin.
struct Stretch {
  std::int64_t begin, end;
  bool Holds(std::int64_t position) const { return position >= begin && position < end; }
};

std::vector<Stretch> Stretches(const Protection& p, std::span<const Segment> segments,
                               std::int64_t newest) {
  std::vector<Stretch> stretches = {
      {0, p.n_sink},
      {newest + 1 - p.n_recent, newest + 1},
      {std::int64_t{p.n_prompt} - p.n_tail, p.n_prompt},
  };
  for (const Segment& s : segments) {
    const std::int64_t begin = s.begin, end = s.end;
    stretches.push_back({begin, std::min(begin + s.head, end)});
    stretches.push_back({std::max(begin, end - s.tail), end});
  }
  return stretches;
}

}  // namespace

std::vector<std::uint8_t> Protect(std::span<const std::int32_t> positions,
                                  const Protection& protection, std::span<const Segment> segments) {
  std::vector<std::uint8_t> is_protected(positions.size());
  if (positions.empty()) return is_protected;
  for (const Stretch& stretch : Stretches(protection, segments, positions.back())) {
    auto at = std::lower_bound(positions.begin(), positions.end(), stretch.begin);
    for (; at != positions.end() && stretch.Holds(*at); ++at)
      is_protected[at - positions.begin()] = 1;
  }
  return is_protected;
}

std::vector<std::uint32_t> SelectKept(std::span<const float> scores,
                                      std::span<const std::uint8_t> is_protected,
                                      std::uint32_t keep) {
  std::vector<std::uint8_t> stays(scores.size());
  std::copy(is_protected.begin(), is_protected.end(), stays.begin());
  std::vector<std::uint32_t> others, kept;
  for (std::uint32_t i = 0; i < stays.size(); ++i) {
    if (stays[i] == 0) others.push_back(i);
  }
  const std::size_t held = stays.size() - others.size(), wanted = std::max<std::size_t>(keep, 1);
  const std::size_t more = std::min(wanted - std::min(wanted, held), others.size());
  const auto end = others.begin() + static_cast<std::ptrdiff_t>(more);
  std::nth_element(others.begin(), end, others.end(), Better{scores});
  for (auto at = others.begin(); at != end; ++at) stays[*at] = 1;
  for (std::uint32_t i = 0; i < stays.size(); ++i) {
    if (stays[i] != 0) kept.push_back(i);
  }
  return kept;
}

}  // namespace kvtamp::policy
