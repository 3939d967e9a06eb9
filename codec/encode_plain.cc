#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "codec/encode.h"
#include "codec/encode_planes.h"
#include "codec/layout.h"
#include "codec/trellis.h"

namespace kvtamp::codec {
namespace {

float Finite(half_t h) {
  const float x = HalfToFloat(h);
  return std::isfinite(x) ? x : 0.0f;
}

// The least index of a logarithmic grid of `steps` per octave whose value is at least x.
int IndexUp(float x, float steps, float origin, float slack) {
  const float index = std::ceil(steps * (std::log2(std::max(x, 1e-30f)) + origin) - slack);
  return static_cast<int>(std::clamp(index, 0.0f, 255.0f));
}

constexpr auto kBoundaries = [] {  // between levels
  std::array<float, 15> b{};
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = (kLm4Levels[i] + kLm4Levels[i + 1]) / 2.0f;
  return b;
}();

int NearestLevel(float x) {  // of kLm4Levels
  int level = 0;
  for (int step = 8; step > 0; step /= 2) level += x >= kBoundaries[level + step - 1] ? step : 0;
  return level;
}

// ------------------------------------------------------------------------------------------- K

// One channel's values without the mean, and the best grid so far.
class KChannel {
 public:
  KChannel(std::uint32_t bits, std::vector<float> values)
      : bits_(bits),
        levels_(static_cast<float>((1u << bits) - 1)),
        steps_(static_cast<float>(1u << bits)),
        x_(std::move(values)) {}

  void Search() {
    if (x_.empty()) return;
    const auto [lo, hi] = std::minmax_element(x_.begin(), x_.end());
    centre_ = (*lo + *hi) / 2;
    half_ = (*hi - *lo) / 2;
    const int covering = Covering();
    for (const KCandidate& candidate : KCandidates(bits_)) {
      for (int i = 0; i < candidate.shifts; ++i)
        Try(covering + candidate.dk, kShifts[i] * candidate.unit);
    }
    Try(AlwaysCovering(), 0);
  }

  int k() const { return k_; }
  int z() const { return z_; }
  int Code(float x) const { return Code(x, Scale(k_), Min(k_, z_)); }

 private:
  int Index(float scale) const {
    return IndexUp(scale, 16, 6 + static_cast<float>(bits_), kKIndexSlack);
  }
  float Scale(int k) const { return KScale(bits_, static_cast<std::uint8_t>(k)); }
  float Min(int k, int z) const {
    return KMinFactor(static_cast<std::int8_t>(z)) * Scale(k) * steps_;
  }
  int Code(float x, float scale, float min) const {
    return static_cast<int>(std::clamp(std::nearbyint((x - min) / scale), 0.0f, levels_));
  }

  // The minimum that puts the middle of the codes nearest to the middle of the data; for data that
  // does not spread over two codes, one code.
  int NearestZ(int k) const {
    const float f = (centre_ + std::min(half_, Scale(k) / 2)) / (Scale(k) * steps_);
    const float z = kMinWidth * std::asinh(f / (kMinWidth * kMinStep));
    return static_cast<int>(std::clamp(std::nearbyint(z), -128.0f, 127.0f));
  }

  int Least() const { return Index(std::abs(centre_) / (kMinReach * steps_)); }

  // Covers the data up to half a step on either side, wherever the nearest minimum lies.
  int Covering() const {
    const int k = std::max(Least(), Index(2 * half_ / levels_));
    const float middle = Min(k, NearestZ(k)) + Scale(k) * levels_ / 2;
    return std::max(k, Index(2 * (half_ + std::abs(middle - centre_)) / steps_));
  }

  int AlwaysCovering() const {
    const float gap =
        std::max(kMinStep * steps_ * Scale(Covering()), std::abs(centre_) / kMinWidth);
    return std::max(Least(), Index((2 * half_ + gap) / levels_));
  }

  void Try(int k, int dz) {
    k = std::clamp(k, 0, 255);
    const int z = std::clamp(NearestZ(k) + dz, -128, 127);
    const float scale = Scale(k), min = Min(k, z);
    float error = 0;
    for (float x : x_) {
      const float d = x - (min + scale * static_cast<float>(Code(x, scale, min)));
      error += d * d;
    }
    if (error < error_) {
      error_ = error;
      k_ = k;
      z_ = z;
    }
  }

