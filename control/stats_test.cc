#include "control/stats.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace kvtamp::control {
namespace {

Snapshot Sample() {
  Snapshot s;
  s.version = "0.1.0";
  s.device = "KVTAMP";
  s.ggml_version = "0.25.3";
  s.cpu = "avx2";
  s.type = "k4v4";
  s.format_k = "int4_pc+mean";
  s.format_v = "lm4_g64_pt+had";
  s.page_size = 64;
  s.n_sink = 4;
  s.residual_length = 64;
  s.logical_bytes_k = 16000;
  s.logical_bytes_v = 16000;
  s.stored_bytes_k = 4500;
  s.stored_bytes_v = 4000;
  s.resident = {5000, 1000, 100, 2000, 300, 40};
  s.resident_peak_bytes = 9000;
  s.pages = {1, 2, 30};
  s.cells_used = 2048;
  s.cells_capacity = 4096;
  s.rows_written_total = 2050;
  s.rows_dead = 2;
  s.caches = {{"kv",
               2048,
               4096,
               1,
               32000,
               8500,
               9000,
               {{0, 3, 64, 64, "int4_pc+mean", "lm4_g64_pt+had", 32000, 8500}}}};
  s.fallback_ops = {{"ROPE", "K-shift", 3}};
  s.warnings = {"flash attention is off"};
  return s;
}

TEST(Stats, EntriesByHeadWhereTheyGo) {
  Snapshot s = Sample();
  auto j = nlohmann::json::parse(StatsJson(s));
  for (const char* absent : {"entries", "policy"}) EXPECT_FALSE(j.contains(absent)) << absent;
  EXPECT_FALSE(j.at("pages").contains("demoted"));
  EXPECT_FALSE(j.at("caches")[0].at("layers")[0].contains("entries_by_head"));
  s.policy = "snapkv";
  s.pages.demoted = 4;
  s.entries_kept = 30;
  s.entries_evicted = 20;
  s.entries_demoted = 10;
  s.caches[0].layers[0].heads = {{12, 3, 4}, {18, 17, 6}};
  j = nlohmann::json::parse(StatsJson(s));
  EXPECT_EQ(j.at("policy"), "snapkv");
  EXPECT_EQ(j.at("pages").at("demoted"), 4);
  EXPECT_EQ(j.at("entries").at("evicted"), 20);
  EXPECT_EQ(j.at("caches")[0].at("layers")[0].at("entries_by_head")[1].at("evicted"), 17);
  EXPECT_NE(StatsText(s).find("20 are evicted and 10 have fewer bits (snapkv)"), std::string::npos);
}

TEST(Stats, JsonHasTheNamesOfTheMetrics) {
  const auto j = nlohmann::json::parse(StatsJson(Sample()));
  EXPECT_EQ(j.at("logical_bytes"), 32000);
  EXPECT_EQ(j.at("logical_bytes_by_tensor").at("k"), 16000);
  EXPECT_EQ(j.at("stored_bytes"), 8500);
  EXPECT_EQ(j.at("stored_bytes_by_tensor").at("v"), 4000);
  std::uint64_t sum = 0;
  for (const auto& [tag, bytes] : j.at("resident_bytes").items()) sum += bytes.get<std::uint64_t>();
  EXPECT_EQ(j.at("resident_bytes").size(), 6u);
  EXPECT_EQ(sum, Sample().resident.total());
  EXPECT_EQ(j.at("resident_total_bytes"), sum);
  EXPECT_EQ(j.at("resident_peak_bytes"), 9000);
  EXPECT_DOUBLE_EQ(j.at("bits_per_element").at("k"), 4.5);
  EXPECT_DOUBLE_EQ(j.at("bits_per_element").at("v"), 4.0);
  EXPECT_NEAR(j.at("compression_factor"), 32000.0 / 8500.0, 1e-12);
  EXPECT_EQ(j.at("pages"), (nlohmann::json{{"open", 1}, {"settled", 2}, {"sealed", 30}}));
  EXPECT_EQ(j.at("rows_written_total"), 2050);
  EXPECT_EQ(j.at("caches").at(0).at("layers").at(0).at("n_head_kv"), 3);
  EXPECT_EQ(j.at("caches").at(0).at("stored_bytes"), 8500);
  EXPECT_EQ(j.at("fallback_ops").at(0).at("op"), "ROPE");
  EXPECT_EQ(j.at("warnings").at(0), "flash attention is off");
}

TEST(Stats, EmptyIsAllZeroAndParses) {
  const auto j = nlohmann::json::parse(StatsJson({}));
  EXPECT_EQ(j.at("stored_bytes"), 0);
  EXPECT_EQ(j.at("compression_factor"), 0);
  EXPECT_EQ(j.at("bits_per_element").at("k"), 0);
  EXPECT_TRUE(j.at("caches").empty());
}

TEST(Stats, BrokenUtf8IsNoError) {
  Snapshot s;
  s.warnings = {"\xff\xfe"};
  EXPECT_TRUE(nlohmann::json::accept(StatsJson(s)));
}

TEST(Stats, TextSaysWhatMatters) {
  const std::string text = StatsText(Sample());
  for (const char* part : {"k4v4", "3.76x smaller", "31.2 KiB", "4.50", "4.00", "30 sealed",
                           "ROPE (3x)", "2 dead rows", "flash attention is off"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
  EXPECT_EQ(text.find('\n'), std::string::npos);
  Snapshot plain = Sample();
  plain.uncompressed_bytes = 1 << 20;
  EXPECT_NE(StatsText(plain).find("NOT compressed: 1.0 MiB"), std::string::npos);
  EXPECT_NE(StatsText({}).find("nothing compressed"), std::string::npos);
}

TEST(Stats, TheEndIsSaidWhereItIsNotTheFullest) {
  Snapshot s = Sample();
  EXPECT_EQ(StatsJson(s).find("at_end"), std::string::npos);
  s.at_end = AtEnd{s.cells_used, s.logical_bytes(), s.stored_bytes(), s.resident.total()};
  EXPECT_EQ(StatsText(s).find("at the end"), std::string::npos);
  s.at_end = AtEnd{12, 1920, 1024, 2048};
  EXPECT_NE(StatsText(s).find("at the end 12 cells in use, 1.0 KiB as kept"), std::string::npos);
  const auto j = nlohmann::json::parse(StatsJson(s));
  EXPECT_EQ(j.at("cells_used"), 2048);
  EXPECT_EQ(j.at("at_end"), (nlohmann::json{{"cells_used", 12},
                                            {"logical_bytes", 1920},
                                            {"stored_bytes", 1024},
                                            {"resident_total_bytes", 2048}}));
}

TEST(Stats, RangesText) {
  EXPECT_EQ(RangesText({}), "");
  EXPECT_EQ(RangesText({3}), "3");
  EXPECT_EQ(RangesText({0, 1, 2, 5, 7, 8}), "0-2,5,7-8");
}

TEST(Stats, BytesText) {
  EXPECT_EQ(BytesText(0), "0 B");
  EXPECT_EQ(BytesText(1023), "1023 B");
  EXPECT_EQ(BytesText(1024), "1.0 KiB");
  EXPECT_EQ(BytesText(1536ull << 20), "1.5 GiB");
}

}  // namespace
}  // namespace kvtamp::control
