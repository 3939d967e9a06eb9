#include "attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>
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

// KVTAMP_TEST_SEED repeats a failure.
std::uint32_t Seed() {
  static const std::uint32_t seed = [] {
    const char* env = std::getenv("KVTAMP_TEST_SEED");
    const std::uint32_t s = env != nullptr
                                ? static_cast<std::uint32_t>(std::strtoul(env, nullptr, 10))
                                : std::random_device()();
    std::printf("seed %u\n", s);
    return s;
  }();
  return seed;
}

double Nmse(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, power = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    power += double{want[i]} * want[i];
  }
  return power == 0 ? error : error / power;
}

std::string Describe(const Shape& s) {
  std::ostringstream o;
  o << "seed " << Seed() << " kv " << s.n_head_kv << " gqa " << s.gqa << " dims " << s.dim_k << "/"
    << s.dim_v << " ps " << s.page_size << " jobs " << s.n_jobs << " tok " << s.n_tok << " pages "
    << s.n_pages << " group " << s.v_group << " k0 " << static_cast<int>(s.k[0]) << "("
    << s.k.size() << ") v0 " << static_cast<int>(s.v[0]) << "(" << s.v.size() << ") had "
    << s.v_hadamard << " mean " << s.mean << " cells " << static_cast<int>(s.cells) << " mask "
    << static_cast<int>(s.mask) << " dead " << s.dead_rows << " null " << s.null_sides
    << " partial " << s.partial_pages << " cap " << s.softcap << " sinks " << s.sinks << " q "
    << s.q_size;
  return o.str();
}

constexpr std::size_t kScratch = 16 << 20;

class EveryIsa : public cpu::EveryIsa {
 protected:
  void Compare(const Shape& shape, int threads = 1, double limit = 1e-6) {
    SCOPED_TRACE(Describe(shape));
    const World world(shape, Seed());
    std::vector<float> want, got;
    AttendReference(world.layer, world.JobsInto(want), world.params);
    Workspace workspace;
    std::memset(workspace.Get(kScratch), 0xFF,
                kScratch);  // NaN, so that nothing unwritten is used unseen
    ThreadExecutor executor(threads);
    const Status status =
        Attend(world.layer, world.JobsInto(got), world.params, workspace, executor);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_LT(workspace.bytes(), 2 * kScratch);
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_TRUE(std::isfinite(got[i])) << i;
    EXPECT_LE(Nmse(got, want), limit);
  }
};

INSTANTIATE_TEST_SUITE_P(Isa, EveryIsa, testing::ValuesIn(cpu::AvailableIsas()),
                         [](const auto& info) { return info.param; });

const std::vector<Coding> kAllK = {Coding::kF16, Coding::kKInt8, Coding::kKInt4, Coding::kKPlanes,
                                   Coding::kRows};
const std::vector<Coding> kAllV = {Coding::kF16, Coding::kVInt8, Coding::kVLm4, Coding::kVTrellis,
                                   Coding::kRows};

TEST_P(EveryIsa, EachCodingAndPageSize) {
  for (const std::uint32_t n_tok : {1u, 24u}) {
    for (const std::uint32_t page_size : {16u, 32u, 64u, 128u}) {
      for (std::size_t i = 0; i < kAllK.size(); ++i) {
        Shape shape;
        shape.page_size = page_size;
        shape.n_tok = n_tok;
        shape.k = {kAllK[i]};
        shape.v = {kAllV[i]};
        shape.n_pages = 6;
        // f16, and what is decoded to it: nothing is rounded but floats.
        const bool f16 = kAllK[i] == Coding::kF16 || kAllK[i] == Coding::kRows;
        Compare(shape, 1, f16 ? 1e-11 : 1e-6);
      }
    }
  }
}

