// Attention through the plug-in: a host's micro-batches, played on our device and on ggml's CPU
// backend.
#include <thread>

#include "plugins/ggml/test_graph.h"

namespace kvtamp::ggml_plugin::test {
namespace {

struct Step {
  int n_tok = 1;
  Way way = Way::kDirect;
  int s0 = 0, ns = 1;
  double overwrite = 0;  // share of rows that replace older ones
  bool in_order = true;  // cells 0, 1, 2, …
  double holes = 0.1;    // share of a query's cells that are masked
  bool masked_rows = false;
  float max_bias = 0, softcap = 0;
  bool sinks = false;
  bool idx32 = false, rows_f16 = false;
  int row_pad = 0;
  bool whole_kv = false;  // n_kv is the whole cache
  int layer = 0;
};

// Plays micro-batches, and knows what must be in the cache.
class Play {
 public:
  Play(const Setting& setting, const Dims& dims, int gqa, unsigned seed, int n_threads = 1)
      : setting_(setting),
        dims_(dims),
        n_head_(dims.n_head_kv * gqa),
        random_(seed),
        ours_(NewBackend(setting, n_threads)),
        cpu_(NewCpu(n_threads)),
        cache_(OurType(), dims),
        layers_(static_cast<std::size_t>(dims.n_layers)) {
    if (!coded()) plain_ = std::make_unique<Cache>(CpuType(), dims);
    for (Layer& l : layers_) {
      l.k.resize(static_cast<std::size_t>(dims.n_streams * dims.n_cells * dims.n_embd_k()));
      l.v.resize(static_cast<std::size_t>(dims.n_streams * dims.n_cells * dims.n_embd_v()));
      l.used.resize(static_cast<std::size_t>(dims.n_streams * dims.n_cells));
    }
    bias_ = random_.Normals(static_cast<std::size_t>(dims.n_embd_k()));
  }

  void Do(const Step& step) {
    SCOPED_TRACE("n_tok " + std::to_string(step.n_tok) + ", streams " + std::to_string(step.s0) +
                 "+" + std::to_string(step.ns) +
                 (step.way == Way::kSched ? ", sched" : ", direct"));
    Layer& layer = layers_[static_cast<std::size_t>(step.layer)];
    const auto il = static_cast<std::size_t>(step.layer);
    std::vector<Half> k = Get<Half>(cache_.k[il]), v = Get<Half>(cache_.v[il]);
    if (!coded()) {
      ASSERT_EQ(k, layer.k);
      ASSERT_EQ(v, layer.v);
    }
    const Batch b = Make(step, layer);
    Put(b, b.k, k);
    Put(b, b.v, v);
    Put(b, b.k, layer.k);
    Put(b, b.v, layer.v);
    const std::vector<float> out =
        RunLayer(step.way, ours_.get(), cpu_.get(), cache_, b, step.layer);
    const std::vector<double> exact = Exact(dims_, b, k, v);
    const double error = Nmse(out, exact);
    worst_ = std::max(worst_, error);
    EXPECT_LE(error, coded() ? kExactBound : kF16Bound);
    for (std::size_t i = 0; i < exact.size(); ++i) {
      if (exact[i] != 0) continue;
      ASSERT_EQ(out[i], 0) << "row " << i / static_cast<std::size_t>(dims_.dv) << " is masked";
    }
    if (plain_ == nullptr) return;
    const double to_cpu =
        Nmse(out, RunLayer(Way::kDirect, cpu_.get(), cpu_.get(), *plain_, b, step.layer));
    EXPECT_LE(to_cpu, kCpuBound);
  }

  // That the store did it, not the plain fallback; and that coded rows are coded, and well.
  void Check() {
    const nlohmann::json stats = Stats();
    EXPECT_EQ(stats["uncompressed_bytes"], 0);
    if (!coded()) return;
    EXPECT_GT(stats["pages"]["sealed"], 0);
    const Layer& l = layers_[0];
    const double k = Nmse(ToFloat(Get<Half>(cache_.k[0])), ToFloat(l.k));
    const double v = Nmse(ToFloat(Get<Half>(cache_.v[0])), ToFloat(l.v));
    // 8 bits of a Gaussian: about 3e-5; 4 bits: about 1e-2; part of the rows is f16.
    const bool four = setting_.type == "k4v4";
    for (double e : {k, v}) {
      EXPECT_GT(e, four ? 1e-4 : 1e-7);
      EXPECT_LT(e, four ? 2e-2 : 2e-4);
    }
  }

