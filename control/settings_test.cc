#include "control/settings.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <set>

#include "cpu/cpu.h"

namespace kvtamp::control {
namespace {

// A TOML file that is gone at the end of the test.
class TempFile {
 public:
  explicit TempFile(const std::string& text) : path_(::testing::TempDir() + "kvtamp-XXXXXX") {
    ::close(::mkstemp(path_.data()));
    std::ofstream(path_) << text;
  }
  ~TempFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

Settings Load(const Overrides& flags = {}, const Environment& env = {},
              const std::string& file = {}) {
  Result<Settings> s = LoadSettings(flags, env, file);
  EXPECT_TRUE(s.ok()) << s.status().message();
  return s.ok() ? s.value() : Settings{};
}

std::string Error(const Overrides& flags, const Environment& env = {},
                  const std::string& file = {}) {
  const Result<Settings> s = LoadSettings(flags, env, file);
  EXPECT_FALSE(s.ok());
  return s.status().message();
}

const Value& ValueOf(const Settings& s, std::string_view path) {
  for (const Value& value : s.values) {
    if (path == value.option->path) return value;
  }
  ADD_FAILURE() << path;
  return s.values.front();
}

// A profile that can be read, for as long as the tests run.
const TempFile profile_file(
    "version = 1\n[[layer]]\nindex = 3\nhead_size_k = 64\nhead_size_v = 64\n"
    "k = [0.1, 0.001]\nv = [0.001, 0.001]\n");
const char* const kProfile = profile_file.path().c_str();

// A value that is valid and not the default, for every row of the table.
const std::pair<const char*, const char*> kSamples[] = {
    {"cache.type", "f16"},           {"cache.type_k", "f16"},     {"cache.type_v", "f16"},
    {"cache.n_sink", "7"},           {"cache.page_size", "32"},   {"cache.residual_length", "96"},
    {"cache.residual_type", "int8"}, {"cache.profile", kProfile}, {"cache.skip_layers", "1,3"},
    {"cache.skip_type", "f16"},      {"log.level", "info"},       {"cpu", "scalar"},
    {"stats", "/tmp/x.json"},        {"debug.accept_ops", "1"},   {"cache.top_pages", "8"},
    {"evict.policy", "snapkv"},      {"evict.keep_ratio", "0.5"}, {"evict.target_size", "256"},
    {"evict.interval", "64"},        {"evict.window_size", "16"}, {"evict.kernel_size", "7"},
    {"evict.n_recent", "32"},        {"evict.budget", "adakv"},   {"evict.alpha_safeguard", "0.5"},
    {"evict.then", "drop"}};

std::string Toml(const Option& option, const std::string& text) {
  const std::string path = option.path;
  const std::string value = option.kind == Kind::kString ? "\"" + text + "\""
                            : option.kind == Kind::kInteger || option.kind == Kind::kNumber
                                ? text
                                : "[" + text + "]";
  return path + " = " + value + "\n";
}

TEST(OptionTable, EveryRowHasThreeFormsThatWork) {
  std::size_t seen = 0;
  for (const auto& [path, text] : kSamples) {
    const Option* option = FindOption(path);
    ASSERT_NE(option, nullptr) << path;
    ++seen;

    const TempFile file(Toml(*option, text));
    Settings s = Load({}, {}, file.path());
    EXPECT_EQ(ValueOf(s, path).text, text);
    EXPECT_EQ(ValueOf(s, path).source, Source::kFile);
    EXPECT_EQ(ValueOf(s, path).where, file.path() + ":1");

    s = Load({}, {{EnvName(path), text}});
    EXPECT_EQ(ValueOf(s, path).text, text);
    EXPECT_EQ(ValueOf(s, path).source, Source::kEnv);

    s = Load({{path, text, ""}});
    EXPECT_EQ(ValueOf(s, path).text, text);
    EXPECT_EQ(ValueOf(s, path).source, Source::kFlag);
    EXPECT_EQ(ValueOf(s, path).where, FlagName(path));

    if (*option->short_env != 0) {
      s = Load({}, {{option->short_env, text}});
      EXPECT_EQ(ValueOf(s, path).text, text);
    }
  }
  EXPECT_EQ(seen, Options().size()) << "a row of the table has no sample here";
}

TEST(Docs, ListTheSettingsOfEvict) {
  std::ifstream file(KVTAMP_SOURCE_DIR "/docs/policies.md");
  ASSERT_TRUE(file.is_open());
  std::set<std::string> listed, expected;
  bool in_section = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("```")) in_section = false;
    if (in_section)
      listed.insert(line.substr(0, line.find_last_not_of(' ', line.find('#') - 1) + 1));
    if (line.starts_with("[evict]")) in_section = true;
  }
  for (const Option& option : Options()) {
    const std::string path = option.path, quote = option.kind == Kind::kString ? "\"" : "";
    if (path.starts_with("evict."))
      expected.insert(path.substr(6) + " = " + quote + option.fallback + quote);
  }
  EXPECT_EQ(listed, expected);
}

TEST(OptionTable, NoTwoRowsShareAName) {
  std::set<std::string> paths, flags, envs;
  for (const char* name : OtherVariables()) EXPECT_TRUE(envs.insert(name).second) << name;
  for (const Option& option : Options()) {
    EXPECT_TRUE(paths.insert(option.path).second) << option.path;
    EXPECT_TRUE(flags.insert(FlagName(option.path)).second) << option.path;
    EXPECT_TRUE(envs.insert(EnvName(option.path)).second) << option.path;
    if (*option.short_flag != 0) {
      EXPECT_TRUE(flags.insert(option.short_flag).second) << option.short_flag;
    }
    if (*option.short_env != 0) {
      EXPECT_TRUE(envs.insert(option.short_env).second) << option.short_env;
    }
    EXPECT_NE(*option.help, 0) << option.path;
  }
}

TEST(OptionTable, NamesFollowTheRule) {
  EXPECT_EQ(FlagName("cache.type_k"), "--cache-type-k");
  EXPECT_EQ(EnvName("cache.type_k"), "KVTAMP_CACHE_TYPE_K");
  EXPECT_EQ(EnvName("cpu"), "KVTAMP_CPU");
  EXPECT_EQ(FindOption("cache.typ_k"), nullptr);
}

TEST(Settings, Defaults) {
  const Settings s = Load();
  EXPECT_TRUE(s.prune.policy.empty());
  EXPECT_EQ(s.prune.budget.keep_ratio, 1.0);
  EXPECT_EQ(s.prune.interval, 32u);
  EXPECT_EQ(s.prune.scores.window_size, 64u);
  EXPECT_EQ(s.prune.n_recent, 128u);
  EXPECT_EQ(s.type, codec::ParsePair("auto").value());
  EXPECT_EQ(s.skip_type, codec::ParsePair("int8").value());
  EXPECT_EQ(s.n_sink, 4u);
  EXPECT_EQ(s.residual_length, 64u);
  EXPECT_EQ(s.page_size, 64u);
  EXPECT_TRUE(s.skip_layers.empty());
  EXPECT_EQ(s.log_level, LogLevel::kInfo);
  EXPECT_EQ(s.cpu, "auto");
  EXPECT_EQ(s.stats, "");
  for (const Value& value : s.values) EXPECT_EQ(value.source, Source::kDefault);
}

TEST(Settings, FlagBeatsEnvironmentBeatsFile) {
  const TempFile file("[cache]\nn_sink = 1\npage_size = 16\nresidual_length = 8\n");
  const Settings s =
      Load({{"cache.n_sink", "3", ""}},
           {{"KVTAMP_CACHE_N_SINK", "2"}, {"KVTAMP_CACHE_PAGE_SIZE", "32"}}, file.path());
  EXPECT_EQ(s.n_sink, 3u);
  EXPECT_EQ(s.page_size, 32u);
  EXPECT_EQ(s.residual_length, 8u);
  EXPECT_EQ(ValueOf(s, "cache.residual_length").where, file.path() + ":4");
  EXPECT_EQ(s.config_file, file.path());
}

TEST(Settings, ConfigVariableNamesTheFile) {
  const TempFile file("cpu = \"scalar\"\n");
  EXPECT_EQ(Load({}, {{"KVTAMP_CONFIG", file.path()}}).cpu, "scalar");
}

TEST(Settings, SidesKeyBeatsCacheTypeOfTheSameSource) {
  const codec::Pair f16 = codec::ParsePair("f16").value();
  const codec::Pair int8 = codec::ParsePair("int8").value();
  Settings s = Load({{"cache.type", "int8", ""}, {"cache.type_k", "f16", ""}});
  EXPECT_EQ(s.type.k, f16.k);
  EXPECT_EQ(s.type.v, int8.v);
  // Stronger source, wider key.
  s = Load({{"cache.type", "int8", ""}}, {{"KVTAMP_CACHE_TYPE_K", "f16"}});
  EXPECT_EQ(s.type, int8);
  // Stronger source, narrower key.
  s = Load({{"cache.type_v", "f16", ""}}, {{"KVTAMP_CACHE_TYPE", "int8"}});
  EXPECT_EQ(s.type.k, int8.k);
  EXPECT_EQ(s.type.v, f16.v);
  s = Load({{"cache.type_v", "auto", ""}}, {{"KVTAMP_CACHE_TYPE", "int8"}});
  EXPECT_EQ(s.type, int8);
}

TEST(Settings, SideTakesDescriptorAndShortNameButNoPair) {
  const codec::Pair int8 = codec::ParsePair("int8").value();
  EXPECT_EQ(Load({{"cache.type_k", "int8", ""}}).type.k, int8.k);
  EXPECT_EQ(Load({{"cache.type_v", codec::FormatName(int8.v), ""}}).type.v, int8.v);
  const std::string error = Error({{"cache.type_k", "k8v4", "-ctk"}});
  EXPECT_NE(error.find("(from -ctk)"), std::string::npos) << error;
  EXPECT_NE(error.find("cache.type"), std::string::npos) << error;
}

TEST(Settings, SkipLayers) {
  const Settings s = Load({{"cache.skip_layers", "5, 0,28-30,5", ""}});
  EXPECT_EQ(s.skip_layers, (std::vector<std::uint32_t>{0, 5, 28, 29, 30}));
  EXPECT_EQ(s.TypeOfLayer(29), s.skip_type);
  EXPECT_EQ(s.TypeOfLayer(1), s.type);
  for (const char* bad : {"x", "3-1", "1,,2", "-1", "5000", "1,"}) {
    Error({{"cache.skip_layers", bad, ""}});
  }
}

TEST(Settings, EmptyVariableIsUnset) {
  EXPECT_EQ(Load({}, {{"KVTAMP_CPU", ""}}).cpu, "auto");
  EXPECT_EQ(Load({}, {{"OTHER", "x"}, {"KVTAMP_PLUGIN", "/x"}}).cpu, "auto");
}

TEST(Settings, TwoSpellingsMustAgree) {
  EXPECT_EQ(Load({}, {{"KVTAMP_LOG", "info"}, {"KVTAMP_LOG_LEVEL", "info"}}).log_level,
            LogLevel::kInfo);
  Error({}, {{"KVTAMP_LOG", "info"}, {"KVTAMP_LOG_LEVEL", "warn"}});
}

TEST(SettingsErrors, UnknownNamesGetTheNearest) {
  std::string error = Error({}, {{"KVTAMP_CACHE_TYP_K", "f16"}});
  EXPECT_NE(error.find("KVTAMP_CACHE_TYP_K"), std::string::npos) << error;
  EXPECT_NE(error.find("did you mean KVTAMP_CACHE_TYPE_K?"), std::string::npos) << error;

  const TempFile file("[cache]\npage-size = 16\n");
  error = Error({}, {}, file.path());
  EXPECT_NE(error.find(file.path() + ":2: unknown key cache.page-size"), std::string::npos)
      << error;
  EXPECT_NE(error.find("did you mean cache.page_size?"), std::string::npos) << error;

  const TempFile table("[cahce]\ntype = \"f16\"\n");
  EXPECT_NE(Error({}, {}, table.path()).find("unknown key cahce"), std::string::npos);

  error = Error({{"log.level", "warning", ""}});
  EXPECT_NE(error.find("did you mean warn?"), std::string::npos) << error;
}

TEST(SettingsErrors, EachIsOneLineThatNamesItsOrigin) {
  const TempFile broken("[cache\n");
  const TempFile string_for_number("cache.n_sink = \"4\"\n");
  const TempFile number_for_list("cache.skip_layers = 4\n");
  const TempFile fraction("cache.n_sink = 4.5\n");
  const std::vector<std::pair<std::string, std::string>> errors = {
      {Error({{"cache.type", "k5v9", "--cache"}}), "--cache"},
      {Error({{"cache.type_v", "q9_9", "-ctv"}}), "-ctv"},
      {Error({}, {{"KVTAMP_CACHE_N_SINK", "65"}}), "KVTAMP_CACHE_N_SINK"},
      {Error({}, {{"KVTAMP_CACHE_N_SINK", "4x"}}), "KVTAMP_CACHE_N_SINK"},
      {Error({}, {{"KVTAMP_CACHE_N_SINK", "-1"}}), "KVTAMP_CACHE_N_SINK"},
      {Error({{"cache.residual_length", "65537", ""}}), "--cache-residual-length"},
      {Error({{"cache.residual_type", "int4", ""}}), "int8 or f16"},
      {Error({{"cache.page_size", "48", ""}}), "--cache-page-size"},
      {Error({{"cache.page_size", "256", ""}}), "--cache-page-size"},
      {Error({}, {{"KVTAMP_CPU", "mmx"}}), "KVTAMP_CPU"},
      {Error({}, {}, broken.path()), broken.path()},
      {Error({}, {}, string_for_number.path()), "whole number"},
      {Error({}, {}, number_for_list.path()), "list"},
      {Error({}, {}, fraction.path()), "whole number"},
      {Error({}, {{"KVTAMP_CONFIG", "/nonexistent.toml"}}), "/nonexistent.toml"},
      {Error({{"cache.no_such", "1", ""}}), "cache.no_such"},
      {Error({{"evict.policy", "snapvk", ""}}), "snapkv"},
      {Error({{"evict.policy", "kvzip", ""}}), "not available behind ggml"},
      {Error({{"evict.policy", "expected_attention", ""}}), "not available behind ggml"},
      {Error({}, {{"KVTAMP_EVICT_KEEP_RATIO", "0"}}), "KVTAMP_EVICT_KEEP_RATIO"},
      {Error({}, {{"KVTAMP_EVICT_KEEP_RATIO", "50%"}}), "above 0 and at most 1"},
      {Error({{"evict.keep_ratio", "nan", ""}}), "above 0"},
      {Error({{"evict.kernel_size", "4", ""}}), "odd"},
      {Error({{"evict.budget", "fair", ""}}), "pyramidkv+adakv"},
      {Error({{"evict.then", "merge", ""}}), "demote or drop"},
      {Error({{"evict.then", "keep", ""}}), "demote or drop"},
  };
  for (const auto& [error, part] : errors) {
    EXPECT_NE(error.find(part), std::string::npos) << error;
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  }
}

TEST(Settings, EveryInstructionSetIsAccepted) {
  for (const std::string& isa : cpu::AvailableIsas()) EXPECT_EQ(Load({{"cpu", isa, ""}}).cpu, isa);
}

TEST(NearestName, FindsTyposAndNothingElse) {
  const std::vector<std::string> names = {"eval", "doctor", "formats", "run"};
  EXPECT_EQ(NearestName("evla", names), "eval");
  EXPECT_EQ(NearestName("format", names), "formats");
  EXPECT_EQ(NearestName("zzzzzz", names), "");
}

TEST(ProcessEnvironment, TakesOnlyOurs) {
  ASSERT_EQ(setenv("KVTAMP_CACHE_N_SINK", "9", 1), 0);
  ASSERT_EQ(setenv("NOT_KVTAMP", "1", 1), 0);
  bool found = false;
  for (const auto& [name, text] : ProcessEnvironment()) {
    EXPECT_TRUE(name.starts_with("KVTAMP_")) << name;
    found = found || (name == "KVTAMP_CACHE_N_SINK" && text == "9");
  }
  EXPECT_TRUE(found);
  unsetenv("KVTAMP_CACHE_N_SINK");
  unsetenv("NOT_KVTAMP");
}

}  // namespace
}  // namespace kvtamp::control
