// How far a long command is: one line on a terminal, one line a minute otherwise, and Ctrl-C.
#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace kvtamp::tool {

// `done`: 0 … 1, of what. False once there is to be an end.
using ProgressCall = std::function<bool(double done, const std::string& what)>;

class Progress {
 public:
  // `command`: "eval". Quiet: no line, Ctrl-C still counts.
  Progress(const char* command, bool quiet);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // A ProgressCall: the user ends it.
  bool operator()(double done, const std::string& what);

 private:
  using Clock = std::chrono::steady_clock;
  const char* command_;
  bool quiet_, terminal_, shown_ = false;
  double first_ = -1;  // what was done when we began: by an earlier run
  Clock::time_point start_ = Clock::now(), last_ = start_;
};

// The first Ctrl-C from here on is only noted, the second ends the process.
void NoteInterrupts();

}  // namespace kvtamp::tool
