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
  EXPECT_EQ(model.layers[0].head_size_v, 0u);
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
    Basics(gguf, "gemma4", 6);
    gguf_set_val_u32(gguf, "gemma4.attention.shared_kv_layers", 2);
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

TEST(Layout, WindowsThatTheHostKnowsByArchitecture) {
  struct Case {
    const char* architecture;
    std::uint32_t n_layer, said, n_swa;  // the file's words (0: none), the host's window
    std::vector<std::uint32_t> whole;    // layers
  };
  for (const Case& c : std::vector<Case>{{"gemma3n", 10, 512, 512, {4, 9}},
                                         {"gemma2", 4, 0, 4096, {1, 3}},
                                         {"gpt-oss", 4, 128, 128, {1, 3}},
                                         {"olmo2", 8, 4096, 4096, {3, 7}},
                                         {"olmo2", 2, 0, 0, {0, 1}},
                                         {"cohere2moe", 8, 4096, 4096, {0, 4}},
                                         {"laguna", 4, 512, 512, {0}},
                                         {"llama4", 4, 0, 8192, {3}},
                                         {"smallthinker", 8, 1, 4096, {0, 4}},
                                         {"lfm2", 2, 512, 512, {}},
                                         {"exaone4", 4, 4096, 0, {0, 1, 2, 3}},
                                         {"phi3", 2, 2048, 0, {0, 1}}}) {
    const TempModel file([&](gguf_context* gguf, ggml_context*) {
      Basics(gguf, c.architecture, c.n_layer);
      if (c.said > 0)
        gguf_set_val_u32(gguf, (std::string(c.architecture) + ".attention.sliding_window").c_str(),
                         c.said);
    });
    const ModelLayout model = file.Read();
    EXPECT_EQ(model.n_swa, c.n_swa) << c.architecture;
    EXPECT_TRUE(model.swa_known) << c.architecture;
    std::vector<std::uint32_t> whole;
    for (const LayerLayout& l : model.layers)
      if (!l.swa) whole.push_back(l.layer);
    EXPECT_EQ(whole, c.whole) << c.architecture;
  }
}

TEST(Layout, LayersThatTheTrunkHasNot) {
  const TempModel drafts([](gguf_context* gguf, ggml_context*) {
    Basics(gguf, "glm4moe", 6);
    gguf_set_val_u32(gguf, "glm4moe.nextn_predict_layers", 1);
  });
  EXPECT_EQ(drafts.Read().layers.size(), 5u);
  const TempModel shared([](gguf_context* gguf, ggml_context*) { Basics(gguf, "gemma3n", 30); });
  EXPECT_EQ(shared.Read().layers.size(), 20u);
  EXPECT_EQ(shared.Read().n_shared, 10u);
  for (const char* architecture : {"bert", "gemma-embedding", "llada"}) {
    const TempModel none([&](gguf_context* gguf, ggml_context*) { Basics(gguf, architecture, 2); });
    EXPECT_FALSE(none.Read().causal) << architecture;
  }
}

TEST(Layout, RecurrentStateIsThatOfTheHost) {
  const TempModel mamba([](gguf_context* gguf, ggml_context* tensors) {
    Basics(gguf, "mamba", 3);
    gguf_set_val_u32(gguf, "mamba.ssm.conv_kernel", 4);
    gguf_set_val_u32(gguf, "mamba.ssm.inner_size", 1536);
    gguf_set_val_u32(gguf, "mamba.ssm.state_size", 16);
    for (const char* blk : {"blk.0.", "blk.1.", "blk.2."})
      AddTensor(gguf, tensors, std::string(blk) + "ssm_in.weight", 8, 8);
  });
  EXPECT_EQ(mamba.Read().state_bytes, 3u * 4 * (3 * 1536 + 16 * 1536));
  const TempModel rwkv([](gguf_context* gguf, ggml_context* tensors) {
    Basics(gguf, "rwkv7", 1);
    gguf_set_val_u32(gguf, "rwkv7.wkv.head_size", 64);
    gguf_set_val_u32(gguf, "rwkv7.token_shift_count", 2);
    AddTensor(gguf, tensors, "blk.0.time_mix_w1.weight", 8, 8);
  });
  EXPECT_EQ(rwkv.Read().state_bytes, 4u * 576 * (2 + 64));
}

// A model in two files: metadata and the first layer's weights in one, the second layer's in the
// other.
class SplitModel {
 public:
  SplitModel() {
    for (const int part : {0, 1}) {
      gguf_context* gguf = gguf_init_empty();
      ggml_context* tensors = ggml_init({64 * ggml_tensor_overhead(), nullptr, true});
      if (part == 0) Basics(gguf, "llama", 2);
      gguf_set_val_u16(gguf, "split.no", static_cast<std::uint16_t>(part));
      gguf_set_val_u16(gguf, "split.count", 2);
      const std::string blk = "blk." + std::to_string(part) + ".";
      AddTensor(gguf, tensors, blk + "attn_k.weight", 576, 3 * 96);
      AddTensor(gguf, tensors, blk + "attn_output.weight", 576, 576);
      gguf_write_to_file(gguf, Path(part).c_str(), true);
      gguf_free(gguf);
      ggml_free(tensors);
    }
  }
  ~SplitModel() {
    for (const int part : {0, 1}) std::remove(Path(part).c_str());
  }
  static std::string Path(int part) {
    return TempPath() + "-0000" + std::to_string(part + 1) + "-of-00002.gguf";
  }
};

