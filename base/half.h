// IEEE binary16 in memory is uint16_t everywhere; these are the scalar conversions that define it
// (round to nearest even, NaN stays NaN). Bulk conversions live in cpu/convert.h.
#pragma once

#include <bit>
#include <cstdint>

namespace kvtamp {

using half_t = std::uint16_t;

inline float HalfToFloat(half_t h) {
  const std::uint32_t sign = (h & 0x8000u) << 16;
  const std::uint32_t exp = (h >> 10) & 0x1Fu;
  const std::uint32_t man = h & 0x3FFu;
  if (exp == 0) {  // zero or subnormal: man * 2^-24, exact in float
    const float v = static_cast<float>(man) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(v) | sign);
  }
  if (exp == 31) return std::bit_cast<float>(sign | 0x7F800000u | (man << 13));
  return std::bit_cast<float>(sign | ((exp + 112) << 23) | (man << 13));
}

inline half_t FloatToHalf(float f) {
  const std::uint32_t x = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t sign = (x >> 16) & 0x8000u;
  const std::uint32_t abs = x & 0x7FFFFFFFu;
  if (abs > 0x7F800000u) return static_cast<half_t>(sign | 0x7E00u);   // NaN
  if (abs >= 0x477FF000u) return static_cast<half_t>(sign | 0x7C00u);  // rounds to infinity
  if (abs < 0x38800000u) {  // subnormal or zero: let the FPU round at 2^-24
    const float r = std::bit_cast<float>(abs) + 0.5f;  // ulp of 0.5 is 2^-24
    return static_cast<half_t>(sign | (std::bit_cast<std::uint32_t>(r) - 0x3F000000u));
  }
  const std::uint32_t rounded = abs + 0xFFFu + ((abs >> 13) & 1u);
  return static_cast<half_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace kvtamp
