// The graph side: which ops are ours, and computing them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "plugins/ggml/delegate.h"

namespace kvtamp::ggml_plugin {

struct KvTensor;

// The scheduler's question. Refusing an op whose result lies in our buffers aborts the host, so
// those are always ours; of the rest only attention over our K and V is.
bool SupportsOp(const ggml_tensor* op);

// One backend instance (one per context of the host). Holds no cache state: that lives in buffers.
class Backend {
 public:
  int n_threads = 1;
  ggml_abort_callback abort_callback = nullptr;
  void* abort_data = nullptr;

  ggml_status Compute(ggml_cgraph* graph);

 private:
  ggml_status ComputeNode(ggml_tensor* node, ggml_cgraph* graph);
  ggml_status SetRows(ggml_tensor* node, ggml_cgraph* graph);
  ggml_status Attend(ggml_tensor* node);
  ggml_status Shift(ggml_tensor* node);
  Status Angles(const ggml_tensor& node, std::int32_t shift, std::span<float> cos_sin);
  ggml_status ShiftRows(ggml_tensor* node, const KvTensor& kv, std::uint64_t first,
                        std::size_t in_row);
  ggml_status HostCompute(ggml_tensor* node, const char* why);

  Delegate delegate_;
};

}  // namespace kvtamp::ggml_plugin