TEST_P(EveryIsa, EveryHeadSize) {
  for (const std::uint32_t n_tok : {1u, 9u}) {
    for (const std::uint32_t dim : {32u, 40u, 64u, 72u, 80u, 96u, 112u, 128u, 192u, 256u, 576u}) {
      for (const int coded : {0, 1, 2}) {
        Shape shape;
        shape.n_tok = n_tok;
        shape.n_head_kv = 1;
        shape.gqa = 3;
        shape.dim_k = dim;
        shape.dim_v = dim == 576 ? 512 : dim == 192 ? 128 : dim;
        shape.n_pages = 3;
        if (coded != 1) {
          shape.k = {coded == 0 ? Coding::kF16 : Coding::kKPlanes};
          shape.v = {coded == 0 ? Coding::kF16 : Coding::kVTrellis};
        }
        Compare(shape);
      }
    }
  }
}

// The last block of such a head is half padding, which has no scales. Scratch is no larger than it
// has to be, so that a sanitizer sees a read past them.
TEST_P(EveryIsa, HeadsThatEndInsideABlockWithManyScales) {
  for (const Coding coding : {Coding::kVInt8, Coding::kVLm4}) {
    for (const std::uint32_t group : {1u, 3u, 8u}) {
      Shape shape;
      shape.page_size = 128;
      shape.n_tok = 23;
      shape.n_head_kv = 1;
      shape.dim_v = 168;
      shape.v_group = group;
      shape.v = {coding};
      shape.n_pages = 1;
      const World world(shape, Seed());
      std::vector<float> want, got;
      AttendReference(world.layer, world.JobsInto(want), world.params);
      Workspace workspace;
      SerialExecutor executor;
      ASSERT_TRUE(Attend(world.layer, world.JobsInto(got), world.params, workspace, executor).ok());
      EXPECT_LE(Nmse(got, want), 1e-6);
    }
  }
}

TEST_P(EveryIsa, GroupedHeads) {
  for (const std::uint32_t n_tok : {1u, 2u, 17u}) {
    for (const std::uint32_t gqa : {1u, 2u, 3u, 5u, 7u, 8u, 16u, 64u}) {
      Shape shape;
      shape.n_tok = n_tok;
      shape.gqa = gqa;
      shape.n_pages = 3;
      shape.k = kAllK;
      shape.v = kAllV;
      Compare(shape, 2);
    }
  }
}

TEST_P(EveryIsa, ScaleGroupsThatStraddleBlocks) {
  for (const std::uint32_t n_tok : {1u, 9u}) {
    for (const std::uint32_t group : {4u, 8u, 20u, 40u, 80u}) {
      Shape shape;
      shape.n_tok = n_tok;
      shape.dim_k = shape.dim_v = 80;
      shape.v_group = group;
      shape.v = {Coding::kVInt8, Coding::kVLm4};
      Compare(shape);
    }
  }
}

TEST_P(EveryIsa, MasksAndSinksAndCaps) {
  for (const std::uint32_t n_tok : {1u, 3u, 40u}) {
    for (const MaskKind mask :
         {MaskKind::kNone, MaskKind::kCausal, MaskKind::kHoles, MaskKind::kPerHead,
          MaskKind::kAlibi, MaskKind::kAllShut, MaskKind::kWindow}) {
      for (const bool special : {false, true}) {
        Shape shape;
        shape.n_tok = n_tok;
        shape.mask = mask;
        shape.gqa = 3;  // 6 heads: ALiBi's second slope
        shape.k = kAllK;
        shape.v = kAllV;
        shape.sinks = special;
        shape.softcap = special ? 5.0f : 0.0f;
        shape.cells = special ? Cells::kScattered : Cells::kRun;
        shape.dead_rows = special;
        Compare(shape);
      }
    }
  }
}

TEST_P(EveryIsa, TurnedPages) {
  for (const std::uint32_t n_tok : {1u, 3u, 40u}) {
    for (const std::uint32_t pairs : {8u, 32u, 40u}) {
      for (const bool neox : {false, true}) {
        Shape shape;
        shape.n_tok = n_tok;
        shape.dim_k = shape.dim_v = 80;
        shape.turn_pairs = pairs;
        shape.turn_neox = neox;
        shape.n_pages = 9;
        shape.page_size = pairs == 8 ? 16 : 64;
        shape.k = kAllK;
        shape.v = kAllV;
        Compare(shape, 2);
        shape.k = {Coding::kF16};
        shape.v = {Coding::kF16};
        Compare(shape, 1, 1e-11);
      }
    }
  }
}

