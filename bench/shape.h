// What one line of bench/attention measures: the shape of a layer's attention, and what every cache
// is given to attend with, so that all of them do the same work.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/half.h"
#include "base/status.h"

namespace kvtamp::bench {

inline constexpr std::uint32_t kPageSize = 64;  // the store's

struct Shape {
  std::uint32_t n_head = 0, n_head_kv = 0, dim = 0;
  std::uint32_t length = 0;  // tokens stored, those that ask among them
  std::uint32_t n_tok = 1;   // that ask: the last ones

  bool decode() const { return n_tok == 1; }
  std::uint32_t n_embd() const { return n_head_kv * dim; }  // of a row of K, or of V
  bool operator==(const Shape&) const = default;
};

// "32/8/128:4096" is query heads / KV heads / head size : length.
Result<Shape> ParseShape(const std::string& text);
std::string ShapeText(const Shape& shape);

// Of q·K and p·V; what the causal mask hides is not counted.
double Flops(const Shape& shape);

// Laid out as both the store's and ggml's attention take them.
struct Query {
  explicit Query(const Shape& shape);
  std::vector<float> q;      // [n_tok][n_head][dim]
  std::vector<half_t> mask;  // [n_tok][length], causal
};

// Rows of K or V, the same for every cache of one seed: halves between 0.5 and 1, of either sign.
class RowSource {
 public:
  explicit RowSource(std::uint64_t seed) : rng_(seed) {}
  void Fill(std::span<half_t> rows);

 private:
  std::mt19937_64 rng_;
};
inline std::uint64_t SeedOf(std::uint32_t layer, bool v) { return 2 * std::uint64_t{layer} + v; }

}  // namespace kvtamp::bench
