// The kernels of dots_arm-inl.h, which includes this twice: with KVTAMP_ARM_I8MM 0, for sdot, and
// 1, for smmla and usmmla. No guard.
namespace kvtamp::attention {
namespace HWY_NAMESPACE {
#if KVTAMP_ARM_I8MM
namespace i8mm {
#else
namespace dotprod {
#endif

// A vector of codes has four elements each of four rows (tokens for K, channels for V). Sums of
// four rows: those of the factor's upper bytes and of its lower bytes, or both of two rows in `a`
// and of the other two in `b`.
struct Sums {
  int32x4_t a, b;
};

#if KVTAMP_ARM_I8MM
// One instruction: two rows times both bytes, of eight elements each.
template <Codes kCodes>
HWY_INLINE int32x4_t Multiply(int32x4_t sum, uint8x16_t x, int8x16_t u) {
  if constexpr (kCodes == Codes::kUnsigned) return vusmmlaq_s32(sum, x, u);
  return vmmlaq_s32(sum, vreinterpretq_s8_u8(x), u);
}
// x0, x1: elements 0-3, 4-7 of four rows. To rows of eight elements, two to a vector.
HWY_INLINE void Arrange(uint8x16_t& x0, uint8x16_t& x1) {
  const uint32x4_t y0 = vreinterpretq_u32_u8(x0), y1 = vreinterpretq_u32_u8(x1);
  x0 = vreinterpretq_u8_u32(vzip1q_u32(y0, y1));
  x1 = vreinterpretq_u8_u32(vzip2q_u32(y0, y1));
}
template <Codes kCodes>
HWY_INLINE void Add(Sums& sums, uint8x16_t x0, uint8x16_t x1, int8x16_t u) {
  sums.a = Multiply<kCodes>(sums.a, x0, u);
  sums.b = Multiply<kCodes>(sums.b, x1, u);
}
HWY_INLINE int32x4_t Total(const Sums& sums) {
  return vaddq_s32(vshlq_n_s32(vuzp1q_s32(sums.a, sums.b), 8), vuzp2q_s32(sums.a, sums.b));
}
#else
HWY_INLINE void Arrange(uint8x16_t&, uint8x16_t&) {}
template <Codes kCodes>
HWY_INLINE void Add(Sums& sums, uint8x16_t x0, uint8x16_t x1, int8x16_t u) {
  const int8x16_t y0 = vreinterpretq_s8_u8(x0), y1 = vreinterpretq_s8_u8(x1);
  sums.a = vdotq_laneq_s32(vdotq_laneq_s32(sums.a, y0, u, 0), y1, u, 1);
  sums.b = vdotq_laneq_s32(vdotq_laneq_s32(sums.b, y0, u, 2), y1, u, 3);
}
HWY_INLINE int32x4_t Total(const Sums& sums) { return vaddq_s32(vshlq_n_s32(sums.a, 8), sums.b); }
// sdot has no unsigned side: 128 is taken from each code, and so many times u is missing then.
template <int kHeads>
HWY_INLINE void Missing(std::uint32_t n, const std::uint8_t* const* folded, std::int32_t* missing) {
  for (int h = 0; h < kHeads; ++h) {
    int32x4_t sum = vdupq_n_s32(0);
    for (std::uint32_t i = 0; i < n; i += 8)
      sum = vdotq_s32(sum, vld1q_s8(reinterpret_cast<const std::int8_t*>(folded[h]) + 2 * i),
                      vdupq_n_s8(1));
    missing[h] = 128 * (256 * (vgetq_lane_s32(sum, 0) + vgetq_lane_s32(sum, 1)) +
                        vgetq_lane_s32(sum, 2) + vgetq_lane_s32(sum, 3));
  }
}
#endif

// kVecs vectors of rows times n elements. The next four elements lie `stride` bytes further, with
// kLevels the next eight. Writes to out[h] + at; the upper nibbles' rows `upper` further.
template <Codes kCodes, int kHeads, int kVecs>
HWY_INLINE void Tile(const std::uint8_t* p, std::size_t stride, std::uint32_t n,
                     const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                     const std::int32_t* missing, std::size_t at, std::size_t upper,
                     std::int32_t* const* out) {
  const uint8x16_t nibble = vdupq_n_u8(15), sign = vdupq_n_u8(0x80);
  const uint8x16_t levels = vreinterpretq_u8_s8(vld1q_s8(codec::kLm4Levels));
  constexpr int kLoads = kCodes == Codes::kNibbles ? kVecs / 2 : kVecs;
  Sums sums[kHeads][kVecs];
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVecs; ++v) sums[h][v].a = sums[h][v].b = vdupq_n_s32(0);
  }
  for (std::uint32_t i = 0; i < n; i += 8) {
    int8x16_t u[kHeads];
    for (int h = 0; h < kHeads; ++h)
      u[h] = vld1q_s8(reinterpret_cast<const std::int8_t*>(folded[h]) + 2 * i);
    const auto add = [&](int v, uint8x16_t x0, uint8x16_t x1) {
      Arrange(x0, x1);
      for (int h = 0; h < kHeads; ++h) Add<kCodes>(sums[h][v], x0, x1, u[h]);
    };
    for (int v = 0; v < kLoads; ++v) {
      const std::uint8_t* from = p + v * 16;
      const uint8x16_t x0 = vld1q_u8(from);
      if (v % 4 == 0) hwy::Prefetch(from + ahead);
      if constexpr (kCodes == Codes::kLevels) {
        add(v, vqtbl1q_u8(levels, vandq_u8(x0, nibble)), vqtbl1q_u8(levels, vshrq_n_u8(x0, 4)));
      } else {
        const uint8x16_t x1 = vld1q_u8(from + stride);
        if (v % 4 == 0) hwy::Prefetch(from + stride + ahead);
        if constexpr (kCodes == Codes::kNibbles) {
          add(v, vandq_u8(x0, nibble), vandq_u8(x1, nibble));
          add(v + kLoads, vshrq_n_u8(x0, 4), vshrq_n_u8(x1, 4));
        } else if constexpr (kCodes == Codes::kUnsigned && KVTAMP_ARM_I8MM == 0) {
          add(v, veorq_u8(x0, sign), veorq_u8(x1, sign));
        } else {
          add(v, x0, x1);
        }
      }
    }
    p += kCodes == Codes::kLevels ? stride : 2 * stride;
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVecs; ++v) {
      int32x4_t total = Total(sums[h][v]);
      if constexpr (kCodes == Codes::kUnsigned && KVTAMP_ARM_I8MM == 0)
        total = vaddq_s32(total, vdupq_n_s32(missing[h]));
      vst1q_s32(out[h] + at + (v < kLoads ? v * 4 : upper + (v - kLoads) * 4), total);
    }
  }
}

// As many as their sums fit into the registers.
template <int kHeads>
inline constexpr int kVecsAtOnce = kHeads == 1   ? 8
                                   : kHeads == 4 ? 2
                                                 : 4;

template <int kHeads, int kVecs>
HWY_INLINE void KDotsOf(codec::Coding coding, const std::uint8_t* codes, std::uint32_t rows,
                        std::uint32_t dim, const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                        std::int32_t* const* out) {
  std::int32_t missing[kHeads] = {};
  if (coding == codec::Coding::kKInt4) {
    const std::uint32_t half = std::min(32u, rows) / 2;
    for (std::uint32_t chunk = 0; chunk < rows; chunk += 2 * half) {
      for (std::uint32_t t = 0; t < half; t += 2 * kVecs)
        Tile<Codes::kNibbles, kHeads, kVecs>(codes + chunk * 2 + t * 4, rows * 2, dim, folded,
                                             ahead, missing, chunk + t, half, out);
    }
  } else if (coding == codec::Coding::kKPlanes) {
    for (std::uint32_t t = 0; t < rows; t += 4 * kVecs)
      Tile<Codes::kSigned, kHeads, kVecs>(codes + t * 4, rows * 4, dim, folded, ahead, missing, t,
                                          0, out);
  } else {
#if !KVTAMP_ARM_I8MM
    Missing<kHeads>(dim, folded, missing);
#endif
    for (std::uint32_t t = 0; t < rows; t += 4 * kVecs)
      Tile<Codes::kUnsigned, kHeads, kVecs>(codes + t * 4, rows * 4, dim, folded, ahead, missing, t,
                                            0, out);
  }
}

template <int kHeads>
HWY_NOINLINE void KDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t rows,
                        std::uint32_t dim, const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                        std::int32_t* const* out) {
  constexpr int kVecs = kVecsAtOnce<kHeads>;
  if (rows % (4 * kVecs) == 0) {
    KDotsOf<kHeads, kVecs>(coding, codes, rows, dim, folded, ahead, out);
  } else {  // a page of 16
    KDotsOf<kHeads, 4>(coding, codes, rows, dim, folded, ahead, out);
  }
}

template <int kHeads>
HWY_NOINLINE void VDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t n_blocks,
                        std::uint32_t rows, const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                        std::int32_t* const* out) {
  constexpr int kVecs = std::min(kVecsAtOnce<kHeads>, 4);  // 16 channels lie side by side
  for (std::uint32_t c = 0; c < n_blocks * 16; c += 4 * kVecs) {
    const std::uint8_t* from = codes + c / 16 * BlockBytes(coding, rows) + c % 16 * 4;
    if (coding == codec::Coding::kVInt8) {
      Tile<Codes::kSigned, kHeads, kVecs>(from, 64, rows, folded, ahead, nullptr, c, 0, out);
    } else {
      Tile<Codes::kLevels, kHeads, kVecs>(from, 64, rows, folded, ahead, nullptr, c, 0, out);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
