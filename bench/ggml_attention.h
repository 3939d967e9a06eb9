// ggml's own CPU flash attention over a cache of one type, as llama.cpp asks for it: one node of a
// graph for each layer, K and V as rows of all heads, in a buffer of the CPU backend.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <memory>
#include <vector>

#include "bench/attention.h"
#include "bench/shape.h"

namespace kvtamp::bench {

// K and V of a layer. The shape must be one the type can hold.
std::size_t GgmlLayerBytes(const Shape& shape, ggml_type type);

class GgmlAttention final : public Attention {
 public:
  static Result<std::unique_ptr<GgmlAttention>> Make(const Shape& shape, ggml_type type,
                                                     std::uint32_t n_layers, int n_threads);

  Status Step() override;
  std::uint32_t n_layers() const override { return n_layers_; }
  std::span<const float> out() const override;

 private:
  struct FreeContext {
    void operator()(ggml_context* p) const { ggml_free(p); }
  };
  struct FreeBackend {
    void operator()(ggml_backend* p) const { ggml_backend_free(p); }
  };
  struct FreeBuffer {
    void operator()(ggml_backend_buffer* p) const { ggml_backend_buffer_free(p); }
  };

  GgmlAttention(const Shape& shape, ggml_type type, std::uint32_t n_layers)
      : shape_(shape), type_(type), n_layers_(n_layers) {}
  Status OpenBackend(int n_threads);
  Status MakeGraph();
  void FillRows(ggml_tensor* rows, std::uint64_t seed) const;

  const Shape shape_;
  const ggml_type type_;
  const std::uint32_t n_layers_;
  std::unique_ptr<ggml_backend, FreeBackend> backend_;
  std::unique_ptr<ggml_context, FreeContext> context_;
  std::unique_ptr<ggml_backend_buffer, FreeBuffer> buffer_;
  ggml_cgraph* graph_ = nullptr;
  ggml_tensor* last_ = nullptr;
};

}  // namespace kvtamp::bench
