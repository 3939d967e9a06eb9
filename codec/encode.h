// How a grid is chosen, and the plain encoders. EncodeK and EncodeV of codec.h are vector code with
// the same candidates (encode_simd.cc); these say in scalar float what they mean and are what tests
// measure them against.
//
// K, one channel: with the range of the valid rows given, the scale that just covers it has index
// k. Tried for 4 bits are (k), (k-1, k-2) each with the nearest three minima, (k-3), and one wide
// enough to cover the range wherever the grid of the minima falls, which matters far from the mean.
// On 64 rows of real keys this is 1.3 % above the least squared error over all (k, z), and 6 %
// below the usual search over a few float scales; (k) alone would be 26 % above. At 8 bits clipping
// never pays and the grid of the minima is coarse, so the candidates lie above k.
//
// V, one group of one token: all sixteen scales from the one just above the covering one down to
// 1 / 2.2 of it (kVLm4), or the covering one and its neighbours (kVInt8). So few elements share a
// scale that luck decides: against the scale that the root mean square suggests, searching this
// wide takes off a quarter of the squared error.
//
// Either way a page that was decoded, rounded to f16 and encoded again is nearly always the same
// page: the grid it was coded with is among the candidates and has no error.
#pragma once

#include <cstdint>
#include <span>

#include "codec/codec.h"

namespace kvtamp::codec {

// KMinFactor(z) = kMinWidth * kMinStep * sinh(z / kMinWidth) - 1/2, in units of scale * 2^bits.
inline constexpr float kMinStep = 1.0f / 64;
inline constexpr float kMinWidth = 24.5f;
// The middle of the codes lies at most this far from the mean, in units of scale * 2^bits; a little
// below what z = 127 says, so that rounding z cannot leave the table.
inline constexpr float kMinReach = 31.4f;

// Offsets from the covering scale index, and how many minima are tried around the nearest.
struct KCandidate {
  int dk;
  int shifts;  // 1: the nearest, 3: its neighbours too
};
// The nearest first: of equals the first wins, and it is the exact one for a channel that is its
// mean.
inline constexpr int kShifts[] = {0, -1, 1};
inline constexpr KCandidate kKCandidates4[] = {{0, 1}, {-1, 3}, {-2, 3}, {-3, 1}};
inline constexpr KCandidate kKCandidates8[] = {{0, 3}, {1, 3}, {2, 1}};
inline std::span<const KCandidate> KCandidates(int bits) {
  if (bits == 8) return kKCandidates8;
  return kKCandidates4;
}

// K's covering index is rounded up only beyond this: rounding to f16 must not push a page that is
// encoded again off its scale.
inline constexpr float kKIndexSlack = 0.03f;

inline constexpr int kVCandidates = 16;  // scale indices top, top - 1, … with top = covering + 1

// For kVLm4: cost[u][j] is twice the squared error of a magnitude u/2, in units of the covering
// scale's levels, under candidate j: the least sum over a whole head fits 16 bits.
struct VCosts {
  alignas(64) std::uint16_t cost[256][kVCandidates];
};
const VCosts& VCostTable();

namespace plain {
void EncodeK(Coding coding, const PageShape& shape, const EncodeInput& in, const float* mean,
             std::uint8_t* out);
void EncodeV(Coding coding, const PageShape& shape, const EncodeInput& in, bool hadamard,
             std::uint8_t* out);
}  // namespace plain

// Whether row r matters.
inline bool IsValid(const EncodeInput& in, std::uint32_t r) {
  return (in.valid[r / 64] >> (r % 64)) & 1u;
}

}  // namespace kvtamp::codec
