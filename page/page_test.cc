#include "page/page.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "page/allocator.h"
#include "page/cell_index.h"

namespace kvtamp::page {
namespace {

TEST(Allocator, CountsEveryByteAndGivesMemoryBack) {
  Allocator a;
  EXPECT_EQ(a.resident_bytes(), 0u);
  std::vector<std::uint8_t*> blocks;
  for (int i = 0; i < 1000; ++i) blocks.push_back(a.Allocate(2176));
  EXPECT_EQ(a.used_bytes(), 1000u * 2176);
  EXPECT_GE(a.resident_bytes(), a.used_bytes());
  EXPECT_LE(a.resident_bytes(), a.used_bytes() * 1.08);  // one slab is not full, and each rounds up
  for (std::uint8_t* b : blocks) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b) % 64, 0u);
    a.Free(b, 2176);
  }
  EXPECT_EQ(a.used_bytes(), 0u);
  EXPECT_EQ(a.resident_bytes(), 0u);  // empty slabs stay only beside used ones
  EXPECT_GT(a.peak_bytes(), 1000u * 2176);
  a.Clear();
  EXPECT_EQ(a.resident_bytes(), 0u);
}

// One used block must not hold on to its whole slab.
TEST(Allocator, FreedBlocksGoBackBetweenUsedOnes) {
  Allocator a;
  std::vector<std::uint8_t*> blocks;
  for (int i = 0; i < 512; ++i) {
    blocks.push_back(a.Allocate(16384));
    std::fill_n(blocks.back(), 16384, static_cast<std::uint8_t>(i));
  }
  const std::size_t full = a.resident_bytes();
  for (int i = 0; i < 512; ++i)
    if (i % 8 != 0) a.Free(blocks[static_cast<std::size_t>(i)], 16384);
  EXPECT_EQ(a.used_bytes(), 64u * 16384);
  EXPECT_LE(a.resident_bytes(), full / 8 + full / 32);
  for (int i = 0; i < 512; i += 8)
    for (std::size_t j = 0; j < 16384; j += 4000)
      ASSERT_EQ(blocks[static_cast<std::size_t>(i)][j], static_cast<std::uint8_t>(i));
  for (int i = 0; i < 448; ++i) ASSERT_NE(a.Allocate(16384), nullptr);
  EXPECT_EQ(a.resident_bytes(), full);  // the same places again
}

// Coded pages are of any size: a little more than some pages of the system, say.
TEST(Allocator, BlocksOfAnySizeFillPages) {
  for (std::size_t bytes : {3000u, 8704u, 16896u, 17408u, 20544u, 25024u, 33280u, 66000u}) {
    Allocator a;
    for (int i = 0; i < 64; ++i) ASSERT_NE(a.Allocate(bytes), nullptr);
    EXPECT_LE(a.resident_bytes(), a.used_bytes() * 33 / 32 + 4096) << bytes;
  }
}

TEST(Allocator, BlocksNeverOverlap) {
  Allocator a;
  std::mt19937 rng(7);
  std::vector<std::pair<std::uint8_t*, std::size_t>> held;
  for (int i = 0; i < 5000; ++i) {
    if (held.size() > 50 && rng() % 2 == 0) {
      const std::size_t at = rng() % held.size();
      auto [p, n] = held[at];
      for (std::size_t j = 0; j < n; j += 61) ASSERT_EQ(p[j], static_cast<std::uint8_t>(n));
      a.Free(p, n);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(at));
      continue;
    }
    const std::size_t sizes[] = {1, 64, 100, 2176, 24592, 90000};
    const std::size_t n = sizes[rng() % 6];
    std::uint8_t* p = a.Allocate(n);
    ASSERT_NE(p, nullptr);
    for (std::size_t j = 0; j < n; ++j) p[j] = static_cast<std::uint8_t>(n);
    held.emplace_back(p, n);
  }
}

TEST(CellIndex, FindsWhatWasSetLast) {
  CellIndex index;
  EXPECT_EQ(index.Find(0), CellIndex::kNone);
  EXPECT_EQ(index.Find(1u << 30), CellIndex::kNone);
  std::mt19937 rng(11);
  std::vector<std::uint32_t> truth(1000, CellIndex::kNone);
  for (int i = 0; i < 20000; ++i) {
    const std::uint32_t cell = rng() % 1000, page = rng() % 5;
    index.Set(cell, page);
    truth[cell] = page;
    const std::uint32_t probe = rng() % 1000;
    if (truth[probe] != CellIndex::kNone) {
      ASSERT_EQ(index.Find(probe), truth[probe]);
    }
  }
}

TEST(CellIndex, RunsCostASixteenthByteACell) {
  CellIndex index;
  for (std::uint32_t c = 0; c < 64 * 1024; ++c) index.Set(c, c / 64);
  EXPECT_LE(index.bytes(), 64 * 1024 / 64 * 4 * 2u);
  // A second pass in other pages leaves runs again, not tables.
  for (std::uint32_t c = 0; c < 64 * 1024; ++c) index.Set(c, 5000 + c / 64);
  EXPECT_LE(index.bytes(), 64 * 1024 / 64 * 4 * 2u);
  EXPECT_EQ(index.Find(64 * 1024 - 1), 5000u + 1023);
}

TEST(RowMask, ContainsIsSubset) {
  RowMask a, b;
  a.set(3);
  a.set(100);
  b.set(100);
  EXPECT_TRUE(a.contains(b));
  EXPECT_FALSE(b.contains(a));
  EXPECT_EQ(a.count(), 2u);
  a.reset(100);
  EXPECT_FALSE(a.contains(b));
}

}  // namespace
}  // namespace kvtamp::page
