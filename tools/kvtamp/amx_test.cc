#include "tools/kvtamp/amx.h"

#include <ggml-backend.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>

namespace kvtamp::tool {
namespace {

using Outcome = AmxTrial::Outcome;

TEST(Amx, SaysSomethingOnlyWhereTheTrialWentWrong) {
  for (const Outcome outcome : {Outcome::kUnused, Outcome::kUntried, Outcome::kRight}) {
    EXPECT_FALSE(ProblemOf({outcome, 0, "lib.so", "GCC: (Debian 12.2.0-14) 12.2.0"}).has_value());
  }
  const auto died =
      ProblemOf({Outcome::kDied, SIGILL, "/x/libggml-cpu.so", "GCC: (Debian) 12.2.0"});
  ASSERT_TRUE(died.has_value());
  EXPECT_EQ(
      died->text,
      "the host's CPU backend dies (illegal instruction) with this processor's AMX instructions; "
      "it was compiled by GCC: (Debian) 12.2.0: /x/libggml-cpu.so");
  EXPECT_NE(died->hint.find("scripts/gcc-amx.h"), std::string::npos);
  EXPECT_NE(died->hint.find("-mno-amx-int8"), std::string::npos);

  const auto crashed = ProblemOf({Outcome::kDied, SIGSEGV, "", ""});
  ASSERT_TRUE(crashed.has_value());
  EXPECT_EQ(crashed->text, "the host's CPU backend dies with this processor's AMX instructions");
  const auto wrong = ProblemOf({Outcome::kWrong, 0, "", ""});
  ASSERT_TRUE(wrong.has_value());
  EXPECT_EQ(wrong->text,
            "the host's CPU backend computes wrongly with this processor's AMX instructions");
}

// The host of the tests was built with scripts/gcc-amx.h where that is needed.
TEST(Amx, TheHostOfTheTestsSurvives) {
  ggml_backend_load_all();
  const AmxTrial trial = TryAmx();
  EXPECT_TRUE(trial.outcome == Outcome::kUnused || trial.outcome == Outcome::kRight)
      << static_cast<int>(trial.outcome) << ", signal " << trial.signal << ", " << trial.compiler;
}

TEST(Amx, FindsTheCompilerOfAFile) {
  const std::string self = CompilerOf("/proc/self/exe");
#ifdef __clang__
  EXPECT_FALSE(self.empty());
#else
  EXPECT_EQ(self.rfind("GCC: ", 0), 0U) << self;
  EXPECT_NE(self.find(__VERSION__), std::string::npos) << self;
#endif
  EXPECT_EQ(CompilerOf("/proc/self/status"), "");
  EXPECT_EQ(CompilerOf("/nonexistent"), "");
}

}  // namespace
}  // namespace kvtamp::tool
