#include "tools/kvtamp/layout.h"

#include <ggml.h>
#include <gguf.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>

namespace kvtamp::tool {
namespace {

// Tests may run side by side.
std::string TempPath() {
  return ::testing::TempDir() + "kvtamp-layout-" + std::to_string(::getpid()) + ".gguf";
}

// A GGUF file of metadata and tensor shapes that is gone at the end of the test.
class TempModel {
 public:
  explicit TempModel(const std::function<void(gguf_context*, ggml_context*)>& fill)
      : path_(TempPath()) {
    gguf_context* gguf = gguf_init_empty();
    ggml_context* tensors = ggml_init({64 * ggml_tensor_overhead(), nullptr, true});
    fill(gguf, tensors);
    gguf_write_to_file(gguf, path_.c_str(), true);
    gguf_free(gguf);
    ggml_free(tensors);
  }
  ~TempModel() { std::remove(path_.c_str()); }
  ModelLayout Read() const {
    const auto layout = ReadLayout(path_);
    EXPECT_TRUE(layout.ok()) << layout.status().message();
    return layout.ok() ? layout.value() : ModelLayout{};
  }

 private:
  std::string path_;
};

void AddTensor(gguf_context* gguf, ggml_context* tensors, const std::string& name,
               std::int64_t columns, std::int64_t rows) {
  ggml_tensor* tensor = ggml_new_tensor_2d(tensors, GGML_TYPE_F32, columns, rows);
  ggml_set_name(tensor, name.c_str());
  gguf_add_tensor(gguf, tensor);
}

void Basics(gguf_context* gguf, const std::string& arch, std::uint32_t n_layer) {
  gguf_set_val_str(gguf, "general.architecture", arch.c_str());
  gguf_set_val_u32(gguf, (arch + ".block_count").c_str(), n_layer);
  gguf_set_val_u32(gguf, (arch + ".context_length").c_str(), 4096);
  gguf_set_val_u32(gguf, (arch + ".embedding_length").c_str(), 576);
  gguf_set_val_u32(gguf, (arch + ".attention.head_count").c_str(), 9);
  gguf_set_val_u32(gguf, (arch + ".attention.head_count_kv").c_str(), 3);
}

TEST(Layout, Plain) {
  const TempModel file([](gguf_context* gguf, ggml_context*) { Basics(gguf, "llama", 30); });
  const ModelLayout model = file.Read();
  EXPECT_EQ(model.architecture, "llama");
  EXPECT_EQ(model.n_head, 9u);
  ASSERT_EQ(model.layers.size(), 30u);
  EXPECT_EQ(model.layers[29].layer, 29u);
  EXPECT_EQ(model.layers[0].n_head_kv, 3u);
  EXPECT_EQ(model.layers[0].head_size_k, 64u);
  EXPECT_EQ(model.layers[0].elements_k() + model.layers[0].elements_v(), 3u * 128);
  EXPECT_FALSE(model.mla);
  EXPECT_TRUE(model.causal);
}

TEST(Layout, WeightsOverruleTheArithmetic) {
  const TempModel file([](gguf_context* gguf, ggml_context* tensors) {
    Basics(gguf, "llama", 1);
    AddTensor(gguf, tensors, "blk.0.attn_k.weight", 576, 3 * 96);
    AddTensor(gguf, tensors, "blk.0.attn_v.weight", 576, 3 * 48);
    AddTensor(gguf, tensors, "blk.0.attn_output.weight", 576, 576);
  });
  const ModelLayout model = file.Read();
  ASSERT_EQ(model.layers.size(), 1u);
  EXPECT_EQ(model.layers[0].head_size_k, 96u);
  EXPECT_EQ(model.layers[0].head_size_v, 48u);
}

TEST(Layout, SlidingWindows) {
  const TempModel known([](gguf_context* gguf, ggml_context*) {
    Basics(gguf, "gemma3", 12);
    gguf_set_val_u32(gguf, "gemma3.attention.sliding_window", 512);
  });
  ModelLayout model = known.Read();
  EXPECT_TRUE(model.swa_known);
  EXPECT_TRUE(model.layers[4].swa);
  EXPECT_FALSE(model.layers[5].swa);
  EXPECT_FALSE(model.layers[11].swa);

  const TempModel array([](gguf_context* gguf, ggml_context*) {
    Basics(gguf, "other", 2);
    gguf_set_val_u32(gguf, "other.attention.sliding_window", 512);
    gguf_set_val_u32(gguf, "other.attention.key_length_swa", 32);
    const bool pattern[] = {false, true};
    gguf_set_arr_data(gguf, "other.attention.sliding_window_pattern", GGUF_TYPE_BOOL, pattern, 2);
  });
  model = array.Read();
  EXPECT_FALSE(model.layers[0].swa);
  EXPECT_TRUE(model.layers[1].swa);
  EXPECT_EQ(model.layers[0].head_size_k, 64u);
  EXPECT_EQ(model.layers[1].head_size_k, 32u);

  const TempModel unknown([](gguf_context* gguf, ggml_context*) {
    Basics(gguf, "other", 2);
    gguf_set_val_u32(gguf, "other.attention.sliding_window", 512);
  });
  EXPECT_FALSE(unknown.Read().swa_known);
}

TEST(Layout, MultiHeadLatentAttention) {
  const TempModel file([](gguf_context* gguf, ggml_context*) {
    Basics(gguf, "deepseek2", 2);
    gguf_set_val_u32(gguf, "deepseek2.attention.kv_lora_rank", 512);
    gguf_set_val_u32(gguf, "deepseek2.attention.key_length_mla", 192);
    gguf_set_val_u32(gguf, "deepseek2.rope.dimension_count", 64);
  });
  ModelLayout model = file.Read();
  EXPECT_TRUE(model.mla);
  EXPECT_EQ(model.layers[0].n_head_kv, 1u);
  EXPECT_EQ(model.layers[0].head_size_k, 576u);
  EXPECT_EQ(model.layers[0].head_size_v, 0u);

  const TempModel unfolded([](gguf_context* gguf, ggml_context*) {
    Basics(gguf, "minicpm3", 2);
    gguf_set_val_u32(gguf, "minicpm3.attention.kv_lora_rank", 512);
  });
  model = unfolded.Read();
  EXPECT_FALSE(model.mla);
  EXPECT_EQ(model.layers[0].n_head_kv, 3u);
  EXPECT_EQ(model.layers[0].head_size_v, 64u);
}

TEST(Layout, WhatTheHostAttendsItself) {
  const TempModel sparse([](gguf_context* gguf, ggml_context* tensors) {
    Basics(gguf, "deepseek4", 3);
    for (const char* blk : {"blk.0.", "blk.1.", "blk.2."})
      AddTensor(gguf, tensors, std::string(blk) + "attn_output_a.weight", 8, 8);
    AddTensor(gguf, tensors, "blk.1.indexer.proj.weight", 8, 8);
    AddTensor(gguf, tensors, "blk.2.attn_compressor_kv.weight", 8, 8);
  });
  ModelLayout model = sparse.Read();
  ASSERT_EQ(model.layers.size(), 3u);
  EXPECT_EQ(model.layers[0].why_plain, "");
  EXPECT_NE(model.layers[1].why_plain.find("sparse"), std::string::npos);
  EXPECT_NE(model.layers[2].why_plain.find("sparse"), std::string::npos);

  const TempModel grok([](gguf_context* gguf, ggml_context*) { Basics(gguf, "grok", 1); });
  EXPECT_NE(grok.Read().layers[0].why_plain.find("flash attention"), std::string::npos);
}

TEST(Layout, LayersWithoutACache) {
  const TempModel hybrid([](gguf_context* gguf, ggml_context* tensors) {
    Basics(gguf, "hybrid", 3);
    const std::int32_t heads[] = {0, 2, 0};
    gguf_set_arr_data(gguf, "hybrid.attention.head_count_kv", GGUF_TYPE_INT32, heads, 3);
    AddTensor(gguf, tensors, "blk.0.ssm_in.weight", 8, 8);
    AddTensor(gguf, tensors, "blk.2.ssm_in.weight", 8, 8);
    AddTensor(gguf, tensors, "blk.1.attn_k.weight", 576, 128);
    AddTensor(gguf, tensors, "blk.1.attn_output.weight", 576, 576);
  });
  ModelLayout model = hybrid.Read();
  EXPECT_EQ(model.n_recurrent, 2u);
  ASSERT_EQ(model.layers.size(), 1u);
  EXPECT_EQ(model.layers[0].layer, 1u);
  EXPECT_EQ(model.layers[0].n_head_kv, 2u);

  const TempModel shared([](gguf_context* gguf, ggml_context*) {
    Basics(gguf, "gemma3n", 6);
    gguf_set_val_u32(gguf, "gemma3n.attention.shared_kv_layers", 2);
  });
  EXPECT_EQ(shared.Read().layers.size(), 4u);

  const TempModel recurrent([](gguf_context* gguf, ggml_context* tensors) {
    gguf_set_val_str(gguf, "general.architecture", "mamba");
    gguf_set_val_u32(gguf, "mamba.block_count", 2);
    AddTensor(gguf, tensors, "blk.0.ssm_in.weight", 8, 8);
    AddTensor(gguf, tensors, "blk.1.ssm_in.weight", 8, 8);
  });
  EXPECT_TRUE(recurrent.Read().layers.empty());
}

TEST(CheckFormats, AGroupMustDivideEveryHead) {
  const TempModel file([](gguf_context* gguf, ggml_context*) { Basics(gguf, "llama", 2); });
  const ModelLayout model = file.Read();
  const auto check = [&](const char* type_v) {
    const auto settings = control::LoadSettings({{"cache.type_v", type_v, ""}}, {});
    EXPECT_TRUE(settings.ok()) << settings.status().message();
    return CheckFormats(model, settings.value());
  };
  EXPECT_TRUE(check("auto").ok());
  EXPECT_TRUE(check("lm4_g32_pt+had").ok());
  EXPECT_NE(check("lm4_g48_pt+had").message().find("48"), std::string::npos);
}

TEST(Layout, BadFiles) {
  const auto missing = ReadLayout("/nonexistent/model.gguf");
  ASSERT_FALSE(missing.ok());
  EXPECT_NE(missing.status().message().find("No such file"), std::string::npos);

  const std::string path = TempPath();
  std::ofstream(path) << "this is text";
  const auto text = ReadLayout(path);
  ASSERT_FALSE(text.ok());
  EXPECT_NE(text.status().message().find("not a GGUF file"), std::string::npos);
  std::ofstream(path) << "GGUF and then rubbish";
  EXPECT_FALSE(ReadLayout(path).ok());
  std::remove(path.c_str());
}

}  // namespace
}  // namespace kvtamp::tool
