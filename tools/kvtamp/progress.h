// How far a long command is: one line on a terminal, one line a minute otherwise. While one lives,
// the first Ctrl-C asks the command to stop, so that it can keep what was done; the second ends it.
#pragma once

#include <chrono>
#include <string>

namespace kvtamp::tool {

class Progress {
 public:
  Progress(std::string command, bool quiet);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `done`: share of all work, 0 … 1. False when the command should stop.
  bool Show(double done, const std::string& what);

 private:
  using Clock = std::chrono::steady_clock;
  const std::string command_;
  const bool quiet_, terminal_;
  bool shown_ = false;
  Clock::time_point start_ = Clock::now(), last_ = start_;
};

}  // namespace kvtamp::tool
