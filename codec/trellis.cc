#include "codec/trellis.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "codec/encode.h"
#include "codec/layout.h"
#include "cpu/convert.h"

namespace kvtamp::codec {
namespace {

constexpr float kIndicesPerOctave = 12, kOrigin = 17;

// What a root mean square of one is in level units: the tables are made so.
float LevelsPerSigma(std::uint32_t rate8) { return rate8 <= 20 ? 127 / 2.811f : 127 / 3.255f; }

int IndexNear(float scale) {
  const float index = kIndicesPerOctave * (std::log2(std::max(scale, 1e-30f)) + kOrigin);
  return static_cast<int>(std::clamp(std::nearbyint(index), 1.0f, 255.0f));
}

// To the nearest integer, ties to even, for |x| < 2^22: without a call for each value.
float Nearest(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: the sum's last bit is worth 1
  return (x + magic) - magic;
}

// The table as a set: where the nearest level lies.
class LevelSet {
 public:
  explicit LevelSet(const std::int8_t* levels) {
    for (int i = 0; i < 256; ++i) has_[levels[i] + 128] = true;
  }
  bool Near(float x, float tolerance) const {
    if (std::abs(x) > 128) return false;
    const float level = Nearest(x);
    if (std::abs(level) > 127 || std::abs(x - level) > tolerance) return false;
    return has_[static_cast<int>(level) + 128];
  }

