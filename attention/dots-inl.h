// The integer stage of decode: exact arithmetic on a page's codes. Per-target header. Each version
// defines, for kHeads folded vectors (fold-inl.h) at once,
//
//   KDots<kHeads>(coding, codes, rows, dim, folded, ahead, out)
//     out[h][rows] = sum over channels of code * u[h]; kKPlanes: codes are as kKInt8's, but less
//     than 16, and u is 0 beyond the channels that there are, up to a multiple of 16
//   VDots<kHeads>(coding, codes, n_blocks, rows, folded, ahead, out)
//     out[h][n_blocks * 16] = sum over tokens of level * w[h], n_blocks <= kBlocksAtOnce
//
// and fetches what lies `ahead` bytes further, the same place of the next page, while it works.
#if defined(KVTAMP_ATTENTION_DOTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_DOTS_INL_H_
#undef KVTAMP_ATTENTION_DOTS_INL_H_
#else
#define KVTAMP_ATTENTION_DOTS_INL_H_
#endif

#include "attention/dots_arm-inl.h"
#include "attention/dots_pairs-inl.h"
#include "attention/dots_plain-inl.h"
#include "attention/dots_vnni-inl.h"

#endif  // per-target guard
