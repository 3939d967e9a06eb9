// A real model through libllama: what the commands that run one share.
#pragma once

#include <llama.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "tools/kvtamp/plugin.h"

namespace kvtamp::tool {

using Model = std::unique_ptr<llama_model, decltype(&llama_model_free)>;
using Context = std::unique_ptr<llama_context, decltype(&llama_free)>;

// The same model twice: on the CPU alone for the base, and on the plug-in's device.
struct ModelPair {
  Model base{nullptr, &llama_model_free};
  Model own{nullptr, &llama_model_free};  // null without the plug-in: the host's cache is tested
  std::optional<Plugin> plugin;
  llama_model* tested() const { return own ? own.get() : base.get(); }
};
// Loads the host's backends and, where that is wanted, the plug-in before.
Result<ModelPair> LoadPair(const std::string& path, bool with_plugin);

struct ModelFacts {
  std::string type;  // as libllama describes it
  std::uint64_t size = 0, n_params = 0;
  std::uint32_t n_ctx_train = 0;
};
ModelFacts FactsOf(const llama_model* model);

struct ContextShape {
  std::uint32_t n_ctx = 0, n_batch = 0, n_ubatch = 0;
  int n_threads = 1;
  bool flash_attention = true;
  ggml_type type_k = GGML_TYPE_F16, type_v = GGML_TYPE_F16;
  // Sees the graph's nodes as they are computed.
  ggml_backend_sched_eval_callback on_node = nullptr;
  void* on_node_data = nullptr;
};
Context MakeContext(llama_model* model, const ContextShape& shape);

// `whole`: with what the model wants around a text.
std::vector<llama_token> Tokenize(const llama_vocab* vocab, const std::string& text,
                                  bool whole = true);
std::string Piece(const llama_vocab* vocab, llama_token token);

// One llama_batch of up to n tokens of sequence 0.
class Batch {
 public:
  explicit Batch(std::uint32_t n) : batch_(llama_batch_init(static_cast<std::int32_t>(n), 0, 1)) {}
  ~Batch() { llama_batch_free(batch_); }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  void Clear() { batch_.n_tokens = 0; }
  void Add(llama_token token, std::uint32_t pos, bool wants_logits);
  llama_batch get() const { return batch_; }

 private:
  llama_batch batch_;
};

// `seconds` grows by the time it took; `which` names the context in the error.
Status Decode(llama_context* context, const Batch& batch, const std::string& which,
              double& seconds);

// `what`, with what the host said before.
Status HostError(const std::string& what);

}  // namespace kvtamp::tool
