// What a coded K or V looks like: its name, its parameters, its true size.
//
//   FORMAT = "f16" | (("int" | "lm" | "tcq") BITS | "fp8_e4m3" | "fp8_e5m2") ["_g" N]
//            ("_pc" | "_pt") ["_sym"] MODIFIERS
//   MODIFIERS = ["+had"] ["+mean"] ["+qw" | "+rw"] ["+out" N]
//   PAIR   = "k" BITS "v" BITS        short names that set both sides, e.g. k4v4, k2.5v2.25
//
// `_pc` per channel and `_pt` per token, always inside one page of one head; `lm` = Lloyd-Max
// levels of a Gaussian; `tcq` = trellis-coded levels; `+had` = block-diagonal Hadamard over the
// head before coding; `+mean` = the head's mean key is taken off before coding (softmax does not
// see it); `+qw` = bits per channel weighted by the queries, BITS being their mean; `+rw` = the
// same by range alone, to see what the queries bring;
// `+outN` = the N channels of largest range are kept apart in f16. BITS may be
// fractional, to hundredths, for `+qw`, `+rw` and `tcq`. ParseFormat(FormatName(f)) == f for every
// f with a layout.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace kvtamp::codec {

enum class Side : std::uint8_t { kK, kV };
enum class Levels : std::uint8_t { kF16, kInt, kLm, kTcq, kFp8E4m3, kFp8E5m2 };
enum class Axis : std::uint8_t { kChannel, kToken };

struct Format {
  Levels levels = Levels::kF16;
  std::uint16_t centibits = 1600;  // hundredths of a bit
  Axis axis = Axis::kToken;
  // Elements sharing one scale. Per channel: 0 = the page. Per token: 0 = chosen by Resolve.
  std::uint16_t group = 0;
  bool sym = false;
  bool hadamard = false;
  bool mean = false;
  bool weighted = false;       // +qw
  bool by_range = false;       // +rw
  std::uint16_t outliers = 0;  // channels kept in f16

  bool operator==(const Format&) const = default;
  bool coded() const { return levels != Levels::kF16; }
};

struct Pair {
  Format k, v;
  bool operator==(const Pair&) const = default;
};

// The physical layouts there are (docs/formats.md); kernels switch on this and nothing else.
// The numbers go to disk: never renumber.
enum class Coding : std::uint8_t {
  kF16 = 0,
  kKInt8 = 1,
  kKInt4 = 2,
  kVInt8 = 3,
  kVLm4 = 4,
  kKPlanes = 5,
  kVTrellis = 6,
  kRows = 7,  // either side: what has no layout made for speed
};

// Full descriptor, e.g. "int4_pc+mean". An unknown word is an error that names the nearest known
// one; a format without a layout on this side, and a type of the host's, is kUnsupported.
Result<Format> ParseFormat(std::string_view text, Side side);
std::string FormatName(const Format& format);

// A short name, "k=… v=…", or a full descriptor valid on both sides.
Result<Pair> ParsePair(std::string_view text);
// The shortest name that parses to `pair`: a short name where there is one, else "k=… v=…".
std::string PairName(const Pair& pair);

// One documented short name (the list `kvtamp formats` prints).
struct ShortName {
  const char* name;
  const char* k;
  const char* v;
  const char* note;
};
std::span<const ShortName> ShortNames();

// The layout that holds `format` on `side`, or why there is none yet.
Result<Coding> CodingOf(const Format& format, Side side);

// Fills in group for a head of `dim` elements and checks it: per token, 64 where it divides, else
// the largest divisor of dim up to 128; an explicit group must divide dim.
Result<Format> Resolve(Format format, Side side, std::uint32_t dim);

// The format of the short names for so many bits (k3v3 …), with the mean, the rotation and the
// groups of `format`: pages of both can lie in one layer.
Format WithBits(const Format& format, Side side, std::uint16_t centibits);

// Bits per element of a full coded page, scales and minima counted; those of the layout, which has
// the nearest size to that asked for that it can have.
double BitsPerElement(const Format& resolved, Side side, std::uint32_t dim,
                      std::uint32_t page_size);

}  // namespace kvtamp::codec
