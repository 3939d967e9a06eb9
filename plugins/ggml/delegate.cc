#include "plugins/ggml/delegate.h"

#include "base/log.h"

namespace kvtamp::ggml_plugin {

Delegate::~Delegate() {
  if (ctx_ != nullptr) ggml_free(ctx_);
  if (backend_ != nullptr) ggml_backend_free(backend_);
}

bool Delegate::Init() {
  if (graph_ != nullptr) return true;
  ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (cpu == nullptr) {
    Log(LogLevel::kError, "no CPU backend in this process: load ggml's backends before kvtamp");
    return false;
  }
  if (backend_ == nullptr) backend_ = ggml_backend_dev_init(cpu, nullptr);
  if (backend_ == nullptr) return false;
  set_n_threads_ = reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(cpu), "ggml_backend_set_n_threads"));
  constexpr std::size_t kNodes = 8;
  ctx_ = ggml_init({ggml_graph_overhead_custom(kNodes, false) + 1024, nullptr, true});
  if (ctx_ == nullptr) return false;
  graph_ = ggml_new_graph_custom(ctx_, kNodes, false);
  return graph_ != nullptr;
}

ggml_status Delegate::Compute(ggml_tensor* node, int n_threads) {
  if (!Init()) return GGML_STATUS_FAILED;
  if (set_n_threads_ != nullptr) set_n_threads_(backend_, n_threads);
  ggml_graph_clear(graph_);
  ggml_graph_add_node(graph_, node);
  return ggml_backend_graph_compute(backend_, graph_);
}

}  // namespace kvtamp::ggml_plugin
