#include "bench/shape.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "codec/codec.h"

namespace kvtamp::bench {

Result<Shape> ParseShape(const std::string& text) {
  Shape s;
  int end = 0;
  const bool read = std::sscanf(text.c_str(), "%u/%u/%u:%u%n", &s.n_head, &s.n_head_kv, &s.dim,
                                &s.length, &end) == 4 &&
                    static_cast<std::size_t>(end) == text.size();
  if (!read)
    return Status::Invalid(text + ": not of the form HEADS/KV_HEADS/DIM:LENGTH, as 32/8/128:4096");
  if (s.n_head_kv == 0 || s.n_head == 0 || s.n_head % s.n_head_kv != 0)
    return Status::Invalid(text + ": query heads must be a multiple of KV heads");
  if (s.dim < 32 || s.dim > codec::kMaxDim || s.dim % 8 != 0)
    return Status::Invalid(
        fmt::format("{}: the head size must be a multiple of 8, 32 to {}", text, codec::kMaxDim));
  if (s.length == 0 || s.length % kPageSize != 0 || s.length > (1u << 24))
    return Status::Invalid(
        fmt::format("{}: the length must be a multiple of {}, up to 2^24", text, kPageSize));
  return s;
}

std::string ShapeText(const Shape& s) {
  return fmt::format("{}/{}/{}", s.n_head, s.n_head_kv, s.dim);
}

double Flops(const Shape& s) {
  // Token t of the last n_tok sees length - n_tok + t + 1.
  const double seen = s.n_tok * (s.length - (s.n_tok - 1) / 2.0);
  return 4.0 * s.n_head * s.dim * seen;
}

Query::Query(const Shape& s)
    : q(std::size_t{s.n_tok} * s.n_head * s.dim), mask(std::size_t{s.n_tok} * s.length) {
  std::mt19937_64 rng(1);
  std::normal_distribution<float> normal;
  for (float& x : q) x = normal(rng);
  constexpr half_t kMinusInf = 0xFC00;
  for (std::size_t t = 0; t < s.n_tok; ++t) {
    half_t* row = mask.data() + t * s.length;
    std::fill(row + (s.length - s.n_tok + t + 1), row + s.length, kMinusInf);
  }
}

void RowSource::Fill(std::span<half_t> rows) {
  std::size_t i = 0;
  while (i < rows.size()) {
    std::uint64_t x = (rng_() & 0x83FF83FF83FF83FFu) | 0x3800380038003800u;
    for (int j = 0; j < 4 && i < rows.size(); ++j, x >>= 16) rows[i++] = static_cast<half_t>(x);
  }
}

}  // namespace kvtamp::bench
