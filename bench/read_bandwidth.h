// How fast this machine reads memory, as STREAM measures it (McCalpin 1995), but reading alone:
// the most that attention, which writes next to nothing, can get.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtamp::bench {

// Of the largest cache a core reads through, or 0 where the system does not say.
std::size_t LastLevelCacheBytes();

// Exclusive or of all words, read by `n_threads` threads, each a part of its own.
std::uint64_t ReadAll(std::span<const std::uint64_t> words, int n_threads);

// Memory far larger than the caches, so that no pass finds anything of the last one there, and
// nothing of what was measured before either.
class ReadBuffer {
 public:
  // At least 256 MiB and four times the last cache, at most 2 GiB.
  static std::size_t DefaultBytes();
  // Written first by the threads that will read it, so that each part lies near its thread.
  ReadBuffer(std::size_t bytes, int n_threads);
  ~ReadBuffer();
  ReadBuffer(const ReadBuffer&) = delete;
  ReadBuffer& operator=(const ReadBuffer&) = delete;

  bool ok() const { return words_ != nullptr; }
  int n_threads() const { return n_threads_; }
  std::size_t bytes() const { return n_words_ * sizeof(std::uint64_t); }
  // Bytes per second of one pass.
  double Pass();

 private:
  std::uint64_t* words_ = nullptr;
  std::size_t n_words_;
  int n_threads_;
};

}  // namespace kvtamp::bench
