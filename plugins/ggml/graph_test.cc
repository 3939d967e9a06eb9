// Attention through the plug-in: a host's micro-batches, played on our device and on ggml's CPU backend.
#include <set>
#include <thread>

#include "plugins/ggml/test_graph.h"

namespace kvtamp::ggml_plugin::test {
namespace {

// Our answer against attention in double over the rows the cache says it holds. In f16 that is single
// precision; coded rows read back are rounded to f16 (relative error 2^-12 rms: 6e-8), and q and p
// are rounded to 15 bits on the way.
constexpr double kExactBound = 1e-6;
// ggml's CPU code rounds q and, for less than a tile of queries, every partial sum of V to f16: it is
// off by 6e-7 at 33 cells and 1.2e-5 at 500 by itself.
constexpr double kCpuBound = 3e-5;

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
    SCOPED_TRACE("n_tok " + std::to_string(step.n_tok) + ", streams " + std::to_string(step.s0) + "+" +
                 std::to_string(step.ns) + (step.way == Way::kSched ? ", sched" : ", direct"));
    Layer& layer = layers_[static_cast<std::size_t>(step.layer)];
    const auto il = static_cast<std::size_t>(step.layer);
    std::vector<Half> k = Get<Half>(cache_.k[il]), v = Get<Half>(cache_.v[il]);
    if (!coded()) {
      ASSERT_EQ(k, layer.k);
      ASSERT_EQ(v, layer.v);
    }
    const Batch b = Make(step, layer);
    Overlay(b, k, v);
    Overlay(b, layer.k, layer.v);
    const std::vector<float> out = RunLayer(step.way, ours_.get(), cpu_.get(), cache_, b, step.layer);
    const std::vector<double> exact = Exact(dims_, b, ToFloat(k), ToFloat(v));
    const double error = Nmse(out, exact);
    worst_ = std::max(worst_, error);
    EXPECT_LE(error, kExactBound);
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
        if (layer.used[static_cast<std::size_t>(s * dims_.n_cells + c)]) highest = std::max(highest, c);
    b.n_kv = step.whole_kv ? dims_.n_cells : std::min(dims_.n_cells, (highest + 256) / 256 * 256);

    const Half hidden = ggml_fp32_to_fp16(-INFINITY);
    b.mask.assign(static_cast<std::size_t>(b.ns * b.n_tok * b.n_kv), hidden);
    for (std::int64_t s = 0; s < b.ns; ++s)
      for (std::int64_t t = 0; t < b.n_tok; ++t) {
        if (step.masked_rows && random_.Chance(0.25)) continue;
        Half* row = b.mask.data() + (s * b.n_tok + t) * b.n_kv;
        for (std::int64_t c = 0; c < b.n_kv; ++c) {
          const int when = since[static_cast<std::size_t>((b.s0 + s) * dims_.n_cells + c)];
          if (when > t || (when != t && random_.Chance(step.holes))) continue;
          row[c] = ggml_fp32_to_fp16(b.max_bias > 0 ? -static_cast<float>(random_.Int(0, 40)) : 0.0f);
        }
      }
    return b;
  }

