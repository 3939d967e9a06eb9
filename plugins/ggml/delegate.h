// Work that is not ours but has landed on our buffers (recurrent state, forced weights, caches of a
// kind the store does not hold): computed by a private instance of ggml's own CPU backend.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

namespace kvtamp::ggml_plugin {

class Delegate {
 public:
  Delegate() = default;
  ~Delegate();
  Delegate(const Delegate&) = delete;
  Delegate& operator=(const Delegate&) = delete;

  // Computes one node in place; every tensor it touches must be readable memory.
  ggml_status Compute(ggml_tensor* node, int n_threads);

 private:
  bool Init();
  ggml_backend_t backend_ = nullptr;
  ggml_context* ctx_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  ggml_backend_set_n_threads_t set_n_threads_ = nullptr;
};

}  // namespace kvtamp::ggml_plugin
