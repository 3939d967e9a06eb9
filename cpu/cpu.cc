#include "cpu/highway.h"  // first

#include "cpu/cpu.h"

#include <atomic>
#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvtamp::cpu {
namespace HWY_NAMESPACE {

std::int64_t Target() { return HWY_TARGET; }

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#if KVTAMP_ARM_DOTS
#include <sys/auxv.h>
#endif

namespace kvtamp::cpu {
namespace {

HWY_EXPORT(Target);

struct Name {
  const char* name;
  std::int64_t target;
  ArmDots dots = ArmDots::kNone;
};

// Best first.
constexpr Name kNames[] = {
    {"avx512_vnni", HWY_AVX3_DL},
    {"avx512", HWY_AVX3},
    {"avx2", HWY_AVX2},
    {"sse4", HWY_SSE4},
    {"neon_i8mm", HWY_NEON, ArmDots::kI8mm},
    {"neon_dotprod", HWY_NEON, ArmDots::kDotprod},
    {"neon", HWY_NEON},
    {"scalar", HWY_EMU128},
    {"scalar", HWY_SCALAR},
};

ArmDots BestArmDots() {
#if KVTAMP_ARM_DOTS
  if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) == 0) return ArmDots::kNone;
  return (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0 ? ArmDots::kI8mm : ArmDots::kDotprod;
#else
  return ArmDots::kNone;
#endif
}

// What the processor can run, whatever is forced at the moment.
std::int64_t Runnable() {
#if HWY_ARCH_ARM_A64
  return HWY_TARGETS;  // Highway's own answer has no NEON where there is no AES, unused here
#else
  // SupportedTargets applies what was forced. HWY_STATIC_TARGET is the baseline the compiler itself
  // assumes, so it always runs.
  static const std::int64_t runnable = hwy::SupportedTargets() | HWY_STATIC_TARGET;
  return runnable & HWY_TARGETS;
#endif
}

bool CanRun(const Name& n) { return (Runnable() & n.target) != 0 && n.dots <= BestArmDots(); }

// Back to the best. Also un-initialises the dispatch tables, so that the next call of every kernel
// looks again.
ArmDots Unforce() {
  hwy::SetSupportedTargetsForTest(HWY_ARCH_ARM_A64 ? Runnable() : 0);
  return BestArmDots();
}

// Contexts on threads of their own all set it, to the same.
std::atomic<ArmDots> arm_dots = Unforce();

}  // namespace

ArmDots ActiveArmDots() { return arm_dots.load(std::memory_order_relaxed); }

std::vector<std::string> AvailableIsas() {
  std::vector<std::string> names;
  for (const Name& n : kNames) {
    if (CanRun(n)) names.emplace_back(n.name);
  }
  return names;
}

std::string ActiveIsa() {
  const std::int64_t target = HWY_DYNAMIC_DISPATCH(Target)();
  for (const Name& n : kNames) {
    if (n.target == target && n.dots == arm_dots) return n.name;
  }
  return "unknown";
}

Status ForceIsa(std::string_view name) {
  if (name.empty() || name == "auto") {
    arm_dots = Unforce();
    return Status::Ok();
  }
  for (const Name& n : kNames) {
    if (name != n.name || !CanRun(n)) continue;
    hwy::SetSupportedTargetsForTest(n.target);
    arm_dots = n.dots;
    return Status::Ok();
  }
  std::string message =
      "instruction set \"" + std::string(name) + "\" is not available here; there are:";
  for (const std::string& isa : AvailableIsas()) message += " " + isa;
  return Status::Invalid(std::move(message));
}

}  // namespace kvtamp::cpu
#endif  // HWY_ONCE
