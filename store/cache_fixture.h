// What the store's tests share: a cache of one layer beside the rows that were written.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "store/cache.h"

namespace kvtamp::store {

using codec::Side;

inline constexpr std::uint32_t kHeads = 3, kDim = 64, kEmbd = kHeads * kDim;

inline codec::Pair Type(const char* name) {
  auto p = codec::ParsePair(name);
  EXPECT_TRUE(p.ok()) << p.status().message();
  return p.value();
}

struct Rows {
  explicit Rows(unsigned seed) : rng(seed) {}
  std::vector<half_t> Next() {
    std::vector<half_t> row(kEmbd);
    for (half_t& h : row) h = FloatToHalf(normal(rng));
    return row;
  }
  std::mt19937 rng;
  std::normal_distribution<float> normal;
};

inline double Nmse(const std::vector<half_t>& x, const std::vector<half_t>& truth) {
  double e = 0, s = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double d = HalfToFloat(x[i]) - HalfToFloat(truth[i]);
    e += d * d;
    s += HalfToFloat(truth[i]) * HalfToFloat(truth[i]);
  }
  return e / s;
}

class CacheTest : public ::testing::Test {
 protected:
  void Make(const char* type, Options options = {}, std::uint32_t streams = 1,
            std::uint32_t cells = 4096) {
    cache = std::make_unique<Cache>(options, streams, cells);
    ASSERT_TRUE(cache->AddLayer(0, kEmbd, kEmbd, Type(type)).ok());
    ASSERT_TRUE(cache->SetHeads(0, kHeads).ok());
  }
  void Put(std::uint64_t cell) {
    for (Side side : {Side::kK, Side::kV}) PutSide(side, cell);
  }
  void PutSide(Side side, std::uint64_t cell) {
    auto row = rows.Next();
    ASSERT_TRUE(cache->Write(0, side, std::span(&cell, 1), row.data(), kEmbd).ok());
    truth[{static_cast<int>(side), cell}] = row;
  }
  void Seal() { ASSERT_TRUE(cache->Maintain(0, executor).ok()); }
  double Error(Side side, std::uint64_t cell) {
    std::vector<half_t> row(kEmbd);
    EXPECT_TRUE(cache->Read(0, side, cell, row.data())) << "cell " << cell;
    return Nmse(row, truth[{static_cast<int>(side), cell}]);
  }
  StreamBytes Sum() { return cache->bytes().layers.at(0).sum; }
  // One query [kEmbd] of all heads of stream 0 over mask.size() cells.
  static Cache::StreamJob OneQuery(const std::vector<float>& q, std::vector<float>& out,
                                   const std::vector<half_t>& mask) {
    Cache::StreamJob job;
    job.job.q = q.data();
    job.job.q_tok_stride = job.job.out_tok_stride = kEmbd;
    job.job.q_head_stride = job.job.out_head_stride = kDim;
    job.job.out = out.data();
    job.job.mask = mask.data();
    job.job.mask_tok_stride = job.job.n_kv = static_cast<std::uint32_t>(mask.size());
    job.job.n_tok = 1;
    return job;
  }

  std::unique_ptr<Cache> cache;
  Rows rows{42};
  std::map<std::pair<int, std::uint64_t>, std::vector<half_t>> truth;
  SerialExecutor executor;
};

}  // namespace kvtamp::store
