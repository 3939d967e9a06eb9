// For tests: a fixture that runs on each instruction set that there is, which is its parameter
// (testing::ValuesIn(cpu::AvailableIsas())).
#pragma once

#include <string>

#include <gtest/gtest.h>

#include "cpu/cpu.h"

namespace kvtamp::cpu {

class EveryIsa : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(ForceIsa(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(ForceIsa("").ok()); }
};

}  // namespace kvtamp::cpu
