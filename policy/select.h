// Which entries of a head stay, from scores, protections and a number.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policy/stats.h"

namespace kvtamp::policy {

// Tokens that may never be evicted, by position.
struct Protection {
  std::uint32_t n_sink = 4;      // positions below it
  std::uint32_t n_recent = 128;  // the newest positions, counted back from the head's newest entry
  // The prompt's tail, where the question stands: positions [n_prompt - n_tail, n_prompt).
  std::uint32_t n_prompt = 0, n_tail = 0;
};

// A stretch of the sequence, a document or a message, of which head and tail stay whatever they
// score; only its middle goes by importance. Positions [begin, end).
struct Segment {
  std::int32_t begin = 0, end = 0;
  std::uint32_t head = 0, tail = 0;
};

// [n], 1 for protected entries. positions: [n], ascending. Segments may overlap.
std::vector<std::uint8_t> Protect(std::span<const std::int32_t> positions,
                                  const Protection& protection,
                                  std::span<const Segment> segments = {});

// The order in which entries stay: higher scores first, of equal ones the newer, after all finite
// ones those that are not.
struct Better {
  std::span<const float> scores;
  bool operator()(std::uint32_t a, std::uint32_t b) const {
    const float x = FiniteOrWorst(scores[a]), y = FiniteOrWorst(scores[b]);
    return x != y ? x > y : a > b;
  }
};

// Indices of the entries that stay, ascending: all protected ones, then the best. `keep` is raised
// to the number of protected entries, and to 1; where it is more than there are, all stay. Empty
// only for a head without entries. `is_protected`: [n], or empty for none. Linear in n on average.
std::vector<std::uint32_t> SelectKept(std::span<const float> scores,
                                      std::span<const std::uint8_t> is_protected,
                                      std::uint32_t keep);

}  // namespace kvtamp::policy
