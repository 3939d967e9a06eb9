// Keys that moved: rows, pages and streams under ShiftK.
#include <algorithm>
#include <cmath>

#include "store/cache_fixture.h"

namespace kvtamp::store {
namespace {

// Pairs turn by shift / (i + 1) radians.
Status TestAngles(std::int32_t shift, std::span<float> cos_sin) {
  for (std::size_t i = 0; i < cos_sin.size() / 2; ++i) {
    const float angle = static_cast<float>(shift) / static_cast<float>(i + 1);
    cos_sin[2 * i] = std::cos(angle);
    cos_sin[2 * i + 1] = std::sin(angle);
  }
  return Status::Ok();
}

std::vector<half_t> Turned(std::vector<half_t> row, std::int32_t shift, const TurnShape& t) {
  std::vector<float> cs(2 * t.pairs);
  EXPECT_TRUE(TestAngles(shift, cs).ok());
  for (std::uint32_t h = 0; h < kHeads; ++h)
    for (std::uint32_t i = 0; i < t.pairs; ++i) {
      half_t& a = row[h * kDim + t.first + (t.neox ? i : 2 * i)];
      half_t& b = row[h * kDim + t.first + (t.neox ? t.pairs + i : 2 * i + 1)];
      const float x = HalfToFloat(a), y = HalfToFloat(b);
      a = FloatToHalf(cs[2 * i] * x - cs[2 * i + 1] * y);
      b = FloatToHalf(cs[2 * i + 1] * x + cs[2 * i] * y);
    }
  return row;
}

// Shifts among writes, overwrites of either side, copies of streams and sealing: a row is always
// its last key turned by the shifts since.
TEST_F(CacheTest, ShiftsAreOfRowsWhateverHappensToThem) {
  const TurnShape turn{8, 24, true};
  Make("f16", {16, 4, 32}, 2, 512);
  std::map<std::uint64_t, std::int32_t> shift;  // since the key of the cell was written
  std::mt19937 rng(7);
  for (int step = 0; step < 400; ++step) {
    const std::uint64_t cell = rng() % 300 + (rng() % 2) * 512;
    switch (rng() % 9) {
      case 8: {  // the host removed a tail
        const std::uint32_t stream = static_cast<std::uint32_t>(cell / 512);
        if (rng() % 4 != 0) break;
        const std::uint32_t end = static_cast<std::uint32_t>(rng() % 300);
        cache->DropFrom(0, stream, end);
        std::erase_if(
            shift, [&](const auto& s) { return s.first / 512 == stream && s.first % 512 >= end; });
        break;
      }
      case 0: {
        std::vector<std::int32_t> delta(1024, 0);
        const std::uint64_t from = rng() % 1024, to = from + rng() % (1025 - from);
        const std::int32_t by = static_cast<std::int32_t>(rng() % 7) - 3;
        for (std::uint64_t c = from; c < to; ++c) delta[c] = rng() % 9 == 0 ? 2 * by : by;
        ASSERT_TRUE(cache->ShiftK(0, delta, turn, TestAngles).ok());
        for (auto& [c, s] : shift) s += delta[c];
        break;
      }
      case 1:
        if (shift.contains(cell)) PutSide(Side::kV, cell);
        break;
      case 2:
        if (rng() % 8 != 0) break;
        for (Side side : {Side::kK, Side::kV}) ASSERT_TRUE(cache->CopySide(0, side, 0, 1).ok());
        for (std::uint64_t c = 0; c < 512; ++c) {
          shift.erase(512 + c);
          if (!shift.contains(c)) continue;
          shift[512 + c] = shift[c];
          for (int side : {0, 1}) truth[{side, 512 + c}] = truth[{side, c}];
        }
        break;
      default:
        for (std::uint64_t c = cell; c < std::min<std::uint64_t>(cell + 20, cell / 512 * 512 + 300);
             ++c) {
          Put(c);
          shift[c] = 0;
        }
        Seal();
    }
  }
  std::vector<half_t> row(kEmbd);
  int turned = 0;
  for (const auto& [c, s] : shift) {
    turned += s != 0;
    ASSERT_TRUE(cache->Read(0, Side::kK, c, row.data()));
    // A page of many shifts is turned for good, and rounded to f16 again.
    EXPECT_LT(Nmse(row, Turned(truth[{0, c}], s, turn)), 1e-5) << c;
    EXPECT_EQ(Error(Side::kV, c), 0.0);
  }
  EXPECT_GT(turned, 50);
}

// A row that has a value but no key yet, behind rows that were shifted, twice.
TEST_F(CacheTest, ARowWithoutItsKeyIsNotShifted) {
  const TurnShape turn{0, 32, true};
  Make("f16", {16, 0, 16}, 1, 256);
  const auto shift = [&](std::uint32_t end, std::int32_t by) {
    std::vector<std::int32_t> delta(256, 0);
    std::fill_n(delta.begin(), end, by);
    ASSERT_TRUE(cache->ShiftK(0, delta, turn, TestAngles).ok());
  };
  for (std::uint64_t c = 0; c < 4; ++c) Put(c);
  shift(4, 11);
  Put(4);
  shift(2, 5);
  shift(4, 1);
  PutSide(Side::kV, 5);
  std::vector<float> q(kEmbd, 1.0f), out(kEmbd);
  std::vector<half_t> mask(256, 0);
  const Cache::StreamJob job = OneQuery(q, out, mask);
  attention::Params params;
  params.n_head = kHeads;
  ASSERT_TRUE(cache->Attend(0, std::span(&job, 1), params, executor).ok());
  PutSide(Side::kK, 5);
  for (std::uint64_t c = 0; c < 6; ++c) {
    const std::int32_t by = c < 2 ? 17 : c < 4 ? 12 : 0;
    truth[{0, c}] = Turned(truth[{0, c}], by, turn);
    EXPECT_LT(Error(Side::kK, c), 1e-5) << c;
  }
}

// A key that is zeros by a failed restore, its value not, and then moves: from nought, not from
// where the key before it was.
TEST_F(CacheTest, AKeyZeroedAndThenShifted) {
  const TurnShape turn{0, 32, true};
  Make("f16", {16, 0, 16}, 1, 256);
  for (std::uint64_t c = 0; c < 4; ++c) Put(c);
  std::vector<std::int32_t> delta(256, 0);
  delta[1] = 11;
  ASSERT_TRUE(cache->ShiftK(0, delta, turn, TestAngles).ok());
  ASSERT_TRUE(cache->WriteZero(0, Side::kK, 1).ok());
  delta[1] = 5;
  ASSERT_TRUE(cache->ShiftK(0, delta, turn, TestAngles).ok());
  std::vector<half_t> row(kEmbd);
  ASSERT_TRUE(cache->Read(0, Side::kK, 1, row.data()));
  EXPECT_TRUE(std::all_of(row.begin(), row.end(), [](half_t h) { return (h & 0x7FFF) == 0; }));
  EXPECT_EQ(Error(Side::kV, 1), 0.0);
}

TEST_F(CacheTest, ShiftsDoNotTouchCodedKeys) {
  const TurnShape turn{0, 32, false};
  Make("k4v4", {64, 4, 64}, 1, 1024);
  for (std::uint32_t c = 0; c < 700; ++c) Put(c);
  Seal();
  std::vector<std::vector<half_t>> before(700, std::vector<half_t>(kEmbd));
  for (std::uint32_t c = 0; c < 700; ++c) cache->Read(0, Side::kK, c, before[c].data());
  std::vector<std::int32_t> delta(1024, -5);
  std::fill_n(delta.begin(), 100, 0);
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(cache->ShiftK(0, delta, turn, TestAngles).ok());
  std::vector<half_t> row(kEmbd);
  for (std::uint32_t c = 0; c < 700; ++c) {
    cache->Read(0, Side::kK, c, row.data());
    EXPECT_EQ(row, Turned(before[c], c < 100 ? 0 : -250, turn)) << c;
  }
  // And back: not one bit has changed.
  std::fill(delta.begin() + 100, delta.end(), 250);
  ASSERT_TRUE(cache->ShiftK(0, delta, turn, TestAngles).ok());
  for (std::uint32_t c = 0; c < 700; ++c) {
    cache->Read(0, Side::kK, c, row.data());
    EXPECT_EQ(row, before[c]) << c;
  }
  EXPECT_EQ(cache->ShiftK(0, delta, TurnShape{0, 16, false}, TestAngles).code(), Code::kOk);
}

// Each row moves by its own number of positions, as seq_div does: pages of many shifts are coded
// again, so that attention does not pass over them once for each.
TEST_F(CacheTest, PagesOfManyShiftsAreSettled) {
  const TurnShape turn{0, 32, true};
  Make("k8v8", {64, 0, 64}, 1, 1024);
  for (std::uint32_t c = 0; c < 700; ++c) Put(c);
  Seal();
  std::vector<std::int32_t> delta(1024);
  for (std::uint32_t c = 0; c < 1024; ++c) delta[c] = -static_cast<std::int32_t>(c / 2);
  ASSERT_TRUE(cache->ShiftK(0, delta, turn, TestAngles).ok());
  for (std::uint32_t c = 0; c < 700; ++c) {
    truth[{0, c}] = Turned(truth[{0, c}], delta[c], turn);
    EXPECT_LT(Error(Side::kK, c), 3e-4) << c;
  }
  // Nothing is left to turn, so another way of turning is no conflict.
  EXPECT_TRUE(cache->ShiftK(0, delta, TurnShape{0, 8, false}, TestAngles).ok());
  std::fill(delta.begin(), delta.end(), 3);
  ASSERT_TRUE(cache->ShiftK(0, delta, TurnShape{0, 8, false}, TestAngles).ok());
  EXPECT_EQ(cache->ShiftK(0, delta, turn, TestAngles).code(), Code::kUnsupported);
}

}  // namespace
}  // namespace kvtamp::store