 private:
  bool has_[256] = {};
};

// One group of one token: the scale whose levels all its values lie on; 0 if there is none.
int RecogniseScale(const float* y, std::uint32_t n, int guess, float tolerance,
                   const LevelSet& set) {
  for (int i = 0; i <= 16; ++i) {  // nearest to the guess first
    const int k = guess + (i % 2 == 0 ? i / 2 : -(i + 1) / 2);
    if (k < 1 || k > 255) continue;
    const float inverse = 1 / VScale(static_cast<std::uint8_t>(k));
    const float limit = std::min(0.3f, tolerance * inverse + 1e-3f);
    std::uint32_t c = 0;
    while (c < n && set.Near(y[c] * inverse, limit)) ++c;
    if (c == n) return k;
  }
  return 0;
}

// y: [dim][rows], so that all rows are rotated together.
void LoadRows(const PageShape& shape, const EncodeInput& in, bool hadamard, TrellisScratch& s) {
  const std::uint32_t rows = shape.rows, dim = shape.dim, block = dim & (0u - dim);
  const float norm = hadamard ? 1.0f / std::sqrt(static_cast<float>(block)) : 1.0f;
  s.y.assign(std::size_t{rows} * dim, 0.0f);
  float row[kMaxDim];
  for (std::uint32_t r = 0; r < rows; ++r) {
    if (!IsValid(in, r)) continue;
    cpu::HalfToFloat(in.rows + r * in.stride, row, dim);
    for (std::uint32_t c = 0; c < dim; ++c)
      s.y[std::size_t{c} * rows + r] = std::abs(row[c]) <= 65504.0f ? row[c] * norm : 0.0f;
  }
  if (!hadamard) return;
  for (std::uint32_t h = 1; h < block; h *= 2) {
    for (std::uint32_t c = 0; c < dim; ++c) {
      if ((c & h) != 0) continue;
      float *a = s.y.data() + std::size_t{c} * rows, *b = a + std::size_t{h} * rows;
      for (std::uint32_t r = 0; r < rows; ++r) {
        const float sum = a[r] + b[r], difference = a[r] - b[r];
        a[r] = sum;
        b[r] = difference;
      }
    }
  }
}

// Scales before the search.
void GuessScales(const PageShape& shape, const EncodeInput& in, TrellisScratch& s,
                 std::uint8_t* scales) {
  const LevelSet set(TrellisLevels(shape.rate8));
  const std::uint32_t rows = shape.rows, group = shape.group, n_groups = shape.dim / group;
  s.known.assign(std::size_t{rows} * n_groups, 0);
  for (std::uint32_t g = 0; g < n_groups; ++g) {
    const float* y = s.y.data() + std::size_t{g} * group * rows;
    float power[kMaxPageSize] = {};
    for (std::uint32_t c = 0; c < group; ++c)
      for (std::uint32_t r = 0; r < rows; ++r) power[r] += y[c * rows + r] * y[c * rows + r];
    for (std::uint32_t r = 0; r < rows; ++r) {
      const float rms = std::sqrt(power[r] / static_cast<float>(group));
      std::uint8_t& k = scales[g * rows + r];
      k = 0;
      if (!IsValid(in, r) || rms / LevelsPerSigma(shape.rate8) < VScale(1)) continue;
      const int guess = IndexNear(rms / LevelsPerSigma(shape.rate8));
      float one[kMaxDim];
      for (std::uint32_t c = 0; c < group; ++c) one[c] = y[c * rows + r];
      // A row of halves, rotated: the errors of all its elements in each.
      const float tolerance = 4 * rms * 0x1p-11f;
      const int exact = RecogniseScale(one, group, guess, tolerance, set);
      k = static_cast<std::uint8_t>(exact != 0 ? exact : guess);
      s.known[r * n_groups + g] = exact != 0;
    }
  }
}

// Where the values of four tokens' channel c begin in the string: token r's is at
// [r % 4 * steps + r / 4] from there.
std::size_t PlaceOf(const PageShape& shape, std::uint32_t c) {
  return std::size_t{TrellisLane(0, c)} * TrellisSteps(shape) + TrellisStep(shape, 0, c);
}

void SetTargets(const PageShape& shape, const std::uint8_t* scales, TrellisScratch& s) {
  const std::uint32_t rows = shape.rows, steps = TrellisSteps(shape);
  s.target.assign(std::size_t{steps} * kTrellisLanes, kNoTarget);
  float inverse[kMaxPageSize];
  std::int16_t none[kMaxPageSize], targets[kMaxPageSize];  // all bits set where there is no scale
  for (std::uint32_t c = 0; c < shape.dim; ++c) {
    if (c % shape.group == 0) {
      const std::uint8_t* k = scales + c / shape.group * rows;
      for (std::uint32_t r = 0; r < rows; ++r) {
        inverse[r] = k[r] == 0 ? 0 : 1.0f / VScale(k[r]);
        none[r] = k[r] == 0 ? -1 : 0;
      }
    }
    const float* y = s.y.data() + std::size_t{c} * rows;
    for (std::uint32_t r = 0; r < rows; ++r) {
      constexpr float kMost = TrellisErrors::kMaxTarget;
      const float x = Nearest(std::min(std::max(y[r] * inverse[r], -kMost), kMost));
      const auto target = static_cast<std::int16_t>(static_cast<std::int32_t>(x));
      targets[r] = static_cast<std::int16_t>((target & ~none[r]) | (kNoTarget & none[r]));
    }
    std::int16_t* to = s.target.data() + PlaceOf(shape, c);
    for (std::uint32_t i = 0; i < 4; ++i)
      for (std::uint32_t q = 0; q < rows / 4; ++q) to[i * steps + q] = targets[4 * q + i];
  }
}

// Each scale by least squares on the levels found.
void FitScales(const PageShape& shape, const TrellisScratch& s, std::uint8_t* scales) {
  const std::uint32_t rows = shape.rows, steps = TrellisSteps(shape);
  const std::uint32_t n_groups = shape.dim / shape.group;
  const std::int8_t* levels = TrellisLevels(shape.rate8);
  for (std::uint32_t g = 0; g < n_groups; ++g) {
    float dot[kMaxPageSize] = {}, power[kMaxPageSize] = {}, level[kMaxPageSize];
    for (std::uint32_t c = g * shape.group; c < (g + 1) * shape.group; ++c) {
      const float* y = s.y.data() + std::size_t{c} * rows;
      const std::uint8_t* window = s.window.data() + PlaceOf(shape, c);
      for (std::uint32_t i = 0; i < 4; ++i)
        for (std::uint32_t q = 0; q < rows / 4; ++q)
          level[4 * q + i] = levels[window[i * steps + q]];
      for (std::uint32_t r = 0; r < rows; ++r) {
        dot[r] += level[r] * y[r];
        power[r] += level[r] * level[r];
      }
    }
    for (std::uint32_t r = 0; r < rows; ++r) {
      std::uint8_t& k = scales[g * rows + r];
      if (k == 0 || s.known[r * n_groups + g] != 0 || dot[r] <= 0) continue;
      k = static_cast<std::uint8_t>(IndexNear(dot[r] / power[r]));
    }
  }
}

void WriteString(const PageShape& shape, const TrellisScratch& s, std::uint8_t* codes) {
  const std::uint32_t steps = TrellisSteps(shape);
  std::vector<std::uint8_t> bits_of(steps);
  for (std::uint32_t i = 0; i < steps; ++i)
    bits_of[i] = static_cast<std::uint8_t>(TrellisBits(shape.rate8, i));
  for (std::uint32_t lane = 0; lane < kTrellisLanes; ++lane) {
    const std::uint8_t* window = s.window.data() + std::size_t{lane} * steps;
    std::uint32_t bits = 0, n_bits = 0, byte = 0;
    for (std::uint32_t i = 0; i < steps; ++i) {
      const std::uint32_t n = bits_of[i];
      bits = (bits << n) | (window[i] & ((1u << n) - 1));
      n_bits += n;
      if (n_bits < 8) continue;
      n_bits -= 8;
      codes[byte++ * kTrellisLanes + lane] = static_cast<std::uint8_t>(bits >> n_bits);
    }
  }
}

}  // namespace

const TrellisErrors& TrellisErrorsOf(std::uint32_t rate8) {
  const auto make = [](std::uint32_t rate) {
    auto table = std::make_unique<TrellisErrors>();
    const std::int8_t* levels = TrellisLevels(rate);
    for (int target = -TrellisErrors::kMaxTarget; target <= TrellisErrors::kMaxTarget; ++target)
      for (int w = 0; w < 256; ++w) {
        const int error = std::min(std::abs(target - levels[w]), kTrellisErrorCap);
        table->squared[target + TrellisErrors::kMaxTarget][w] =
            static_cast<std::uint16_t>(error * error);
      }
    std::fill_n(table->squared[2 * TrellisErrors::kMaxTarget + 1], 256, std::uint16_t{0});
    return table;
  };
  if (TrellisLevels(rate8) == TrellisLevels(16)) {
    static const auto low = make(16);
    return *low;
  }
  static const auto high = make(24);
  return *high;
}

void SearchTrellisPlain(const PageShape& shape, TrellisScratch& s) {
  const std::int8_t* levels = TrellisLevels(shape.rate8);
  const std::uint32_t steps = TrellisSteps(shape), n = steps * kTrellisLanes;
  const std::uint32_t stride = TrellisBackStride(shape.rate8);
  s.window.resize(n);
  s.back.resize(std::size_t{n} * stride);
  std::uint16_t cost[256], m[128];
  std::fill_n(cost, 256, std::uint16_t{65535});
  cost[0] = 0;
  for (std::uint32_t i = 0; i < n; ++i) {
    const std::uint32_t b = TrellisBits(shape.rate8, i % steps), n_m = 256u >> b;
    std::uint16_t least = 65535;
    for (std::uint32_t q = 0; q < n_m; ++q) {
      std::uint32_t best = 0;
      for (std::uint32_t j = 1; j < 1u << b; ++j)
        if (cost[q + j * n_m] < cost[q + best * n_m]) best = j;
      m[q] = cost[q + best * n_m];
      least = std::min(least, m[q]);
      s.back[std::size_t{i} * stride + q] = static_cast<std::uint8_t>(best);
    }
    if (i % kTrellisNormalise == 0) {
      for (std::uint32_t q = 0; q < n_m; ++q) m[q] = static_cast<std::uint16_t>(m[q] - least);
    }
    for (std::uint32_t w = 0; w < 256; ++w) {
      int error = 0;
      if (s.target[i] != kNoTarget)
        error = std::min(std::abs(s.target[i] - levels[w]), kTrellisErrorCap);
      cost[w] = static_cast<std::uint16_t>(std::min(65535, m[w >> b] + error * error));
    }
  }
  std::uint32_t w = 0;
  for (std::uint32_t i = 1; i < 256; ++i)
    if (cost[i] < cost[w]) w = i;
  for (std::uint32_t i = n; i-- > 0;) {
    s.window[i] = static_cast<std::uint8_t>(w);
    const std::uint32_t b = TrellisBits(shape.rate8, i % steps), q = w >> b;
    w = q + s.back[std::size_t{i} * stride + q] * (256u >> b);
  }
}

void EncodeTrellis(const PageShape& shape, const EncodeInput& in, bool hadamard, TrellisScratch& s,
                   std::uint8_t* out, TrellisSearch search) {
  const PageBytes bytes = EncodedBytes(Coding::kVTrellis, shape);
  LoadRows(shape, in, hadamard, s);
  GuessScales(shape, in, s, out);
  SetTargets(shape, out, s);
  search(shape, s);
  FitScales(shape, s, out);
  WriteString(shape, s, out + bytes.scales);
}

}  // namespace kvtamp::codec
