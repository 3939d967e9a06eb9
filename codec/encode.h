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
  int shifts;    // 1: the nearest, 3: those `unit` below and above it too
  int unit = 1;  // with few levels the grid of the minima is finer than it need be
};
// The nearest first: of equals the first wins, and it is the exact one for a channel that is its
// mean.
inline constexpr int kShifts[] = {0, -1, 1};
inline constexpr KCandidate kKCandidates1[] = {{0, 1},      {-8, 3, 4},  {-14, 3, 4},
                                               {-18, 3, 4}, {-22, 3, 4}, {-26, 3, 4}};
inline constexpr KCandidate kKCandidates2[] = {
    {0, 1}, {-3, 3, 3}, {-6, 3, 3}, {-9, 3, 3}, {-12, 1}};
inline constexpr KCandidate kKCandidates3[] = {{0, 1}, {-2, 3, 2}, {-4, 3, 2}, {-6, 1}};
inline constexpr KCandidate kKCandidates4[] = {{0, 1}, {-1, 3}, {-2, 3}, {-3, 1}};
inline constexpr KCandidate kKCandidates5[] = {{0, 3}, {-1, 3}, {-2, 1}};
inline constexpr KCandidate kKCandidates6[] = {{0, 3}, {1, 1}, {-1, 1}};
// One more on either side than is ever best at first: a decoded page covers a little more or less.
inline constexpr KCandidate kKCandidates8[] = {{0, 3}, {1, 3}, {2, 3}, {-1, 3}, {3, 3}};
inline std::span<const KCandidate> KCandidates(std::uint32_t bits) {
  switch (bits) {
    case 1:
      return kKCandidates1;
    case 2:
      return kKCandidates2;
    case 3:
      return kKCandidates3;
    case 4:
      return kKCandidates4;
    case 5:
      return kKCandidates5;
    case 6:
      return kKCandidates6;
    default:
      return kKCandidates8;
  }
}

// K's covering index is rounded up only beyond this: rounding to f16 must not push a page that is
// encoded again off its scale.
inline constexpr float kKIndexSlack = 0.03f;

inline constexpr int kVInt8Reach = 2;    // kVInt8: scale indices covering + 2 … covering - 2
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

// Trellis (kVTrellis): one scale index a token and group, so that the levels have about the root
// mean square of the table; Viterbi's algorithm over the whole page; then each scale by least
// squares on the levels it found. Rows that come from a page decoded before are recognised by their
// lying on the levels of one scale, and keep it.
// Costs grow by 600 a value at one bit and by less at more; sums saturate.
inline constexpr std::uint32_t kTrellisNormalise = 16;
inline constexpr int kTrellisErrorCap = 90;  // in level units, see encode_trellis-inl.h

// Whether row r matters.
inline bool IsValid(const EncodeInput& in, std::uint32_t r) {
  return (in.valid[r / 64] >> (r % 64)) & 1u;
}

}  // namespace kvtamp::codec
