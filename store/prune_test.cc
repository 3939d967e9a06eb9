// Entries that go by head: what is left is attended as if it were all there is, whatever the host
// does with the rows.
#include <algorithm>
#include <cmath>
#include <deque>
#include <set>

#include "attention/reference.h"
#include "cpu/every_isa.h"
#include "store/cache_fixture.h"

namespace kvtamp::store {
namespace {

constexpr std::uint32_t kGqa = 2;

// The cache beside a list of what was evicted.
class Pruned : public CacheTest {
 protected:
  void Evict(std::uint32_t head, const std::vector<std::uint32_t>& cells,
             std::uint32_t stream = 0) {
    for (std::uint32_t c : cells) {
      if (cache->Evict(0, stream, head, std::span(&c, 1)) == 1) gone[stream].insert({head, c});
    }
  }
  // Of cells [first, end) those that a draw with `percent` takes.
  std::vector<std::uint32_t> Draw(std::uint32_t first, std::uint32_t end, std::uint32_t percent) {
    std::vector<std::uint32_t> cells;
    for (std::uint32_t c = first; c < end; ++c)
      if (rng() % 100 < percent) cells.push_back(c);
    return cells;
  }
  bool Gone(std::uint32_t head, std::uint32_t cell, std::uint32_t stream = 0) {
    return gone[stream].contains({head, cell});
  }
  // The rows as they are read, all in f16, without the entries that are gone: attended by the
  // reference, beside what the cache makes of them.
  void ExpectAttended(std::uint32_t n_tok, std::uint32_t n_kv, double limit,
                      std::uint32_t stream = 0) {
    SCOPED_TRACE(n_tok);
    const std::uint32_t n_head = kHeads * kGqa;
    std::vector<float> q(std::size_t{n_tok} * n_head * kDim), got(q.size()), want(q.size());
    for (float& x : q) x = rows.normal(rows.rng);
    std::vector<half_t> mask(std::size_t{n_tok} * n_kv, half_t{0});
    for (std::uint32_t t = 0; t < n_tok; ++t)
      for (std::uint32_t c = 0; c < n_kv; ++c)
        if (c + n_tok > n_kv + t || rng() % 20 == 0) mask[std::size_t{t} * n_kv + c] = 0xFC00;
    Cache::StreamJob job;
    job.stream = stream;
    job.job.q = q.data();
    job.job.q_head_stride = job.job.out_head_stride = kDim;
    job.job.q_tok_stride = job.job.out_tok_stride = std::size_t{n_head} * kDim;
    job.job.out = got.data();
    job.job.mask = mask.data();
    job.job.mask_tok_stride = job.job.n_kv = n_kv;
    job.job.n_tok = n_tok;
    attention::Params params;
    params.n_head = n_head;
    params.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
    ASSERT_TRUE(cache->Attend(0, std::span(&job, 1), params, executor).ok());

    attention::Layer layer;
    layer.n_head_kv = kHeads;
    layer.dim_k = layer.dim_v = kDim;
    std::deque<std::vector<half_t>> halves;
    std::vector<attention::Page> pages;
    for (std::uint32_t c = 0; c < n_kv; ++c) {
      std::vector<half_t>&k = halves.emplace_back(kEmbd), &v = halves.emplace_back(kEmbd);
      const std::uint64_t cell = std::uint64_t{stream} * cache->n_cells() + c;
      if (!cache->Read(0, Side::kK, cell, k.data())) continue;
      cache->Read(0, Side::kV, cell, v.data());
      for (std::uint32_t h = 0; h < kHeads; ++h) {
        const bool reads_gone = k[h * kDim] == kEvicted && v[h * kDim + 1] == kEvicted;
        ASSERT_EQ(reads_gone, Gone(h, c, stream)) << "head " << h << " of cell " << c;
        if (reads_gone) continue;
        attention::Page& p = pages.emplace_back();
        p.k = reinterpret_cast<const std::uint8_t*>(k.data());
        p.v = reinterpret_cast<const std::uint8_t*>(v.data());
        p.first_cell = c;
        p.rows = 1;
        p.head = h & attention::kAllHeads;
      }
    }
    attention::Job reference = job.job;
    reference.out = want.data();
    reference.pages = pages;
    attention::AttendReference(layer, std::span(&reference, 1), params);
    double error = 0, power = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_TRUE(std::isfinite(got[i]));
      error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
      power += double{want[i]} * want[i];
    }
    EXPECT_LE(error, limit * power);
  }

