#include "base/gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvtamp {
namespace {

// Two numbers that agree whenever nobody is in.
TEST(Gate, NeverBothIn) {
  Gate gate;
  std::uint64_t a = 0, b = 0;
  std::atomic<bool> done = false;
  std::atomic<std::uint64_t> seen = 0;
  std::vector<std::thread> guests;
  for (int i = 0; i < 2; ++i) {
    guests.emplace_back([&] {
      while (!done) {
        const Gate::Guest guest(gate);
        EXPECT_EQ(a, b);
        seen++;
      }
    });
  }
  // Long enough for both to be in often.
  while (a < 100000 || seen < 1000) {
    const Gate::Host host(gate);
    a++;
    b++;
  }
  done = true;
  for (std::thread& t : guests) t.join();
  EXPECT_EQ(a, b);
}

}  // namespace
}  // namespace kvtamp
