#include "tools/kvtamp/host_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

namespace kvtamp::tool {
namespace {

// device null: the CPU alone. Null with the reason in TakeHostErrors() if it cannot be loaded.
Model LoadModel(const std::string& path, ggml_backend_dev_t device) {
  ggml_backend_dev_t devices[] = {device, nullptr};  // null first: the CPU alone
  llama_model_params params = llama_model_default_params();
  params.devices = devices;
  params.n_gpu_layers = device == nullptr ? 0 : 999;
  return {llama_model_load_from_file(path.c_str(), params), &llama_model_free};
}

}  // namespace

Result<ModelPair> LoadPair(const std::string& path, bool with_plugin) {
  ModelPair pair;
  if (with_plugin) {
    const Result<std::string> file = FindPlugin();
    if (!file.ok()) return file.status();
    const Result<Plugin> plugin = LoadPlugin(file.value());
    if (!plugin.ok()) return plugin.status();
    pair.plugin = plugin.value();
  } else {
    LoadHost();
  }
  TakeHostErrors();
  pair.base = LoadModel(path, nullptr);
  if (!pair.base) return HostError("cannot load " + path);
  if (!pair.plugin) return pair;
  pair.own = LoadModel(path, pair.plugin->device);
  if (!pair.own) return HostError("cannot load " + path + " for device " + kDeviceName);
  return pair;
}

ModelFacts FactsOf(const llama_model* model) {
  char desc[128] = "";
  llama_model_desc(model, desc, sizeof(desc));
  return {desc, llama_model_size(model), llama_model_n_params(model),
          static_cast<std::uint32_t>(llama_model_n_ctx_train(model))};
}

Context MakeContext(llama_model* model, const ContextShape& shape) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = shape.n_ctx;
  params.n_batch = shape.n_batch;
  params.n_ubatch = shape.n_ubatch;
  params.n_seq_max = 1;
  params.n_threads = shape.n_threads;
  params.n_threads_batch = shape.n_threads;
  params.flash_attn_type =
      shape.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = shape.type_k;
  params.type_v = shape.type_v;
  params.swa_full = false;  // as the host's programs do
  params.no_perf = true;
  params.cb_eval = shape.on_node;
  params.cb_eval_user_data = shape.on_node_data;
  return {llama_init_from_model(model, params), &llama_free};
}

std::vector<llama_token> Tokenize(const llama_vocab* vocab, const std::string& text, bool whole) {
  std::vector<llama_token> tokens(text.size() + 8);
  const auto call = [&] {
    return llama_tokenize(vocab, text.data(), static_cast<std::int32_t>(text.size()), tokens.data(),
                          static_cast<std::int32_t>(tokens.size()), whole, false);
  };
  std::int32_t n = call();
  if (n < 0) {
    tokens.resize(static_cast<std::size_t>(-n));
    n = call();
  }
  tokens.resize(static_cast<std::size_t>(std::max(n, 0)));
  return tokens;
}

std::string Piece(const llama_vocab* vocab, llama_token token) {
  std::string piece(64, 0);
  const auto call = [&] {
    return llama_token_to_piece(vocab, token, piece.data(), static_cast<std::int32_t>(piece.size()),
                                0, false);
  };
  std::int32_t n = call();
  if (n < 0) {
    piece.resize(static_cast<std::size_t>(-n));
    n = call();
  }
  piece.resize(static_cast<std::size_t>(std::max(n, 0)));
  return piece;
}

void Batch::Add(llama_token token, std::uint32_t pos, bool wants_logits) {
  const auto i = static_cast<std::size_t>(batch_.n_tokens++);
  batch_.token[i] = token;
  batch_.pos[i] = static_cast<llama_pos>(pos);
  batch_.n_seq_id[i] = 1;
  batch_.seq_id[i][0] = 0;
  batch_.logits[i] = wants_logits ? 1 : 0;
}

Status Decode(llama_context* context, const Batch& batch, const std::string& which,
              double& seconds) {
  const auto start = std::chrono::steady_clock::now();
  const int code = llama_decode(context, batch.get());
  llama_synchronize(context);
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (code == 0) return Status::Ok();
  const std::string said = TakeHostErrors();
  return Status::Internal(fmt::format("the {} context cannot decode ({}){}", which, code,
                                      said.empty() ? "" : ": " + said));
}

Status HostError(const std::string& what) {
  const std::string said = TakeHostErrors();
  return Status::Invalid(said.empty() ? what : what + ": " + said);
}

}  // namespace kvtamp::tool
