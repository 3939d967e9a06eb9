#include "attention/observe.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "attention/attention_fixture.h"
#include "attention/reference.h"
#include "cpu/cpu.h"
#include "cpu/every_isa.h"

namespace kvtamp::attention {
namespace {

using codec::Coding;

constexpr std::size_t kScratch = 16 << 20;

class EveryIsa : public cpu::EveryIsa {
 protected:
  // The first job's tokens [first, first + n) beside the reference.
  void Compare(const Shape& shape, std::uint32_t first, std::uint32_t n, int threads = 1) {
    for (std::uint32_t seed = 1; seed <= 3; ++seed) {
      SCOPED_TRACE(seed);
      const World world(shape, seed);
      std::vector<float> unused;
      const Job job = world.JobsInto(unused)[0];
      const std::size_t stride = job.n_kv + 3, size = stride * world.layer.n_head_kv;
      std::vector<double> want(size, 0.25);
      ObserveReference(world.layer, job, world.params, first, n, want.data(), stride);
      std::vector<float> got(size, 0.25f);  // is added to
      Workspace workspace;
      std::memset(workspace.Get(kScratch), 0xFF, kScratch);  // NaN, so that using it would show
      ThreadExecutor executor(threads);
      const Status status = Observe(world.layer, job, world.params, first, n, got.data(), stride,
                                    workspace, executor);
      ASSERT_TRUE(status.ok()) << status.message();
      for (std::size_t i = 0; i < size; ++i) ASSERT_NEAR(got[i], want[i], 2e-4 * n) << i;
      double all = 0, error = 0;
      for (std::size_t i = 0; i < size; ++i) {
        all += want[i] - 0.25;
        error += std::abs(got[i] - want[i]);
      }
      EXPECT_LE(error, 1e-3 * all + 1e-6);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Isa, EveryIsa, testing::ValuesIn(cpu::AvailableIsas()),
                         [](const auto& info) { return info.param; });

TEST_P(EveryIsa, EachCodingOfKeys) {
  for (const Coding k :
       {Coding::kF16, Coding::kKInt8, Coding::kKInt4, Coding::kKPlanes, Coding::kRows}) {
    SCOPED_TRACE(static_cast<int>(k));
    Shape shape;
    shape.k = {k};
    Compare(shape, 0, 1);
  }
}

TEST_P(EveryIsa, AFewTokensOfMany) {
  Shape shape;
  shape.n_tok = 40;
  shape.k = {Coding::kF16, Coding::kKPlanes};
  for (const std::uint32_t n : {1u, 5u, 6u, 7u, 16u, 40u})  // blocks of 24 rows: 6 tokens
    Compare(shape, 40 - n, n, n > 6 ? 3 : 1);
  Compare(shape, 0, 3);
  Compare(shape, 7, 0);
}

TEST_P(EveryIsa, WhatTheMaskSays) {
  for (const MaskKind mask : {MaskKind::kNone, MaskKind::kHoles, MaskKind::kPerHead,
                              MaskKind::kAlibi, MaskKind::kAllShut, MaskKind::kWindow}) {
    for (const Cells cells : {Cells::kRun, Cells::kScattered}) {
      SCOPED_TRACE(static_cast<int>(mask) * 10 + static_cast<int>(cells));
      Shape shape;
      shape.n_tok = 4;
      shape.mask = mask;
      shape.cells = cells;
      shape.dead_rows = shape.null_sides = shape.partial_pages = true;
      shape.k = {Coding::kF16, Coding::kKInt4, Coding::kKPlanes};
      Compare(shape, 1, 2);
    }
  }
}

TEST_P(EveryIsa, PagesOfOneHead) {
  Shape shape;
  shape.n_tok = 4;
  shape.n_head_kv = 3;
  shape.n_pages = 9;
  shape.single_heads = shape.dead_rows = true;
  shape.k = {Coding::kF16, Coding::kKInt4, Coding::kKPlanes};
  Compare(shape, 1, 2);
}

TEST_P(EveryIsa, SinksCapsAndTurns) {
  Shape shape;
  shape.n_tok = 3;
  shape.sinks = true;
  shape.softcap = 20;
  shape.turn_pairs = 16;
  shape.k = {Coding::kKPlanes, Coding::kKInt8};
  Compare(shape, 0, 3);
  shape.mask = MaskKind::kAllShut;  // all goes to the sinks
  Compare(shape, 0, 3);
}

TEST_P(EveryIsa, ValuesInsideKeys) {
  Shape shape;
  shape.n_head_kv = 1;
  shape.gqa = 16;
  shape.dim_k = 576;
  shape.dim_v = 512;
  shape.v_in_k = true;
  shape.n_tok = 2;
  Compare(shape, 0, 2);
}

TEST_P(EveryIsa, AQueryGivesOneInAll) {
  Shape shape;
  shape.n_head_kv = 3;
  const World world(shape, 7);
  std::vector<float> unused;
  const Job job = world.JobsInto(unused)[0];
  std::vector<float> mass(std::size_t{3} * job.n_kv);
  Workspace workspace;
  SerialExecutor executor;
  ASSERT_TRUE(
      Observe(world.layer, job, world.params, 0, 1, mass.data(), job.n_kv, workspace, executor)
          .ok());
  for (std::uint32_t h = 0; h < 3; ++h) {
    double sum = 0;
    for (std::uint32_t c = 0; c < job.n_kv; ++c) sum += mass[h * job.n_kv + c];
    EXPECT_NEAR(sum, shape.gqa, 1e-4);
  }
}

TEST(Observe, RefusesWhatIsNotThere) {
  const World world(Shape(), 1);
  std::vector<float> unused;
  Job job = world.JobsInto(unused)[0];
  std::vector<float> mass(std::size_t{2} * job.n_kv);
  Workspace workspace;
  SerialExecutor executor;
  const auto observe = [&](std::uint32_t first, std::uint32_t n, std::size_t stride) {
    return Observe(world.layer, job, world.params, first, n, mass.data(), stride, workspace,
                   executor)
        .ok();
  };
  EXPECT_TRUE(observe(0, 1, job.n_kv));
  EXPECT_FALSE(observe(0, 2, job.n_kv));
  EXPECT_FALSE(observe(2, 0, job.n_kv));
  EXPECT_FALSE(observe(1, UINT32_MAX, job.n_kv));
  EXPECT_FALSE(observe(0, 1, job.n_kv - 1));
  job.pages = {};
  EXPECT_TRUE(observe(0, 1, job.n_kv));
}

}  // namespace
}  // namespace kvtamp::attention