  void Overlay(const Batch& b, std::vector<Half>& k, std::vector<Half>& v) const {
    const std::vector<Half> new_k = ToHalf(b.k), new_v = ToHalf(b.v);
    for (std::size_t i = 0; i < b.cells.size(); ++i) {
      const auto row = static_cast<std::int64_t>(i);
      std::copy_n(new_k.begin() + row * dims_.n_embd_k(), dims_.n_embd_k(),
                  k.begin() + b.cells[i] * dims_.n_embd_k());
      std::copy_n(new_v.begin() + row * dims_.n_embd_v(), dims_.n_embd_v(),
                  v.begin() + b.cells[i] * dims_.n_embd_v());
    }
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

const char* const kTypes[] = {"f16", "k8v8", "k4v4"};

// --- shapes ------------------------------------------------------------------------------------------

class HeadSizes : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(HeadSizes, PrefillAndDecode) {
  const auto [dk, dv] = GetParam();
  for (const char* type : kTypes) {
    SCOPED_TRACE(type);
    Play play({type}, {.dk = dk, .dv = dv, .n_head_kv = 2}, 3, Seed(static_cast<unsigned>(dk + dv)));
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

INSTANTIATE_TEST_SUITE_P(Dk, HeadSizes,
                         ::testing::Values(std::pair(40, 40), std::pair(64, 64), std::pair(72, 72),
                                           std::pair(80, 80), std::pair(96, 96), std::pair(112, 112),
                                           std::pair(128, 128), std::pair(192, 192),
                                           std::pair(256, 256), std::pair(192, 128),
                                           std::pair(64, 128), std::pair(96, 40)),
                         [](const auto& info) {
                           return std::to_string(info.param.first) + "x" +
                                  std::to_string(info.param.second);
                         });

class Gqa : public ::testing::TestWithParam<int> {};

TEST_P(Gqa, EveryQueryHeadFindsItsKvHead) {
  const int gqa = GetParam();
  for (const char* type : kTypes) {
    SCOPED_TRACE(type);
    Play play({type}, {.n_head_kv = 1 + gqa % 3}, gqa, Seed(100 + static_cast<unsigned>(gqa)));
    for (int n_tok : {100, 90, 33, 3, 1}) play.Do(Next(n_tok, n_tok % 2 ? Way::kSched : Way::kDirect));
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
    Play play(s, {.n_head_kv = 3, .n_cells = 768}, 3, Seed(200 + static_cast<unsigned>(s.page_size)));
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
          play.Do({.n_tok = n_tok, .s0 = 0, .ns = 2, .overwrite = 0.2, .in_order = false,
                   .idx32 = idx32, .rows_f16 = rows_f16, .row_pad = pad});
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
        play.Do({.n_tok = n_tok, .overwrite = 0.8, .in_order = false, .holes = holes,
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
  std::printf("seed %u: %s, pages of %d, %d sinks, window %d, Dk %d, Dv %d, %d KV heads x %d, %d cells, "
              "%d streams\n",
              seed, setting.type.c_str(), setting.page_size, setting.n_sink, setting.residual_length,
              static_cast<int>(d.dk), static_cast<int>(d.dv), static_cast<int>(d.n_head_kv), gqa,
              static_cast<int>(d.n_cells), static_cast<int>(d.n_streams));
  Play play(setting, d, gqa, seed, r.Chance(0.3) ? kManyThreads : 1);
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

// --- what stays exact --------------------------------------------------------------------------------

TEST(Attention, FirstAndNewestRowsStayF16) {
  constexpr int kSink = 4, kWindow = 64, kPage = 32, kRows = 400;
  const Dims d{.n_head_kv = 2, .n_cells = 512};
  const ggml_backend_ptr ours = NewBackend({"k4v4", kPage, kSink, kWindow}), cpu = NewCpu();
  Cache cache(OurType(), d);
  Random random(Seed(700));
  std::vector<Half> k, v;
  for (int at = 0; at < kRows; at += 50) {
    Batch b;
    b.n_head = 2;
    b.n_tok = 50;
    b.n_kv = 512;
    b.scale = 0.125f;
    for (int i = 0; i < 50; ++i) b.cells.push_back(at + i);
    b.k = random.Normals(50 * 128);
    b.v = random.Normals(50 * 128);
    b.q = random.Normals(50 * 128);
    b.mask.assign(50 * 512, ggml_fp32_to_fp16(-INFINITY));
    for (int t = 0; t < 50; ++t) std::fill_n(b.mask.begin() + t * 512, at + t + 1, Half{0});
    RunLayer(Way::kSched, ours.get(), cpu.get(), cache, b);
    for (Half h : ToHalf(b.k)) k.push_back(h);
    for (Half h : ToHalf(b.v)) v.push_back(h);
  }
  const std::vector<Half> k_now = Get<Half>(cache.k[0]), v_now = Get<Half>(cache.v[0]);
  int coded = 0;
  for (int row = 0; row < kRows; ++row) {
    const bool exact = std::equal(k.begin() + row * 128, k.begin() + (row + 1) * 128, k_now.begin() + row * 128) &&
                       std::equal(v.begin() + row * 128, v.begin() + (row + 1) * 128, v_now.begin() + row * 128);
    if (row < kSink || row >= kRows - kWindow) {
      EXPECT_TRUE(exact) << "row " << row;
    }
    coded += !exact;
  }
  // All but the sinks, the window, and what does not fill a page.
  EXPECT_GE(coded, kRows - kSink - kWindow - 2 * kPage);
}

// --- mechanics of graphs -----------------------------------------------------------------------------

Batch Simple(const Dims& d, Random& random, int n_tok, int first_cell, int gqa = 2) {
  Batch b;
  b.n_head = d.n_head_kv * gqa;
  b.n_tok = n_tok;
  b.n_kv = d.n_cells;
  b.scale = 0.1f;
  for (int i = 0; i < n_tok; ++i) b.cells.push_back(first_cell + i);
  b.k = random.Normals(b.cells.size() * static_cast<std::size_t>(d.n_embd_k()));
  b.v = random.Normals(b.cells.size() * static_cast<std::size_t>(d.n_embd_v()));
  b.q = random.Normals(static_cast<std::size_t>(n_tok * b.n_head * d.dk));
  b.mask.assign(static_cast<std::size_t>(n_tok * b.n_kv), ggml_fp32_to_fp16(-INFINITY));
  for (int t = 0; t < n_tok; ++t) std::fill_n(b.mask.begin() + t * b.n_kv, first_cell + t + 1, Half{0});
  return b;
}

TEST(Mechanics, MaskForEachHead) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  const ggml_backend_ptr ours = NewBackend(), cpu = NewCpu();
  for (int heads : {2, 4}) {  // 2: heads 0, 2 share a mask, 1, 3 the other
    Cache a(OurType(), d), c(CpuType(), d);
    Random random(Seed(800));
    const Batch b = Simple(d, random, 40, 0);
    RunLayer(Way::kDirect, ours.get(), cpu.get(), a, b);
    RunLayer(Way::kDirect, cpu.get(), cpu.get(), c, b);
    std::vector<Half> mask(static_cast<std::size_t>(heads * 40 * 256), ggml_fp32_to_fp16(-INFINITY));
    for (std::size_t i = 0; i < mask.size(); ++i)
      if (i % 256 < 40 && random.Chance(0.5)) mask[i] = 0;
    std::vector<float> out[2];
    for (int i = 0; i < 2; ++i) {
      Graph g;
      const Cache& cache = i == 0 ? a : c;
      ggml_tensor* m = g.Input(GGML_TYPE_F16, {256, 40, heads, 1}, mask);
      ggml_tensor* q = Queries(g, b, d.dk);
      ggml_tensor* fa = ggml_flash_attn_ext(
          g.ctx(), ggml_permute(g.ctx(), q, 0, 2, 1, 3),
          ggml_permute(g.ctx(), CacheView(g, cache.k[0], 64, 2, b), 0, 2, 1, 3),
          ggml_permute(g.ctx(), CacheView(g, cache.v[0], 64, 2, b), 0, 2, 1, 3), m, b.scale, 0, 0);
      g.Add(fa);
      ASSERT_EQ(g.Compute(i == 0 ? ours.get() : cpu.get()), GGML_STATUS_SUCCESS);
      out[i] = Get<float>(fa);
    }
    EXPECT_LE(Nmse(out[0], out[1]), kCpuBound) << heads << " masks";
  }
}

TEST(Mechanics, NoMaskSeesEveryCellBelowNkv) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  for (const char* type : kTypes)
    for (int n_kv : {256, 128, 100, 1}) {
      const ggml_backend_ptr ours = NewBackend({type, 32, 4, 0}), cpu = NewCpu();
      Cache a(OurType(), d);
      Random random(Seed(810));
      RunLayer(Way::kDirect, ours.get(), cpu.get(), a, Simple(d, random, 256, 0));
      Batch b = Simple(d, random, 3, 0);
      b.cells.clear();
      b.n_kv = n_kv;
      b.mask.assign(static_cast<std::size_t>(3 * n_kv), Half{0});
      const std::vector<double> exact = Exact(d, b, ToFloat(Get<Half>(a.k[0])), ToFloat(Get<Half>(a.v[0])));
      b.mask.clear();
      EXPECT_LE(Nmse(RunLayer(Way::kDirect, ours.get(), cpu.get(), a, b), exact), kExactBound)
          << type << ", n_kv " << n_kv;
    }
}

// A masked cell is never looked at: it may hold anything, as cells of dead sequences do.
TEST(Mechanics, MaskedCellsMayHoldNonsense) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  for (const char* type : kTypes)
    for (float nonsense : {NAN, INFINITY, 60000.0f}) {
      const ggml_backend_ptr ours = NewBackend({type, 32, 4, 0}), cpu = NewCpu();
      Cache cache(OurType(), d);
      Random random(Seed(815));
      Batch b = Simple(d, random, 200, 0);
      b.rows_f16 = true;  // so that nothing is clamped on the way in
      for (std::size_t row : {0u, 40u, 41u, 77u, 150u, 199u}) {
        for (std::size_t i = 0; i < 128; i += 3) b.k[row * 128 + i] = b.v[row * 128 + i] = nonsense;
        for (std::size_t t = 0; t < 200; ++t) b.mask[t * 256 + row] = ggml_fp32_to_fp16(-INFINITY);
      }
      std::vector<float> k(256 * 128), v(256 * 128);
      const std::vector<float> new_k = ToFloat(ToHalf(b.k)), new_v = ToFloat(ToHalf(b.v));
      std::copy(new_k.begin(), new_k.end(), k.begin());
      std::copy(new_v.begin(), new_v.end(), v.begin());
      EXPECT_LE(Nmse(RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b), Exact(d, b, k, v)), kExactBound)
          << type << ", " << nonsense;
      b.cells.clear();  // again over what was coded, many queries and one
      for (int n_tok : {200, 1}) {
        b.n_tok = n_tok;
        b.q = random.Normals(static_cast<std::size_t>(n_tok * 4 * 64));
        b.mask.erase(b.mask.begin(), b.mask.end() - n_tok * 256);
        const std::vector<double> exact =
            Exact(d, b, ToFloat(Get<Half>(cache.k[0])), ToFloat(Get<Half>(cache.v[0])));
        // A channel's scale follows its largest value, dead or alive; queries times scales are rounded
        // to 15 bits of the largest.
        const double bound = nonsense == 60000.0f ? 1e-4 : kExactBound;
        EXPECT_LE(Nmse(RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b), exact), bound)
            << type << ", " << nonsense << ", " << n_tok << " queries";
      }
    }
}

// The host's own cache would hold infinities.
TEST(Mechanics, RowsTooLargeForF16AreClamped) {
  const Dims d{.n_head_kv = 1, .n_cells = 256};
  const ggml_backend_ptr ours = NewBackend(), cpu = NewCpu();
  Cache cache(OurType(), d);
  Batch b;
  b.cells = {7};
  b.k = b.v = std::vector<float>(64, 1e6f);
  b.k[1] = -1e30f;
  RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b);
  const std::vector<float> k = ToFloat(Get<Half>(cache.k[0]));
  EXPECT_EQ(k[7 * 64], 65504.0f);
  EXPECT_EQ(k[7 * 64 + 1], -65504.0f);
}

TEST(Mechanics, CellOutsideTheCacheFails) {
  const Dims d{.n_cells = 256, .n_streams = 2};
  const ggml_backend_ptr ours = NewBackend();
  for (std::int64_t cell : {std::int64_t{512}, std::int64_t{-1}, std::int64_t{1} << 40}) {
    Cache cache(OurType(), d);
    Batch b;
    b.cells = {cell};
    b.k = std::vector<float>(128, 1);
    Graph g;
    ggml_build_forward_expand(g.get(), SetRows(g, cache.k[0], b, b.k));
    EXPECT_EQ(g.Compute(ours.get()), GGML_STATUS_FAILED) << cell;
  }
}

TEST(Mechanics, NodesWithoutComputeFlagAndEmptyNodesDoNothing) {
  const Dims d{.n_cells = 256};
  const ggml_backend_ptr ours = NewBackend();
  Cache cache(OurType(), d);
  Random random(Seed(820));
  Batch b = Simple(d, random, 8, 0);
  {
    Graph g;
    ggml_tensor* write = SetRows(g, cache.k[0], b, b.k);
    ggml_build_forward_expand(g.get(), write);
    write->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
    ASSERT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
    const std::vector<std::uint8_t> k = Get(cache.k[0]);
    EXPECT_TRUE(std::all_of(k.begin(), k.end(), [](std::uint8_t x) { return x == 0; }));
    write->flags |= GGML_TENSOR_FLAG_COMPUTE;
    ASSERT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
    EXPECT_NE(Get(cache.k[0]), k);
  }
  Graph g;
  ggml_tensor* none = ggml_view_2d(g.ctx(), cache.k[0], d.n_embd_k(), 0, cache.k[0]->nb[1], 0);
  g.Add(ggml_scale_inplace(g.ctx(), none, 0));
  g.Add(ggml_set_rows(g.ctx(), ggml_view_2d(g.ctx(), cache.k[0], 128, 256, cache.k[0]->nb[1], 0),
                      ggml_view_2d(g.ctx(), g.Input(GGML_TYPE_F32, {128, 1}, random.Normals(128)), 128,
                                   0, 512, 0),
                      ggml_view_1d(g.ctx(), g.Input(GGML_TYPE_I64, {1}, std::vector<std::int64_t>{5}), 0, 0)));
  const std::vector<std::uint8_t> before = Get(cache.k[0]);
  ASSERT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
  EXPECT_EQ(Get(cache.k[0]), before);
  EXPECT_EQ(UncompressedBytes(), 0u);
}

// A host keeps a graph for many tokens and only fills in new inputs.
TEST(Mechanics, GraphIsReused) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  for (const char* type : {"f16", "k4v4"}) {
    const ggml_backend_ptr ours = NewBackend({type, 16, 4, 16}), cpu = NewCpu();
    Cache cache(OurType(), d);
    Random random(Seed(830));
    Batch b = Simple(d, random, 1, 0);
    Graph g;
    ggml_tensor* q = Queries(g, b, d.dk);
    ggml_tensor* k_row = g.Input(GGML_TYPE_F32, {d.n_embd_k(), 1}, b.k);
    ggml_tensor* v_row = g.Input(GGML_TYPE_F32, {d.n_embd_v(), 1}, b.v);
    ggml_tensor* idx = g.Input(GGML_TYPE_I64, {1}, b.cells);
    ggml_tensor* mask = g.Input(GGML_TYPE_F16, {b.n_kv, 1, 1, 1}, b.mask);
    ggml_build_forward_expand(g.get(), ggml_set_rows(g.ctx(), cache.k[0], k_row, idx));
    ggml_build_forward_expand(g.get(), ggml_set_rows(g.ctx(), cache.v[0], v_row, idx));
    ggml_tensor* out = ggml_flash_attn_ext(
        g.ctx(), ggml_permute(g.ctx(), q, 0, 2, 1, 3),
        ggml_permute(g.ctx(), CacheView(g, cache.k[0], d.dk, d.n_head_kv, b), 0, 2, 1, 3),
        ggml_permute(g.ctx(), CacheView(g, cache.v[0], d.dv, d.n_head_kv, b), 0, 2, 1, 3), mask, b.scale,
        0, 0);
    g.Add(out);
    for (int token = 0; token < 100; ++token) {
      b = Simple(d, random, 1, token);
      std::vector<float> k = ToFloat(Get<Half>(cache.k[0])), v = ToFloat(Get<Half>(cache.v[0]));
      std::copy_n(ToFloat(ToHalf(b.k)).begin(), 128, k.begin() + token * 128);
      std::copy_n(ToFloat(ToHalf(b.v)).begin(), 128, v.begin() + token * 128);
      Set(q, b.q);
      Set(k_row, b.k);
      Set(v_row, b.v);
      Set(idx, b.cells);
      Set(mask, b.mask);
      ASSERT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
      ASSERT_LE(Nmse(Get<float>(out), Exact(d, b, k, v)), kExactBound) << type << " token " << token;
    }
  }
}

// imatrix and others watch nodes: the scheduler then hands over our split in pieces.
TEST(Mechanics, EvalCallbackCutsGraphsInPieces) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  const ggml_backend_ptr ours = NewBackend({"k4v4"}), cpu = NewCpu();
  Cache cache(OurType(), d);
  Random random(Seed(840));
  const Batch b = Simple(d, random, 200, 0);
  Graph g;
  ggml_tensor* q = g.OnCpu(Queries(g, b, d.dk));
  ggml_build_forward_expand(g.get(), q);
  ggml_build_forward_expand(g.get(), SetRows(g, cache.k[0], b, b.k));
  ggml_build_forward_expand(g.get(), SetRows(g, cache.v[0], b, b.v));
  ggml_tensor* fa = Attend(g, b, q, CacheView(g, cache.k[0], d.dk, d.n_head_kv, b),
                           CacheView(g, cache.v[0], d.dv, d.n_head_kv, b));
  ggml_tensor* out = g.OnCpu(fa);
  g.Add(out);
  static int asked = 0;
  asked = 0;
  ASSERT_EQ(g.Compute(ours.get(), cpu.get(),
                      [](ggml_tensor*, bool ask, void*) {
                        asked += ask;
                        return true;
                      }),
            GGML_STATUS_SUCCESS);
  EXPECT_GE(asked, 4);
  EXPECT_EQ(g.BackendOf(fa), ours.get());
  const std::vector<double> exact = Exact(d, b, [&] {
    std::vector<float> k(256 * 128);
    const std::vector<float> rows = ToFloat(ToHalf(b.k));
    std::copy(rows.begin(), rows.end(), k.begin());
    return k;
  }(), [&] {
    std::vector<float> v(256 * 128);
    const std::vector<float> rows = ToFloat(ToHalf(b.v));
    std::copy(rows.begin(), rows.end(), v.begin());
    return v;
  }());
  EXPECT_LE(Nmse(Get<float>(out), exact), kExactBound);
}

