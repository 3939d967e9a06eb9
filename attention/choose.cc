#include "attention/choose.h"

#include <algorithm>
#include <limits>

namespace kvtamp::attention {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// [n_pages]; +inf and -inf as bounds.
void PageWorth(const PageChoice& choice, float* worth) {
  std::fill_n(worth, choice.n_pages, -kInf);
  for (std::uint32_t r = 0; r < choice.rows; ++r) {
    const float* bound = choice.bounds + std::size_t{r} * choice.n_pages;
    float top = -kInf;
    for (std::uint32_t i = 0; i < choice.n_pages; ++i)
      if (bound[i] != kInf) top = std::max(top, bound[i]);
    for (std::uint32_t i = 0; i < choice.n_pages; ++i) {
      const bool finite = bound[i] != kInf && bound[i] != -kInf;
      worth[i] = std::max(worth[i], finite ? bound[i] - top : bound[i]);
    }
  }
}

struct ByWorth {
  const float* worth;
  bool operator()(std::uint32_t a, std::uint32_t b) const {
    return worth[a] != worth[b] ? worth[a] > worth[b] : a > b;
  }
};

}  // namespace

std::uint32_t ChoosePages(const PageChoice& choice, std::uint32_t top_pages,
                          std::vector<float>& worth) {
  worth.resize(choice.n_pages);
  PageWorth(choice, worth.data());
  std::fill_n(choice.read, (choice.n_pages + 63) / 64, std::uint64_t{0});
  const auto take = [&](std::uint32_t i) { choice.read[i / 64] |= std::uint64_t{1} << (i % 64); };
  std::vector<std::uint32_t> coded;
  std::uint32_t n = 0;
  for (std::uint32_t i = 0; i < choice.n_pages; ++i) {
    if (worth[i] == -kInf) continue;
    if (worth[i] != kInf) {
      coded.push_back(i);
      continue;
    }
    take(i);
    ++n;
  }
  if (coded.size() > top_pages) {
    std::nth_element(coded.begin(), coded.begin() + top_pages, coded.end(), ByWorth{worth.data()});
    coded.resize(top_pages);
  }
  for (std::uint32_t i : coded) take(i);
  return n + static_cast<std::uint32_t>(coded.size());
}

}  // namespace kvtamp::attention
