// The sub-commands of `kvtamp`. Each takes the arguments after its own name and returns the exit
// code: 0 done, 1 failed, 2 bad usage, 3 ran but a --fail-if limit was passed; `run` and `doctor`
// say their own. Results go to stdout, everything else to stderr. Only this folder prints.
#pragma once

#include <string>
#include <vector>

namespace kvtamp::tool {

using Args = std::vector<std::string>;

inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kBadUsage = 2;
inline constexpr int kLimitPassed = 3;
inline constexpr int kInterrupted = 130;  // by Ctrl-C, as shells have it

int RunMain(const Args& args);
int DoctorMain(const Args& args);
int BenchMain(const Args& args);  // one of the two:
int BenchQualityMain(const Args& args);
int BenchSpeedMain(const Args& args);
int ErrorsMain(const Args& args);
int EvalMain(const Args& args);
int FormatsMain(const Args& args);
int PlanMain(const Args& args);
int SensitivityMain(const Args& args);

}  // namespace kvtamp::tool
