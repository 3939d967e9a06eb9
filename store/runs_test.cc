// Which rows share a page: those of one sequence, as far as what tokens see tells.
#include "store/cache_fixture.h"

namespace kvtamp::store {
namespace {

// Sequences of tokens over one stream, as a host's unified cache has them. `sees` of a token: the
// cells of its sequence.
class RunsTest : public CacheTest {
 protected:
  struct Token {
    std::uint32_t cell;
    std::vector<std::uint32_t> sees;
  };
  // One token of each of `sequences`, in cells that are free.
  void Step(std::initializer_list<int> sequences) {
    std::vector<Token> batch;
    for (int s : sequences) batch.push_back(Next(s));
    Write(batch);
  }
  Token Next(int s) {
    auto& seen = sequences_[s];
    seen.push_back(next_cell_++);
    return {seen.back(), seen};
  }
  void Write(const std::vector<Token>& batch) {
    std::vector<half_t> mask(batch.size() * kCells, 0xFC00);
    std::vector<std::uint64_t> cells;
    std::vector<half_t> rows[2];
    for (std::size_t i = 0; i < batch.size(); ++i) {
      cells.push_back(batch[i].cell);
      for (std::uint32_t c : batch[i].sees) mask[i * kCells + c] = 0;
      for (auto& side : rows) {
        const auto row = this->rows.Next();
        side.insert(side.end(), row.begin(), row.end());
      }
      truth_[batch[i].cell] = {rows[0].end() - kEmbd, rows[0].end()};
    }
    const Sight sight{mask.data(), kCells, kCells};
    for (Side side : {Side::kK, Side::kV})
      ASSERT_TRUE(
          cache->Write(0, side, cells, rows[static_cast<int>(side)].data(), kEmbd, &sight).ok());
    for (const Token& t : batch)
      if (t.sees.size() <= kSinks) cache->MarkSinks(0, 0, t.sees);
    SerialExecutor serial;
    ASSERT_TRUE(cache->Maintain(0, serial).ok());
  }
  // A row is exact as long as it is f16.
  bool Exact(std::uint32_t cell) {
    std::vector<half_t> row(kEmbd);
    EXPECT_TRUE(cache->Read(0, Side::kK, cell, row.data()));
    return row == truth_.at(cell);
  }
  StreamBytes bytes() { return cache->bytes().layers[0].sum; }

