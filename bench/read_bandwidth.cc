#include "bench/read_bandwidth.h"

#include <benchmark/benchmark.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>

namespace kvtamp::bench {
namespace {

// That of worker w of n: whole, and without an end in common.
std::span<const std::uint64_t> PartOf(std::span<const std::uint64_t> words, int w, int n) {
  const std::size_t from = words.size() * static_cast<std::size_t>(w) / static_cast<std::size_t>(n);
  const std::size_t to =
      words.size() * static_cast<std::size_t>(w + 1) / static_cast<std::size_t>(n);
  return words.subspan(from, to - from);
}

// Sixteen sums, so that no addition waits for another.
std::uint64_t Xor(std::span<const std::uint64_t> words) {
  constexpr std::size_t kSums = 16;
  std::uint64_t sums[kSums] = {};
  std::size_t i = 0;
  for (; i + kSums <= words.size(); i += kSums)
    for (std::size_t j = 0; j < kSums; ++j) sums[j] ^= words[i + j];
  std::uint64_t sum = 0;
  for (; i < words.size(); ++i) sum ^= words[i];
  for (const std::uint64_t s : sums) sum ^= s;
  return sum;
}

}  // namespace

std::size_t LastLevelCacheBytes() {
  // Not sysconf: it answers with that of all cores of the socket.
  std::size_t most = 0;
  for (int i = 0; i < 8; ++i) {
    std::ifstream in("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/size");
    std::size_t n = 0;
    char unit = 0;
    if (!(in >> n >> unit)) continue;
    most = std::max(most, n << (unit == 'M' ? 20 : 10));
  }
  return most;
}

std::uint64_t ReadAll(std::span<const std::uint64_t> words, int n_threads) {
  std::uint64_t sum = 0;
#pragma omp parallel num_threads(n_threads) reduction(^ : sum)
  for (int w = omp_get_thread_num(); w < n_threads; w += omp_get_num_threads())
    sum ^= Xor(PartOf(words, w, n_threads));
  return sum;
}

std::size_t ReadBuffer::DefaultBytes() {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  return std::clamp(4 * LastLevelCacheBytes(), 256 * kMiB, 2048 * kMiB);
}

ReadBuffer::ReadBuffer(std::size_t bytes, int n_threads)
    : n_words_(bytes / 64 * 8), n_threads_(n_threads) {
  words_ = static_cast<std::uint64_t*>(std::aligned_alloc(64, n_words_ * sizeof(std::uint64_t)));
  if (words_ == nullptr) return;
#pragma omp parallel num_threads(n_threads)
  for (int w = omp_get_thread_num(); w < n_threads; w += omp_get_num_threads()) {
    const auto part = PartOf({words_, n_words_}, w, n_threads);
    std::uint64_t* to = words_ + (part.data() - words_);
    // Not zeros: those a system may keep as one page.
    for (std::size_t i = 0; i < part.size(); ++i) to[i] = i * 0x9E3779B97F4A7C15u + 1;
  }
}

ReadBuffer::~ReadBuffer() { std::free(words_); }

double ReadBuffer::Pass() {
  const auto start = std::chrono::steady_clock::now();
  std::uint64_t sum = ReadAll({words_, n_words_}, n_threads_);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  benchmark::DoNotOptimize(sum);
  return static_cast<double>(bytes()) / took.count();
}

}  // namespace kvtamp::bench
