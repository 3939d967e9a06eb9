// Pages chosen by bounds on q·k: that bounds are bounds, and that what is chosen is what is read.
#include "attention/choose.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "attention/attention_fixture.h"
#include "attention/kernels.h"
#include "attention/reference.h"
#include "cpu/cpu.h"
#include "cpu/every_isa.h"

namespace kvtamp::attention {
namespace {

using codec::Coding;

constexpr float kInf = std::numeric_limits<float>::infinity();

// --- the choice alone ---------------------------------------------------------------------------

struct Choice {
  Choice(std::uint32_t rows, std::vector<float> b) : bounds(std::move(b)) {
    choice.rows = rows;
    choice.n_pages = static_cast<std::uint32_t>(bounds.size() / rows);
    read.resize((choice.n_pages + 63) / 64);
    choice.bounds = bounds.data();
    choice.read = read.data();
  }
  std::string Read(std::uint32_t top_pages) {
    std::vector<float> worth;
    const std::uint32_t n = ChoosePages(choice, top_pages, worth);
    std::string text;
    for (std::uint32_t i = 0; i < choice.n_pages; ++i) text += choice.reads(i) ? '1' : '0';
    EXPECT_EQ(n, static_cast<std::uint32_t>(std::count(text.begin(), text.end(), '1')));
    return text;
  }
  std::vector<float> bounds;
  std::vector<std::uint64_t> read;
  PageChoice choice;
};

TEST(ChoosePages, ThoseOfTheHighestBounds) {
  Choice c(1, {1, 5, -kInf, 3, kInf, 5, 2});
  EXPECT_EQ(c.Read(1), "0000110");  // of equal ones the later
  EXPECT_EQ(c.Read(2), "0100110");
  EXPECT_EQ(c.Read(3), "0101110");
  EXPECT_EQ(c.Read(99), "1101111");
}

// A row of large queries does not outvote one of small ones.
TEST(ChoosePages, EachRowCountsFromItsOwnTop) {
  Choice c(2, {100, 90, 80, 70,  //
               0, 0.5f, 1, -kInf});
  EXPECT_EQ(c.Read(2), "1010");
  EXPECT_EQ(c.Read(3), "1110");
}

TEST(ChoosePages, RowsThatSeeNothing) {
  Choice c(2, {-kInf, -kInf, -kInf,  //
               -kInf, 1, 2});
  EXPECT_EQ(c.Read(1), "001");
  EXPECT_EQ(c.Read(9), "011");
}

// --- in attention -------------------------------------------------------------------------------

class EveryIsa : public cpu::EveryIsa {
 protected:
  // Bounds of the world's first job, [row][page] of one KV head.
  static std::vector<float> Bounds(const World& world, const Job& job, std::uint32_t head_kv) {
    Unit unit;
    unit.layer = &world.layer;
    unit.job = &job;
    unit.params = &world.params;
    unit.head_kv = head_kv;
    unit.row0 = 0;
    unit.rows = job.n_tok * unit.gqa();
    unit.page0 = 0;
    unit.page1 = static_cast<std::uint32_t>(job.pages.size());
    std::vector<float> bounds(std::size_t{unit.rows} * unit.page1);
    Workspace workspace;
    RunBounds(unit, workspace.Get(DecodeScratch(world.layer, unit.rows)), bounds.data(),
              unit.page1);
    return bounds;
  }
};

Shape ShapeOf(Coding k, std::uint32_t seed) {
  Shape s;
  s.n_head_kv = 2;
  s.gqa = 3;
  s.dim_k = seed % 2 == 0 ? 64 : 72;
  s.n_pages = 9;
  s.k = {k, k, k, Coding::kF16};
  s.v = {Coding::kVLm4, Coding::kVInt8};
  s.v_group = 64;
  s.cells = seed % 3 == 0 ? Cells::kScattered : Cells::kRun;
  s.mask = seed % 4 == 1 ? MaskKind::kHoles : MaskKind::kCausal;
  s.turn_pairs = seed % 5 == 2 ? 16 : 0;
  s.softcap = seed % 7 == 3 ? 5.0f : 0.0f;
  s.n_tok = 1 + seed % 2;
  s.partial_pages = seed % 2 == 1;
  s.scale = 0.3f;
  return s;
}

// Against q·k of every row, in double, of the decoded keys.
TEST_P(EveryIsa, BoundsAreBounds) {
  for (Coding k : {Coding::kKPlanes, Coding::kKInt4, Coding::kKInt8}) {
    for (std::uint32_t seed = 0; seed < 20; ++seed) {
      SCOPED_TRACE("coding " + std::to_string(static_cast<int>(k)) + " seed " +
                   std::to_string(seed));
      const World world(ShapeOf(k, seed), seed);
      std::vector<float> out;
      const Job job = world.JobsInto(out)[0];
      const std::uint32_t gqa = world.params.n_head / world.layer.n_head_kv;
      double nearest = 1e9;
      for (std::uint32_t head_kv = 0; head_kv < world.layer.n_head_kv; ++head_kv) {
        const std::vector<float> bounds = Bounds(world, job, head_kv);
        for (std::uint32_t r = 0; r < job.n_tok * gqa; ++r) {
          for (std::size_t p = 0; p < job.pages.size(); ++p) {
            const Page& page = job.pages[p];
            const float bound = bounds[r * job.pages.size() + p];
            const OpenRows open = OpenRowsOf(page, job.n_kv);
            double top = -kInf;
            for (std::uint32_t row = 0; row < page.rows; ++row) {
              const std::uint32_t cell =
                  page.cells != nullptr ? page.cells[row] : page.first_cell + row;
              if (!open.test(row) || job.mask[r / gqa * job.mask_tok_stride + cell] == 0xFC00)
                continue;
              if (page.k_layout == nullptr) {
                top = kInf;
                continue;
              }
              float key[codec::kMaxDim], q[codec::kMaxDim];
              const codec::SideLayout::Head& block = page.k_layout->heads[head_kv];
              codec::DecodeRowK(block.coding, block.shape, page.k + block.offset,
                                world.layer.k_mean + head_kv * world.layer.dim_k, row, key);
              TurnedQuery(world.layer, page.turn,
                          job.q + r / gqa * job.q_tok_stride +
                              (head_kv * gqa + r % gqa) * job.q_head_stride,
                          world.params.scale, q, 1);
              double dot = 0;
              for (std::uint32_t c = 0; c < world.layer.dim_k; ++c) dot += double{q[c]} * key[c];
              const double cap = world.params.softcap;
              top = std::max(top, cap != 0 ? cap * std::tanh(dot / cap) : dot);
            }
            if (top == kInf || top == -kInf) {
              EXPECT_EQ(bound, top);
              continue;
            }
            EXPECT_GE(bound, top - 1e-4 * std::abs(top) - 1e-4);
            nearest = std::min(nearest, bound - top);
          }
        }
      }
      EXPECT_LT(nearest, 60);  // not just any large number: scores reach about 20 here
    }
  }
}

// Whatever top_pages leaves out, the rest is attended exactly as if that were all there is.
TEST_P(EveryIsa, TopPagesAreWhatIsRead) {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    for (int threads : {1, 3}) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", threads " + std::to_string(threads));
      Shape shape = ShapeOf(Coding::kKPlanes, seed);
      shape.n_head_kv = 1;
      World world(shape, seed);
      std::vector<float> want, got;
      std::vector<Job> jobs = world.JobsInto(want);
      Choice chosen(jobs[0].n_tok * world.params.n_head, Bounds(world, jobs[0], 0));
      const std::string read = chosen.Read(3);
      std::vector<Page> pages;
      for (std::size_t i = 0; i < read.size(); ++i)
        if (read[i] == '1') pages.push_back(jobs[0].pages[i]);
      ASSERT_LT(pages.size(), read.size());
      jobs[0].pages = pages;
      AttendReference(world.layer, jobs, world.params);