TEST(Layout, AllPartsOfASplitFile) {
  const SplitModel model;
  for (const int part : {0, 1}) {
    const auto read = ReadLayout(SplitModel::Path(part));
    ASSERT_TRUE(read.ok()) << read.status().message();
    ASSERT_EQ(read.value().layers.size(), 2u);
    EXPECT_EQ(read.value().layers[1].head_size_k, 96u);
    EXPECT_EQ(read.value().path, SplitModel::Path(0));
  }
  const std::string other = TempPath() + "-renamed.gguf";
  std::rename(SplitModel::Path(1).c_str(), other.c_str());
  const auto missing = ReadLayout(SplitModel::Path(0));
  ASSERT_FALSE(missing.ok());
  EXPECT_NE(missing.status().message().find("part 2 of 2"), std::string::npos);
  const auto renamed = ReadLayout(other);
  ASSERT_FALSE(renamed.ok());
  EXPECT_NE(renamed.status().message().find("NAME-00001-of-00002"), std::string::npos);
  std::remove(other.c_str());
}

TEST(Layout, WeightsThatAreCutShortAreTold) {
  const TempModel file([](gguf_context* gguf, ggml_context* tensors) {
    Basics(gguf, "llama", 1);
    AddTensor(gguf, tensors, "blk.0.attn_output.weight", 576, 576);
  });
  // No weights were written at all.
  EXPECT_EQ(file.Read().cut_short, std::vector<std::string>{TempPath()});
}

// Numbers that no model has are refused, by what they say; none makes it hang or sum wrongly.
TEST(Layout, NumbersThatCannotBe) {
  const auto read = [](const std::function<void(gguf_context*)>& change) {
    const TempModel file([&](gguf_context* gguf, ggml_context*) {
      Basics(gguf, "llama", 2);
      change(gguf);
    });
    return ReadLayout(TempPath());
  };
  for (const auto& [key, value, says] :
       {std::tuple{"llama.block_count", 4294967295u, "4294967295 layers"},
        {"llama.attention.key_length", 4294967295u, "12884901885 numbers"},
        {"llama.attention.head_count_kv", 2000000000u, "layer 0"},
        {"llama.attention.value_length", 1u << 20, "numbers"}}) {
    const auto layout = read([&](gguf_context* gguf) { gguf_set_val_u32(gguf, key, value); });
    ASSERT_FALSE(layout.ok()) << key;
    EXPECT_NE(layout.status().message().find(says), std::string::npos) << layout.status().message();
    EXPECT_NE(layout.status().message().find("damaged"), std::string::npos);
  }
  const auto wrapped = read([](gguf_context* gguf) {
    gguf_set_val_u64(gguf, "llama.block_count", (std::uint64_t{1} << 32) + 2);
  });
  EXPECT_FALSE(wrapped.ok());
  // Nothing to attend with.
  for (const char* key : {"llama.attention.head_count_kv", "llama.block_count"}) {
    const auto none = read([&](gguf_context* gguf) { gguf_set_val_u32(gguf, key, 0); });
    ASSERT_TRUE(none.ok()) << none.status().message();
    EXPECT_TRUE(none.value().layers.empty()) << key;
  }
  const auto headless =
      read([](gguf_context* gguf) { gguf_set_val_u32(gguf, "llama.attention.head_count", 0); });
  ASSERT_TRUE(headless.ok());
  EXPECT_TRUE(headless.value().layers.empty());
  // Of other kinds than they should be.
  const auto odd = read([](gguf_context* gguf) {
    gguf_set_val_str(gguf, "llama.context_length", "long");
    gguf_set_val_i32(gguf, "llama.attention.sliding_window", -5);
    const std::int64_t heads[] = {-1, 3};
    gguf_set_arr_data(gguf, "llama.attention.head_count_kv", GGUF_TYPE_INT64, heads, 2);
    const char* words[] = {"a", "b"};
    gguf_set_arr_str(gguf, "llama.attention.key_length", words, 2);
  });
  ASSERT_TRUE(odd.ok()) << odd.status().message();
  EXPECT_EQ(odd.value().n_ctx_train, 0u);
  EXPECT_EQ(odd.value().n_swa, 0u);
  ASSERT_EQ(odd.value().layers.size(), 1u);
  EXPECT_EQ(odd.value().layers[0].layer, 1u);
}

// Cut anywhere: an error that says what to do, or, behind the metadata, a whole layout.
TEST(Layout, FilesThatEndTooEarly) {
  const TempModel file([](gguf_context* gguf, ggml_context* tensors) {
    Basics(gguf, "llama", 1);
    AddTensor(gguf, tensors, "blk.0.attn_output.weight", 576, 576);
  });
  std::ifstream in(TempPath(), std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const std::string cut = TempPath() + ".cut";
  std::size_t n_errors = 0;
  for (std::size_t n = 0; n < whole.size(); n += 3) {
    std::ofstream(cut, std::ios::binary).write(whole.data(), static_cast<std::streamsize>(n));
    const auto layout = ReadLayout(cut);
    if (layout.ok()) continue;
    n_errors++;
    EXPECT_NE(layout.status().message().find("GGUF"), std::string::npos);
  }
  EXPECT_GT(n_errors, whole.size() / 3 * 9 / 10);
  // And with bytes that are something else.
  for (std::size_t at = 4; at < whole.size(); at += 5) {
    for (const char byte : {'\xff', '\x00', '\x7f'}) {
      std::string bad = whole;
      bad[at] = byte;
      std::ofstream(cut, std::ios::binary)
          .write(bad.data(), static_cast<std::streamsize>(bad.size()));
      (void)ReadLayout(cut).ok();
    }
  }
  std::remove(cut.c_str());
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
