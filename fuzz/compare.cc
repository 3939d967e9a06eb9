#include "fuzz/compare.h"

namespace kvtamp::fuzz {

namespace {

struct Named {
  const char* type;
  Bounds bounds;
};

constexpr Named kBounds[] = {
    {"f16", {1e-3, 1e-4, 1e-5, false}},
    {"k8v8", {1e-1, 1e-2, 1e-5, true}},
    {"k4v4", {2.0, 0.5, 1e-5, true}},
};

}  // namespace

const Bounds* BoundsOf(const std::string& type) {
  for (const Named& n : kBounds)
    if (type == n.type) return &n.bounds;
  return nullptr;
}

double RowError(const float* host, const float* ours, std::size_t n) {
  double error = 0, length = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double d = static_cast<double>(host[i]) - ours[i];
    error += d * d;
    length += static_cast<double>(host[i]) * host[i];
  }
  return length == 0 ? error : error / length;
}

}  // namespace kvtamp::fuzz
