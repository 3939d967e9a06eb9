// The graph side: which ops are ours, and computing them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "plugins/ggml/delegate.h"
#include "store/cache.h"

namespace kvtamp::ggml_plugin {

class Buffer;
struct KvTensor;

// Where an attention op's K and V lie in the store, checked against the only layout the host's
// caches have: all heads of a cell in one row, one stream after the other.
struct AttentionLayout {
  const ggml_tensor* op = nullptr;
  Buffer* buffer = nullptr;  // of both
  const KvTensor* k = nullptr;
  const KvTensor* v = nullptr;
  std::uint32_t n_head_kv = 0, first_stream = 0, n_streams = 0;
  std::uint32_t v_in_k = 0;       // latent attention: V is the first so many channels of K
  const char* why_not = nullptr;  // null: it fits
};

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
  ggml_status ComputeNode(ggml_tensor* node);
  ggml_status SetRows(ggml_tensor* node);
  ggml_status Attend(ggml_tensor* node);
  ggml_status Shift(ggml_tensor* node);
  Status Angles(const ggml_tensor& node, std::int32_t shift, std::span<float> cos_sin);
  ggml_status ShiftRows(ggml_tensor* node, const KvTensor& kv, std::uint64_t first,
                        std::size_t in_row);
  ggml_status HostCompute(ggml_tensor* node, const char* why);

  Delegate delegate_;
  std::vector<AttentionLayout> attentions_;  // of the graph being computed, over the store
  // Kept for their memory: a token allocates none.
  std::vector<std::uint64_t> cells_;
  std::vector<std::uint32_t> sink_cells_;
  std::vector<store::Cache::StreamJob> jobs_;
};

}  // namespace kvtamp::ggml_plugin
