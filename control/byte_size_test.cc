#include "control/byte_size.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace kvtamp::control {
namespace {

constexpr std::uint64_t kMiB = 1024 * 1024, kGiB = 1024 * kMiB;

TEST(ParseBytes, UnitsAndShares) {
  for (const auto& [text, bytes] : {std::pair<const char*, std::uint64_t>{"4GiB", 4 * kGiB},
                                    {"512 MiB", 512 * kMiB},
                                    {"1.5gib", kGiB + 512 * kMiB},
                                    {"64KiB", 64 * 1024},
                                    {"2TiB", 2048 * kGiB},
                                    {"50%", 8 * kGiB},
                                    {"12.5 %", 2 * kGiB}}) {
    const auto parsed = ParseBytes(text, 16 * kGiB);
    ASSERT_TRUE(parsed.ok()) << text << ": " << parsed.status().message();
    EXPECT_EQ(parsed.value(), bytes) << text;
  }
}

TEST(ParseBytes, WhatIsNoSizeIsRefusedWithAHint) {
  for (const auto& [text, says] : {std::pair{"4", "say 4MiB, 4GiB"},
                                   {"4096", "4096MiB"},
                                   {"4GB", "say GiB"},
                                   {"4g", "say GiB"},
                                   {"4M", "say MiB"},
                                   {"4XiB", "KiB, MiB, GiB, TiB"},
                                   {"", "is not a size"},
                                   {"GiB", "is not a size"},
                                   {"-1GiB", "no memory"},
                                   {"0MiB", "no memory"},
                                   {"0%", "no memory"},
                                   {"101%", "more than there is"},
                                   {"1e3MiB", "no unit"},
                                   {"nan%", "is not a size"},
                                   {"infGiB", "is not a size"},
                                   {" 4 ", "is not a size"},
                                   {"99999999999999TiB", "more than any machine"}}) {
    const auto parsed = ParseBytes(text, 16 * kGiB);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_NE(parsed.status().message().find(says), std::string::npos)
        << text << ": " << parsed.status().message();
  }
}

// A machine of 8 GiB, as its files say it.
class System : public ::testing::Test {
 protected:
  void SetUp() override { Say("proc/meminfo", "MemTotal:        8388608 kB\nMemFree:  1 kB\n"); }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void Say(const std::string& file, const std::string& text) {
    const std::filesystem::path path = root_ + file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  std::string root_ = ::testing::TempDir() + "kvtamp-system-" + std::to_string(::getpid()) + "/";
};

TEST_F(System, AControlGroupMayAllowLess) {
  EXPECT_EQ(MemoryOfSystem(root_), 8 * kGiB);
  Say("sys/fs/cgroup/memory.max", "max\n");
  EXPECT_EQ(MemoryOfSystem(root_), 8 * kGiB);
  Say("proc/self/cgroup", "0::/user.slice/some.service\n");
  Say("sys/fs/cgroup/user.slice/memory.max", "4294967296\n");
  Say("sys/fs/cgroup/user.slice/some.service/memory.max", "max\n");
  EXPECT_EQ(MemoryOfSystem(root_), 4 * kGiB);
  Say("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n");
  EXPECT_EQ(MemoryOfSystem(root_), kGiB);
  EXPECT_GT(MemoryOfSystem(), 256 * kMiB);  // here
}

}  // namespace
}  // namespace kvtamp::control