TEST(Mechanics, AbortCallbackIsPolled) {
  const Dims d{.n_cells = 256};
  const ggml_backend_ptr ours = NewBackend();
  Cache cache(OurType(), d);
  Random random(Seed(850));
  const Batch b = Simple(d, random, 8, 0);
  auto set = Proc<ggml_backend_set_abort_callback_t>(Device(), "ggml_backend_set_abort_callback");
  Graph g;
  ggml_build_forward_expand(g.get(), SetRows(g, cache.k[0], b, b.k));
  bool stop = true;
  set(ours.get(), [](void* data) { return *static_cast<bool*>(data); }, &stop);
  EXPECT_EQ(g.Compute(ours.get()), GGML_STATUS_ABORTED);
  stop = false;
  EXPECT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
  set(ours.get(), nullptr, nullptr);
  EXPECT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
}

TEST(Mechanics, ThreadsDoNotChangeTheAnswer) {
  const Dims d{.dk = 80, .dv = 96, .n_head_kv = 3, .n_cells = 512};
  for (const char* type : kTypes) {
    std::vector<float> one;
    for (int n_threads : {1, 2, kManyThreads, 7}) {
      const ggml_backend_ptr ours = NewBackend({type}, n_threads), cpu = NewCpu();
      Cache cache(OurType(), d);
      Random random(Seed(860));
      RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, Simple(d, random, 300, 0));
      RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, Simple(d, random, 33, 300));
      const std::vector<float> out = RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, Simple(d, random, 1, 333));
      if (one.empty()) one = out;
      EXPECT_LE(Nmse(out, one), 1e-10) << type << ", " << n_threads << " threads";
      if (kManyThreads == 1) break;
    }
  }
}

