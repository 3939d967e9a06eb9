#include "cpu/highway.h"  // first

#include "cpu/cpu.h"

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
namespace kvtamp::cpu {
namespace {

HWY_EXPORT(Target);

struct Name {
  const char* name;
  std::int64_t target;
};

// Best first.
constexpr Name kNames[] = {
    {"avx512_vnni", HWY_AVX3_DL}, {"avx512", HWY_AVX3}, {"avx2", HWY_AVX2},
    {"sse4", HWY_SSE4},           {"neon", HWY_NEON},   {"scalar", HWY_EMU128},
    {"scalar", HWY_SCALAR},
};

const char* NameOf(std::int64_t target) {
  for (const Name& n : kNames) {
    if (n.target == target) return n.name;
  }
  return "unknown";
}

// What the processor can run, whatever is forced at the moment.
std::int64_t Runnable() {
  // SupportedTargets applies what was forced. HWY_STATIC_TARGET is the baseline the compiler itself
  // assumes, so it always runs.
  static const std::int64_t runnable = hwy::SupportedTargets() | HWY_STATIC_TARGET;
  return runnable & HWY_TARGETS;
}

}  // namespace

std::vector<std::string> AvailableIsas() {
  std::vector<std::string> names;
  for (const Name& n : kNames) {
    if ((Runnable() & n.target) != 0) names.emplace_back(n.name);
  }
  return names;
}

std::string ActiveIsa() { return NameOf(HWY_DYNAMIC_DISPATCH(Target)()); }

Status ForceIsa(std::string_view name) {
  const std::int64_t runnable = Runnable();  // before anything is forced, the first time
  if (name.empty() || name == "auto") {
    hwy::SetSupportedTargetsForTest(0);
    return Status::Ok();
  }
  for (const Name& n : kNames) {
    if (name != n.name || (runnable & n.target) == 0) continue;
    // Also un-initialises the dispatch tables, so that the next call of every kernel looks again.
    hwy::SetSupportedTargetsForTest(n.target);
    return Status::Ok();
  }
  std::string message =
      "instruction set \"" + std::string(name) + "\" is not available here; there are:";
  for (const std::string& isa : AvailableIsas()) message += " " + isa;
  return Status::Invalid(std::move(message));
}

}  // namespace kvtamp::cpu
#endif  // HWY_ONCE