  std::uint32_t bits_;
  float levels_, steps_;
  std::vector<float> x_;
  float centre_ = 0, half_ = 0;
  float error_ = std::numeric_limits<float>::infinity();
  int k_ = 0, z_ = 0;
};

// ------------------------------------------------------------------------------------------- V

int VCode(Coding coding, float x, float scale) {
  const float level = scale == 0 ? 0.0f : x / scale;
  if (coding == Coding::kVLm4) return NearestLevel(level);
  return static_cast<int>(std::clamp(std::nearbyint(level), -127.0f, 127.0f));
}

float VError(Coding coding, const float* x, std::uint32_t n, float scale) {
  float error = 0;
  for (std::uint32_t i = 0; i < n; ++i) {
    const int code = VCode(coding, x[i], scale);
    const float level = static_cast<float>(coding == Coding::kVLm4 ? kLm4Levels[code] : code);
    error += (x[i] - scale * level) * (x[i] - scale * level);
  }
  return error;
}

int VSearch(Coding coding, const float* x, std::uint32_t n) {
  float max = 0;
  for (std::uint32_t i = 0; i < n; ++i) max = std::max(max, std::abs(x[i]));
  // Nearer to zero than to the least level of the least scale.
  if (max < VScale(1) * (coding == Coding::kVLm4 ? 3.0f : 0.5f)) return 0;
  const bool lm = coding == Coding::kVLm4;
  const int top = IndexUp(max / (lm ? 127.0f : 127.5f), 12, 17, 0) + (lm ? 1 : kVInt8Reach);
  int best = 0;
  float least = std::numeric_limits<float>::infinity();
  for (int i = 0; i < (lm ? kVCandidates : 2 * kVInt8Reach + 1); ++i) {
    const int k = std::clamp(top - i, 1, 255);
    const float error = VError(coding, x, n, VScale(static_cast<std::uint8_t>(k)));
    if (error < least) {
      least = error;
      best = k;
    }
  }
  return best;
}

void PutCode(std::uint8_t* codes, const Place& place, int code) {
  codes[place.byte] |= static_cast<std::uint8_t>(code << place.shift);
}

}  // namespace

const VCosts& VCostTable() {
  static const VCosts table = [] {
    VCosts t;
    for (int u = 0; u < 256; ++u) {
      for (int j = 0; j < kVCandidates; ++j) {
        const double ratio = std::exp2((1 - j) / 12.0);  // candidate's scale over the covering one
        const double level = kLm4Levels[NearestLevel(static_cast<float>(u / 2.0 / ratio))];
        const double error = u / 2.0 - ratio * level;
        t.cost[u][j] = static_cast<std::uint16_t>(std::lround(2 * error * error));
      }
    }
    return t;
  }();
  return table;
}

namespace plain {

void EncodeK(Coding coding, const PageShape& shape, const EncodeInput& in, const float* mean,
             std::uint8_t* out) {
  if (coding == Coding::kKPlanes) {
    PlanesScratch s;
    EncodePlanes(
        shape, in, mean, s, out, [&](std::uint32_t width, std::span<const std::uint16_t> channels) {
          const std::size_t n = s.x.size() / shape.dim;
          for (std::uint16_t c : channels) {
            const float* x = s.x.data() + c * n;
            KChannel channel(width, {x, x + n});
            channel.Search();
            s.grids[c].k = static_cast<std::uint8_t>(channel.k());
            s.grids[c].z = static_cast<std::int8_t>(channel.z());
            CodesOnGrid(x, static_cast<std::uint32_t>(n), s.grids[c], s.codes.data() + c * n);
          }
        });
    return;
  }
  const PageBytes bytes = EncodedBytes(coding, shape);
  std::memset(out, 0, bytes.total);
  for (std::uint32_t c = 0; c < shape.dim; ++c) {
    const float m = mean == nullptr ? 0.0f : mean[c];
    std::vector<float> values;
    for (std::uint32_t r = 0; r < shape.rows; ++r) {
      if (IsValid(in, r)) values.push_back(Finite(in.rows[r * in.stride + c]) - m);
    }
    KChannel channel(coding == Coding::kKInt8 ? 8 : 4, values);
    channel.Search();
    out[c] = static_cast<std::uint8_t>(channel.k());
    out[shape.dim + c] = static_cast<std::uint8_t>(channel.z());
    std::size_t i = 0;
    for (std::uint32_t r = 0; r < shape.rows; ++r) {
      if (!IsValid(in, r)) continue;
      PutCode(out + bytes.scales, KPlace(coding, shape, r, c), channel.Code(values[i++]));
    }
  }
}

void EncodeV(Coding coding, const PageShape& shape, const EncodeInput& in, bool hadamard,
             std::uint8_t* out) {
  if (coding == Coding::kVTrellis) {
    TrellisScratch s;
    EncodeTrellis(shape, in, hadamard, s, out, SearchTrellisPlain);
    return;
  }
  const PageBytes bytes = EncodedBytes(coding, shape);
  std::memset(out, 0, bytes.total);
  for (std::uint32_t r = 0; r < shape.rows; ++r) {
    std::vector<float> x(shape.dim);
    if (IsValid(in, r)) {
      for (std::uint32_t c = 0; c < shape.dim; ++c) x[c] = Finite(in.rows[r * in.stride + c]);
    }
    if (hadamard) Hadamard(x.data(), shape.dim);
    for (std::uint32_t c = 0; c < shape.dim; c += shape.group) {
      const int k = VSearch(coding, x.data() + c, shape.group);
      out[c / shape.group * shape.rows + r] = static_cast<std::uint8_t>(k);
      for (std::uint32_t i = c; i < c + shape.group; ++i) {
        const int code = VCode(coding, x[i], VScale(static_cast<std::uint8_t>(k)));
        PutCode(out + bytes.scales, VPlace(coding, shape, r, i), code & 255);
      }
    }
  }
}

}  // namespace plain
}  // namespace kvtamp::codec