// llama-server decodes on a worker thread, and not always on the same.
TEST(Mechanics, CallsFromChangingThreads) {
  Play play({"k4v4", 32, 4, 32}, {.n_head_kv = 2}, 2, Seed(870), kManyThreads);
  for (int n_tok : {100, 33, 33, 1, 1, 3})
    std::thread([&] { play.Do(Next(n_tok, n_tok == 33 ? Way::kSched : Way::kDirect)); }).join();
  play.Do(Next(1, Way::kDirect));
  play.Check();
}

TEST(Mechanics, ContextsAtOnceOnTheirOwnThreads) {
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 3; ++i)
    threads.emplace_back([i] {
      const Dims d{.dk = 64 + 16 * i, .dv = 64, .n_head_kv = 2, .n_cells = 256};
      ggml_backend_ptr ours(ggml_backend_dev_init(Device(), nullptr));
      const ggml_backend_ptr cpu = NewCpu();
      Cache cache(OurType(), d);
      Random random(880 + i);
      for (int at = 0; at < 200; at += 20) {
        const Batch b = Simple(d, random, 20, at);
        std::vector<float> k = ToFloat(Get<Half>(cache.k[0])), v = ToFloat(Get<Half>(cache.v[0]));
        const std::vector<float> new_k = ToFloat(ToHalf(b.k)), new_v = ToFloat(ToHalf(b.v));
        std::copy(new_k.begin(), new_k.end(), k.begin() + at * d.n_embd_k());
        std::copy(new_v.begin(), new_v.end(), v.begin() + at * d.n_embd_v());
        EXPECT_LE(Nmse(RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b), Exact(d, b, k, v)), kExactBound);
        Stats();
      }
    });
  for (std::thread& t : threads) t.join();
}

