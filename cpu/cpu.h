// What this processor has, and which instruction set the kernels use. One choice per process, made
// once (Highway's dynamic dispatch); KVTAMP_CPU forces one (read by `control`, passed here).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kvtamp::cpu {

// Names: "scalar" (plain C++), "sse4", "avx2", "avx512", "avx512_vnni", "neon", "neon_dotprod",
// "neon_i8mm".
// All that were compiled in and this processor can run, best first.
std::vector<std::string> AvailableIsas();
// In force now.
std::string ActiveIsa();
// Forces one for the whole process; "" or "auto" goes back to the best. Unknown or unavailable
// names are an error that lists the available ones. Not to be called while kernels run.
Status ForceIsa(std::string_view name);

// Which 8-bit dot products are in force beside the target NEON; kNone on all other targets.
enum class ArmDots : std::uint8_t { kNone, kDotprod, kI8mm };
ArmDots ActiveArmDots();

}  // namespace kvtamp::cpu
