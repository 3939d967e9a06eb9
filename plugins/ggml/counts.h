// Counts what a piece of code asks of the C library and of the system. The program it is linked
// into has its malloc family and its locks of pthread replaced by ones that count, for every
// library in the process.
#pragma once

namespace kvtamp::ggml_plugin::test {

struct Counts {
  int allocations = 0;  // malloc and its like, free included; on every thread
  int locks = 0;        // mutexes, read-write locks and condition variables; on every thread
  // The number of the calling thread's first system call, -1 if it made none.
  long system_call = -1;
};

// False where the kernel cannot tell (Linux before 5.11, other processors than x86-64, valgrind).
bool SystemCallsAreSeen();

void StartCounting();
Counts StopCounting();

}  // namespace kvtamp::ggml_plugin::test