TEST_P(EveryIsa, ValuesInsideKeys) {
  for (const std::uint32_t n_tok : {1u, 3u}) {
    for (const std::uint32_t gqa : {1u, 16u, 40u}) {
      for (const bool whole : {false, true}) {
        Shape shape;
        shape.n_tok = n_tok;
        shape.n_head_kv = 1;
        shape.gqa = gqa;
        shape.v_in_k = true;
        shape.dim_k = whole ? 128 : 576;
        shape.dim_v = whole ? 128 : 512;
        shape.turn_pairs = whole ? 0 : 32;
        shape.k = kAllK;
        shape.n_pages = 7;
        shape.null_sides = gqa == 16;
        shape.dead_rows = gqa == 16;
        shape.mask = gqa == 16 ? MaskKind::kHoles : MaskKind::kCausal;
        shape.mean = gqa != 40;
        Compare(shape, 2);
      }
    }
  }
}

TEST_P(EveryIsa, RandomWorlds) {
  std::mt19937 rng(Seed());
  const auto pick = [&](std::initializer_list<std::uint32_t> of) {
    return of.begin()[rng() % of.size()];
  };
  for (int i = 0; i < 60; ++i) {
    Shape shape;
    shape.n_head_kv = pick({1, 2, 3});
    shape.gqa = pick({1, 2, 3, 4, 6, 8, 16});
    shape.dim_k = pick({40, 64, 80, 96, 128, 192, 256});
    shape.dim_v = rng() % 4 == 0 ? pick({40, 64, 128}) : shape.dim_k;
    shape.page_size = pick({16, 32, 64, 128});
    shape.n_jobs = pick({1, 1, 2, 3});
    shape.n_tok = pick({1, 1, 1, 2, 5, 13, 30});
    shape.n_pages = pick({0, 1, 2, 5, 9});
    shape.k = kAllK;
    shape.v = kAllV;
    shape.v_hadamard = rng() % 3 != 0;
    shape.mean = rng() % 2 == 0;
    shape.cells = static_cast<Cells>(rng() % 2);
    shape.mask = static_cast<MaskKind>(rng() % 7);
    shape.dead_rows = rng() % 2 == 0;
    shape.null_sides = rng() % 4 == 0;
    shape.partial_pages = rng() % 2 == 0;
    shape.softcap = rng() % 4 == 0 ? 20.0f : 0.0f;
    shape.sinks = rng() % 4 == 0;
    shape.turn_pairs = rng() % 3 == 0 ? pick({4, 16, 32}) : 0;
    shape.turn_neox = rng() % 2 == 0;
    shape.single_heads = rng() % 3 == 0;
    Compare(shape, static_cast<int>(1 + rng() % 3));
  }
}

// Once entries go by head, a page may be one head's alone, or lack one.
TEST_P(EveryIsa, PagesOfOneHead) {
  for (const std::uint32_t n_tok : {1u, 3u, 40u}) {
    for (const std::uint32_t page_size : {16u, 64u}) {
      Shape shape;
      shape.n_head_kv = 3;
      shape.gqa = 2;
      shape.n_tok = n_tok;
      shape.n_pages = 9;
      shape.page_size = page_size;
      shape.single_heads = true;
      shape.dead_rows = shape.partial_pages = true;
      shape.cells = Cells::kScattered;
      shape.turn_pairs = 16;
      shape.k = {Coding::kF16};
      shape.v = {Coding::kF16};
      Compare(shape);
      shape.k = kAllK;
      shape.v = kAllV;
      Compare(shape, 2);
    }
  }
}

TEST_P(EveryIsa, ExtremeScoresStayFinite) {
  for (const std::uint32_t n_tok : {1u, 20u}) {
    for (const float q_size : {0.0f, 1e-30f, 3e4f}) {
      Shape shape;
      shape.n_tok = n_tok;
      shape.k = kAllK;
      shape.v = kAllV;
      shape.q_size = q_size;
      // At such scores float itself cannot order near ties; only finiteness is asked of 3e4.
      Compare(shape, 1, q_size > 1 ? 1e30 : 1e-6);
    }
  }
}

