// What kvtamp's cache takes at a number of tokens, all overhead counted: measured on a store that
// is filled, not computed. Bytes do not depend on what the rows hold, so a hollow store will do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "control/settings.h"
#include "tools/kvtamp/cache_size.h"
#include "tools/kvtamp/layout.h"

namespace kvtamp::tool {

// One sequence of n_tokens that came in by micro-batches of n_ubatch.
Result<CacheSize> StoredSize(const ModelLayout& layout, const control::Settings& settings,
                             std::uint32_t n_tokens, std::uint32_t n_ubatch);

// Why the store cannot hold a layer, in the words of the load; empty if it can.
std::string WhyNotStored(const LayerLayout& layer, const control::Settings& settings);

// The bytes of a cache by what they are for. All but `logical` add up to stored().
struct StoredBytes {
  double logical = 0;  // of the same rows in f16
  // Pages in their final format: codes (rows, where that is f16), scales and minima.
  double codes = 0, scales = 0;
  // Rows that have no final format yet, or never will: first tokens, recent window, open page.
  double sinks = 0, window = 0, filling = 0;
  double index = 0;  // page tables, cells, liveness, what queries leave
  double slack = 0;  // held and not used
  double stored() const { return codes + scales + sinks + window + filling + index + slack; }
  StoredBytes& operator+=(const StoredBytes& other);
  StoredBytes& operator*=(double factor);
};

// The host pads every context to so many cells.
inline constexpr std::uint32_t kCellsPad = 256;
// Longer contexts than this are nobody's, and sums of them would not hold.
inline constexpr std::uint64_t kMaxContext = std::uint64_t{1} << 30;

// How the host spreads sequences over its caches.
struct Sharing {
  std::uint32_t n_users = 1;
  bool unified = false;  // one pool of cells for all, else a stream for each
  std::uint32_t n_ubatch = 512;
};
// Cells of a sliding window's cache that one of the users has, at a context of so many tokens.
std::uint64_t SwaCells(std::uint32_t n_swa, const Sharing& sharing, std::uint64_t n_tokens);

// One user's bytes at every context length: a store is filled once, up to so many tokens that its
// pages no longer tell; from there on the bytes grow by what each page takes.
class SizeCurve {
 public:
  static Result<SizeCurve> Make(const ModelLayout& layout, const control::Settings& settings,
                                const Sharing& sharing);
  // n_tokens: a multiple of kCellsPad; of a full context.
  StoredBytes At(std::uint64_t n_tokens) const;
  // The most that is held up to there, but for InFlight(): just before a page is full, it is f16.
  double Peak(std::uint64_t n_tokens) const;
  // Layers that the host keeps in f16 as they are.
  double Plain(std::uint64_t n_tokens) const;
  // What one micro-batch of all users takes in f16 until it is coded: a layer at a time, of each of
  // the host's caches.
  double InFlight() const { return in_flight_; }

 private:
  struct Sample {
    StoredBytes bytes;
    double peak = 0;
  };
  // Of the layers of one of the host's caches; entry i is of (i + 1) * kCellsPad tokens.
  struct Part {
    std::vector<Sample> samples;
    std::uint64_t n_most = kMaxContext;  // tokens beyond take no more
    Sample At(std::uint64_t n_tokens) const;
  };
  static Status Fill(const ModelLayout& layout, const control::Settings& settings,
                     const Sharing& sharing, bool swa, std::uint64_t n_tokens, Part& part);

  Part full_, swa_;
  double plain_full_ = 0, plain_swa_ = 0;  // bytes of a token
  double interleaved_ = 0;                 // of the index, too
  double in_flight_ = 0;
  std::uint32_t n_swa_ = 0;
  Sharing sharing_;
};

}  // namespace kvtamp::tool
