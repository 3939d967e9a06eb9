// What would spoil the benchmark's figures in silence: bytes counted wrongly, work that differs
// between kvtamp and ggml, memory that is not read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "bench/coded_attention.h"
#include "bench/ggml_attention.h"
#include "bench/read_bandwidth.h"
#include "bench/results.h"
#include "codec/layout.h"
#include "store/cache.h"

namespace kvtamp::bench {
namespace {

using codec::Side;

constexpr const char* kFormats[] = {"f16", "k8v8", "k4v4", "k3.5v3", "k3v3", "k2.5v2.5", "k2v2"};

CodedFormat FormatOf(const Shape& shape, const char* name) {
  const auto pair = codec::ParsePair(name);
  EXPECT_TRUE(pair.ok()) << pair.status().message();
  const auto format = MakeCodedFormat(shape, pair.value());
  EXPECT_TRUE(format.ok()) << format.status().message();
  return format.value();
}

std::unique_ptr<CodedAttention> Coded(const Shape& shape, const char* name, Executor& executor,
                                      std::uint32_t n_layers = 1) {
  auto made = CodedAttention::Make(shape, FormatOf(shape, name), n_layers, 0, executor);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return std::move(made.value());
}

std::unique_ptr<GgmlAttention> Ggml(const Shape& shape, ggml_type type,
                                    std::uint32_t n_layers = 1) {
  auto made = GgmlAttention::Make(shape, type, n_layers, 2);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return std::move(made.value());
}

// Root of the mean square of the difference, against that of `truth`.
double Error(std::span<const float> x, std::span<const float> truth) {
  EXPECT_EQ(x.size(), truth.size());
  double error = 0, size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += (x[i] - truth[i]) * (x[i] - truth[i]);
    size += truth[i] * truth[i];
  }
  return std::sqrt(error / size);
}

// ------------------------------------------------------------------------------------- shapes

TEST(Shape, IsReadAsItIsWritten) {
  const auto shape = ParseShape("32/8/128:4096");
  ASSERT_TRUE(shape.ok());
  EXPECT_EQ(shape.value(), (Shape{32, 8, 128, 4096, 1}));
  EXPECT_EQ(ShapeText(shape.value()), "32/8/128");
}

TEST(Shape, NonsenseIsRefused) {
  for (const char* text : {"", "32/8/128", "32/8/128:4096x", "32/8:4096", "30/8/128:4096",
                           "0/8/128:4096", "8/0/128:4096", "32/8/12:4096", "32/8/128:100"})
    EXPECT_FALSE(ParseShape(text).ok()) << text;
}

TEST(Shape, FlopsCountWhatTheMaskShows) {
  const Shape shape{2, 1, 64, 192, 3};
  const Query query(shape);
  const auto open = std::count(query.mask.begin(), query.mask.end(), half_t{0});
  EXPECT_EQ(open, 190 + 191 + 192);
  EXPECT_DOUBLE_EQ(Flops(shape), 4.0 * 2 * 64 * static_cast<double>(open));
}

// -------------------------------------------------------------------------------------- bytes

// What the store says of the sealed pages of a cache of as many rows.
std::uint64_t StoreBytes(const Shape& shape, const char* name) {
  store::Cache cache({.n_sink = 0}, 1, shape.length);
  const auto pair = codec::ParsePair(name);
  EXPECT_TRUE(cache.AddLayer(0, shape.n_embd(), shape.n_embd(), pair.value()).ok());
  EXPECT_TRUE(cache.SetHeads(0, shape.n_head_kv).ok());
  RowSource source(1);
  SerialExecutor executor;
  std::vector<half_t> row(shape.n_embd());
  for (std::uint64_t cell = 0; cell < shape.length; ++cell) {
    for (const Side side : {Side::kK, Side::kV}) {
      source.Fill(row);
      EXPECT_TRUE(cache.Write(0, side, {&cell, 1}, row.data(), row.size()).ok());
    }
  }
  EXPECT_TRUE(cache.Maintain(0, executor).ok());
  const store::StreamBytes sum = cache.bytes().layers.at(0).sum;
  std::uint64_t bytes = 0;
  for (const int side : {0, 1}) bytes += sum.coded[side] + sum.scales[side];
  // An f16 cache has no other pages than those that are open to the others.
  if (!pair.value().k.coded()) return sum.open[0] + sum.open[1];
  EXPECT_GT(sum.n_sealed, 0u);
  return bytes / sum.n_sealed * (shape.length / kPageSize);
}

TEST(Bytes, AreThoseTheStoreCounts) {
  for (const Shape& shape : {Shape{4, 2, 64, 256, 1}, Shape{6, 3, 128, 256, 1}})
    for (const char* name : kFormats)
      EXPECT_EQ(FormatOf(shape, name).layer_bytes(shape), StoreBytes(shape, name))
          << name << ' ' << ShapeText(shape);
}

TEST(Bytes, OfGgmlAreThoseOfItsTensors) {
  const Shape shape{4, 2, 64, 256, 1};
  EXPECT_EQ(GgmlLayerBytes(shape, GGML_TYPE_F16), 2u * 256 * 128 * 2);
  EXPECT_EQ(GgmlLayerBytes(shape, GGML_TYPE_Q8_0), 2u * 256 * 128 / 32 * 34);
  EXPECT_EQ(GgmlLayerBytes(shape, GGML_TYPE_Q4_0), 2u * 256 * 128 / 32 * 18);
}

TEST(Bytes, OfWidthsAddUpToTheBudget) {
  std::mt19937_64 rng(1);
  for (const char* name : {"k4v4", "k3.5v3", "k2v2", "k1.25v2", "k7.5v4"}) {
    const Shape shape{1, 1, 128, 64, 1};
    const CodedFormat format = FormatOf(shape, name);
    const auto& head = format.layout(Side::kK)->heads.at(0);
    ASSERT_EQ(head.coding, codec::Coding::kKPlanes) << name;
    std::vector<std::uint8_t> page(head.bytes);
    FillCoded(head, Side::kK, rng, page.data());
    std::uint32_t sum = 0;
    for (std::uint32_t c = 0; c < shape.dim; ++c) sum += codec::KWidth(page.data(), shape.dim, c);
    EXPECT_EQ(sum, head.shape.budget) << name;
  }
}

// --------------------------------------------------------------------------------------- work

TEST(Work, KvtampAndGgmlAttendToTheSame) {
  SerialExecutor executor;
  for (const Shape& shape : {Shape{8, 2, 64, 1024, 1}, Shape{6, 1, 128, 512, 1},
                             Shape{8, 2, 64, 512, 40}, Shape{9, 3, 64, 256, 256}}) {
    const auto own = Coded(shape, "f16", executor, 2);
    const auto ggml = Ggml(shape, GGML_TYPE_F16, 2);
    ASSERT_TRUE(own->Step().ok() && ggml->Step().ok());
    EXPECT_LT(Error(own->out(), ggml->out()), 0.01)  // ggml adds up V in f16
        << ShapeText(shape) << " of " << shape.n_tok << " tokens";
    const auto q8_0 = Ggml(shape, GGML_TYPE_Q8_0, 2);
    ASSERT_TRUE(q8_0->Step().ok());
    EXPECT_LT(Error(q8_0->out(), ggml->out()), 0.1);
  }
}

TEST(Work, CodedPagesGiveNumbers) {
  SerialExecutor executor;
  const Shape shape{4, 2, 64, 256, 1};
  for (const char* name : kFormats) {
    const auto own = Coded(shape, name, executor);
    ASSERT_TRUE(own->Step().ok());
    double sum = 0;
    for (const float x : own->out()) sum += std::fabs(x);
    EXPECT_TRUE(std::isfinite(sum) && sum > 0) << name;
  }
}

TEST(Work, ADecodeStepPassesOver64MiB) {
  EXPECT_EQ(LayersFor(1 << 20, true), 64u);
  EXPECT_EQ(LayersFor((1 << 20) + 1, true), 64u);
  EXPECT_EQ(LayersFor(std::size_t{1} << 30, true), 1u);
  EXPECT_EQ(LayersFor(1 << 20, false), 1u);
}

TEST(Work, WhatAFormatCannotIsAnError) {
  const Shape odd{2, 1, 80, 64, 1};
  EXPECT_FALSE(GgmlAttention::Make(odd, GGML_TYPE_Q8_0, 1, 1).ok());
  const auto slow = codec::ParsePair("k=int5_pt v=f16");
  ASSERT_TRUE(slow.ok());
  EXPECT_FALSE(MakeCodedFormat(odd, slow.value()).ok());
}

// ------------------------------------------------------------------------------ read bandwidth

TEST(Read, EveryWordIsReadOnce) {
  std::mt19937_64 rng(1);
  for (const std::size_t n : {0, 1, 15, 16, 17, 1000, 4099}) {
    std::vector<std::uint64_t> words(n);
    for (auto& w : words) w = rng();
    const std::uint64_t sum =
        std::accumulate(words.begin(), words.end(), std::uint64_t{0}, std::bit_xor<>());
    for (const int n_threads : {1, 2, 3, 7})
      EXPECT_EQ(ReadAll(words, n_threads), sum) << n << " words, " << n_threads << " threads";
  }
}

TEST(Read, BufferIsFarLargerThanTheCache) {
  EXPECT_GE(ReadBuffer::DefaultBytes(), std::size_t{256} << 20);
  ReadBuffer buffer(std::size_t{4} << 20, 2);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(buffer.bytes(), std::size_t{4} << 20);
  EXPECT_GT(buffer.Pass(), 0);
}

// ------------------------------------------------------------------------------------- figures

TEST(Figures, AreMediansOfTheTurns) {
  Line line{"kvtamp k4v4", "avx2", {2, 1, 64, 128, 1}, 1, 4000};
  Turns turns;
  turns.seconds = {1e-6, 4e-6, 2e-6};
  turns.peer_seconds = {3e-6, 4e-6, 8e-6};  // 3, 1 and 4 times as long
  turns.read = {6e9, 8e9, 7e9};
  const Figures f = FiguresOf(line, turns);
  EXPECT_DOUBLE_EQ(f.seconds, 2e-6);
  EXPECT_DOUBLE_EQ(f.coded_rate, 2e9);
  EXPECT_DOUBLE_EQ(f.read_rate, 8e9);
  EXPECT_DOUBLE_EQ(f.share, 0.25);
  EXPECT_DOUBLE_EQ(f.flop_rate, 4.0 * 2 * 64 * 128 / 2e-6);
  EXPECT_DOUBLE_EQ(f.ratio, 3);
  EXPECT_DOUBLE_EQ(f.ratio_min, 1);
  EXPECT_DOUBLE_EQ(f.ratio_max, 4);
}

TEST(Figures, ATableHasARowForEach) {
  const Row row{{"ggml q8_0", "host", {32, 8, 128, 4096, 512}, 2, 1 << 20}, {.seconds = 2e-3}};
  const std::string table = Markdown(std::vector<Row>{row, row});
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 4);
  EXPECT_THAT(table, testing::HasSubstr(
                         "| prefill 512 | 4096 | 32/8/128 | ggml q8_0 | host | 2 | 1024 | 2 |"));
}

}  // namespace
}  // namespace kvtamp::bench
