#include "fuzz/model.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "fuzz/random.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "gguf.h"

namespace kvtamp::fuzz {

namespace {

//                sliding grouped wide_heads latent recurrent attends
constexpr Architecture kArchitectures[] = {
    {"llama", false, true, true, false, false, true},   // pairs of neighbours turn, each by factors
    {"qwen2", false, true, false, false, false, true},  // halves turn; biases
    {"gptneox", false, false, false, false, false, true},  // a part of each head turns
    {"bloom", false, false, false, false, false, true},    // no rotation: the mask holds distances
    {"gemma2", true, true, true, false, false, true},      // scores are capped
    {"gemma3", true, true, true, false, false, true},      // two rotary bases
    {"gpt-oss", true, true, true, false, false, true},     // attention sinks
    {"deepseek2", false, false, true, true, false, true},  // latent attention
    {"lfm2", false, true, false, false, true, true},       // layers with attention, and without
    {"falcon-h1", false, true, true, false, true, true},   // both in each layer
    {"mamba2", false, false, true, false, true, false},    // no attention at all
};

std::uint64_t HashOf(std::string_view text) {  // FNV-1a
  std::uint64_t h = 0xCBF29CE484222325u;
  for (char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return h;
}

struct WeightSource {
  std::uint64_t seed;
  bool latent;
};

// Weights such that what was attended decides the logits: sharp scores, attention that outweighs
// the rest of the model. Otherwise a lost row would drown in the embedding of the token itself.
void Fill(ggml_tensor* t, void* user) {
  const std::string_view name = t->name;
  const auto has = [&](std::string_view part) { return name.find(part) != name.npos; };
  const auto& source = *static_cast<const WeightSource*>(user);
  Random r(source.seed ^ HashOf(name));
  std::vector<float> x(static_cast<std::size_t>(ggml_nelements(t)));
  const float by_row = 1.0f / std::sqrt(static_cast<float>(t->ne[0]));
  float mean = 0, spread = by_row;
  if (has("ssm_a")) {
    mean = -1, spread = 0.1f;
  } else if (has("sinks")) {
    mean = 1, spread = 1;
  } else if (has("scale")) {
    mean = 1, spread = 0;
  } else if (has("norm") && has(".weight")) {
    mean = has("post_attention") || has("attn_post") ? 2.0f : 1.0f, spread = 0.1f;
  } else if (has(".bias")) {
    spread = 0.1f;
  } else if (has("rope_freqs")) {
    mean = 2.0f, spread = 0.2f;
  } else if (has("token_embd")) {
    spread = 0.2f;
  } else if (has("attn_q") || has("attn_k")) {  // attn_qkv too
    // Latent keys pass two such matrices.
    spread = (source.latent ? 1.0f : 1.4f) * by_row;
  } else if (has("attn_v") || has("attn_output")) {
    spread = 1.5f * by_row;
  } else if (has("ffn")) {
    spread = 0.5f * by_row;
  }
  for (float& f : x) f = mean + spread * r.Normal();
  if (t->type == GGML_TYPE_F32) {
    ggml_backend_tensor_set(t, x.data(), 0, ggml_nbytes(t));
  } else {
    std::vector<ggml_fp16_t> half(x.size());
    ggml_fp32_to_fp16_row(x.data(), half.data(), static_cast<std::int64_t>(x.size()));
    ggml_backend_tensor_set(t, half.data(), 0, ggml_nbytes(t));
  }
}

}  // namespace

std::span<const Architecture> Architectures() { return kArchitectures; }

const Architecture* FindArchitecture(std::string_view name) {
  for (const Architecture& a : kArchitectures)
    if (name == a.name) return &a;
  return nullptr;
}

llama_model* NewModel(const Setup& s, ggml_backend_dev_t device) {
  const Architecture& arch = *FindArchitecture(s.arch);
  gguf_context_ptr meta(gguf_init_empty());
  const auto u32 = [&](const std::string& key, std::uint32_t value) {
    gguf_set_val_u32(meta.get(), (s.arch + "." + key).c_str(), value);
  };
  const auto f32 = [&](const std::string& key, float value) {
    gguf_set_val_f32(meta.get(), (s.arch + "." + key).c_str(), value);
  };
  gguf_set_val_str(meta.get(), "general.architecture", s.arch.c_str());
  gguf_set_val_str(meta.get(), "tokenizer.ggml.model", "no_vocab");
  u32("vocab_size", kVocab);
  u32("context_length", 4096);
  u32("embedding_length", arch.wide_heads ? 64 : s.heads * s.head_size);
  u32("block_count", s.layers);
  u32("feed_forward_length", 64);
  u32("attention.head_count", s.heads);
  if (s.arch == "lfm2") {  // nought: a layer without attention
    std::vector<std::uint32_t> kv_heads(s.layers, 0);
    for (std::size_t il = 1; il < s.layers; il += 2) kv_heads[il] = s.kv_heads;
    gguf_set_arr_data(meta.get(), "lfm2.attention.head_count_kv", GGUF_TYPE_UINT32, kv_heads.data(),
                      kv_heads.size());
    u32("shortconv.l_cache", 3);
  } else {
    u32("attention.head_count_kv", arch.latent ? 1 : s.kv_heads);
  }
  f32("attention.layer_norm_rms_epsilon", 1e-5f);
  f32("attention.layer_norm_epsilon", 1e-5f);
  if (arch.latent) {  // keys of nope and rotary part; all heads share one latent row
    const std::uint32_t rot = std::min(64u, s.head_size / 2), nope = 32;
    u32("attention.q_lora_rank", 0);
    u32("attention.kv_lora_rank", s.head_size);
    u32("attention.key_length", s.head_size + rot);
    u32("attention.value_length", s.head_size);
    u32("attention.key_length_mla", nope + rot);
    u32("attention.value_length_mla", nope);
    u32("rope.dimension_count", rot);
    u32("leading_dense_block_count", s.layers);
    u32("expert_shared_count", 0);
    u32("expert_feed_forward_length", 32);
  } else if (arch.wide_heads) {
    u32("attention.key_length", s.head_size);
    u32("attention.value_length", s.head_size);
  }
  if (s.arch == "gpt-oss") {
    u32("expert_count", 2);
    u32("expert_used_count", 2);
    u32("expert_feed_forward_length", 32);
  }
  if (s.arch == "falcon-h1" || s.arch == "mamba2") {
    u32("ssm.conv_kernel", 4);
    u32("ssm.inner_size", 64);
    u32("ssm.state_size", 16);
    u32("ssm.time_step_rank", 4);
    u32("ssm.group_count", 1);
  }
  if (s.arch == "gptneox") {
    u32("rope.dimension_count", s.head_size / 4);
    gguf_set_val_bool(meta.get(), "gptneox.use_parallel_residual", s.model_seed % 2 == 0);
  }
  if (s.arch == "gemma2") f32("attn_logit_softcapping", 5.0f);
  if (s.arch == "gemma3") f32("rope.freq_base", 1e6f);
  if (s.yarn) {
    gguf_set_val_str(meta.get(), (s.arch + ".rope.scaling.type").c_str(), "yarn");
    f32("rope.scaling.factor", 4.0f);
    u32("rope.scaling.original_context_length", 128);
    // So that all keys keep their length, and the host can shift them: Pair::CanShift.
    if (s.yarn == 2) f32("rope.scaling.attn_factor", 1.0f / (1.0f + 0.1f * std::log(4.0f)));
  }
  if (arch.sliding) {
    u32("attention.sliding_window", s.window);
    u32("attention.sliding_window_pattern", 2);
  }

  ggml_backend_dev_t devices[] = {device, nullptr};
  llama_model_params params = llama_model_default_params();
  params.devices = devices;
  params.n_gpu_layers = device == nullptr ? 0 : 999;
  params.progress_callback = [](float, void*) { return true; };
  WeightSource source{s.model_seed, arch.latent};
  return llama_model_init_from_user(meta.get(), Fill, &source, params);
}

}  // namespace kvtamp::fuzz