  // By stream: (head, cell).
  std::map<std::uint32_t, std::set<std::pair<std::uint32_t, std::uint32_t>>> gone;
  std::mt19937 rng{5};
};

class PrunedOnEveryIsa : public Pruned, public testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(cpu::ForceIsa(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(cpu::ForceIsa("").ok()); }
};

INSTANTIATE_TEST_SUITE_P(Isa, PrunedOnEveryIsa, testing::ValuesIn(cpu::AvailableIsas()),
                         [](const auto& info) { return info.param; });

// Rows read are f16, and so differ a little from the codes that are attended.
constexpr double kReadAsF16 = 1e-5;

TEST_P(PrunedOnEveryIsa, WhatIsKeptIsAttended) {
  for (const char* type : {"f16", "k8v8", "k4v4", "k2.5v2.5", "k=int5_pt v=int5_pt"}) {
    for (std::uint32_t page_size : {16u, 64u}) {
      SCOPED_TRACE(std::string(type) + " " + std::to_string(page_size));
      Options options;
      options.page_size = page_size;
      Make(type, options, 1, 1024);
      gone.clear();
      for (std::uint32_t c = 0; c < 300; ++c) Put(c);
      Evict(0, Draw(0, 300, 50));
      Evict(1, Draw(0, 300, 90));
      ExpectAttended(1, 300, kReadAsF16);  // all in f16 yet
      Seal();
      ExpectAttended(1, 300, kReadAsF16);
      ExpectAttended(30, 300, kReadAsF16);
      for (std::uint32_t c = 300; c < 400; ++c) Put(c);
      Evict(0, Draw(0, 400, 30));  // of packed pages as well
      Evict(2, Draw(100, 200, 100));
      Seal();
      ExpectAttended(2, 400, kReadAsF16);
      ExpectAttended(30, 400, kReadAsF16);
      Evict(1, Draw(0, 400, 100));  // all but its sinks
      Seal();
      ExpectAttended(1, 400, kReadAsF16);
    }
  }
}

TEST_F(Pruned, BytesGoWithTheEntries) {
  for (const char* type : {"f16", "k4v4"}) {
    Make(type);
    gone.clear();
    for (std::uint32_t c = 0; c < 2048; ++c) Put(c);
    Seal();
    const auto total = [&] {
      const StreamBytes b = Sum();
      return static_cast<double>(b.coded[0] + b.coded[1] + b.scales[0] + b.scales[1] + b.open[0] +
                                 b.open[1] + b.slack);
    };
    const double before = total(), resident = static_cast<double>(cache->bytes().allocator_slack);
    std::vector<std::uint32_t> cells;
    for (std::uint32_t c = 0; c < 1984; c += 2) cells.push_back(c);
    Evict(1, cells);
    Seal();
    EXPECT_NEAR(total() / before, 1 - 0.5 / kHeads, 0.03) << type;
    EXPECT_LT(static_cast<double>(cache->bytes().allocator_slack), resident + 0.1 * before) << type;
    for (std::uint32_t h : {0u, 1u, 2u}) Evict(h, Draw(0, 1984, 100));
    Seal();
    EXPECT_LT(total() / before, 0.12) << type;  // window and sinks, in f16
  }
}

TEST_F(Pruned, EntriesAreCountedByHead) {
  Make("k4v4");
  for (std::uint32_t c = 0; c < 500; ++c) Put(c);
  EXPECT_TRUE(cache->bytes().layers[0].heads.empty());
  Evict(1, Draw(0, 500, 40));
  const auto check = [&] {
    const auto heads = cache->bytes().layers[0].heads;
    ASSERT_EQ(heads.size(), kHeads);
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      const std::uint64_t evicted = h == 1 ? gone[0].size() : 0;
      EXPECT_EQ(heads[h].evicted, evicted) << h;
      EXPECT_EQ(heads[h].kept, 500 - evicted) << h;
    }
  };
  check();
  Seal();
  check();
  EXPECT_EQ(Sum().live_rows, 500u);
}

