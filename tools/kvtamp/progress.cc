#include "tools/kvtamp/progress.h"

#include <fmt/format.h>
#include <signal.h>  // sigaction
#include <unistd.h>

#include <csignal>

namespace kvtamp::tool {
namespace {

volatile std::sig_atomic_t g_stop = 0;
void OnInterrupt(int) { g_stop = 1; }

}  // namespace

Progress::Progress(const char* command, bool quiet)
    : command_(command), quiet_(quiet), terminal_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (shown_ && terminal_) fmt::print(stderr, "\r\033[K");
}

bool Progress::operator()(double done, const std::string& what) {
  const auto now = Clock::now();
  if (first_ < 0) first_ = done;
  const auto wait = terminal_ ? std::chrono::milliseconds(500) : std::chrono::milliseconds(60'000);
  if (!quiet_ && now - last_ >= wait) {
    last_ = now;
    shown_ = true;
    const double passed = std::chrono::duration<double>(now - start_).count();
    const std::string left =
        done > first_ ? fmt::format(", {:.0f} s left", passed * (1 - done) / (done - first_)) : "";
    fmt::print(stderr, "{}kvtamp {}: {}, {:.0f}%{}{}", terminal_ ? "\r\033[K" : "", command_, what,
               100 * done, left, terminal_ ? "" : "\n");
  }
  return g_stop == 0;
}

void NoteInterrupts() {
  struct sigaction action = {};
  action.sa_handler = OnInterrupt;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
}

}  // namespace kvtamp::tool
