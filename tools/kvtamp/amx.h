// Does the host's CPU backend survive its own AMX instructions? Debian 12's GCC miscompiles the one
// that configures the tiles (scripts/gcc-amx.h has the details): a llama.cpp that it built for its
// own processor dies at the first matrix product. The compiler's version alone does not tell, for
// there are ways round it, so it is tried.
#pragma once

#include <optional>
#include <string>

namespace kvtamp::tool {

struct AmxTrial {
  enum class Outcome {
    kUnused,  // the host's CPU backend has no AMX, or the processor or the kernel does not offer it
    kUntried,  // it has, but the product could not be set up
    kRight,
    kWrong,  // the product is wrong
    kDied,
  };
  Outcome outcome = Outcome::kUnused;
  int signal = 0;        // that it died of
  std::string library;   // of the CPU backend; empty if not known
  std::string compiler;  // what made it: "GCC: (Debian 12.2.0-14) 12.2.0"; empty if not known
};

// One small product in a child process, some milliseconds. ggml's backends must be loaded.
AmxTrial TryAmx();

// What is wrong and what to do about it; nothing when all is well or there is nothing to be well.
struct AmxProblem {
  std::string text;
  std::string hint;
};
std::optional<AmxProblem> ProblemOf(const AmxTrial& trial);

// The section .comment of an ELF file, which compilers put their names in; "" if there is none.
std::string CompilerOf(const std::string& file);

}  // namespace kvtamp::tool
