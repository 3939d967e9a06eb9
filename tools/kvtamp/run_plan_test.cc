#include "tools/kvtamp/run_plan.h"

#include <gtest/gtest.h>

#include <map>

namespace kvtamp::tool {
namespace {

using Env = std::map<std::string, std::string>;

RunPlan Plan(const std::vector<std::string>& program, const Env& env = {}) {
  Result<RunPlan> plan = PlanRun("/lib/libggml-kvtamp.so", program, [&](const std::string& name) {
    const auto it = env.find(name);
    return it == env.end() ? std::nullopt : std::optional<std::string>(it->second);
  });
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return plan.ok() ? plan.value() : RunPlan{};
}

Env Set(const RunPlan& plan) { return Env(plan.set.begin(), plan.set.end()); }

TEST(RunPlan, SetsWhatAHostNeeds) {
  const RunPlan plan = Plan({"/opt/llama-server", "-m", "x.gguf"});
  EXPECT_EQ(Set(plan), (Env{{"GGML_BACKEND_PATH", "/lib/libggml-kvtamp.so"},
                            {"LLAMA_ARG_DEVICE", "KVTAMP"},
                            {"LLAMA_ARG_N_GPU_LAYERS", "999"},
                            {"LLAMA_ARG_FLASH_ATTN", "on"},
                            {"LLAMA_ARG_MMPROJ_OFFLOAD", "0"},
                            {"LLAMA_ARG_CACHE_RAM", "0"}}));
  EXPECT_TRUE(plan.append.empty());
  EXPECT_TRUE(plan.warnings.empty());
  EXPECT_EQ(plan.model, "x.gguf");
}

TEST(RunPlan, LeavesWhatTheUserSet) {
  EXPECT_EQ(Set(Plan({"llama-server", "-dev", "CUDA0,kvtamp", "--n_gpu_layers", "all", "-fa",
                      "auto", "--no-mmproj-offload", "-cram", "100"})),
            (Env{{"GGML_BACKEND_PATH", "/lib/libggml-kvtamp.so"}}));
  const Env env = {{"GGML_BACKEND_PATH", "/x/libggml-kvtamp.so"},
                   {"LLAMA_ARG_DEVICE", "KVTAMP"},
                   {"LLAMA_ARG_N_GPU_LAYERS", "-1"},
                   {"LLAMA_ARG_FLASH_ATTN", "auto"},
                   {"LLAMA_ARG_NO_MMPROJ_OFFLOAD", "1"},
                   {"LLAMA_ARG_CACHE_RAM", "5"}};
  const RunPlan plan = Plan({"llama-server"}, env);
  EXPECT_TRUE(plan.set.empty());
  EXPECT_TRUE(plan.warnings.empty());
}

TEST(RunPlan, BenchGetsFlags) {
  RunPlan plan = Plan({"./bin/llama-bench", "-m", "x"});
  EXPECT_EQ(plan.append, (std::vector<std::string>{"-dev", "KVTAMP", "-ngl", "999", "-fa", "1"}));
  EXPECT_EQ(Set(plan), (Env{{"GGML_BACKEND_PATH", "/lib/libggml-kvtamp.so"}}));
  plan = Plan({"llama-bench", "-fa", "1", "-ngl", "99", "-nkvo", "0"});
  EXPECT_EQ(plan.append, (std::vector<std::string>{"-dev", "KVTAMP"}));
  EXPECT_TRUE(plan.warnings.empty());
  EXPECT_EQ(Plan({"llama-bench", "-nkvo", "1"}).warnings.size(), 1u);
}

TEST(RunPlan, SaysWhatDefeatsUs) {
  for (const std::vector<std::string>& args : {std::vector<std::string>{"-ngl", "0"},
                                               {"-fa", "off"},
                                               {"-fa", "0"},
                                               {"-nkvo"},
                                               {"--no-kv-offload"},
                                               {"-dev", "none"},
                                               {"-dev", "CUDA0"},
                                               {"-dev", "KVTAMP,CUDA0"},
                                               {"--rpc", "127.0.0.1:50052"},
                                               {"-ngl", "12"},
                                               {"-ctk", "q8_0"},
                                               {"-ctv", "q4_0"}}) {
    std::vector<std::string> program = {"llama-cli"};
    program.insert(program.end(), args.begin(), args.end());
    EXPECT_EQ(Plan(program).warnings.size(), 1u) << args[0];
  }
  for (const Env& env :
       {Env{{"LLAMA_ARG_N_GPU_LAYERS", "0"}}, Env{{"LLAMA_ARG_FLASH_ATTN", "off"}},
        Env{{"LLAMA_ARG_KV_OFFLOAD", "false"}}, Env{{"LLAMA_ARG_NO_KV_OFFLOAD", "1"}},
        Env{{"LLAMA_ARG_DEVICE", "none"}}, Env{{"LLAMA_ARG_CACHE_TYPE_K", "q4_0"}}}) {
    EXPECT_EQ(Plan({"llama-cli"}, env).warnings.size(), 1u) << env.begin()->first;
  }
  EXPECT_TRUE(Plan({"llama-cli", "-ctk", "f16", "-ngl", "all", "-fa", "on"}).warnings.empty());
  // The flag wins over the variable.
  EXPECT_TRUE(
      Plan({"llama-cli", "-ngl", "all"}, {{"LLAMA_ARG_N_GPU_LAYERS", "0"}}).warnings.empty());
}

TEST(RunPlan, OtherDevicesAreNamed) {
  const RunPlan plan = Plan({"llama-cli", "-dev", "RPC0,kvtamp,CUDA1"});
  ASSERT_EQ(plan.warnings.size(), 1u);
  EXPECT_NE(plan.warnings[0].find("layers on RPC0, CUDA1 keep"), std::string::npos);
  EXPECT_TRUE(Plan({"llama-cli", "--rpc", "x:1", "-dev", "KVTAMP"}).warnings.empty());
}

TEST(RunPlan, AnRpcServerIsAnError) {
  const auto plan = PlanRun("/lib/libggml-kvtamp.so", {"/opt/ggml-rpc-server"},
                            [](const std::string&) { return std::optional<std::string>(); });
  ASSERT_FALSE(plan.ok());
  EXPECT_NE(plan.status().message().find("ggml-rpc-server"), std::string::npos);
}

TEST(RunPlan, AnotherPluginIsAnError) {
  const auto plan = PlanRun("/lib/libggml-kvtamp.so", {"llama-cli"}, [](const std::string& name) {
    return name == "GGML_BACKEND_PATH" ? std::optional<std::string>("/x/libggml-vulkan.so")
                                       : std::nullopt;
  });
  ASSERT_FALSE(plan.ok());
  EXPECT_NE(plan.status().message().find("libggml-vulkan.so"), std::string::npos);
}

}  // namespace
}  // namespace kvtamp::tool
