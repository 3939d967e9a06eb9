// Prefill and decode of several caches of one model at given depths, in one process and in turns,
// so that whatever else the machine does meets all of them alike.
#pragma once

#include <cstdint>
#include <ctime>
#include <span>
#include <string>
#include <vector>

#include "tools/kvtamp/evaluate.h"

namespace kvtamp::tool {

struct SpeedConfig {
  std::string model;
  std::vector<std::uint32_t> depths{0, 2048, 8192, 32768};  // tokens in the cache before a test
  std::uint32_t n_prompt = 512, n_gen = 32;                 // 0: that test is left out
  std::uint32_t n_batch = 2048, n_ubatch = 512;
  std::uint32_t repetitions = 5;
  int n_threads = 1;
};

// One test at one depth: a prompt of so many tokens, or so many tokens one by one.
struct SpeedTest {
  std::uint32_t n_depth = 0, n_prompt = 0, n_gen = 0;
  std::time_t time = 0;
  std::vector<std::vector<double>> seconds;  // [cache][repetition]
  std::uint32_t n_tokens() const { return n_prompt + n_gen; }
};

struct SpeedResult {
  ModelFacts model;
  std::vector<SpeedTest> tests;
};

// `progress` is false when it is to end: then with the repetitions that all caches have done.
Result<SpeedResult> MeasureSpeed(const ModelPair& models, const SpeedConfig& config,
                                 std::span<const TestedCache> caches, const ProgressCall& progress);

}  // namespace kvtamp::tool