TEST_F(Pruned, SinksAndRowsThatAreNotThereStay) {
  Make("k4v4");
  for (std::uint32_t c = 0; c < 200; ++c) Put(c);
  const std::uint32_t cells[] = {0, 3, 4, 4, 700};
  EXPECT_EQ(cache->Evict(0, 0, 1, cells), 1u);  // 4, once
  Seal();
  EXPECT_EQ(cache->Evict(0, 0, 1, cells), 0u);
  EXPECT_EQ(cache->Evict(0, 0, kHeads, cells), 0u);
}

// A cell that is written again has all its entries.
TEST_F(Pruned, OverwritingBringsARowBack) {
  Make("k4v4");
  for (std::uint32_t c = 0; c < 300; ++c) Put(c);
  Seal();
  for (std::uint32_t h = 0; h < 2; ++h) Evict(h, Draw(0, 300, 60));
  const auto again = [&](std::uint32_t c) {
    for (std::uint32_t h = 0; h < kHeads; ++h) gone[0].erase({h, c});
    Put(c);
  };
  for (std::uint32_t c : {10u, 11u, 290u}) again(c);  // before they are packed
  ExpectAttended(1, 300, kReadAsF16);
  Seal();
  for (std::uint32_t c : {10u, 20u, 21u, 63u, 64u, 291u}) again(c);
  ExpectAttended(1, 300, kReadAsF16);
  for (std::uint32_t c = 100; c < 164; ++c) again(c);
  Seal();
  ExpectAttended(1, 300, kReadAsF16);
  ExpectAttended(30, 300, kReadAsF16);
}

// One half alone: the other half is kept, and with it what is gone.
TEST_F(Pruned, OneHalfWrittenAnew) {
  Make("k4v4");
  for (std::uint32_t c = 0; c < 300; ++c) Put(c);
  Evict(0, Draw(0, 300, 60));
  Seal();
  for (std::uint64_t c = 40; c < 60; ++c) PutSide(Side::kV, c);
  ExpectAttended(1, 300, kReadAsF16);
  for (std::uint64_t c = 50; c < 70; ++c) {
    PutSide(Side::kK, c);
    gone[0].erase({0, static_cast<std::uint32_t>(c)});
  }
  for (std::uint64_t c = 50; c < 70; ++c) PutSide(Side::kV, c);
  ExpectAttended(1, 300, kReadAsF16);
  Seal();
  ExpectAttended(1, 300, kReadAsF16);
}

TEST_F(Pruned, RowsOfZerosAndRowsDropped) {
  Make("k4v4");
  for (std::uint32_t c = 0; c < 300; ++c) Put(c);
  Evict(0, Draw(0, 300, 60));
  Evict(2, Draw(0, 300, 20));
  Seal();
  for (std::uint64_t c = 30; c < 40; ++c) {
    for (Side side : {Side::kK, Side::kV}) ASSERT_TRUE(cache->WriteZero(0, side, c).ok());
    for (std::uint32_t h = 0; h < kHeads; ++h) gone[0].erase({h, static_cast<std::uint32_t>(c)});
  }
  ExpectAttended(1, 300, kReadAsF16);
  cache->DropFrom(0, 0, 120);
  std::erase_if(gone[0], [](const auto& e) { return e.second >= 120; });
  Seal();
  ExpectAttended(1, 120, kReadAsF16);
  for (std::uint32_t c = 120; c < 250; ++c) Put(c);
  Seal();
  ExpectAttended(1, 250, kReadAsF16);
  cache->Clear();
  gone.clear();
  EXPECT_EQ(Sum().live_rows, 0u);
  for (std::uint32_t c = 0; c < 250; ++c) Put(c);
  Seal();
  ExpectAttended(1, 250, kReadAsF16);
  EXPECT_TRUE(cache->bytes().layers[0].heads.empty());
}

