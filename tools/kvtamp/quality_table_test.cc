#include "tools/kvtamp/quality_table.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "tools/kvtamp/cache_list.h"
#include "tools/kvtamp/stored_size.h"

namespace kvtamp::tool {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

QualityRow Row(const char* name, const char* device, double bits, double kld) {
  QualityRow r;
  r.name = name;
  r.device = device;
  r.bits = r.bits_long = bits;
  r.total.kld_mean = kld;
  r.total.ppl_ratio = 1;
  return r;
}

QualityTable Example() {
  QualityTable t;
  t.model = "a <model> & more";
  t.kld_floor = 0.002;
  t.n_needles = 3;
  t.rows = {Row("q4_0", "host", 4.5, 0.05), Row("k4v4", "kvtamp", 4.4, 0.005),
            Row("q8_0", "host", 8.5, 0.004), Row("k2v2", "kvtamp", 2.4, 0.06),
            Row("k9", "kvtamp", 8.4, 0.0045)};
  t.rows[1].needles = 2;
  t.Finish();
  return t;
}

TEST(QualityTable, TheFrontIsWhatNothingBeatsInBoth) {
  const QualityTable t = Example();
  std::vector<std::string> names, front;
  for (const QualityRow& r : t.rows) {
    names.push_back(r.name);
    if (r.pareto) front.push_back(r.name);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"q8_0", "k9", "q4_0", "k4v4", "k2v2"}));
  EXPECT_EQ(front, (std::vector<std::string>{"q8_0", "k9", "k4v4", "k2v2"}));
}

TEST(QualityTable, OfTwoEqualRowsBothStand) {
  QualityTable t;
  t.rows = {Row("a", "kvtamp", 4, 0.01), Row("b", "kvtamp", 4, 0.01)};
  t.Finish();
  EXPECT_TRUE(t.rows[0].pareto && t.rows[1].pareto);
}

TEST(QualityTable, MarkdownComparesWithTheHostsTypes) {
  const std::string text = QualityMarkdown(Example());
  EXPECT_THAT(text, HasSubstr("| k4v4 * | 4.40 | 0 | 0.00500"));
  EXPECT_THAT(text, HasSubstr("| 1.25 | 0.10 |"));  // 0.005 / 0.004, 0.005 / 0.05
  EXPECT_THAT(text, HasSubstr("| host q4_0 | 4.50"));
  EXPECT_THAT(text, HasSubstr("| 2/3 |"));
  QualityTable ours = Example();
  std::erase_if(ours.rows, [](const QualityRow& r) { return r.device == "host"; });
  EXPECT_THAT(QualityMarkdown(ours), HasSubstr("| - | - |"));
}

TEST(QualityTable, CsvHasARowForEachAndJsonTheSame) {
  QualityTable t = Example();
  t.rows[1].settings = "a=\"b\",c";
  const std::string csv = QualityCsv(t);
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 6);
  EXPECT_TRUE(csv.starts_with("name,device,"));
  EXPECT_THAT(csv, HasSubstr(",\"a=\"\"b\"\",c\","));
  const auto j = QualityJson(t);
  EXPECT_EQ(j.at("rows").size(), 5u);
  EXPECT_EQ(j.at("rows").at(3).at("kld_mean"), 0.005);
}

TEST(QualityTable, ThePlotIsWholeAndEscaped) {
  const std::string svg = QualitySvg(Example());
  EXPECT_TRUE(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
  EXPECT_THAT(svg, HasSubstr("a &lt;model&gt; &amp; more"));
  EXPECT_THAT(svg, HasSubstr("noise floor"));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  const auto count = [&](const std::string& what) {
    std::size_t n = 0;
    for (std::size_t at = 0; (at = svg.find(what, at)) != svg.npos; ++at) n++;
    return n;
  };
  EXPECT_EQ(count("<circle"), 3u);
  EXPECT_EQ(count("class=\"host\""), 2u);
  EXPECT_TRUE(QualitySvg(QualityTable{}).ends_with("</svg>\n"));
}

// What a store of noise takes is near what its format says, f16 sinks, window and half an open page
// beside it.
TEST(OwnCache, TakesSettingsOfBothSections) {
  const auto e = OwnCache("k4v4@n_sink=2@evict.policy=h2o@evict.keep_ratio=0.25");
  ASSERT_TRUE(e.ok()) << e.status().message();
  EXPECT_EQ(e.value().settings.n_sink, 2u);
  EXPECT_EQ(e.value().settings.prune.policy, "h2o");
  EXPECT_EQ(e.value().settings.prune.budget.keep_ratio, 0.25);
  const std::pair<std::string, std::string> policy("KVTAMP_EVICT_POLICY", "h2o");
  EXPECT_TRUE(std::ranges::count(e.value().cache.environment, policy));
  const auto bad = OwnCache("k4v4@evict.polcy=h2o");
  ASSERT_FALSE(bad.ok());
  EXPECT_NE(bad.status().message().find("did you mean evict.policy?"), std::string::npos)
      << bad.status().message();
}

TEST(StoredSize, IsTheFormatsAndTheWindows) {
  ModelLayout layout;
  for (std::uint32_t l = 0; l < 4; ++l) layout.layers.push_back({l, 3, 64, 64, false, ""});
  const auto bits = [&](const char* type, std::uint32_t n) {
    const auto settings = control::LoadSettings({{"cache.type", type, "--cache"}}, {});
    EXPECT_TRUE(settings.ok());
    const auto size = StoredSize(layout, settings.value(), n, 64);
    EXPECT_TRUE(size.ok());
    EXPECT_EQ(size.value().logical_bytes, 4.0 * 2 * 3 * 64 * 2 * n);
    return 16 * size.value().stored_bytes / size.value().logical_bytes;
  };
  const double f16_rows = 4 + 64 + 32.0;
  for (const std::uint32_t n : {2048u, 8192u}) {
    const double expected = (4.22 * (n - f16_rows) + 16 * f16_rows) / n;
    EXPECT_NEAR(bits("k4v4", n), expected, 0.3 * 2048 / n) << n;
  }
  EXPECT_NEAR(bits("f16", 2048), 16.2, 0.2);
  EXPECT_LT(bits("k2v2", 4096), bits("k3v3", 4096) - 0.8);
}

// What queries leave is counted: a float for each channel of K, where its widths depend on them.
TEST(StoredSize, CountsWhatQueriesLeave) {
  ModelLayout layout;
  layout.layers = {{0, 3, 64, 64, false, ""}, {1, 2, 576, 0, false, ""}};
  const auto bytes = [&](const char* type_k) {
    const auto settings = control::LoadSettings({{"cache.type_k", type_k, "-ctk"}}, {});
    EXPECT_TRUE(settings.ok());
    const auto size = StoredSize(layout, settings.value(), 64, 64);  // all in the window: f16
    EXPECT_TRUE(size.ok()) << size.status().message();
    return size.value().stored_bytes;
  };
  EXPECT_EQ(bytes("int4_pc+qw") - bytes("int4_pc"), (3 * 64 + 2 * 576) * sizeof(float));
}

// A sliding window keeps what it sees.
TEST(StoredSize, OfASlidingWindowStopsGrowing) {
  ModelLayout layout;
  layout.n_swa = 256;
  layout.layers.push_back({0, 2, 64, 64, true, ""});
  const auto settings = control::LoadSettings({}, {});
  const auto at = [&](std::uint32_t n) {
    return StoredSize(layout, settings.value(), n, 64).value().stored_bytes;
  };
  EXPECT_NEAR(at(4096) / at(1024), 1, 0.2);
}

}  // namespace
}  // namespace kvtamp::tool