TEST(Mechanics, BackendGoesBeforeItsBuffers) {
  const Dims d{.n_cells = 256};
  Random random(Seed(890));
  const ggml_backend_ptr cpu = NewCpu();
  Cache first(OurType(), d), second(OurType(), d);
  ggml_backend_ptr ours = NewBackend({"k4v4"});
  const Batch b = Simple(d, random, 100, 0);
  RunLayer(Way::kSched, ours.get(), cpu.get(), first, b);
  ours.reset();
  const std::vector<std::uint8_t> rows = Get(first.k[0]);
  EXPECT_FALSE(std::all_of(rows.begin(), rows.end(), [](std::uint8_t x) { return x == 0; }));
  // Another context reads the same cache, as a draft model may.
  ours = NewBackend({"f16"});
  ggml_backend_ptr other = NewBackend({"f16"});
  Batch read = b;
  read.cells.clear();
  const std::vector<float> one = RunLayer(Way::kDirect, other.get(), cpu.get(), first, read);
  EXPECT_EQ(one, RunLayer(Way::kDirect, ours.get(), cpu.get(), first, read));
  RunLayer(Way::kDirect, ours.get(), cpu.get(), second, b);
  other.reset();
  ours.reset();
  EXPECT_EQ(Get(first.k[0]), rows);
}

}  // namespace
}  // namespace kvtamp::ggml_plugin::test
