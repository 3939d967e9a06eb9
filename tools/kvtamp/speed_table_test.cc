#include "tools/kvtamp/speed_table.h"

#include <gmock/gmock.h>

namespace kvtamp::tool {
namespace {

using testing::HasSubstr;

CacheEntry Entry(const char* name, bool host) {
  CacheEntry e;
  e.name = e.format_k = e.format_v = name;
  e.cache.host = host;
  return e;
}

SpeedResult Example() {
  SpeedResult result;
  result.model = {"a model", 2u << 20, 3000000, 2048};
  // The second turn ran at half speed for both.
  result.tests.push_back({.n_depth = 0, .n_prompt = 100, .seconds = {{1, 2, 1}, {0.5, 1, 0.4}}});
  result.tests.push_back({.n_depth = 4096, .n_gen = 10, .seconds = {{1, 1}, {0.5, 0.25}}});
  result.tests.push_back({.n_depth = 8192, .n_gen = 10, .seconds = {{}, {}}});
  return result;
}

TEST(SpeedTable, MedianOfOddEvenAndNone) {
  EXPECT_EQ(Median({3, 1, 2}), 2);
  EXPECT_EQ(Median({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(Median({}), 0);
}

TEST(SpeedTable, RatiosAreOfTheSameTurn) {
  const auto rows = SpeedRows({}, {Entry("f16", true), Entry("k4v4", false)}, Example());
  ASSERT_EQ(rows.size(), 4u);  // a test without a repetition is none
  EXPECT_EQ(rows[0].at("median_ts"), 100);
  EXPECT_EQ(rows[0].at("min_ts"), 50);
  EXPECT_EQ(rows[0].at("ratio"), 1);
  EXPECT_EQ(rows[1].at("ratio"), 2);
  EXPECT_EQ(rows[1].at("ratio_max"), 2.5);
  EXPECT_EQ(rows[1].at("device"), "kvtamp");
  EXPECT_NEAR(rows[0].at("stddev_ts").get<double>(), 28.8675, 1e-3);
  EXPECT_EQ(rows[3].at("n_depth"), 4096);
  EXPECT_EQ(rows[3].at("ratio"), 3);
  EXPECT_EQ(rows[3].at("samples_ns"), (std::vector<std::int64_t>{500000000, 250000000}));
}

TEST(SpeedTable, WithoutAHostThereIsNoRatio) {
  SpeedResult result = Example();
  for (SpeedTest& test : result.tests) test.seconds.erase(test.seconds.begin());
  const auto rows = SpeedRows({}, {Entry("k4v4", false)}, result);
  EXPECT_FALSE(rows[0].contains("ratio"));
  const std::string text = SpeedMarkdown(rows);
  EXPECT_THAT(text, HasSubstr("| cache | test | t/s | min … max |\n"));
  EXPECT_THAT(text, HasSubstr("| k4v4 | pp100 | 200.00 | 100.00 … 250.00 |\n"));
}

TEST(SpeedTable, FormsAgree) {
  const auto rows = SpeedRows({}, {Entry("f16", true), Entry("k4v4", false)}, Example());
  EXPECT_THAT(
      SpeedMarkdown(rows),
      HasSubstr("| a model | 2.00 MiB | 3.00 M | KVTAMP | 1 | k4v4 | tg10 @ d4096 | 30.00 | "
                "20.00 … 40.00 | 3.00 | 2.00 … 4.00 |\n"));
  const std::string csv = SpeedCsv(rows);
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 5);
  EXPECT_THAT(csv, HasSubstr("build_commit,cpu_info,backends,model_filename"));
  EXPECT_EQ(csv.find("samples"), std::string::npos);
}

}  // namespace
}  // namespace kvtamp::tool
