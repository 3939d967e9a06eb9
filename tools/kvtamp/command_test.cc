// The command as a user meets it: exit codes, one clear line for each mistake, results on stdout.
// Needs no model and no plug-in.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

namespace {

struct Outcome {
  int code = -1;
  std::string out;
  std::string err;
};

std::string Slurp(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// `prefix`: variables, as a shell writes them.
Outcome Kvtamp(const std::string& args, const std::string& prefix = "") {
  // Tests may run side by side.
  const std::string folder =
      ::testing::TempDir() + "kvtamp-command-" + std::to_string(::getpid()) + "/";
  ::mkdir(folder.c_str(), 0700);
  const std::string out = folder + "out", err = folder + "err";
  // A file is all that `run` asks of a plug-in; the host is what loads it.
  const std::string plugin = folder + "libggml-kvtamp.so";
  std::ofstream(plugin) << "";
  const std::string line = "env -u KVTAMP_CONFIG KVTAMP_PLUGIN=" + plugin + " " + prefix +
                           " " KVTAMP_COMMAND " " + args + " >" + out + " 2>" + err;
  const int status = std::system(line.c_str());
  Outcome outcome{WIFEXITED(status) ? WEXITSTATUS(status) : -1, Slurp(out), Slurp(err)};
  std::filesystem::remove_all(folder);
  return outcome;
}

void ExpectOneLine(const Outcome& outcome, int code, const std::string& part) {
  EXPECT_EQ(outcome.code, code) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_NE(outcome.err.find(part), std::string::npos) << outcome.err;
}

TEST(Command, HelpAndVersion) {
  EXPECT_EQ(Kvtamp("").code, 2);
  EXPECT_EQ(Kvtamp("--help").code, 0);
  const Outcome version = Kvtamp("--version");
  EXPECT_EQ(version.code, 0);
  EXPECT_NE(version.out.find("ggml"), std::string::npos);
  for (const char* command : {"run", "plan", "doctor", "eval", "formats"}) {
    const Outcome help = Kvtamp(std::string("help ") + command);
    EXPECT_EQ(help.code, 0) << command;
    EXPECT_NE(help.out.find("Examples:"), std::string::npos) << command;
  }
}

TEST(Command, Mistakes) {
  ExpectOneLine(Kvtamp("evla"), 2, "did you mean eval?");
  ExpectOneLine(Kvtamp("formats --outptu json"), 2, "did you mean --output?");
  ExpectOneLine(Kvtamp("formats -o yaml"), 2, "yaml");
  ExpectOneLine(Kvtamp("formats", "KVTAMP_CACHE_TYP=f16"), 2, "did you mean KVTAMP_CACHE_TYPE?");
}

TEST(Command, MistakesOfPlan) {
  ExpectOneLine(Kvtamp("plan"), 2, "--model");
  ExpectOneLine(Kvtamp("plan /nonexistent.gguf"), 1, "No such file");
  ExpectOneLine(Kvtamp("plan /etc/passwd"), 1, "not a GGUF file");
  ExpectOneLine(Kvtamp("plan /"), 1, "is a folder");
  ExpectOneLine(Kvtamp("plan a.gguf b.gguf"), 2, "b.gguf");
  for (const auto& [budget, says] : {std::pair{"4", "say 4MiB, 4GiB"},
                                     {"4GB", "say GiB"},
                                     {"-1", "has no unit"},
                                     {"0%", "no memory"},
                                     {"1e3", "no unit e3"}})
    ExpectOneLine(Kvtamp(std::string("plan a.gguf --budget=") + budget), 2, says);
  for (const char* ctx : {"0", "-1", "9223372036854775808", "1073741825", "8k"})
    ExpectOneLine(Kvtamp(std::string("plan a.gguf --ctx=") + ctx), 2, "--ctx");
  for (const char* users : {"0", "257", "-1"})
    ExpectOneLine(Kvtamp(std::string("plan a.gguf --users=") + users), 2, "--users");
  ExpectOneLine(Kvtamp("plan a.gguf --cache k4v9"), 2, "k4v9");
  ExpectOneLine(Kvtamp("plan a.gguf --budgte 4GiB"), 2, "did you mean --budget?");
}

TEST(Command, FormatsAsJson) {
  const Outcome formats = Kvtamp("formats -o json");
  EXPECT_EQ(formats.code, 0) << formats.err;
  const auto j = nlohmann::json::parse(formats.out);
  ASSERT_FALSE(j.empty());
  for (const auto& row : j) {
    EXPECT_GT(row.at("bits").at("64").at("kv").get<double>(), 0) << row;
    EXPECT_LE(row.at("bits").at("128").at("kv").get<double>(), 16.0) << row;
  }
}

TEST(CommandRun, MistakesAreSaidBeforeAnythingRuns) {
  ExpectOneLine(Kvtamp("run --cache k5v9 -- true"), 2, "k5v9");
  ExpectOneLine(Kvtamp("run -ctk q9 -- true"), 2, "-ctk");
  ExpectOneLine(Kvtamp("run --cache-page-size 48 -- true"), 2, "16, 32, 64 or 128");
  ExpectOneLine(Kvtamp("run --chace f16 -- true"), 2, "did you mean --cache?");
  ExpectOneLine(Kvtamp("run"), 2, "PROGRAM");
  ExpectOneLine(Kvtamp("run -- true", "KVTAMP_CACHE_N_SINK=x"), 2, "KVTAMP_CACHE_N_SINK");
  ExpectOneLine(Kvtamp("run -- true", "KVTAMP_PLUGIN=/nonexistent.so"), 125, "/nonexistent.so");
  ExpectOneLine(Kvtamp("run -- true", "GGML_BACKEND_PATH=/x/libggml-vulkan.so"), 125,
                "libggml-vulkan.so");
}

TEST(CommandRun, ExitCodeIsThatOfTheProgram) {
  EXPECT_EQ(Kvtamp("run -- true").code, 0);
  EXPECT_EQ(Kvtamp("run -- sh -c 'exit 7'").code, 7);
  EXPECT_EQ(Kvtamp("run -q sh -c 'exit 9'").code, 9);  // "--" may be left out
  EXPECT_EQ(Kvtamp("run -- /nonexistent/program").code, 127);
  EXPECT_EQ(Kvtamp("run -- /").code, 126);
}

TEST(CommandRun, TheProgramSeesTheSettings) {
  const Outcome outcome = Kvtamp("run --cache f16 --cache-n-sink=8 --log-level debug -- env",
                                 "KVTAMP_LOG=warn LLAMA_ARG_DEVICE=kvtamp");
  EXPECT_EQ(outcome.code, 0);
  for (const char* part :
       {"KVTAMP_CACHE_TYPE_K=f16\n", "KVTAMP_CACHE_TYPE_V=f16\n", "KVTAMP_CACHE_N_SINK=8\n",
        "KVTAMP_LOG_LEVEL=debug\n", "LLAMA_ARG_DEVICE=kvtamp\n", "LLAMA_ARG_FLASH_ATTN=on\n",
        "LLAMA_ARG_N_GPU_LAYERS=999\n", "libggml-kvtamp.so\n"}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part << outcome.out;
  }
  EXPECT_EQ(outcome.out.find("KVTAMP_LOG=warn"), std::string::npos);
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_NE(outcome.err.find("set KVTAMP_CACHE_N_SINK=8"), std::string::npos) << outcome.err;
}

TEST(CommandRun, PrintEnvCanBeSourced) {
  const Outcome outcome = Kvtamp("run --print-env --cache int8");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_NE(outcome.out.find("export GGML_BACKEND_PATH="), std::string::npos);
  EXPECT_NE(outcome.out.find("export LLAMA_ARG_DEVICE=KVTAMP"), std::string::npos);
  EXPECT_NE(outcome.out.find("export KVTAMP_CACHE_TYPE_K="), std::string::npos);
  const Outcome bench = Kvtamp("run --print-env -- llama-bench");
  EXPECT_NE(bench.out.find("-dev KVTAMP -ngl 999 -fa 1"), std::string::npos) << bench.out;
}

TEST(CommandRun, SaysWhatDefeatsIt) {
  EXPECT_NE(Kvtamp("run -- true -ngl 0").err.find("warning: -ngl 0"), std::string::npos);
  EXPECT_NE(Kvtamp("run -- true -fa off").err.find("uncompressed"), std::string::npos);
}

TEST(CommandEval, Mistakes) {
  ExpectOneLine(Kvtamp("eval -m x.gguf"), 2, "--file");
  ExpectOneLine(Kvtamp("eval -m /nonexistent.gguf -f /dev/null"), 1, "/nonexistent.gguf");
  ExpectOneLine(Kvtamp("eval -m x -f y --cache k5v9"), 2, "k5v9");
  ExpectOneLine(Kvtamp("eval -m x -f y -ctk q4_0"), 2, "--device host");
  ExpectOneLine(Kvtamp("eval -m x -f y --device host -ctk q40"), 2, "did you mean q4_0?");
  ExpectOneLine(Kvtamp("eval -m x -f y --device host --cache-page-size 16"), 2,
                "--cache-page-size");
  ExpectOneLine(Kvtamp("eval -m x -f y --device gpu"), 2, "gpu");
  ExpectOneLine(Kvtamp("eval -m x -f y --fail-if 'kldmean>0.1'"), 2, "did you mean kld_mean?");
  ExpectOneLine(Kvtamp("eval -m x -f y --fail-if kld_mean"), 2, "kld_mean>0.01");
  ExpectOneLine(Kvtamp("eval -m x -f y --chunks 0"), 2, "--chunks");
}

TEST(CommandEval, MistakesAboutTasks) {
  const auto eval = [](const std::string& args) { return Kvtamp("eval -m x -f y " + args); };
  ExpectOneLine(eval("--task neddle"), 2, "did you mean needle?");
  ExpectOneLine(eval("--task needle --depths 0,120"), 2, "numbers from 0 to 100");
  ExpectOneLine(eval("--task needle --depths 0,nan"), 2, "--depths");
  ExpectOneLine(eval("--task needle --depths 0,50,50"), 2, "50 is there twice");
  ExpectOneLine(eval("--task needle --depths ''"), 2, "--depths");
  ExpectOneLine(eval("--task needle -c 1024 --lengths 512,2048"), 2,
                "--lengths 2048: more than --ctx-size 1024");
  ExpectOneLine(eval("--task needle --lengths 512,x"), 2, "--lengths");
  ExpectOneLine(eval("--task needle --needles 0"), 2, "--needles");
  ExpectOneLine(eval("--task ruler --ruler-tasks vt,multikye"), 2, "did you mean multikey?");
  ExpectOneLine(eval("--task ruler --ruler-tasks vt,vt"), 2, "vt is there twice");
  ExpectOneLine(eval("--task generate --prompt-tokens 4096"), 2, "more than --ctx-size 2048");
  ExpectOneLine(eval("--task ruler --depths 50"), 2, "--depths means nothing to --task ruler");
  ExpectOneLine(eval("--needles 2"), 2, "only to needle");
  ExpectOneLine(eval("--task generate --chunks 2"), 2, "--chunks");
  ExpectOneLine(eval("--needels 2"), 2, "did you mean --needles?");
  ExpectOneLine(eval("--task needle --fail-if 'needle_acuracy<1'"), 2,
                "did you mean needle_accuracy?");
  ExpectOneLine(eval("--task needle --fail-if 'kld_mean>1'"), 2, "no field kld_mean");
  ExpectOneLine(eval("--task ppl --fail-if 'kld_mean>1'"), 2, "no field kld_mean");
  // Words that are right: the model is what is missing.
  for (const char* args : {"--task needle --fail-if 'needle_accuracy_base<1' --depths 0,12.5",
                           "--task ruler --fail-if 'ruler_score<0.5' --ruler-tasks cwe,vt",
                           "--task generate --fail-if 'bleu<50' --fail-if 'rouge_l<0.5'"})
    ExpectOneLine(eval(args), 1, "x");
}

TEST(CommandDoctor, SaysSettingsAndWhereTheyCameFrom) {
  const Outcome outcome = Kvtamp("doctor -o json --cache-n-sink 8", "KVTAMP_CACHE_PAGE_SIZE=32");
  EXPECT_EQ(outcome.code, 2);  // the plug-in of this test is an empty file
  const auto j = nlohmann::json::parse(outcome.out);
  int seen = 0;
  for (const auto& setting : j.at("settings")) {
    if (setting.at("path") == "cache.n_sink") {
      EXPECT_EQ(setting.at("source"), "flag");
      EXPECT_EQ(setting.at("value"), "8");
      ++seen;
    }
    if (setting.at("path") == "cache.page_size") {
      EXPECT_EQ(setting.at("source"), "env");
      EXPECT_EQ(setting.at("where"), "KVTAMP_CACHE_PAGE_SIZE");
      ++seen;
    }
  }
  EXPECT_EQ(seen, 2);
  bool plugin = false;
  for (const auto& check : j.at("checks"))
    plugin = plugin || (check.at("id") == "plugin.loads" && check.at("status") == "fail");
  EXPECT_TRUE(plugin) << outcome.out;
  EXPECT_EQ(Kvtamp("doctor", "KVTAMP_CACHE_TYPE=k5v9").code, 2);
  EXPECT_EQ(Kvtamp("doctor -m /nonexistent.gguf").code, 2);
}

}  // namespace
