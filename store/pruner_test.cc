// A cache with a policy: entries go while it is written and attended, run by run.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "store/cache_fixture.h"

namespace kvtamp::store {
namespace {

class PrunerTest : public CacheTest {
 protected:
  void MakePruned(const char* type, const std::string& policy, double keep, bool demote = false,
                  std::uint32_t target = 0, std::uint32_t n_recent = 64) {
    Options options;
    options.prune.policy = policy;
    options.prune.budget.keep_ratio = keep;
    options.prune.budget.target_size = target;
    options.prune.n_recent = n_recent;
    options.prune.demote = demote;
    options.prune.scores.window_size = 16;
    Change(options);
    ASSERT_TRUE(CheckPruneOptions(options.prune).ok());
    Make(type, options);
    end = 0;
  }
  virtual void Change(Options&) {}

  // n tokens of one sequence, written and attended as a micro-batch of it alone. The cells a token
  // sees: `own` before it, and itself.
  void Step(std::uint32_t n, std::vector<std::uint32_t>& own) {
    const std::uint32_t first = end;
    end += n;
    std::vector<half_t> mask(std::size_t{n} * end, half_t{0xFC00});
    std::vector<std::uint64_t> cells;
    for (std::uint32_t t = 0; t < n; ++t) {
      own.push_back(first + t);
      cells.push_back(first + t);
      for (std::uint32_t c : own) mask[std::size_t{t} * end + c] = 0;
    }
    const Sight sight{mask.data(), end, end};
    for (Side side : {Side::kK, Side::kV}) {
      std::vector<half_t> all;
      for (std::uint64_t c : cells) {
        std::vector<half_t> row = rows.Next();
        if (side == Side::kK && loud.contains(static_cast<std::uint32_t>(c)))
          std::fill(row.begin(), row.end(), FloatToHalf(2.0f));
        all.insert(all.end(), row.begin(), row.end());
      }
      ASSERT_TRUE(
          cache->Write(0, side, cells, all.data(), kEmbd, side == Side::kK ? &sight : nullptr)
              .ok());
    }
    std::vector<float> q(std::size_t{n} * kEmbd), out(q.size());
    for (float& x : q) x = 1.0f + 0.3f * rows.normal(rows.rng);
    Cache::StreamJob job = OneQuery(q, out, mask);
    job.job.mask_tok_stride = job.job.n_kv = end;
    job.job.n_tok = n;
    attention::Params params;
    params.n_head = kHeads;
    params.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
    ASSERT_TRUE(cache->Attend(0, std::span(&job, 1), params, executor).ok());
    for (float x : out) ASSERT_TRUE(std::isfinite(x));
    const Status status = cache->Maintain(0, executor);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  std::vector<LayerBytes::Entries> Heads() { return cache->bytes().layers.at(0).heads; }
  // Cells whose entry in the head is there.
  std::vector<std::uint32_t> KeptCells(std::uint32_t head) {
    std::vector<std::uint32_t> kept;
    std::vector<half_t> k(kEmbd);
    for (std::uint32_t c = 0; c < end; ++c) {
      EXPECT_TRUE(cache->Read(0, Side::kK, c, k.data()));
      const auto* own = k.data() + head * kDim;
      if (!std::all_of(own, own + kDim, [](half_t x) { return x == kEvicted; })) kept.push_back(c);
    }
    return kept;
  }
  double StoredBytes() {
    const StreamBytes b = Sum();
    return static_cast<double>(b.coded[0] + b.coded[1] + b.scales[0] + b.scales[1] + b.open[0] +
                               b.open[1] + b.slack);
  }

  std::uint32_t end = 0;         // cells written
  std::set<std::uint32_t> loud;  // cells whose keys all queries attend
};

TEST_F(PrunerTest, EachPolicyKeepsItsShare) {
  for (const char* policy :
       {"streaming_llm", "h2o", "observed_attention", "tova", "snapkv", "keydiff", "knorm", "r_kv",
        "value_norm", "random", "snapkv+value_norm", "h2o+value_norm"}) {
    SCOPED_TRACE(policy);
    MakePruned("k4v4", policy, 0.5);
    std::vector<std::uint32_t> own;
    for (int i = 0; i < 4; ++i) Step(200, own);
    for (int i = 0; i < 100; ++i) Step(1, own);
    const auto heads = Heads();
    ASSERT_EQ(heads.size(), kHeads);
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      EXPECT_EQ(heads[h].kept + heads[h].evicted, 900u);
      EXPECT_LE(heads[h].kept, 450u + 32 + 4);  // what came since the last time, and sinks
      EXPECT_GE(heads[h].kept, 400u);
      const auto kept = KeptCells(h);
      EXPECT_EQ(kept.size(), heads[h].kept);
      for (std::uint32_t c : {0u, 1u, 2u, 3u}) EXPECT_TRUE(std::ranges::count(kept, c)) << c;
      for (std::uint32_t c = 900 - 64; c < 900; ++c) EXPECT_TRUE(std::ranges::count(kept, c)) << c;
    }
  }
}

TEST_F(PrunerTest, WithoutEvictionNothingDiffers) {
  std::vector<double> bytes;
  std::vector<std::vector<half_t>> read;
  for (const char* policy : {"", "snapkv"}) {
    rows = Rows(3);
    if (*policy == 0) {
      Make("k4v4");
      end = 0;
    } else {
      MakePruned("k4v4", policy, 1.0);
    }
    std::vector<std::uint32_t> own;
    for (int i = 0; i < 3; ++i) Step(200, own);
    bytes.push_back(StoredBytes());
    std::vector<half_t>& all = read.emplace_back(end * kEmbd);
    for (std::uint64_t c = 0; c < end; ++c) cache->Read(0, Side::kK, c, all.data() + c * kEmbd);
  }
  EXPECT_EQ(bytes[0], bytes[1]);
  EXPECT_EQ(read[0], read[1]);
}

// What is attended is what stays.
TEST_F(PrunerTest, WhatIsAttendedStays) {
  for (const char* policy : {"snapkv", "h2o", "tova"}) {
    SCOPED_TRACE(policy);
    loud = {50, 51, 120, 200, 333, 401, 402, 403, 404, 405};
    MakePruned("k8v8", policy, 0.25);
    std::vector<std::uint32_t> own;
    for (int i = 0; i < 2; ++i) Step(500, own);
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      const auto kept = KeptCells(h);
      EXPECT_LT(kept.size(), 300u);
      for (std::uint32_t c : loud) EXPECT_TRUE(std::ranges::count(kept, c)) << c;
    }
  }
  loud.clear();
}

// A number of entries holds while an answer is written as well.
TEST_F(PrunerTest, ATargetSizeBoundsGrowth) {
  MakePruned("k4v4", "snapkv", 1.0, false, 256);
  std::vector<std::uint32_t> own;
  Step(1000, own);
  double most = 0;
  for (int i = 0; i < 600; ++i) {
    Step(1, own);
    for (const auto& e : Heads()) EXPECT_LE(e.kept, 256u + 32 + 4) << i;
    if (i > 100) most = std::max(most, StoredBytes());
  }
  EXPECT_LE(StoredBytes(), most);
  // 256 entries coded, a window in f16, pages not full.
  EXPECT_LT(most, kHeads * kDim * 2.0 * (256 * 0.55 * 1.4 + 192 * 2));
}

TEST_F(PrunerTest, NeverToNothing) {
  for (std::uint32_t n : {1u, 2u, 3u, 5u, 10u, 100u}) {
    for (double keep : {0.01, 0.1, 0.5, 0.99, 1.0}) {
      MakePruned("k4v4", "random", keep, false, 0, 0);
      std::vector<std::uint32_t> own;
      Step(n, own);
      for (int i = 0; i < 40; ++i) Step(1, own);
      for (const auto& e : Heads()) EXPECT_GE(e.kept, 1u);
    }
  }
}

class PrunerByHead : public PrunerTest {
 protected:
  void Change(Options& o) override { o.prune.budget.ada = true; }
};

// The layer's sum holds, heads get shares of their own.
TEST_F(PrunerByHead, BudgetsByHead) {
  MakePruned("k4v4", "snapkv", 0.4);
  std::vector<std::uint32_t> own;
  for (int i = 0; i < 4; ++i) Step(250, own);
  std::uint64_t sum = 0;
  for (const auto& e : Heads()) sum += e.kept;
  EXPECT_NEAR(static_cast<double>(sum), 0.4 * 1000 * kHeads, 4 * kHeads + 1);
}

// Two sequences in one stream: each keeps a share of its own.
TEST_F(PrunerTest, RunsArePrunedEachByItself) {
  MakePruned("k4v4", "knorm", 0.5);
  std::vector<std::uint32_t> a, b;
  Step(400, a);
  Step(100, b);
  Step(300, a);
  Step(100, b);
  const auto kept = KeptCells(1);
  const auto count = [&](const std::vector<std::uint32_t>& own) {
    return std::ranges::count_if(own, [&](std::uint32_t c) { return std::ranges::count(kept, c); });
  };
  EXPECT_NEAR(static_cast<double>(count(a)), 350, 8);
  EXPECT_NEAR(static_cast<double>(count(b)), 100, 8);
}

// What no query was seen to look at has no score: it stays until one does.
TEST_F(PrunerTest, RowsThatNobodySawStay) {
  MakePruned("k4v4", "snapkv", 0.5);
  std::vector<std::uint64_t> cells(400);
  std::iota(cells.begin(), cells.end(), 0u);
  std::vector<half_t> all;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const auto row = rows.Next();
    all.insert(all.end(), row.begin(), row.end());
  }
  for (Side side : {Side::kK, Side::kV})
    ASSERT_TRUE(cache->Write(0, side, cells, all.data(), kEmbd).ok());
  Seal();  // a state was restored: nobody attended
  for (const auto& e : Heads()) EXPECT_EQ(e.kept, 400u);
  end = 400;
  std::vector<std::uint32_t> own(400);
  std::iota(own.begin(), own.end(), 0u);
  Step(32, own);
  for (const auto& e : Heads()) EXPECT_LE(e.kept, 216u + 4);
}

