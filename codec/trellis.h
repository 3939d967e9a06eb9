// kVTrellis, all but the search of a path, which is the caller's (plain or vector code).
#pragma once

#include <cstdint>
#include <vector>

#include "codec/codec.h"

namespace kvtamp::codec {

// A target of nobody: any level will do.
inline constexpr std::int16_t kNoTarget = -32768;

// Scratch of one encoding thread, kept: a page of a head is up to 1.5 MB.
struct TrellisScratch {
  std::vector<float> y;              // [dim][rows], rotated
  std::vector<std::int16_t> target;  // in the order of the string, in level units
  std::vector<std::uint8_t> window;  // the same order
  std::vector<std::uint8_t> back;    // which of the windows before was best, for each value
  std::vector<std::uint8_t> known;   // [rows][groups] scales that need no fitting
};

// What each window's level costs for a target: min(|target - level|, kTrellisErrorCap)².
struct TrellisErrors {
  static constexpr int kMaxTarget = 180;
  // [256]; of kNoTarget all zeros.
  const std::uint16_t* of(std::int16_t target) const {
    return squared[target == kNoTarget ? 2 * kMaxTarget + 1 : target + kMaxTarget];
  }
  alignas(64) std::uint16_t squared[2 * kMaxTarget + 2][256];
};
const TrellisErrors& TrellisErrorsOf(std::uint32_t rate8);

// Windows before one value, at most: bytes of TrellisScratch::back for each.
inline std::uint32_t TrellisBackStride(std::uint32_t rate8) { return 256u >> (rate8 / 8); }

// Viterbi's algorithm over all values of a page in 16-bit integers, exact in the order of every
// step, so that all code gives the same path:
//   m[q] = least cost[q + j * (256 >> b)], j < 2^b the first of equals; every sixteenth value less
//   the least m; cost[w] = m[w >> b] + min(|target - level[w]|, kTrellisErrorCap)², saturating.
// It begins in window 0; the path ends in the first window of least cost.
using TrellisSearch = void (*)(const PageShape& shape, TrellisScratch& s);
void SearchTrellisPlain(const PageShape& shape, TrellisScratch& s);

void EncodeTrellis(const PageShape& shape, const EncodeInput& in, bool hadamard, TrellisScratch& s,
                   std::uint8_t* out, TrellisSearch search);

}  // namespace kvtamp::codec