TEST_F(Pruned, CopiedStreams) {
  for (bool lone : {false, true}) {
    Make("k4v4", {}, 2, 512);
    gone.clear();
    for (std::uint32_t c = 0; c < 300; ++c) Put(c);
    Evict(0, Draw(0, 300, 60));
    Seal();
    Evict(1, Draw(0, 300, 30));
    gone[1] = gone[0];
    ASSERT_TRUE(cache->CopySide(0, Side::kK, 0, 1).ok());
    if (lone) {  // something in between: each side goes through its rows
      std::vector<half_t> row(kEmbd);
      cache->Read(0, Side::kK, 512, row.data());
    }
    ASSERT_TRUE(cache->CopySide(0, Side::kV, 0, 1).ok());
    ExpectAttended(1, 300, kReadAsF16, 1);
    Seal();
    // Each goes its way.
    for (std::uint32_t c = 10; c < 20; ++c) {
      for (std::uint32_t h = 0; h < kHeads; ++h) gone[0].erase({h, c});
      Put(c);
    }
    Evict(2, Draw(0, 300, 50), 1);
    Seal();
    for (std::uint32_t s : {0u, 1u}) {
      ExpectAttended(1, 300, kReadAsF16, s);
      ExpectAttended(20, 300, kReadAsF16, s);
    }
  }
}

// A state that is saved row by row and restored into another cache says what is gone.
TEST_F(Pruned, ASavedStateSaysWhatIsGone) {
  for (const char* type : {"f16", "k4v4"}) {
    for (bool half : {false, true}) {
      Options options;
      options.int8_window = half;
      Make(type, options, 1, 512);
      gone.clear();
      for (std::uint32_t c = 0; c < 300; ++c) Put(c);
      Evict(0, Draw(0, 300, 60));
      Seal();
      Evict(2, Draw(0, 300, 30));
      std::vector<half_t> saved[2];
      for (Side side : {Side::kK, Side::kV}) {
        std::vector<half_t>& to = saved[static_cast<int>(side)];
        to.resize(300 * kEmbd);
        for (std::uint64_t c = 0; c < 300; ++c)
          ASSERT_TRUE(cache->Read(0, side, c, to.data() + c * kEmbd));
      }
      Make(type, options, 1, 512);
      cache->BeginRestored(0, 0);
      for (Side side : {Side::kK, Side::kV}) {
        for (std::uint64_t c = 0; c < 300; ++c) {
          ASSERT_TRUE(cache
                          ->Write(0, side, std::span(&c, 1),
                                  saved[static_cast<int>(side)].data() + c * kEmbd, kEmbd)
                          .ok());
        }
        if (half) Seal();
      }
      ExpectAttended(1, 300, kReadAsF16);
      Seal();
      ExpectAttended(1, 300, kReadAsF16);
      ExpectAttended(20, 300, kReadAsF16);
      EXPECT_EQ(cache->bytes().layers[0].heads.at(2).kept,
                300 - static_cast<std::uint64_t>(std::count_if(
                          gone[0].begin(), gone[0].end(), [](auto& e) { return e.first == 2; })));
    }
  }
}

// A state may come before the first graph shows where heads lie.
TEST_F(Pruned, HeadsKnownOnlyOnceAStateIsThere) {
  cache = std::make_unique<Cache>(Options{}, 1, 512);
  ASSERT_TRUE(cache->AddLayer(0, kEmbd, kEmbd, Type("k4v4")).ok());
  for (Side side : {Side::kK, Side::kV}) {
    for (std::uint64_t c = 0; c < 100; ++c) {
      std::vector<half_t> row = rows.Next();
      if (c % 5 == 2) {
        std::fill_n(row.begin() + kDim, kDim, kEvicted);
        gone[0].insert({1, static_cast<std::uint32_t>(c)});
      }
      ASSERT_TRUE(cache->Write(0, side, std::span(&c, 1), row.data(), kEmbd).ok());
    }
  }
  ASSERT_TRUE(cache->SetHeads(0, kHeads).ok());
  EXPECT_EQ(cache->bytes().layers[0].heads.at(1).evicted, 20u);
  ExpectAttended(1, 100, kReadAsF16);
}

