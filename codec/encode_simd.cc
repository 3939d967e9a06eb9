#include "cpu/highway.h"  // first

#include <cmath>
#include <cstring>

#include "codec/encode.h"
#include "codec/encode_planes.h"
#include "codec/rows.h"
#include "codec/trellis.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/encode_simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// Highway's target of one lane lacks what these use, and they are empty there; plain C++ stands in.
// Included all the same: their guards count the targets.
#include "codec/encode_k-inl.h"
#include "codec/encode_trellis-inl.h"
#include "codec/encode_v-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvtamp::codec {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

void EncodeKPage(Coding coding, const PageShape& shape, const EncodeInput& in, const float* mean,
                 std::uint8_t* out) {
  plain::EncodeK(coding, shape, in, mean, out);
}

void EncodeVPage(Coding coding, const PageShape& shape, const EncodeInput& in, bool hadamard,
                 std::uint8_t* out) {
  plain::EncodeV(coding, shape, in, hadamard, out);
}

#else

// Codes of one block of channels, [rows][lanes], to their planes.
template <int kBits>
HWY_INLINE void PlaceK(std::uint32_t rows, std::uint32_t lanes, std::uint8_t* codes,
                       std::uint8_t* out) {
  if constexpr (kBits == 8) {
    for (std::uint32_t g = 0; g < lanes; g += 4) {
      for (std::uint32_t t = 0; t < rows; ++t, out += 4) std::memcpy(out, codes + t * lanes + g, 4);
    }
  } else {
    const std::uint32_t half = std::min<std::uint32_t>(32, rows) / 2;
    for (std::uint32_t g = 0; g < lanes; g += 4) {
      for (std::uint32_t chunk = 0; chunk < rows; chunk += 2 * half) {
        for (std::uint32_t t = chunk; t < chunk + half; ++t, out += 4) {
          std::uint32_t low, high;
          std::memcpy(&low, codes + t * lanes + g, 4);
          std::memcpy(&high, codes + (t + half) * lanes + g, 4);
          low |= high << 4;
          std::memcpy(out, &low, 4);
        }
      }
    }
  }
}

template <int kBits>
void EncodeKBits(const PageShape& shape, const EncodeInput& in, const float* mean,
                 std::uint8_t* out) {
  const auto lanes = static_cast<std::uint32_t>(hn::Lanes(D16()));
  std::uint8_t valid[kMaxPageSize];
  KSource source{in.rows, in.stride, valid, 0};
  for (std::uint32_t r = 0; r < shape.rows; ++r) {
    if (IsValid(in, r)) valid[source.n++] = static_cast<std::uint8_t>(r);
  }
  const std::size_t code_bytes = shape.rows * kBits / 8;  // of one channel
  std::uint8_t* planes = out + 2 * shape.dim;
  if (source.n == 0) {
    std::memset(out, 0, 2 * shape.dim + code_bytes * shape.dim);
    return;
  }
  KBlock block;
  alignas(64) std::uint8_t codes[kMaxPageSize * kChannels];
  std::memset(codes, 0, sizeof(codes));
  for (std::uint32_t first = 0; first < shape.dim; first += lanes) {
    const std::uint32_t c = std::min(first, shape.dim - lanes);  // the last one may do some again
    source.rows = in.rows + c;
    LoadK(source, mean == nullptr ? nullptr : mean + c, block);
    ToFixed<kBits>(block);
    SearchK<kBits>(block);
    CodesOf<kBits>(block, valid, codes);
    for (std::uint32_t j = 0; j < lanes; ++j) {
      out[c + j] = static_cast<std::uint8_t>(block.k[j]);
      out[shape.dim + c + j] = static_cast<std::uint8_t>(block.z[j]);
    }
    PlaceK<kBits>(shape.rows, lanes, codes, planes + c * code_bytes);
  }
}

// Channels of one width: gathered, searched, and put back.
template <int kBits>
void SearchPlanes(PlanesScratch& s, std::size_t n, std::span<const std::uint16_t> channels) {
  const std::size_t lanes = hn::Lanes(D16());
  KBlock block;
  block.n = static_cast<std::uint32_t>(n);
  alignas(64) std::uint8_t codes[kMaxPageSize * kChannels];
  std::uint8_t all[kMaxPageSize];
  for (std::size_t i = 0; i < n; ++i) all[i] = static_cast<std::uint8_t>(i);
  for (std::size_t first = 0; first < channels.size(); first += lanes) {
    const std::size_t count = std::min(lanes, channels.size() - first);
    for (std::size_t j = 0; j < lanes; ++j) {
      const std::uint16_t c = channels[first + std::min(j, count - 1)];
      const float* x = s.x.data() + c * n;
      block.centre[j] = (s.lo[c] + s.hi[c]) * 0.5f;
      block.half[j] = (s.hi[c] - s.lo[c]) * 0.5f;
      for (std::size_t i = 0; i < n; ++i) block.x[i * lanes + j] = x[i];
    }
    ToFixed<kBits>(block);
    SearchK<kBits>(block);
    CodesOf<kBits>(block, all, codes);
    for (std::size_t j = 0; j < count; ++j) {
      const std::uint16_t c = channels[first + j];
      s.grids[c].k = static_cast<std::uint8_t>(block.k[j]);
      s.grids[c].z = static_cast<std::int8_t>(block.z[j]);
      for (std::size_t i = 0; i < n; ++i) s.codes[c * n + i] = codes[i * lanes + j];
    }
  }
}

