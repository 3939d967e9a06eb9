// One cache under test: layers of K and V as it stores them, attended one after the other, as a
// model's step does.
#pragma once

#include <cstddef>
#include <span>

#include "base/status.h"

namespace kvtamp::bench {

class Attention {
 public:
  Attention() = default;
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;
  virtual ~Attention() = default;

  // Attends once in each layer.
  virtual Status Step() = 0;
  virtual std::uint32_t n_layers() const = 0;
  // The last layer's result, [n_tok][n_head][dim].
  virtual std::span<const float> out() const = 0;
};

// So many layers that a decode step passes over 64 MiB: long enough to be timed, and a step of a
// small cache is not one layer met in L2 again and again. Prefill reads its one layer many times
// over anyway.
inline std::uint32_t LayersFor(std::size_t bytes_of_layer, bool decode) {
  constexpr std::size_t kStepBytes = std::size_t{64} << 20;
  return decode ? static_cast<std::uint32_t>((kStepBytes + bytes_of_layer - 1) / bytes_of_layer)
                : 1;
}

}  // namespace kvtamp::bench