TEST_P(EveryIsa, ThreadsDoNotChangeTheResult) {
  for (const std::uint32_t n_tok : {1u, 50u}) {
    Shape shape;
    shape.n_tok = n_tok;
    shape.n_pages = 40;
    shape.n_head_kv = 1;
    shape.k = kAllK;
    shape.v = kAllV;
    const World world(shape, Seed());
    std::vector<float> one, many;
    Workspace workspace;
    SerialExecutor serial;
    ASSERT_TRUE(Attend(world.layer, world.JobsInto(one), world.params, workspace, serial).ok());
    for (const int threads : {2, 3, 7}) {
      ThreadExecutor executor(threads);
      ASSERT_TRUE(
          Attend(world.layer, world.JobsInto(many), world.params, workspace, executor).ok());
      EXPECT_LE(Nmse(many, one), 1e-9) << threads;
    }
  }
}

TEST(Attention, ScratchIsKept) {
  Shape shape;
  const World world(shape, Seed());
  std::vector<float> out;
  Workspace workspace;
  SerialExecutor serial;
  const std::vector<Job> jobs = world.JobsInto(out);
  ASSERT_TRUE(Attend(world.layer, jobs, world.params, workspace, serial).ok());
  const std::size_t bytes = workspace.bytes();
  EXPECT_GT(bytes, 0u);
  ASSERT_TRUE(Attend(world.layer, jobs, world.params, workspace, serial).ok());
  EXPECT_EQ(workspace.bytes(), bytes);
}

TEST(Attention, ImpossibleShapesAreErrors) {
  Workspace workspace;
  SerialExecutor serial;
  Layer layer;
  layer.n_head_kv = 2;
  layer.dim_k = layer.dim_v = 64;
  Params params;
  params.n_head = 4;
  EXPECT_TRUE(Attend(layer, {}, params, workspace, serial).ok());
  params.n_head = 3;
  EXPECT_FALSE(Attend(layer, {}, params, workspace, serial).ok());
  params.n_head = 4;
  layer.dim_k = 60;
  EXPECT_FALSE(Attend(layer, {}, params, workspace, serial).ok());
  layer.dim_k = 64;
  layer.page_size = 48;
  EXPECT_FALSE(Attend(layer, {}, params, workspace, serial).ok());
}

TEST_P(EveryIsa, GridsAreTheCodecsTables) {
  alignas(64) float scale[256], centre[256];
  std::vector<std::uint8_t> page(3 * 256);
  for (std::size_t i = 0; i < 256; ++i) page[i] = page[256 + i] = static_cast<std::uint8_t>(i);
  for (const Coding coding : {Coding::kKInt8, Coding::kKInt4}) {
    Grid(coding, {64, 256, 0}, page.data(), scale, centre);
    const double levels = coding == Coding::kKInt8 ? 256 : 16;
    for (std::size_t i = 0; i < 256; ++i) {
      ASSERT_EQ(scale[i], codec::KScaleTable(coding == Coding::kKInt8 ? 8 : 4)[i]) << i;
      const double want = scale[i] * (codec::KMinFactorTable()[i] * levels + (levels - 1) / 2);
      ASSERT_NEAR(centre[i], want,
                  1e-6 * scale[i] * levels * (1 + std::abs(codec::KMinFactorTable()[i])))
          << i;
    }
  }
  Grid(Coding::kVLm4, {64, 64, 16}, page.data(), scale, centre);
  for (std::size_t i = 0; i < 256; ++i) ASSERT_EQ(scale[i], codec::VScaleTable()[i]) << i;
}