void EncodeKPage(Coding coding, const PageShape& shape, const EncodeInput& in, const float* mean,
                 std::uint8_t* out) {
  if (coding == Coding::kKPlanes) {
    static thread_local PlanesScratch s;
    EncodePlanes(
        shape, in, mean, s, out, [&](std::uint32_t width, std::span<const std::uint16_t> channels) {
          constexpr void (*kSearch[])(PlanesScratch&, std::size_t,
                                      std::span<const std::uint16_t>) = {
              nullptr,         SearchPlanes<1>, SearchPlanes<2>, SearchPlanes<3>, SearchPlanes<4>,
              SearchPlanes<5>, SearchPlanes<6>, SearchPlanes<7>, SearchPlanes<8>};
          kSearch[width](s, s.x.size() / shape.dim, channels);
        });
    return;
  }
  if (coding == Coding::kKInt8) {
    EncodeKBits<8>(shape, in, mean, out);
  } else {
    EncodeKBits<4>(shape, in, mean, out);
  }
}

void EncodeVPage(Coding coding, const PageShape& shape, const EncodeInput& in, bool hadamard,
                 std::uint8_t* out) {
  if (coding == Coding::kVTrellis) {
    static thread_local TrellisScratch s;
    EncodeTrellis(shape, in, hadamard, s, out, SearchTrellis);
    return;
  }
  static constexpr half_t kZeros[kMaxDim] = {};
  const PageBytes bytes = EncodedBytes(coding, shape);
  const std::size_t block_bytes = shape.rows * (coding == Coding::kVInt8 ? 16 : 8);
  if (shape.dim % 16 != 0) std::memset(out + bytes.total - block_bytes, 0, block_bytes);
  const std::uint32_t rotated = shape.dim & (0u - shape.dim);
  const float norm = hadamard ? 1.0f / std::sqrt(static_cast<float>(rotated)) : 1.0f;
  VBlock block;
  for (std::uint32_t t0 = 0; t0 < shape.rows; t0 += kTokens) {
    const half_t* row[kTokens];
    for (std::uint32_t t = 0; t < kTokens; ++t) {
      row[t] = IsValid(in, t0 + t) ? in.rows + (t0 + t) * in.stride : kZeros;
    }
    LoadV(row, shape.dim, norm, block);
    if (hadamard) HadamardTokens(block.x, shape.dim);
    for (std::uint32_t c = 0; c < shape.dim; c += shape.group) {
      std::uint8_t* scales = out + c / shape.group * shape.rows + t0;
      const float* x = block.x + c * kTokens;
      if (coding == Coding::kVLm4) {
        SearchLm4(block, x, shape.group, scales);
        CodesLm4(block, c, shape.group);
      } else {
        SearchInt8(block, x, shape.group, scales);
        CodesInt8(block, c, shape.group);
      }
    }
    PlaceV(coding, shape, block, t0, out + bytes.scales);
  }
}

#endif  // HWY_TARGET

}  // namespace HWY_NAMESPACE
}  // namespace kvtamp::codec
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtamp::codec {

HWY_EXPORT(EncodeKPage);
HWY_EXPORT(EncodeVPage);

void EncodeK(Coding coding, const PageShape& shape, const EncodeInput& in, const float* mean,
             std::uint8_t* out) {
  if (coding == Coding::kRows) return EncodeRowsPage(shape, in, mean, shape.format.hadamard, out);
  HWY_DYNAMIC_DISPATCH(EncodeKPage)(coding, shape, in, mean, out);
}

void EncodeV(Coding coding, const PageShape& shape, const EncodeInput& in, bool hadamard,
             std::uint8_t* out) {
  if (coding == Coding::kRows)
    return EncodeRowsPage(shape, in, nullptr, shape.format.hadamard, out);
  HWY_DYNAMIC_DISPATCH(EncodeVPage)(coding, shape, in, hadamard, out);
}

}  // namespace kvtamp::codec
#endif  // HWY_ONCE
