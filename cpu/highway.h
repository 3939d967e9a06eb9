// Which Highway targets this project compiles. Include it first of all in every file that uses
// Highway, so that all of them agree.
#pragma once

#define HWY_WANT_AVX3_DL  // left out by default; it is the one with 8-bit dot products
#ifdef __aarch64__
#define HWY_COMPILE_ALL_ATTAINABLE  // the scalar one too, as elsewhere
#endif
// SSSE3 is SSE4's poor sibling; the scalable ones cannot keep vectors in arrays, as our kernels do.
#define KVTAMP_NO_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#ifdef KVTAMP_FUZZER
// With sanitizers and coverage clang takes minutes for each; other builds run them all.
#define HWY_DISABLED_TARGETS (KVTAMP_NO_TARGETS | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL)
#else
#define HWY_DISABLED_TARGETS KVTAMP_NO_TARGETS
#endif

// Whether the 8-bit dot products of Arm are compiled in, beside the target NEON, which has none:
// cpu::ArmDots. Clang before 16 has their intrinsics only where all of a file may use them.
#define KVTAMP_ARM_DOTS (HWY_ARCH_ARM_A64 && HWY_COMPILER_GCC_ACTUAL && HWY_OS_LINUX)
