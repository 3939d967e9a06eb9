#include "bench/ggml_attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvtamp::bench {

std::size_t GgmlLayerBytes(const Shape& shape, ggml_type type) {
  return 2 * ggml_row_size(type, shape.n_embd()) * shape.length;
}

Result<std::unique_ptr<GgmlAttention>> GgmlAttention::Make(const Shape& shape, ggml_type type,
                                                           std::uint32_t n_layers, int n_threads) {
  if (shape.dim % ggml_blck_size(type) != 0)
    return Status::Unsupported(
        fmt::format("ggml's {} has blocks of {}, which do not divide a head "
                    "of {}",
                    ggml_type_name(type), ggml_blck_size(type), shape.dim));
  std::unique_ptr<GgmlAttention> made(new GgmlAttention(shape, type, n_layers));
  if (Status s = made->OpenBackend(n_threads); !s.ok()) return s;
  if (Status s = made->MakeGraph(); !s.ok()) return s;
  return made;
}

Status GgmlAttention::OpenBackend(int n_threads) {
  ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (cpu == nullptr) {  // a ggml whose backends are libraries of their own
    ggml_backend_load_all();
    cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  }
  if (cpu == nullptr) return Status::Unsupported("ggml has no CPU backend");
  backend_.reset(ggml_backend_dev_init(cpu, nullptr));
  const auto set_n_threads =
      reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
          ggml_backend_dev_backend_reg(cpu), "ggml_backend_set_n_threads"));
  if (backend_ == nullptr || set_n_threads == nullptr)
    return Status::Unsupported("ggml's CPU backend cannot be used");
  set_n_threads(backend_.get(), n_threads);
  return Status::Ok();
}

void GgmlAttention::FillRows(ggml_tensor* rows, std::uint64_t seed) const {
  RowSource source(seed);
  const std::int64_t n_embd = shape_.n_embd();
  std::vector<half_t> halves(kPageSize * shape_.n_embd());
  std::vector<float> floats(halves.size());
  std::vector<std::uint8_t> coded(rows->nb[2] * kPageSize);
  for (std::uint32_t token = 0; token < shape_.length; token += kPageSize) {
    source.Fill(halves);
    const void* data = halves.data();
    if (type_ != GGML_TYPE_F16) {
      ggml_fp16_to_fp32_row(halves.data(), floats.data(), static_cast<std::int64_t>(floats.size()));
      ggml_quantize_chunk(type_, floats.data(), coded.data(), 0, kPageSize, n_embd, nullptr);
      data = coded.data();
    }
    ggml_backend_tensor_set(rows, data, token * rows->nb[2], coded.size());
  }
}

Status GgmlAttention::MakeGraph() {
  // K, V, both by head and the result of each layer; q, q by head and the mask.
  const std::size_t n_tensors = 5 * std::size_t{n_layers_} + 3;
  context_.reset(
      ggml_init({n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false),
                 nullptr, true}));
  if (context_ == nullptr) return Status::OutOfMemory("ggml's context");
  ggml_context* c = context_.get();
  graph_ = ggml_new_graph_custom(c, n_tensors, false);
  const std::int64_t dim = shape_.dim, n_head_kv = shape_.n_head_kv;
  ggml_tensor* q = ggml_new_tensor_3d(c, GGML_TYPE_F32, dim, shape_.n_head, shape_.n_tok);
  ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, shape_.length, shape_.n_tok);
  ggml_tensor* q_by_head = ggml_permute(c, q, 0, 2, 1, 3);
  std::vector<ggml_tensor*> rows;
  for (std::uint32_t i = 0; i < n_layers_; ++i) {
    ggml_tensor* k = ggml_new_tensor_3d(c, type_, dim, n_head_kv, shape_.length);
    ggml_tensor* v = ggml_new_tensor_3d(c, type_, dim, n_head_kv, shape_.length);
    last_ = ggml_flash_attn_ext(c, q_by_head, ggml_permute(c, k, 0, 2, 1, 3),
                                ggml_permute(c, v, 0, 2, 1, 3), mask,
                                1.0f / std::sqrt(static_cast<float>(dim)), 0.0f, 0.0f);
    ggml_build_forward_expand(graph_, last_);
    rows.insert(rows.end(), {k, v});
  }
  buffer_.reset(ggml_backend_alloc_ctx_tensors(c, backend_.get()));
  if (buffer_ == nullptr)
    return Status::OutOfMemory(fmt::format("no memory for {} bytes of ggml's {}",
                                           n_layers_ * GgmlLayerBytes(shape_, type_),
                                           ggml_type_name(type_)));
  const Query query(shape_);
  ggml_backend_tensor_set(q, query.q.data(), 0, ggml_nbytes(q));
  ggml_backend_tensor_set(mask, query.mask.data(), 0, ggml_nbytes(mask));
  for (std::size_t i = 0; i < rows.size(); ++i)
    FillRows(rows[i], SeedOf(static_cast<std::uint32_t>(i / 2), i % 2 == 1));
  return Status::Ok();
}

Status GgmlAttention::Step() {
  if (ggml_backend_graph_compute(backend_.get(), graph_) != GGML_STATUS_SUCCESS)
    return Status::Internal("ggml could not compute its attention");
  return Status::Ok();
}

std::span<const float> GgmlAttention::out() const {
  return {static_cast<const float*>(last_->data), static_cast<std::size_t>(ggml_nelements(last_))};
}

}  // namespace kvtamp::bench
