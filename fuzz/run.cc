#include "fuzz/run.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kvtamp::fuzz {

namespace {

// A case takes seconds; sanitizers take their time.
constexpr unsigned kLimitSeconds = 300;

// What the child sends: this, then `text_bytes` of text: the difference, a NUL, the trace.
struct Message {
  std::uint64_t at_op = 0;
  Totals totals;
  std::uint8_t ok = 1, whole = 0;
  std::uint64_t text_bytes = 0;
};

void WriteAll(int fd, const void* data, std::size_t n) {
  const auto* p = static_cast<const char*>(data);
  while (n > 0) {
    const ssize_t done = write(fd, p, n);
    if (done <= 0) return;
    p += done;
    n -= static_cast<std::size_t>(done);
  }
}

bool ReadAll(int fd, void* data, std::size_t n) {
  auto* p = static_cast<char*>(data);
  while (n > 0) {
    const ssize_t done = read(fd, p, n);
    if (done <= 0) return false;
    p += done;
    n -= static_cast<std::size_t>(done);
  }
  return true;
}

void Send(int fd, const Outcome& o, bool whole) {
  const std::string text = o.what + '\0' + o.trace;
  Message m{o.at_op, o.totals, o.ok, whole, text.size()};
  WriteAll(fd, &m, sizeof m);
  WriteAll(fd, text.data(), text.size());
}

void Child(const Case& c, ggml_backend_dev_t device, bool trace, int fd) {
  alarm(kLimitSeconds);
  setenv("GGML_NO_BACKTRACE", "1", 1);  // else the host starts a debugger
  Outcome o;
  Pair pair(c.setup, device, o.what);
  for (std::size_t i = 0; o.what.empty() && i < c.ops.size(); ++i) {
    o.at_op = i;
    // The number of the operation gets out even if the operation does not return.
    WriteAll(fd, "\1", 1);
    std::string note;
    o.what = pair.Apply(c.ops[i], o.totals, note);
    if (trace) {
      o.trace += ToText(c.ops[i]) + "  # " + note;
      if (!o.what.empty()) o.trace += " " + o.what;
      o.trace += "\n";
    }
  }
  if (o.what.empty()) o.what = pair.Finish(o.totals);
  o.ok = o.what.empty();
  WriteAll(fd, "\0", 1);
  Send(fd, o, true);
}

}  // namespace

Outcome RunCase(const Case& c, ggml_backend_dev_t device, bool trace) {
  Outcome o;
  int fds[2];
  if (pipe(fds) != 0) return {false, "no pipe", 0, {}, ""};
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    close(fds[0]);
    Child(c, device, trace, fds[1]);
    _exit(0);  // neither our parent's exit handlers nor the plug-in's summary
  }
  close(fds[1]);
  char mark = 0;
  std::size_t started = 0;
  bool ended = false;
  while (!ended && ReadAll(fds[0], &mark, 1)) {
    ended = mark == 0;
    started += !ended;
  }
  Message m;
  if (ended && ReadAll(fds[0], &m, sizeof m)) {
    std::string text(m.text_bytes, '\0');
    ended = ReadAll(fds[0], text.data(), text.size());
    o.ok = m.ok != 0;
    o.at_op = m.at_op;
    o.totals = m.totals;
    const std::size_t nul = std::min(text.find('\0'), text.size());
    o.what = text.substr(0, nul);
    o.trace = text.substr(std::min(nul + 1, text.size()));
  } else {
    ended = false;
  }
  close(fds[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (ended && WIFEXITED(status) && WEXITSTATUS(status) == 0) return o;
  o.ok = false;
  o.at_op = started == 0 ? 0 : started - 1;
  o.what = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM
               ? "hangs"
           : WIFSIGNALED(status) ? "dies of signal " + std::to_string(WTERMSIG(status))
                                 : "exits with " + std::to_string(WEXITSTATUS(status));
  return o;
}

Case Shrink(const Case& c, std::size_t at_op, ggml_backend_dev_t device, int runs) {
  Case best = c;
  if (at_op + 1 < best.ops.size()) best.ops.resize(at_op + 1);
  const auto fails = [&](const Case& smaller) {
    if (runs-- <= 0) return false;
    const Outcome o = RunCase(smaller, device);
    if (o.ok) return false;
    best = smaller;
    if (o.at_op + 1 < best.ops.size()) best.ops.resize(o.at_op + 1);
    return true;
  };
  for (std::size_t chunk = std::max<std::size_t>(1, best.ops.size() / 2);; chunk /= 2) {
    for (std::size_t at = 0; at < best.ops.size() && runs > 0;) {
      Case smaller = best;
      const auto first = smaller.ops.begin() + static_cast<std::ptrdiff_t>(at);
      const auto n = static_cast<std::ptrdiff_t>(std::min(chunk, smaller.ops.size() - at));
      smaller.ops.erase(first, first + n);
      if (!fails(smaller)) at += chunk;
    }
    if (chunk == 1) break;
  }
  // Fewer sequences per batch, fewer tokens.
  for (std::size_t i = 0; i < best.ops.size(); ++i) {
    if (best.ops[i].kind != Kind::kDecode) continue;
    for (std::size_t at = 4; i < best.ops.size() && at + 1 < best.ops[i].args.size();) {
      Case smaller = best;
      auto& args = smaller.ops[i].args;
      const auto part = args.begin() + static_cast<std::ptrdiff_t>(at);
      args.erase(part, part + 2);
      if (args.size() >= InfoOf(Kind::kDecode).n_args && fails(smaller)) continue;
      smaller = best;
      const std::int32_t n = smaller.ops[i].args[at + 1] /= 2;
      if (n < 1 || !fails(smaller)) at += 2;
    }
  }
  return best;
}

}  // namespace kvtamp::fuzz
