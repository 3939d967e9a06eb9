// kvtamp bench: tables of caches side by side.
#include <fmt/format.h>

#include "tools/kvtamp/command.h"

namespace kvtamp::tool {

int BenchMain(const Args& args) {
  if (!args.empty()) {
    const Args rest(args.begin() + 1, args.end());
    if (args.front() == "quality") return BenchQualityMain(rest);
    if (args.front() == "speed") return BenchSpeedMain(rest);
  }
  const bool help = !args.empty() && (args.front() == "-h" || args.front() == "--help");
  fmt::print(
      help ? stdout : stderr,
      "kvtamp bench: tables of caches side by side; --help after each says more\n\n"
      "  kvtamp bench quality   size against loss\n"
      "  kvtamp bench speed     prefill and decode at several depths, beside the host's own\n");
  return help ? kDone : kBadUsage;
}

}  // namespace kvtamp::tool
