// The integer stage in plain C++, for the target without vectors; see dots-inl.h. Per-target
// header.
#if defined(KVTAMP_ATTENTION_DOTS_PLAIN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_DOTS_PLAIN_INL_H_
#undef KVTAMP_ATTENTION_DOTS_PLAIN_INL_H_
#else
#define KVTAMP_ATTENTION_DOTS_PLAIN_INL_H_
#endif

#include <algorithm>

#include "attention/fold-inl.h"
#include "attention/unit.h"

KVTAMP_BEFORE_VNNI();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR

template <int kHeads>
HWY_INLINE void KDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t rows,
                      std::uint32_t dim, const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                      std::int32_t* const* out) {
  const std::uint32_t chunk = std::min(32u, rows);
  for (int h = 0; h < kHeads; ++h) {
    (void)ahead;
    const auto* u = reinterpret_cast<const std::int32_t*>(folded[h]);
    std::fill_n(out[h], rows, 0);
    for (std::uint32_t g = 0; g < dim / 4; ++g) {
      for (std::uint32_t t = 0; t < rows; ++t) {
        for (std::uint32_t j = 0; j < 4; ++j) {
          std::uint32_t code;
          if (coding != codec::Coding::kKInt4) {
            code = codes[(g * rows + t) * 4 + j];
          } else {
            const std::uint32_t r = t % chunk;
            code = codes[g * rows * 2 + t / chunk * chunk * 2 + r % (chunk / 2) * 4 + j];
            code = r < chunk / 2 ? code & 15 : code >> 4;
          }
          out[h][t] += static_cast<std::int32_t>(code) * u[g * 4 + j];
        }
      }
    }
  }
}

template <int kHeads>
HWY_INLINE void VDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t n_blocks,
                      std::uint32_t rows, const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                      std::int32_t* const* out) {
  const std::size_t block_bytes = BlockBytes(coding, rows);
  for (int h = 0; h < kHeads; ++h) {
    (void)ahead;
    const auto* w = reinterpret_cast<const std::int32_t*>(folded[h]);
    std::fill_n(out[h], n_blocks * 16, 0);
    for (std::uint32_t t = 0; t < rows; ++t) {
      for (std::uint32_t c = 0; c < n_blocks * 16; ++c) {
        const std::uint8_t* block = codes + c / 16 * block_bytes + c % 16 * 4 + t % 4;
        std::int32_t level;
        if (coding == codec::Coding::kVInt8) {
          level = static_cast<std::int8_t>(block[t / 4 * 64]);
        } else {
          const std::uint32_t code = block[t / 8 * 64];
          level = codec::kLm4Levels[t / 4 % 2 == 0 ? code & 15 : code >> 4];
        }
        out[h][c] += level * w[t];
      }
    }
  }
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
