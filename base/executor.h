// Threads are lent by whoever calls us (the host's team); the library never starts any.
#pragma once

#include <type_traits>

namespace kvtamp {

class Executor {
 public:
  virtual ~Executor() = default;
  virtual int n_threads() const = 0;
  // Calls fn(arg, worker) once for every worker in [0, n_threads()) and returns when all are done.
  virtual void Run(void (*fn)(void* arg, int worker), void* arg) = 0;

  template <class F>
  void ForEachWorker(F&& f) {
    using Fn = std::remove_reference_t<F>;
    Run([](void* arg, int worker) { (*static_cast<Fn*>(arg))(worker); }, &f);
  }
};

// The calling thread alone.
class SerialExecutor final : public Executor {
 public:
  int n_threads() const override { return 1; }
  void Run(void (*fn)(void*, int), void* arg) override { fn(arg, 0); }
};

}  // namespace kvtamp
