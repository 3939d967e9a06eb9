// Numbers from a seed, the same on every machine and standard library (std's distributions are not).
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace kvtamp::fuzz {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  // splitmix64, by Sebastiano Vigna (public domain).
  std::uint64_t Next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int Int(int low, int high) {  // both included
    return low + static_cast<int>(Next() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool Chance(double p) { return Uniform() < p; }
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  float Normal() {
    const double r = std::sqrt(-2.0 * std::log(1.0 - Uniform()));
    return static_cast<float>(r * std::cos(6.283185307179586 * Uniform()));
  }
  template <class T>
  T OneOf(std::initializer_list<T> list) {
    return *(list.begin() + Int(0, static_cast<int>(list.size()) - 1));
  }

 private:
  std::uint64_t state_;
};

}  // namespace kvtamp::fuzz