  bool coded() const { return setting_.type != "f16"; }
  double worst() const { return worst_; }
  const Cache& cache() const { return cache_; }

 private:
  struct Layer {
    std::vector<Half> k, v;  // as written
    std::vector<bool> used;
  };

  std::vector<std::int64_t> Cells(const Step& step, const Layer& layer, std::int64_t stream) {
    std::vector<std::int64_t> free, used, out;
    for (std::int64_t c = 0; c < dims_.n_cells; ++c) {
      const std::int64_t cell = stream * dims_.n_cells + c;
      (layer.used[static_cast<std::size_t>(cell)] ? used : free).push_back(cell);
    }
    if (!step.in_order) std::shuffle(free.begin(), free.end(), random_.rng());
    std::shuffle(used.begin(), used.end(), random_.rng());
    std::size_t f = 0, u = 0;
    for (int t = 0; t < step.n_tok; ++t) {
      const bool again = u < used.size() && (f == free.size() || random_.Chance(step.overwrite));
      out.push_back(again ? used[u++] : free[f++]);
    }
    return out;
  }

  Batch Make(const Step& step, Layer& layer) {
    Batch b;
    b.idx32 = step.idx32;
    b.rows_f16 = step.rows_f16;
    b.row_pad = step.row_pad;
    b.n_head = n_head_;
    b.n_tok = step.n_tok;
    b.s0 = step.s0;
    b.ns = step.ns;
    b.max_bias = step.max_bias;
    b.softcap = step.softcap;
    b.scale = 1.0f / std::sqrt(static_cast<float>(dims_.dk));
    // What was there before, and what comes with token t, by cell.
    std::vector<int> since(layer.used.size(), INT32_MAX);
    for (std::size_t c = 0; c < since.size(); ++c)
      if (layer.used[c]) since[c] = -1;
    for (int s = step.s0; s < step.s0 + step.ns; ++s) {
      const std::vector<std::int64_t> cells = Cells(step, layer, s);
      for (int t = 0; t < step.n_tok; ++t) {
        const auto cell = static_cast<std::size_t>(cells[static_cast<std::size_t>(t)]);
        layer.used[cell] = true;
        since[cell] = t;
        b.cells.push_back(static_cast<std::int64_t>(cell));
      }
    }
    b.k = random_.Normals(b.cells.size() * static_cast<std::size_t>(dims_.n_embd_k()));
    for (std::size_t i = 0; i < b.k.size(); ++i) b.k[i] += 2 * bias_[i % bias_.size()];
    b.v = random_.Normals(b.cells.size() * static_cast<std::size_t>(dims_.n_embd_v()));
    b.q = random_.Normals(static_cast<std::size_t>(b.ns * b.n_tok * b.n_head * dims_.dk));
    if (step.sinks) b.sinks = random_.Normals(static_cast<std::size_t>(n_head_));

    std::int64_t highest = 0;
    for (std::int64_t s = b.s0; s < b.s0 + b.ns; ++s)
      for (std::int64_t c = 0; c < dims_.n_cells; ++c)
        if (layer.used[static_cast<std::size_t>(s * dims_.n_cells + c)])
          highest = std::max(highest, c);
    b.n_kv = step.whole_kv ? dims_.n_cells : std::min(dims_.n_cells, (highest + 256) / 256 * 256);

    // A token that does not see the one before it may be another sequence's, which has pages of its
    // own: with few holes all are one sequence.
    const bool near = step.holes < 0.5;
    const Half hidden = ggml_fp32_to_fp16(-INFINITY);
    b.mask.assign(static_cast<std::size_t>(b.ns * b.n_tok * b.n_kv), hidden);
    for (std::int64_t s = 0; s < b.ns; ++s)
      for (std::int64_t t = 0; t < b.n_tok; ++t) {
        if (step.masked_rows && random_.Chance(0.25)) continue;
        Half* row = b.mask.data() + (s * b.n_tok + t) * b.n_kv;
        for (std::int64_t c = 0; c < b.n_kv; ++c) {
          const int when = since[static_cast<std::size_t>((b.s0 + s) * dims_.n_cells + c)];
          if (when > t || (when != t && random_.Chance(step.holes) && !(when == t - 1 && near)))
            continue;
          row[c] =
              ggml_fp32_to_fp16(b.max_bias > 0 ? -static_cast<float>(random_.Int(0, 40)) : 0.0f);
        }
      }
    return b;
  }