// Keys turn with a context shift, in whichever page they lie, and may be replaced.
TEST_F(Pruned, ShiftedAndReplacedKeys) {
  for (const char* type : {"f16", "k8v8"}) {
    Make(type, {}, 1, 512);
    gone.clear();
    for (std::uint32_t c = 0; c < 300; ++c) Put(c);
    Evict(0, Draw(0, 300, 60));
    Seal();
    const TurnShape shape{0, 8, true};
    const auto shift = [&](std::uint32_t first, std::uint32_t end, std::int32_t by) {
      std::vector<std::int32_t> delta(512);
      for (std::uint32_t c = first; c < end; ++c) delta[c] = by;
      ASSERT_TRUE(cache
                      ->ShiftK(0, delta, shape,
                               [](std::int32_t n, std::span<float> cos_sin) {
                                 for (std::size_t i = 0; i < cos_sin.size(); i += 2) {
                                   cos_sin[i] = std::cos(0.1f * static_cast<float>(n));
                                   cos_sin[i + 1] = std::sin(0.1f * static_cast<float>(n));
                                 }
                                 return Status::Ok();
                               })
                      .ok());
    };
    std::vector<half_t> before(kEmbd), after(kEmbd);
    ASSERT_TRUE(cache->Read(0, Side::kK, 77, before.data()));
    shift(50, 200, -7);
    ASSERT_TRUE(cache->Read(0, Side::kK, 77, after.data()));
    EXPECT_NE(before, after);
    ExpectAttended(1, 300, kReadAsF16);
    Evict(1, Draw(0, 300, 50));
    Seal();
    ExpectAttended(1, 300, kReadAsF16);
    for (std::uint32_t i = 0; i < 8; ++i) shift(30 * i, 30 * i + 15, 3 + static_cast<int>(i));
    Seal();
    ExpectAttended(2, 300, kReadAsF16);
    ExpectAttended(20, 300, kReadAsF16);
    std::vector<std::uint32_t> cells;
    std::vector<half_t> keys;
    for (std::uint32_t c = 20; c < 220; c += 3) {
      cells.push_back(c);
      const auto row = rows.Next();
      keys.insert(keys.end(), row.begin(), row.end());
    }
    ASSERT_TRUE(cache->ReplaceK(0, 0, cells, keys.data()).ok());
    ExpectAttended(1, 300, kReadAsF16);
    for (std::uint32_t i = 0; i < cells.size(); ++i) {
      ASSERT_TRUE(cache->Read(0, Side::kK, cells[i], after.data()));
      for (std::uint32_t h = 0; h < kHeads; ++h) {
        if (Gone(h, cells[i])) continue;
        EXPECT_NEAR(HalfToFloat(after[h * kDim]), HalfToFloat(keys[i * kEmbd + h * kDim]), 0.05f);
      }
    }
  }
}

// Latent attention: one head, values inside keys.
TEST_F(Pruned, ALayerWithoutValues) {
  cache = std::make_unique<Cache>(Options{}, 1, 512);
  ASSERT_TRUE(cache->AddLayer(0, kEmbd, 0, Type("k4v4")).ok());
  ASSERT_TRUE(cache->SetHeads(0, 1).ok());
  ASSERT_TRUE(cache->SetValuesInKeys(0, 128).ok());
  for (std::uint32_t c = 0; c < 300; ++c) PutSide(Side::kK, c);
  Evict(0, Draw(0, 200, 50));
  Seal();
  std::vector<half_t> row(kEmbd);
  for (std::uint64_t c = 0; c < 300; ++c) {
    ASSERT_TRUE(cache->Read(0, Side::kK, c, row.data()));
    EXPECT_EQ(row[5] == kEvicted && row[6] == kEvicted, Gone(0, static_cast<std::uint32_t>(c)));
  }
  EXPECT_EQ(cache->bytes().layers[0].heads.at(0).evicted, gone[0].size());
}

}  // namespace
}  // namespace kvtamp::store
