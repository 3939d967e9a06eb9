#include <cmath>
#include <cstring>

#include "store/cache_fixture.h"

namespace kvtamp::store {
namespace {

TEST_F(CacheTest, SinksAndRecentWindowStayExactTheRestIsCoded) {
  for (std::uint32_t n : {1u, 63u, 64u, 65u, 127u, 128u, 129u, 200u, 500u}) {
    Make("k4v4");
    truth.clear();
    for (std::uint32_t c = 0; c < n; ++c) Put(c);
    Seal();
    for (std::uint32_t c = 0; c < n; ++c) {
      for (Side side : {Side::kK, Side::kV}) {
        const double e = Error(side, c);
        if (c < 4 || c + 64 >= n) {
          EXPECT_EQ(e, 0.0) << c << " of " << n;
        }
        // Whole pages are sealed, so up to a page more may be exact.
        if (c >= 4 && c + 64 + 64 <= n) {
          EXPECT_GT(e, 1e-4) << c << " of " << n;
        }
        EXPECT_LT(e, 0.03);
      }
    }
  }
}

TEST_F(CacheTest, AFullPageIsInt8UntilItLeavesTheRecentWindow) {
  Options options;
  options.int8_window = true;
  for (std::uint32_t n : {63u, 64u, 127u, 128u, 192u, 250u}) {
    Make("k3.5v3", options);
    truth.clear();
    for (std::uint32_t c = 0; c < n; ++c) {
      Put(c);
      Seal();
    }
    const std::uint32_t full = n / 64 * 64;
    for (std::uint32_t c = 4; c < n; ++c) {
      const bool recent = c / 64 == full / 64 - 1 && n - full < 64;
      for (Side side : {Side::kK, Side::kV}) {
        const double e = Error(side, c);
        if (c >= full) {
          EXPECT_EQ(e, 0.0) << c << " of " << n;
        } else if (recent) {
          EXPECT_GT(e, 1e-6) << c << " of " << n;
          EXPECT_LT(e, 1e-3) << c << " of " << n;
        } else {
          EXPECT_GT(e, 1e-3) << c << " of " << n;
          EXPECT_LT(e, 0.06) << c << " of " << n;
        }
      }
    }
  }
}

// A hollow store counts what a real one does, through overwritten cells and pages made one.
TEST(Hollow, TakesTheSameBytes) {
  for (const char* type : {"f16", "k8v8", "k4v4", "k2v2"}) {
    CacheBytes bytes[2];
    for (const bool hollow : {false, true}) {
      Options options;
      options.hollow = hollow;
      constexpr std::uint32_t kCells = 640;
      Cache cache(options, 2, kCells);
      ASSERT_TRUE(cache.AddLayer(0, kEmbd, kEmbd, Type(type)).ok());
      ASSERT_TRUE(cache.SetHeads(0, kHeads).ok());
      Rows rows(1);
      SerialExecutor executor;
      for (std::uint64_t t = 0; t < 1500; ++t) {
        // Round and round in one stream, and now and then a token of another.
        const std::uint64_t cell = t % 5 == 4 ? kCells + t / 5 : (t * 7 / 5) % kCells;
        const auto row = rows.Next();
        for (const Side side : {Side::kK, Side::kV})
          ASSERT_TRUE(
              cache.Write(0, side, std::span(&cell, 1), hollow ? nullptr : row.data(), kEmbd).ok());
        ASSERT_TRUE(cache.Maintain(0, executor).ok());
      }
      bytes[hollow] = cache.bytes();
    }
    const StreamBytes &real = bytes[0].layers[0].sum, &hollow = bytes[1].layers[0].sum;
    for (int side = 0; side < 2; ++side) {
      EXPECT_EQ(real.coded[side], hollow.coded[side]) << type;
      EXPECT_EQ(real.scales[side], hollow.scales[side]) << type;
      EXPECT_EQ(real.open[side], hollow.open[side]) << type;
    }
    EXPECT_EQ(real.sinks, hollow.sinks) << type;
    EXPECT_EQ(real.window, hollow.window) << type;
    EXPECT_EQ(real.filling, hollow.filling) << type;
    EXPECT_EQ(real.slack, hollow.slack) << type;
    EXPECT_EQ(real.index, hollow.index) << type;
    EXPECT_EQ(real.live_rows, hollow.live_rows) << type;
    EXPECT_EQ(real.dead_rows, hollow.dead_rows) << type;
    EXPECT_EQ(bytes[0].allocator_slack, bytes[1].allocator_slack) << type;
    EXPECT_EQ(real.dead_rows > 0, std::string(type) != "f16") << type;
    EXPECT_EQ(real.sinks > 0, real.coded[0] > 0) << type;
    // A window of 64 rows of each stream, and less than a page that is being filled.
    EXPECT_GE(real.window + real.filling, 2u * 64 * kEmbd * 4) << type;
    EXPECT_LT(real.filling, 2u * 64 * kEmbd * 4) << type;
  }
}

// int8 between costs little: what is coded from it is nearly what would be coded from the rows.
TEST_F(CacheTest, FinalWidthsFromInt8LoseLittle) {
  double error[2] = {};
  for (bool int8 : {false, true}) {
    Options options;
    options.int8_window = int8;
    rows = Rows(7);
    Make("k3v3", options);
    for (std::uint32_t c = 0; c < 512; ++c) {
      Put(c);
      Seal();
    }
    for (std::uint32_t c = 4; c < 384; ++c)
      for (Side side : {Side::kK, Side::kV}) error[int8] += Error(side, c);
  }
  EXPECT_LT(error[1], 1.01 * error[0]);
  EXPECT_GT(error[1], 0.99 * error[0]);
}

// A saved state in another cache: rows that were coded come out as they went in, whether their page
// is int8 yet or has its final format, though nothing but the rows is known.
TEST_F(CacheTest, RowsOfAStateKeepTheirValuesInAnotherCache) {
  for (std::uint32_t n : {100u, 400u}) {
    for (const char* type : {"k8v8", "k4v4", "k2.5v2.5"}) {
      Options options;
      options.int8_window = n == 100;
      Make(type, options, 1, 1024);
      rows = Rows(n);
      for (std::uint32_t c = 0; c < n; ++c) Put(c);
      Seal();
      std::vector<std::vector<half_t>> before[2];
      for (Side side : {Side::kK, Side::kV}) {
        for (std::uint32_t c = 0; c < n; ++c) {
          std::vector<half_t> row(kEmbd);
          ASSERT_TRUE(cache->Read(0, side, c, row.data()));
          before[static_cast<int>(side)].push_back(row);
        }
      }
      Make(type, options, 1, 1024);
      for (Side side : {Side::kK, Side::kV}) {
        for (std::uint64_t c = 0; c < n; ++c) {
          ASSERT_TRUE(cache
                          ->Write(0, side, std::span(&c, 1),
                                  before[static_cast<int>(side)][c].data(), kEmbd)
                          .ok());
        }
      }
      Seal();
      for (Side side : {Side::kK, Side::kV}) {
        std::uint32_t changed = 0;
        for (std::uint32_t c = 0; c < n; ++c) {
          std::vector<half_t> row(kEmbd);
          ASSERT_TRUE(cache->Read(0, side, c, row.data()));
          for (std::uint32_t i = 0; i < kEmbd; ++i) {
            const float x = HalfToFloat(row[i]),
                        y = HalfToFloat(before[static_cast<int>(side)][c][i]);
            changed += std::abs(x - y) > 0.002f * std::max(std::abs(y), 0.1f);
          }
        }
        EXPECT_LE(changed, n * kEmbd / 100)
            << type << " side " << static_cast<int>(side) << " " << n;
      }
    }
  }
}

// Heads of one layer with bits of their own.
TEST_F(CacheTest, EachHeadHasItsFormat) {
  const auto make = [&](std::vector<codec::Pair> heads) {
    cache = std::make_unique<Cache>(Options{}, 1, 1024);
    EXPECT_TRUE(cache->AddLayer(0, kEmbd, kEmbd, Type("k3v3"), std::move(heads)).ok());
    return cache->SetHeads(0, kHeads);
  };
  ASSERT_TRUE(make({Type("k2v4"), Type("k5.5v2"), Type("k8v8")}).ok());
  for (std::uint32_t c = 0; c < 512; ++c) Put(c);
  Seal();
  double error[2][kHeads] = {};
  std::vector<half_t> row(kEmbd);
  for (std::uint64_t c = 4; c < 384; ++c) {
    for (Side side : {Side::kK, Side::kV}) {
      const int s = static_cast<int>(side);
      ASSERT_TRUE(cache->Read(0, side, c, row.data()));
      for (std::uint32_t i = 0; i < kEmbd; ++i) {
        const double d = HalfToFloat(row[i]) - HalfToFloat(truth[{s, c}][i]);
        error[s][i / kDim] += d * d / (380 * kDim);
      }
    }
  }
  EXPECT_NEAR(error[0][0], 0.09, 0.04);
  EXPECT_LT(error[0][1], 0.002);
  EXPECT_LT(error[0][2], 1e-4);
  EXPECT_NEAR(error[1][0], 0.007, 0.002);
  EXPECT_NEAR(error[1][1], 0.079, 0.01);
  EXPECT_LT(error[1][2], 1e-4);
  const StreamBytes b = Sum();
  const double bits = static_cast<double>(b.coded[0] + b.coded[1]) * 8 / (512 * kEmbd);
  EXPECT_NEAR(bits, (2 + 4 + 5.5 + 2 + 8 + 8) / 3.0 * 444 / 512, 0.02);

  EXPECT_EQ(make({Type("k2v4")}).code(), Code::kUnsupported);  // a profile of another model
  EXPECT_EQ(make({Type("f16"), Type("k3v3"), Type("k3v3")}).code(), Code::kUnsupported);
}

TEST_F(CacheTest, ReadBeforeHeadsAreKnown) {
  cache = std::make_unique<Cache>(Options{}, 1, 1024);
  ASSERT_TRUE(cache->AddLayer(0, kEmbd, kEmbd, Type("k4v4")).ok());
  for (std::uint32_t c = 0; c < 300; ++c) Put(c);
  Seal();
  for (std::uint32_t c = 0; c < 300; ++c) EXPECT_EQ(Error(Side::kK, c), 0.0);
  ASSERT_TRUE(cache->SetHeads(0, kHeads).ok());
  Seal();
  EXPECT_GT(Error(Side::kK, 50), 0.0);
  EXPECT_FALSE(cache->SetHeads(0, 2).ok());
}

TEST_F(CacheTest, OverwrittenCellsDieWhateverTheirState) {
  Make("k4v4");
  for (std::uint32_t c = 0; c < 400; ++c) Put(c);
  Seal();
  Put(399);  // open or settled
  Put(100);  // sealed
  Put(1);    // sink
  EXPECT_EQ(Error(Side::kK, 100), 0.0);
  EXPECT_EQ(Error(Side::kV, 1), 0.0);
  EXPECT_EQ(Sum().live_rows, 400u);
  for (std::uint32_t c = 0; c < 400; ++c) Error(Side::kK, c);
}

TEST_F(CacheTest, RewritingOneSideOfASealedRowKeepsTheOther) {
  Make("k4v4");
  for (std::uint32_t c = 0; c < 300; ++c) Put(c);
  Seal();
  const double before = Error(Side::kV, 70);
  PutSide(Side::kK, 70);
  EXPECT_EQ(Error(Side::kK, 70), 0.0);
  EXPECT_NEAR(Error(Side::kV, 70), before, 1e-4);
  EXPECT_GT(before, 0.0);
}

TEST_F(CacheTest, KeysMayComeLongBeforeValues) {
  Make("k4v4");
  for (std::uint32_t c = 0; c < 500; ++c) PutSide(Side::kK, c);
  Seal();
  EXPECT_GT(Error(Side::kK, 70), 0.0);
  std::vector<half_t> row(kEmbd, 1);
  EXPECT_FALSE(cache->Read(0, Side::kV, 70, row.data()));
  EXPECT_EQ(row, std::vector<half_t>(kEmbd, 0));
  for (std::uint32_t c = 0; c < 500; ++c) PutSide(Side::kV, c);
  for (std::uint32_t c = 0; c < 500; ++c) EXPECT_EQ(Error(Side::kV, c), 0.0);
  Seal();
  EXPECT_GT(Error(Side::kV, 70), 0.0);
  EXPECT_EQ(Error(Side::kV, 2), 0.0);
  EXPECT_EQ(Sum().live_rows, 500u);
}

TEST_F(CacheTest, RandomLifeAgainstAMap) {
  for (const char* type : {"f16", "k8v8", "k4v4"}) {
    for (std::uint32_t page_size : {16u, 32u, 64u, 128u}) {
      Make(type, {page_size, 4, 64}, 2, 700);
      truth.clear();
      std::mt19937 rng(page_size);
      for (int step = 0; step < 60; ++step) {
        const std::uint64_t start = rng() % 1400;
        for (std::uint64_t i = 0; i < rng() % 90; ++i)
          Put(rng() % 3 == 0 ? rng() % 1400 : (start + i) % 1400);
        Seal();
      }
      std::vector<half_t> row(kEmbd);
      std::size_t live = 0;
      for (std::uint64_t c = 0; c < 1400; ++c) {
        const bool known = truth.contains({0, c});
        live += known;
        ASSERT_EQ(cache->Read(0, Side::kK, c, row.data()), known);
        if (!known) continue;
        for (Side side : {Side::kK, Side::kV}) {
          const double limit = std::strcmp(type, "f16") == 0 ? 0.0 : type[1] == '8' ? 4e-4 : 0.05;
          ASSERT_LE(Error(side, c), limit) << type << " page " << page_size << " cell " << c;
        }
      }
      EXPECT_EQ(Sum().live_rows, live);
      // Compaction keeps the dead from piling up.
      EXPECT_LT(Sum().dead_rows, live + 4 * page_size + 64);
    }
  }
}

TEST_F(CacheTest, ClearGivesEverythingBack) {
  Make("k4v4");
  for (std::uint32_t c = 0; c < 2000; ++c) Put(c);
  Seal();
  cache->Clear();
  const CacheBytes b = cache->bytes();
  EXPECT_EQ(b.layers[0].sum.live_rows, 0u);
  EXPECT_EQ(b.allocator_slack, 0u);
  std::vector<half_t> row(kEmbd);
  EXPECT_FALSE(cache->Read(0, Side::kK, 5, row.data()));
  Put(0);
  EXPECT_EQ(Error(Side::kK, 0), 0.0);
}

TEST_F(CacheTest, BytesAreWhatTheFormatsSay) {
  constexpr std::uint32_t kLayers = 8, kRows = 8192;
  Make("k4v4", {}, 1, 16384);
  for (std::uint32_t l = 1; l < kLayers; ++l) {
    ASSERT_TRUE(cache->AddLayer(l, kEmbd, kEmbd, Type("k4v4")).ok());
    ASSERT_TRUE(cache->SetHeads(l, kHeads).ok());
  }
  for (std::uint64_t c = 0; c < kRows; ++c) {
    const auto row = rows.Next();
    for (std::uint32_t l = 0; l < kLayers; ++l) {
      for (Side side : {Side::kK, Side::kV})
        ASSERT_TRUE(cache->Write(l, side, std::span(&c, 1), row.data(), kEmbd).ok());
      if (c % 64 == 63) {
        ASSERT_TRUE(cache->Maintain(l, executor).ok());
      }
    }
  }
  const CacheBytes b = cache->bytes();
  double all = b.allocator_slack + b.shared_index;
  for (const LayerBytes& l : b.layers) {
    const StreamBytes& s = l.sum;
    const double bits =
        (s.coded[0] + s.coded[1] + s.scales[0] + s.scales[1]) * 8.0 / kRows / kEmbd / 2;
    EXPECT_NEAR(bits, 4.22 * (kRows - 64) / kRows, 0.02);
    EXPECT_EQ(s.n_sealed, 127u);
    EXPECT_EQ(s.open[0], (64 + 4) * kEmbd * 2u);
    all += s.coded[0] + s.coded[1] + s.scales[0] + s.scales[1] + s.open[0] + s.open[1] + s.slack +
           s.index;
  }
  const double bits = all * 8 / kRows / kEmbd / 2 / kLayers;
  EXPECT_LT(bits, 16 / 3.6);
  EXPECT_GT(bits, 16 / 3.8);
}

TEST_F(CacheTest, CopyOfAStreamIsExactAndIndependent) {
  Make("k4v4", {}, 2, 1024);
  for (std::uint32_t c = 0; c < 300; ++c) Put(c);
  Seal();
  ASSERT_TRUE(cache->CopySide(0, Side::kK, 0, 1).ok());
  ASSERT_TRUE(cache->CopySide(0, Side::kV, 0, 1).ok());
  std::vector<half_t> a(kEmbd), b(kEmbd);
  for (std::uint32_t c = 0; c < 300; ++c) {
    for (Side side : {Side::kK, Side::kV}) {
      cache->Read(0, side, c, a.data());
      ASSERT_TRUE(cache->Read(0, side, 1024 + c, b.data()));
      ASSERT_EQ(a, b);
    }
  }
  Put(1024 + 10);
  cache->Read(0, Side::kK, 10, a.data());
  EXPECT_GT(Nmse(a, truth[{0, 1024 + 10}]), 0.5);
}

TEST_F(CacheTest, CopiesShareCodedBlocksAndCountThemOnce) {
  Make("k4v4", {}, 3, 1024);
  for (std::uint32_t c = 0; c < 1000; ++c) Put(c);
  Seal();
  const StreamBytes one = Sum();
  for (std::uint32_t to : {1u, 2u})
    for (Side side : {Side::kK, Side::kV}) ASSERT_TRUE(cache->CopySide(0, side, 0, to).ok());
  const StreamBytes three = Sum();
  for (int s = 0; s < 2; ++s) {
    EXPECT_NEAR(static_cast<double>(three.coded[s]), static_cast<double>(one.coded[s]), 100);
    EXPECT_NEAR(static_cast<double>(three.scales[s]), static_cast<double>(one.scales[s]), 100);
    EXPECT_EQ(three.open[s], 3 * one.open[s]);
  }
  EXPECT_EQ(three.live_rows, 3000u);
  // The source goes; its copies keep what they read.
  std::vector<half_t> before(kEmbd), after(kEmbd);
  cache->Read(0, Side::kK, 1024 + 500, before.data());
  for (std::uint32_t c = 0; c < 1000; ++c) Put(c);
  Seal();
  cache->Read(0, Side::kK, 1024 + 500, after.data());
  EXPECT_EQ(before, after);
  cache->Clear();
  EXPECT_EQ(Sum().coded[0] + Sum().open[0], 0u);
}

TEST_F(CacheTest, DropsAtTheTailAreUsedAgain) {
  Make("f16", {}, 1, 1024);
  for (std::uint32_t c = 0; c < 40; ++c) Put(c);
  cache->DropFrom(0, 0, 30);
  EXPECT_EQ(Sum().dead_rows, 0u);
  EXPECT_EQ(Sum().live_rows, 30u);
  std::vector<half_t> row(kEmbd);
  EXPECT_FALSE(cache->Read(0, Side::kK, 35, row.data()));
  PutSide(Side::kK, 35);  // V was not: it must not be what was there before
  EXPECT_TRUE(cache->Read(0, Side::kK, 35, row.data()));
  EXPECT_FALSE(cache->Read(0, Side::kV, 35, row.data()));
  cache->DropFrom(0, 0, 0);
  EXPECT_EQ(Sum().n_open, 0u);
}

TEST_F(CacheTest, CopyOfOneSideAlone) {
  Make("k4v4", {}, 2, 512);
  for (std::uint32_t c = 0; c < 200; ++c) Put(c);
  for (std::uint32_t c = 0; c < 100; ++c) Put(512 + c);
  Seal();
  const double v_before = Error(Side::kV, 512 + 20);
  ASSERT_TRUE(cache->CopySide(0, Side::kK, 0, 1).ok());
  std::vector<half_t> a(kEmbd), b(kEmbd);
  cache->Read(0, Side::kK, 20, a.data());
  cache->Read(0, Side::kK, 512 + 20, b.data());
  EXPECT_EQ(a, b);
  EXPECT_EQ(Error(Side::kV, 512 + 20), v_before);
}

TEST_F(CacheTest, ReplaceKReachesEveryState) {
  Make("k4v4");
  for (std::uint32_t c = 0; c < 333; ++c) Put(c);
  Seal();
  std::vector<std::uint32_t> cells;
  std::vector<half_t> fresh;
  for (std::uint32_t c = 0; c < 333; c += 2) {
    auto row = rows.Next();
    truth[{0, c}] = row;
    cells.push_back(c);
    fresh.insert(fresh.end(), row.begin(), row.end());
  }
  ASSERT_TRUE(cache->ReplaceK(0, 0, cells, fresh.data()).ok());
  for (std::uint32_t c = 0; c < 333; ++c) {
    EXPECT_LT(Error(Side::kK, c), 0.05) << c;
    EXPECT_LT(Error(Side::kV, c), 0.05) << c;
  }
  EXPECT_EQ(Error(Side::kK, 0), 0.0);
  EXPECT_EQ(Error(Side::kK, 332), 0.0);
}

TEST_F(CacheTest, AttentionSeesExactlyTheLiveRows) {
  Make("f16", {}, 1, 512);
  for (std::uint32_t c = 0; c < 200; ++c) Put(c);
  Put(50);
  Put(3);
  Seal();
  Rows q_rows(5);
  std::vector<float> q(kEmbd), out(kEmbd);
  for (float& x : q) x = q_rows.normal(q_rows.rng);
  std::vector<half_t> mask(256, 0xFC00);
  for (std::uint32_t c = 0; c < 200; c += 3) mask[c] = 0;
  const Cache::StreamJob job = OneQuery(q, out, mask);
  attention::Params params;
  params.n_head = kHeads;
  params.scale = 0.125f;
  ASSERT_TRUE(cache->Attend(0, std::span(&job, 1), params, executor).ok());
  for (std::uint32_t h = 0; h < kHeads; ++h) {
    std::vector<double> o(kDim, 0.0);
    double sum = 0;
    for (std::uint32_t c = 0; c < 200; c += 3) {
      const auto &k = truth[{0, c}], &v = truth[{1, c}];
      double s = 0;
      for (std::uint32_t d = 0; d < kDim; ++d) s += q[h * kDim + d] * HalfToFloat(k[h * kDim + d]);
      const double p = std::exp(s * 0.125);
      sum += p;
      for (std::uint32_t d = 0; d < kDim; ++d) o[d] += p * HalfToFloat(v[h * kDim + d]);
    }
    for (std::uint32_t d = 0; d < kDim; ++d) EXPECT_NEAR(out[h * kDim + d], o[d] / sum, 1e-4);
  }
}

TEST(Cache, RefusesWhatItCannotHold) {
  Cache cache(Options{}, 1, 256);
  EXPECT_FALSE(cache.AddLayer(0, 0, 0, Type("k4v4")).ok());
  ASSERT_TRUE(cache.AddLayer(0, 60, 60, Type("k4v4")).ok());
  EXPECT_FALSE(cache.AddLayer(0, 60, 60, Type("k4v4")).ok());
  EXPECT_FALSE(cache.SetHeads(0, 7).ok());
  EXPECT_FALSE(cache.SetHeads(0, 2).ok());  // 30 elements a head
  EXPECT_FALSE(cache.SetHeads(9, 2).ok());
  std::vector<half_t> row(60);
  const std::uint64_t outside = 256;
  EXPECT_FALSE(cache.Write(0, Side::kK, std::span(&outside, 1), row.data(), 60).ok());
}

}  // namespace
}  // namespace kvtamp::store
