// The integer stage on 64-bit Arm: with 8-bit dot products where the processor has them, which is
// looked up on every call (cpu::ActiveArmDots), else with pairs; see dots-inl.h. Per-target header.
#if defined(KVTAMP_ATTENTION_DOTS_ARM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTAMP_ATTENTION_DOTS_ARM_INL_H_
#undef KVTAMP_ATTENTION_DOTS_ARM_INL_H_
#else
#define KVTAMP_ATTENTION_DOTS_ARM_INL_H_
#endif

#include "attention/dots_pairs-inl.h"
#include "attention/fold-inl.h"
#include "attention/unit.h"
#include "cpu/cpu.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

#if KVTAMP_ARM_DOTS && HWY_TARGET == HWY_NEON

HWY_BEFORE_NAMESPACE();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

enum class Codes {
  kSigned,    // bytes
  kUnsigned,  // bytes
  kNibbles,   // the other half of the tokens in the upper ones
  kLevels     // nibbles to look up, the next four tokens in the upper ones
};

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#define KVTAMP_ARM_I8MM 0
HWY_PUSH_ATTRIBUTES("arch=armv8.2-a+crypto+dotprod")
#include "attention/dots_arm_tile-inl.h"
HWY_POP_ATTRIBUTES
#undef KVTAMP_ARM_I8MM
#define KVTAMP_ARM_I8MM 1
HWY_PUSH_ATTRIBUTES("arch=armv8.2-a+crypto+dotprod+i8mm")
#include "attention/dots_arm_tile-inl.h"
HWY_POP_ATTRIBUTES
#undef KVTAMP_ARM_I8MM

HWY_BEFORE_NAMESPACE();
namespace kvtamp::attention {
namespace HWY_NAMESPACE {

template <int kHeads>
HWY_INLINE void KDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t rows,
                      std::uint32_t dim, const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                      std::int32_t* const* out) {
  switch (cpu::ActiveArmDots()) {
    case cpu::ArmDots::kI8mm:
      return i8mm::KDots<kHeads>(coding, codes, rows, dim, folded, ahead, out);
    case cpu::ArmDots::kDotprod:
      return dotprod::KDots<kHeads>(coding, codes, rows, dim, folded, ahead, out);
    default:
      return pairs::KDots<kHeads>(coding, codes, rows, dim, folded, ahead, out);
  }
}

template <int kHeads>
HWY_INLINE void VDots(codec::Coding coding, const std::uint8_t* codes, std::uint32_t n_blocks,
                      std::uint32_t rows, const std::uint8_t* const* folded, std::ptrdiff_t ahead,
                      std::int32_t* const* out) {
  switch (cpu::ActiveArmDots()) {
    case cpu::ArmDots::kI8mm:
      return i8mm::VDots<kHeads>(coding, codes, n_blocks, rows, folded, ahead, out);
    case cpu::ArmDots::kDotprod:
      return dotprod::VDots<kHeads>(coding, codes, n_blocks, rows, folded, ahead, out);
    default:
      return pairs::VDots<kHeads>(coding, codes, n_blocks, rows, folded, ahead, out);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::attention
HWY_AFTER_NAMESPACE();

#endif  // KVTAMP_ARM_DOTS

#endif  // per-target guard