  const Setting setting_;
  const Dims dims_;
  const std::int64_t n_head_;
  Random random_;
  ggml_backend_ptr ours_, cpu_;
  Cache cache_;
  std::unique_ptr<Cache> plain_;
  std::vector<Layer> layers_;
  std::vector<float> bias_;
  double worst_ = 0;
};

Step Next(int n_tok, Way way) {
  Step s;
  s.n_tok = n_tok;
  s.way = way;
  return s;
}

// --- shapes -------------------------------------------------------------------------------------

class HeadSizes : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(HeadSizes, PrefillAndDecode) {
  const auto [dk, dv] = GetParam();
  for (const char* type : kTypes) {
    SCOPED_TRACE(type);
    Play play({type}, {.dk = dk, .dv = dv, .n_head_kv = 2}, 3,
              Seed(static_cast<unsigned>(dk + dv)));
    Way way = Way::kDirect;
    for (int n_tok : {33, 200, 1, 3, 33, 1, 3}) {
      play.Do(Next(n_tok, way));
      way = way == Way::kDirect ? Way::kSched : Way::kDirect;
    }
    play.Do({.n_tok = 200, .way = way, .overwrite = 0.3, .masked_rows = true});
    play.Do({.n_tok = 1, .whole_kv = true});
    play.Check();
    std::printf("%s: NMSE at most %.2g\n", type, play.worst());
  }
}

INSTANTIATE_TEST_SUITE_P(
    Dk, HeadSizes,
    ::testing::Values(std::pair(40, 40), std::pair(64, 64), std::pair(72, 72), std::pair(80, 80),
                      std::pair(96, 96), std::pair(112, 112), std::pair(128, 128),
                      std::pair(192, 192), std::pair(256, 256), std::pair(192, 128),
                      std::pair(64, 128), std::pair(96, 40)),
    [](const auto& info) {
      return std::to_string(info.param.first) + "x" + std::to_string(info.param.second);
    });

class Gqa : public ::testing::TestWithParam<int> {};

TEST_P(Gqa, EveryQueryHeadFindsItsKvHead) {
  const int gqa = GetParam();
  for (const char* type : kTypes) {
    SCOPED_TRACE(type);
    Play play({type}, {.n_head_kv = 1 + gqa % 3}, gqa, Seed(100 + static_cast<unsigned>(gqa)));
    for (int n_tok : {100, 90, 33, 3, 1})
      play.Do(Next(n_tok, n_tok % 2 ? Way::kSched : Way::kDirect));
    play.Check();
  }
}

INSTANTIATE_TEST_SUITE_P(Of, Gqa, ::testing::Range(1, 17));

class Settings : public ::testing::TestWithParam<Setting> {};

TEST_P(Settings, PagesWindowsAndSinks) {
  for (const char* type : kTypes) {
    Setting s = GetParam();
    s.type = type;
    SCOPED_TRACE(type);
    Play play(s, {.n_head_kv = 3, .n_cells = 768}, 3,
              Seed(200 + static_cast<unsigned>(s.page_size)));
    for (int n_tok : {130, 1, 1, 1, 64, 200, 1, 33, 1}) play.Do(Next(n_tok, Way::kDirect));
    for (int i = 0; i < 3; ++i) play.Do({.n_tok = 33, .overwrite = 0.5, .in_order = false});
    play.Do({.n_tok = 1, .way = Way::kSched});
    play.Check();
  }
}

INSTANTIATE_TEST_SUITE_P(Of, Settings,
                         ::testing::Values(Setting{"", 16, 0, 0}, Setting{"", 32, 4, 32},
                                           Setting{"", 64, 8, 100}, Setting{"", 128, 64, 0},
                                           Setting{"", 128, 4, 128}),
                         [](const auto& info) {
                           return "page" + std::to_string(info.param.page_size) + "sink" +
                                  std::to_string(info.param.n_sink) + "window" +
                                  std::to_string(info.param.residual_length);
                         });

TEST(Attention, SeveralStreamsAtOnce) {
  for (const char* type : kTypes) {
    SCOPED_TRACE(type);
    Play play({type}, {.n_head_kv = 2, .n_cells = 256, .n_streams = 4}, 2, Seed(300));
    for (Way way : {Way::kDirect, Way::kSched}) {
      play.Do({.n_tok = 70, .way = way, .s0 = 0, .ns = 4});
      play.Do({.n_tok = 33, .way = way, .s0 = 1, .ns = 3});
      play.Do({.n_tok = 3, .way = way, .s0 = 2, .ns = 2});
      play.Do({.n_tok = 1, .way = way, .s0 = 3, .ns = 1});
      play.Do({.n_tok = 1, .way = way, .s0 = 1, .ns = 2, .overwrite = 0.5, .in_order = false});
    }
    play.Do({.n_tok = 1, .s0 = 0, .ns = 4, .masked_rows = true});
    play.Check();
  }
}

TEST(Attention, SoftcapAlibiAndSinks) {
  for (const char* type : kTypes)
    for (float softcap : {0.0f, 20.0f})
      for (float max_bias : {0.0f, 8.0f})
        for (bool sinks : {false, true}) {
          SCOPED_TRACE(std::string(type) + " softcap " + std::to_string(softcap) + " max_bias " +
                       std::to_string(max_bias) + (sinks ? " sinks" : ""));
          // 6 query heads: not a power of two, so both of ALiBi's slopes are used.
          Play play({type, 32, 4, 32}, {.n_head_kv = 2, .n_cells = 256}, 3, Seed(400));
          for (int n_tok : {70, 33, 3, 1, 1, 33})
            play.Do({.n_tok = n_tok,
                     .way = n_tok == 1 ? Way::kDirect : Way::kSched,
                     .masked_rows = true,
                     .max_bias = max_bias,
                     .softcap = softcap,
                     .sinks = sinks});
          play.Check();
        }
}

TEST(Attention, RowsAndIndicesOfEveryKind) {
  for (bool idx32 : {false, true})
    for (bool rows_f16 : {false, true})
      for (int pad : {0, 24}) {
        Play play({"f16"}, {.n_cells = 256, .n_streams = 2}, 2, Seed(500));
        for (int n_tok : {33, 3, 1})
          play.Do({.n_tok = n_tok,
                   .s0 = 0,
                   .ns = 2,
                   .overwrite = 0.2,
                   .in_order = false,
                   .idx32 = idx32,
                   .rows_f16 = rows_f16,
                   .row_pad = pad});
        play.Check();
      }
}

TEST(Attention, SparseMasks) {
  for (const char* type : kTypes) {
    SCOPED_TRACE(type);
    Play play({type, 16, 4, 0}, {.n_head_kv = 2}, 4, Seed(600));
    play.Do({.n_tok = 200, .in_order = false});
    for (double holes : {0.5, 0.9, 0.99, 1.0})
      for (int n_tok : {1, 33})
        play.Do({.n_tok = n_tok,
                 .overwrite = 0.8,
                 .in_order = false,
                 .holes = holes,
                 .masked_rows = n_tok > 1});
    play.Check();
  }
}

class RandomShapes : public ::testing::TestWithParam<int> {};

TEST_P(RandomShapes, Play) {
  const unsigned seed = Seed(1000 + static_cast<unsigned>(GetParam()));
  Random r(seed);
  const Setting setting{r.OneOf({"f16", "k8v8", "k4v4", "k8v4"}), r.OneOf({16, 32, 64, 128}),
                        r.OneOf({0, 1, 4, 20}), r.OneOf({0, 16, 64, 200})};
  Dims d{.dk = r.OneOf({40, 64, 72, 80, 96, 112, 128, 192, 256}),
         .n_head_kv = r.Int(1, 4),
         .n_cells = 256 * r.Int(1, 3),
         .n_streams = r.Int(1, 3),
         .n_layers = r.Int(1, 2)};
  d.dv = r.Chance(0.7) ? d.dk : r.OneOf({40, 64, 80, 96, 128});
  const int gqa = r.OneOf({1, 2, 3, 4, 5, 7, 8, 16});
  std::printf(
      "seed %u: %s, pages of %d, %d sinks, window %d, Dk %d, Dv %d, %d KV heads x %d, %d cells, "
      "%d streams\n",
      seed, setting.type.c_str(), setting.page_size, setting.n_sink, setting.residual_length,
      static_cast<int>(d.dk), static_cast<int>(d.dv), static_cast<int>(d.n_head_kv), gqa,
      static_cast<int>(d.n_cells), static_cast<int>(d.n_streams));
  Play play(setting, d, gqa, seed, r.Chance(0.3) ? 3 : 1);
  const bool alibi = r.Chance(0.2), softcap = r.Chance(0.2), sinks = r.Chance(0.2);
  for (int i = 0; i < 10; ++i) {
    Step s;
    s.n_tok = r.OneOf({1, 1, 2, 3, 8, 17, 33, 64});
    s.way = r.Chance(0.5) ? Way::kSched : Way::kDirect;
    s.s0 = r.Int(0, static_cast<int>(d.n_streams) - 1);
    s.ns = r.Int(1, static_cast<int>(d.n_streams) - s.s0);
    s.overwrite = r.OneOf({0.0, 0.0, 0.3, 1.0});
    s.in_order = r.Chance(0.7);
    s.holes = r.OneOf({0.0, 0.1, 0.6});
    s.masked_rows = r.Chance(0.2);
    s.max_bias = alibi ? 4.0f : 0.0f;
    s.softcap = softcap ? 30.0f : 0.0f;
    s.sinks = sinks;
    s.idx32 = r.Chance(0.2);
    s.rows_f16 = r.Chance(0.2);
    s.row_pad = r.OneOf({0, 0, 8});
    s.whole_kv = r.Chance(0.2);
    s.layer = r.Int(0, d.n_layers - 1);
    play.Do(s);
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_EQ(UncompressedBytes(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Seed, RandomShapes, ::testing::Range(0, 24));

// --- what stays exact ---------------------------------------------------------------------------

void FirstAndNewestRows(const char* residual_type) {
  constexpr int kSink = 4, kWindow = 64, kPage = 32, kRows = 400;
  const bool int8 = std::string(residual_type) == "int8";
  const Dims d{.n_head_kv = 2, .n_cells = 512};
  const ggml_backend_ptr ours = NewBackend({"k4v4", kPage, kSink, kWindow, residual_type}),
                         cpu = NewCpu();
  Cache cache(OurType(), d);
  Random random(Seed(700));
  std::vector<Half> k(512 * 128), v(512 * 128);
  for (int at = 0; at < kRows; at += 50) {
    const Batch b = Causal(d, random, 50, at);
    RunLayer(Way::kSched, ours.get(), cpu.get(), cache, b);
    Put(b, b.k, k);
    Put(b, b.v, v);
  }
  const std::vector<Half> k_now = Get<Half>(cache.k[0]), v_now = Get<Half>(cache.v[0]);
  int coded = 0;
  for (int row = 0; row < kRows; ++row) {
    const bool exact =
        std::equal(k.begin() + row * 128, k.begin() + (row + 1) * 128, k_now.begin() + row * 128) &&
        std::equal(v.begin() + row * 128, v.begin() + (row + 1) * 128, v_now.begin() + row * 128);
    const bool open = row >= kRows - kRows % kPage;
    if (row < kSink || (int8 ? open : row >= kRows - kWindow)) {
      EXPECT_TRUE(exact) << "row " << row;
    } else if (row >= kRows - kWindow) {
      EXPECT_FALSE(exact) << "row " << row;
      for (int i = row * 128; i < (row + 1) * 128; ++i) {  // a step of int8 over a few sigma
        EXPECT_NEAR(ggml_fp16_to_fp32(k_now[i]), ggml_fp16_to_fp32(k[i]), 0.04);
        EXPECT_NEAR(ggml_fp16_to_fp32(v_now[i]), ggml_fp16_to_fp32(v[i]), 0.1);
      }
    }
    coded += !exact;
  }
  // All but the sinks, the window, and what does not fill a page.
  EXPECT_GE(coded, kRows - kSink - kWindow - 2 * kPage);
}

TEST(Attention, FirstAndNewestRowsStayF16) { FirstAndNewestRows("f16"); }
TEST(Attention, FirstRowsStayF16AndNewestInt8) { FirstAndNewestRows("int8"); }

// llama-server decodes on a worker thread, and not always on the same.
TEST(Attention, CallsFromChangingThreads) {
  Play play({"k4v4", 32, 4, 32}, {.n_head_kv = 2}, 2, Seed(870), 3);
  for (int n_tok : {100, 33, 33, 1, 1, 3})
    std::thread([&] { play.Do(Next(n_tok, n_tok == 33 ? Way::kSched : Way::kDirect)); }).join();
  play.Do(Next(1, Way::kDirect));
  play.Check();
}

}  // namespace
}  // namespace kvtamp::ggml_plugin::test