// Every instruction set must give the same integers, or what one machine computes differs from
// another.
TEST(Attention, IntegerStagesAgree) {
  const std::uint32_t seed = Seed();
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  for (const std::uint32_t rows : {16u, 32u, 64u, 128u}) {
    for (const std::uint32_t dim : {40u, 64u, 128u, 576u}) {
      for (const Coding coding :
           {Coding::kKInt8, Coding::kKInt4, Coding::kVInt8, Coding::kVLm4, Coding::kKPlanes}) {
        const bool is_k = coding != Coding::kVInt8 && coding != Coding::kVLm4;
        codec::PageShape shape{rows, dim, dim % 64 == 0 ? 64 : dim};
        if (coding == Coding::kKPlanes) shape.budget = dim * 4;
        std::vector<std::uint8_t> page(codec::EncodedBytes(coding, shape).total);
        for (std::uint8_t& b : page) b = static_cast<std::uint8_t>(rng());
        // Scales of one size, or one channel decides everything; codes at both ends of their range.
        for (std::size_t i = 0; i < codec::EncodedBytes(coding, shape).scales; ++i)
          page[i] = 100 + page[i] % 8;
        if (rows == 16) std::fill(page.begin() + dim * 2, page.end(), is_k ? 0xFF : 0x81);
        std::vector<float> x(std::max(rows, dim));
        for (float& f : x) f = is_k ? normal(rng) : std::abs(normal(rng));
        if (rows == 128) std::fill(x.begin(), x.end(), 1.0f);
        std::vector<std::int32_t> want;
        float step = 0;
        for (const std::string& isa : cpu::AvailableIsas()) {
          ASSERT_TRUE(cpu::ForceIsa(isa).ok());
          std::vector<std::int32_t> out(std::max(rows, 16u));
          IntegerStage stage;
          stage.out = out.data();
          if (is_k) {
            KIntegers(coding, shape, page.data(), x.data(), stage);
          } else {
            VIntegers(coding, shape, page.data(), dim / 32 * 16, x.data(), stage);
          }
          out.push_back(stage.sum);
          if (want.empty()) {
            want = out;
            step = stage.step;
          }
          EXPECT_EQ(out, want) << isa << " rows " << rows << " dim " << dim << " coding "
                               << static_cast<int>(coding) << " seed " << seed;
          EXPECT_EQ(stage.step, step) << isa;
        }
      }
    }
  }
  ASSERT_TRUE(cpu::ForceIsa("").ok());
}

// The reference against the formula written out once more, on the smallest case there is.
TEST(Reference, IsTheFormula) {
  const half_t one = FloatToHalf(1.0f), two = FloatToHalf(2.0f);
  std::vector<half_t> k(16 * 8), v(16 * 8);
  k[0] = one;      // row 0: e0
  k[8 + 1] = two;  // row 1: 2 e1
  for (int c = 0; c < 8; ++c) {
    v[c] = one;
    v[8 + c] = two;
  }
  Page page;
  page.k = reinterpret_cast<const std::uint8_t*>(k.data());
  page.v = reinterpret_cast<const std::uint8_t*>(v.data());
  page.rows = 2;
  Layer layer;
  layer.n_head_kv = 1;
  layer.dim_k = layer.dim_v = 8;
  layer.page_size = 16;
  Params params;
  params.n_head = 1;
  params.scale = 0.5f;
  const std::vector<float> q = {1, 3, 0, 0, 0, 0, 0, 0};
  std::vector<float> out(8);
  const half_t mask[] = {FloatToHalf(0.25f), 0};
  Job job;
  job.pages = {&page, 1};
  job.q = q.data();
  job.out = out.data();
  job.mask = mask;
  job.n_tok = 1;
  job.n_kv = 2;
  const float sink = 1.0f;
  params.sinks = &sink;
  params.softcap = 4.0f;
  AttendReference(layer, {&job, 1}, params);
  const double a = std::exp(4 * std::tanh(0.5 * 1 / 4) + 0.25),
               b = std::exp(4 * std::tanh(0.5 * 6 / 4));
  for (int c = 0; c < 8; ++c) EXPECT_NEAR(out[c], (a + 2 * b) / (a + b + std::exp(1.0)), 1e-6);
}

}  // namespace
}  // namespace kvtamp::attention
