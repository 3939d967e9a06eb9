// Runs cases, each in a process of its own: a crash or a hang is a difference like any other, and one
// case's settings cannot reach the next.
#pragma once

#include <string>

#include "fuzz/case.h"
#include "fuzz/pair.h"
#include "ggml-backend.h"

namespace kvtamp::fuzz {

struct Outcome {
  bool ok = true;
  std::string what;         // the difference
  std::size_t at_op = 0;    // number of the operation that showed it
  Totals totals;
  std::string trace;        // every operation with what it came to, if asked for
};

// `trace`: each operation with what it came to goes into the outcome.
Outcome RunCase(const Case& c, ggml_backend_dev_t device, bool trace = false);

// Shorter, as long as it still fails: operations go by halves, then singly; then lengths go down.
// `runs` bounds the effort.
Case Shrink(const Case& c, std::size_t at_op, ggml_backend_dev_t device, int runs = 400);

}  // namespace kvtamp::fuzz