  static constexpr std::uint32_t kCells = 4096, kSinks = 4;
  std::uint32_t next_cell_ = 0;
  std::map<int, std::vector<std::uint32_t>> sequences_;
  std::map<std::uint32_t, std::vector<half_t>> truth_;
};

TEST_F(RunsTest, EachSequenceHasItsPagesItsSinksAndItsWindow) {
  Make("k4v4", {.page_size = 32, .n_sink = kSinks, .residual_length = 32});
  for (int i = 0; i < 100; ++i) Step({0, 1, 2});
  // Of each 100 rows: pages of 32, 32, 32 and 4; the first is out of the window of 32, the second
  // is too, the third is not.
  EXPECT_EQ(bytes().n_open, 3u);
  EXPECT_EQ(bytes().n_sealed, 6u);
  for (const auto& [s, cells] : sequences_)
    for (std::size_t i = 0; i < cells.size(); ++i)
      EXPECT_EQ(Exact(cells[i]), i < kSinks || i >= 64) << "sequence " << s << " row " << i;
}

// A prompt that several sequences share, and then each goes on by itself.
TEST_F(RunsTest, SequencesThatGoOnFromOneBeginning) {
  for (bool at_once : {true, false}) {
    Make("k4v4", {.page_size = 32, .n_sink = 0, .residual_length = 0});
    next_cell_ = 0;
    sequences_.clear();
    for (int i = 0; i < 10; ++i) Step({0});
    for (int s : {1, 2}) sequences_[s] = sequences_[0];
    // 22 fill the first page, by whoever comes first; 32 more fill one for each.
    for (int i = 0; i < 22 + 32; ++i) {
      if (at_once) {
        Step({0, 1, 2});
      } else {
        for (int s : {0, 1, 2}) Step({s});
      }
    }
    // Whole pages of one sequence each: after all have been cut off but one, no page is left that
    // has rows of two. Counted by what dies.
    const std::uint64_t pages = bytes().n_sealed + bytes().n_open + bytes().n_settled;
    EXPECT_LE(pages, at_once ? 6u : 7u);
    EXPECT_GE(bytes().n_sealed, 4u);
  }
}

// The host takes back what a draft model guessed wrong, and writes the next ones elsewhere.
TEST_F(RunsTest, RejectedDraftsDoNotEndARun) {
  Make("k4v4", {.page_size = 32, .n_sink = 0, .residual_length = 0});
  for (int i = 0; i < 30; ++i) {
    std::vector<Token> batch;
    for (int t = 0; t < 4; ++t) batch.push_back(Next(0));
    Write(batch);
    sequences_[0].resize(sequences_[0].size() - 2);
  }
  EXPECT_EQ(bytes().n_open, 1u);
  EXPECT_EQ(bytes().n_sealed, 3u);  // 120 rows, dead ones included
}

TEST_F(RunsTest, MoreSequencesThanRunsShareTheirPages) {
  Make("k4v4", {.page_size = 32, .n_sink = 0, .residual_length = 0});
  for (int i = 0; i < 20; ++i)
    for (int s = 0; s < 40; ++s) Step({s});
  EXPECT_LE(bytes().n_open, 16u);
  EXPECT_GE(bytes().n_sealed, (20u * 40 - 16 * 32) / 32);
}

// The windows of sequences that are idle do not stay f16 for ever.
TEST_F(RunsTest, IdleWindowsAreCoded) {
  Make("k4v4", {.page_size = 32, .n_sink = 0, .residual_length = 32});
  for (int i = 0; i < 32; ++i) Step({0});
  for (int i = 0; i < 20; ++i) Step({0});  // a page that will not be filled
  for (int i = 0; i < 256; ++i) Step({1});
  EXPECT_TRUE(Exact(sequences_[0][5]));
  Step({1});
  EXPECT_FALSE(Exact(sequences_[0][5]));
  EXPECT_FALSE(Exact(sequences_[0][40]));
  // It goes on in a page of its own.
  for (int i = 0; i < 32; ++i) Step({0, 1});
  EXPECT_TRUE(Exact(sequences_[0][60]));
  EXPECT_EQ(bytes().n_open, 1u);
}

// Request after request in the same cells, as a server's slot has them.
TEST_F(RunsTest, RequestsThatFollowEachOtherAreCoded) {
  Make("k4v4", {.page_size = 32, .n_sink = 0, .residual_length = 32}, 1, kCells);
  std::mt19937 dice(5);
  for (int request = 0; request < 40; ++request) {
    next_cell_ = 0;
    for (std::uint32_t n = 40 + dice() % 300; n > 0; --n) Step({request});
  }
  // All rows of a request are dead when the next has come, but nobody says so.
  const StreamBytes b = bytes();
  EXPECT_GE(b.n_sealed, 3u);
  EXPECT_LE((b.n_open + b.n_settled) * 32, 256u + 40 + 32);
}

// A token of which nothing is known follows the one before.
TEST_F(RunsTest, WithoutSightRowsGoWhereTheLastOneWent) {
  Make("k4v4", {.page_size = 32, .n_sink = 0, .residual_length = 0});
  for (int i = 0; i < 8; ++i) Step({0, 1});
  for (int i = 0; i < 24; ++i) Put(next_cell_++);
  EXPECT_EQ(bytes().n_settled + bytes().n_sealed, 1u);
  EXPECT_EQ(bytes().n_open, 1u);
}

// Restored sequences are cut into pages as they were when they were written.
TEST_F(RunsTest, ARestoredSequenceIsCodedAsItWas) {
  for (const char* type : {"k4v4", "k3v3", "k2v2"}) {
    SCOPED_TRACE(type);
    Make(type, {.page_size = 32, .n_sink = kSinks, .residual_length = 32});
    next_cell_ = 0;
    sequences_.clear();
    for (int i = 0; i < 400; ++i) Step({0, 1, 2});
    const auto read = [&](std::uint32_t cell) {
      std::vector<half_t> both(2 * kEmbd);
      cache->Read(0, Side::kK, cell, both.data());
      cache->Read(0, Side::kV, cell, both.data() + kEmbd);
      return both;
    };
    std::vector<std::vector<half_t>> saved;
    for (std::uint32_t cell : sequences_[1]) saved.push_back(read(cell));
    // Into the cells it came from, while the others stay, all keys before all values.
    cache->BeginRestored(0, 0);
    for (Side side : {Side::kK, Side::kV})
      for (std::size_t i = 0; i < saved.size(); ++i) {
        const std::uint64_t cell = sequences_[1][i];
        const half_t* row = saved[i].data() + (side == Side::kK ? 0 : kEmbd);
        ASSERT_TRUE(cache->Write(0, side, std::span(&cell, 1), row, kEmbd).ok());
      }
    SerialExecutor serial;
    ASSERT_TRUE(cache->Maintain(0, serial).ok());
    // The same up to the rounding of the f16 rows between; coded anew they would be far off.
    std::size_t changed = 0, coded = 0;
    for (std::size_t i = 0; i < saved.size(); ++i) {
      const std::vector<half_t> now = read(sequences_[1][i]);
      for (std::size_t e = 0; e < now.size(); ++e) {
        const float x = HalfToFloat(now[e]), y = HalfToFloat(saved[i][e]);
        changed += std::abs(x - y) > 0.002f * std::max(std::abs(y), 0.1f);
      }
      coded += !Exact(sequences_[1][i]);
    }
    EXPECT_GE(coded, 128u);
    EXPECT_LE(changed, saved.size() * 2 * kEmbd / 100);
  }
}

}  // namespace
}  // namespace kvtamp::store
