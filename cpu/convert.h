// Bulk conversions on the active instruction set; results equal base/half.h bit for bit.
#pragma once

#include <cstddef>

#include "base/half.h"

namespace kvtamp::cpu {

void HalfToFloat(const half_t* in, float* out, std::size_t n);
// Values beyond f16's range become ±65504 and NaN becomes 0, so that one bad element cannot poison
// a page; returns how many were changed.
std::size_t FloatToHalf(const float* in, half_t* out, std::size_t n);

}  // namespace kvtamp::cpu
