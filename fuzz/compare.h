// How far two contexts may be apart, and why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvtamp::fuzz {

// What is allowed of one row of logits: its squared error over the squared length of the host's row.
struct Bounds {
  double row = 0;        // any single row
  double mean = 0;       // over all rows of a case
  double per_shift = 0;  // more of both for each shift that an f16 host cache has rounded its keys in
  bool coded = false;    // over a whole run the error must not be nought
};
const Bounds* BoundsOf(const std::string& type);

// Squared distance of `ours` to `host` over host's squared length.
double RowError(const float* host, const float* ours, std::size_t n);

// Of many rows. Plain data: it travels through a pipe.
struct ErrorStats {
  std::uint64_t rows = 0;
  double sum = 0;
  double max = 0;

  void Add(double e) {
    rows++;
    sum += e;
    if (e > max) max = e;
  }
  void Add(const ErrorStats& other) {
    rows += other.rows;
    sum += other.sum;
    if (other.max > max) max = other.max;
  }
  double mean() const { return rows == 0 ? 0 : sum / static_cast<double>(rows); }
};

}  // namespace kvtamp::fuzz