// Fewer bits first: as many bytes as dropping would leave, and entries that are demoted, not gone.
TEST_F(PrunerTest, DemotingFitsTheBytes) {
  for (const char* policy : {"h2o", "snapkv", "random"}) {
    double dropped = 0;
    for (bool demote : {false, true}) {
      SCOPED_TRACE(std::string(policy) + (demote ? " demote" : " drop"));
      rows = Rows(11);
      MakePruned("k4v4", policy, 0.5, demote);
      std::vector<std::uint32_t> own;
      for (int i = 0; i < 8; ++i) Step(250, own);
      if (!demote) {
        dropped = StoredBytes();
        continue;
      }
      EXPECT_LT(StoredBytes(), 1.1 * dropped);
      std::uint64_t demoted = 0;
      for (const auto& e : Heads()) {
        EXPECT_EQ(e.kept + e.evicted, 2000u);
        demoted += e.demoted;
      }
      EXPECT_GT(demoted, 500u);
      EXPECT_GT(Sum().n_demoted, 0u);
      for (int i = 0; i < 70; ++i) Step(1, own);
      for (std::uint32_t h = 0; h < kHeads; ++h) EXPECT_EQ(KeptCells(h).size(), Heads()[h].kept);
    }
  }
}

// The host writes cells of demoted pages anew, and pages half dead are merged.
TEST_F(PrunerTest, DemotedPagesLiveOn) {
  MakePruned("k4v4", "random", 0.3, true);
  std::vector<std::uint32_t> own;
  for (int i = 0; i < 4; ++i) Step(250, own);
  std::vector<half_t> row(kEmbd);
  for (std::uint64_t c = 10; c < 700; ++c) {
    if (c % 3 == 0) continue;
    Put(c);
    cache->Read(0, Side::kK, c, row.data());
    EXPECT_EQ(row, (truth[{0, c}]));
  }
  Seal();
  for (int i = 0; i < 3; ++i) Step(100, own);
  for (std::uint32_t h = 0; h < kHeads; ++h) EXPECT_EQ(KeptCells(h).size(), Heads()[h].kept);
}

TEST(PruneOptions, WhatCannotBeKnownIsRefused) {
  for (const char* policy : {"kvzip", "expected_attention"}) {
    PruneOptions options;
    options.policy = policy;
    const Status status = CheckPruneOptions(options);
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_NE(status.message().find("not available behind ggml"), std::string::npos);
  }
  PruneOptions options;
  options.policy = "snapvk";
  EXPECT_FALSE(CheckPruneOptions(options).ok());
  options.policy = "snapkv";
  options.budget.keep_ratio = 0;
  EXPECT_FALSE(CheckPruneOptions(options).ok());
}

}  // namespace
}  // namespace kvtamp::store
