#include "tools/kvtamp/run_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <sstream>

namespace kvtamp::tool {
namespace {

using ::testing::HasSubstr;

class RunLogTest : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }
  std::string Text() const {
    std::ostringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }
  std::string Error(const Json& settings) const {
    return RunLog::Open(path_, settings).status().message();
  }

  const std::string path_ =
      ::testing::TempDir() + "kvtamp-run-log-" + std::to_string(::getpid()) + ".jsonl";
  const Json settings_ = {{"task", "needle"}, {"n_ctx", 512}};
};

TEST_F(RunLogTest, GivesBackWhatWasAdded) {
  {
    Result<RunLog> log = RunLog::Open(path_, settings_);
    ASSERT_TRUE(log.ok()) << log.status().message();
    EXPECT_EQ(log.value().Find("base", "needle 1"), nullptr);
    ASSERT_TRUE(log.value().Add("base", "needle 1", {{"answer", "\xff 7\n"}}).ok());
    ASSERT_TRUE(log.value().Add("tested", "needle 1", {{"x", 0.1}}).ok());
  }
  const Result<RunLog> again = RunLog::Open(path_, settings_);
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again.value().size(), 2u);
  ASSERT_NE(again.value().Find("tested", "needle 1"), nullptr);
  EXPECT_EQ(again.value().Find("tested", "needle 1")->at("x"), 0.1);
  EXPECT_EQ(again.value().Find("floor", "needle 1"), nullptr);
}

TEST_F(RunLogTest, ALineCutShortIsDroppedAndWrittenOver) {
  ASSERT_TRUE(RunLog::Open(path_, settings_).value().Add("base", "a", {{"x", 1}}).ok());
  std::ofstream(path_, std::ios::app) << R"({"pass":"base","item":"b",)";
  {
    Result<RunLog> log = RunLog::Open(path_, settings_);
    ASSERT_TRUE(log.ok()) << log.status().message();
    EXPECT_EQ(log.value().size(), 1u);
    ASSERT_TRUE(log.value().Add("base", "c", {{"x", 2}}).ok());
  }
  EXPECT_EQ(RunLog::Open(path_, settings_).value().size(), 2u);
  EXPECT_THAT(Text(), ::testing::Not(HasSubstr("\"b\"")));
}

TEST_F(RunLogTest, OtherSettingsAreRefusedAndTheFileLeftAlone) {
  ASSERT_TRUE(RunLog::Open(path_, settings_).value().Add("base", "a", {{"x", 1}}).ok());
  const std::string before = Text();
  EXPECT_THAT(Error({{"task", "needle"}, {"n_ctx", 1024}}),
              HasSubstr("other settings: it has n_ctx 512, this run 1024"));
  EXPECT_THAT(Error({{"task", "needle"}, {"n_ctx", 512}, {"seed", 1}}),
              HasSubstr("it has seed none, this run 1"));
  EXPECT_THAT(Error({{"task", "needle"}}), HasSubstr("it has n_ctx 512, this run none"));
  EXPECT_EQ(Text(), before);
}

TEST_F(RunLogTest, AnotherKindOfFileIsRefusedAndLeftAlone) {
  for (const char* text : {"Once upon a time", "Once upon\na time\n", "{\"a\":1}\n", "[]\n"}) {
    std::ofstream(path_, std::ios::trunc) << text;
    EXPECT_THAT(Error(settings_), HasSubstr("not")) << text;
    EXPECT_EQ(Text(), text);
  }
  EXPECT_THAT(RunLog::Open("/nonexistent/folder/x", settings_).status().message(),
              HasSubstr("cannot write /nonexistent/folder/x"));
}

TEST_F(RunLogTest, WithoutANameNothingIsKept) {
  Result<RunLog> opened = RunLog::Open("", settings_);
  RunLog& log = opened.value();
  EXPECT_TRUE(log.Add("base", "a", {{"x", 1}}).ok());
  EXPECT_EQ(log.Find("base", "a"), nullptr);
}

}  // namespace
}  // namespace kvtamp::tool