      world.params.top_pages = 3;
      Workspace workspace;
      ThreadExecutor executor(threads);
      PagesRead counts;
      ASSERT_TRUE(
          Attend(world.layer, world.JobsInto(got), world.params, workspace, executor, &counts)
              .ok());
      EXPECT_EQ(counts.read, pages.size());
      EXPECT_GT(counts.seen, counts.read);
      EXPECT_LE(counts.seen, read.size());
      double error = 0, power = 0;
      for (std::size_t i = 0; i < want.size(); ++i) {
        error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
        power += double{want[i]} * want[i];
      }
      EXPECT_LE(error, 1e-6 * power);
    }
  }
}

TEST_P(EveryIsa, AllPagesAreTheSameAsNoChoice) {
  int n = 0;
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    World world(ShapeOf(Coding::kKPlanes, seed), seed);
    std::vector<float> want, got;
    const std::vector<Job> jobs = world.JobsInto(want);
    const auto is_f16 = [](const Page& page) { return page.k_layout == nullptr; };
    if (std::none_of(jobs[0].pages.begin(), jobs[0].pages.end(), is_f16)) continue;
    ++n;
    Workspace workspace;
    SerialExecutor serial;
    ASSERT_TRUE(Attend(world.layer, world.JobsInto(want), world.params, workspace, serial).ok());
    world.params.top_pages = 8;  // of 9
    ASSERT_TRUE(Attend(world.layer, world.JobsInto(got), world.params, workspace, serial).ok());
    EXPECT_EQ(got, want);
  }
  EXPECT_GE(n, 5);
}

INSTANTIATE_TEST_SUITE_P(Isa, EveryIsa, testing::ValuesIn(cpu::AvailableIsas()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace kvtamp::attention
