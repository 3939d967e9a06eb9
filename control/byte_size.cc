#include "control/byte_size.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>

namespace kvtamp::control {
namespace {

struct Unit {
  const char* name;
  double bytes;
};
constexpr Unit kUnits[] = {
    {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0}, {"TiB", 1099511627776.0}};

std::string Lower(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

// The number a file begins with; none where there is no such file, or it says "max".
std::uint64_t NumberIn(const std::string& path) {
  std::ifstream in(path);
  std::uint64_t n = 0;
  return in >> n ? n : std::numeric_limits<std::uint64_t>::max();
}

}  // namespace

Result<std::uint64_t> ParseBytes(std::string_view text, std::uint64_t whole) {
  const std::string quoted = "\"" + std::string(text) + "\"";
  double n = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), n, std::chars_format::fixed);
  std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  if (error != std::errc() || text.empty() || !std::isfinite(n))
    return Status::Invalid(quoted + " is not a size: say 4GiB, 512MiB or 50%");
  if (unit.empty())
    return Status::Invalid(quoted + " has no unit: say " + std::string(text) + "MiB, " +
                           std::string(text) + "GiB or a share such as 50%");
  double bytes = -1;
  if (unit == "%") {
    if (n > 100) return Status::Invalid(quoted + " is more than there is");
    bytes = n / 100 * static_cast<double>(whole);
  }
  for (const Unit& u : kUnits) {
    if (Lower(unit) == Lower(u.name)) bytes = n * u.bytes;
  }
  if (bytes < 0 && n >= 0) {
    for (const Unit& u : kUnits) {
      // "GB", "G" and "g" are read as 2^30 here and as 10^9 there.
      if (Lower(unit) == Lower({u.name, 1}) || Lower(unit) == Lower({u.name, 1}) + "b")
        return Status::Invalid(quoted + ": " + std::string(unit) +
                               " means this here and that there: say " + u.name);
    }
    return Status::Invalid(quoted + ": no unit " + std::string(unit) +
                           ": say KiB, MiB, GiB, TiB or %");
  }
  if (!(bytes >= 1)) return Status::Invalid(quoted + " is no memory at all");
  if (bytes > 1.0e18) return Status::Invalid(quoted + " is more than any machine has");
  return static_cast<std::uint64_t>(bytes);
}

std::uint64_t MemoryOfSystem(const std::string& root) {
  constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t bytes = kNone;
  std::ifstream meminfo(root + "proc/meminfo");
  for (std::string key; meminfo >> key;) {
    std::uint64_t n = 0;
    if (key == "MemTotal:" && meminfo >> n) bytes = n * 1024;
  }
  // Of both versions; a process inside a container sees its own group as the root.
  for (const char* limit :
       {"sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"})
    bytes = std::min(bytes, NumberIn(root + limit));
  // The group of a process on the machine itself, and those above it.
  std::ifstream groups(root + "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::/")) continue;
    for (std::string path = line.substr(3); path.size() > 1;
         path = path.substr(0, path.find_last_of('/')))
      bytes = std::min(bytes, NumberIn(root + "sys/fs/cgroup" + path + "/memory.max"));
  }
  return bytes == kNone ? 0 : bytes;
}

}  // namespace kvtamp::control
