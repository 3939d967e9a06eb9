// Sizes of memory as people write them, and how much of it there is.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace kvtamp::control {

// "4GiB", "512 MiB", "1.5GiB", or a share: "50%" of `whole`. A bare number is refused, and so are
// MB and GB: what they mean differs from program to program. 0 is refused, too.
Result<std::uint64_t> ParseBytes(std::string_view text, std::uint64_t whole);

// What this process may use of the machine's memory: all there is, or its control group's limit.
// `root` is where the system's files are.
std::uint64_t MemoryOfSystem(const std::string& root = "/");

}  // namespace kvtamp::control
