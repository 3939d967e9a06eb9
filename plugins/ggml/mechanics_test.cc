// How graphs reach the plug-in: masks of every form, reuse, fragments, threads, failures, teardown.
#include <atomic>
#include <thread>

#include "plugins/ggml/test_graph.h"

namespace kvtamp::ggml_plugin::test {
namespace {

TEST(Graphs, MaskForEachHead) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  const ggml_backend_ptr ours = NewBackend(), cpu = NewCpu();
  for (int heads : {2, 4}) {  // 2: heads 0, 2 share a mask, 1, 3 the other
    Cache a(OurType(), d), c(CpuType(), d);
    Random random(Seed(800));
    const Batch b = Causal(d, random, 40, 0);
    RunLayer(Way::kDirect, ours.get(), cpu.get(), a, b);
    RunLayer(Way::kDirect, cpu.get(), cpu.get(), c, b);
    std::vector<Half> mask(static_cast<std::size_t>(heads * 40 * 256),
                           ggml_fp32_to_fp16(-INFINITY));
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

TEST(Graphs, NoMaskSeesEveryCellBelowNkv) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  for (const char* type : kTypes)
    for (int n_kv : {256, 128, 100, 1}) {
      const ggml_backend_ptr ours = NewBackend({type, 32, 4, 0}), cpu = NewCpu();
      Cache a(OurType(), d);
      Random random(Seed(810));
      RunLayer(Way::kDirect, ours.get(), cpu.get(), a, Causal(d, random, 256, 0));
      Batch b = Causal(d, random, 3, 0);
      b.cells.clear();
      b.n_kv = n_kv;
      b.mask.assign(std::size_t{3} * static_cast<std::size_t>(n_kv), Half{0});
      const std::vector<double> exact = Exact(d, b, Get<Half>(a.k[0]), Get<Half>(a.v[0]));
      b.mask.clear();
      EXPECT_LE(Nmse(RunLayer(Way::kDirect, ours.get(), cpu.get(), a, b), exact), kExactBound)
          << type << ", n_kv " << n_kv;
    }
}

// A masked cell is never looked at: it may hold anything, as cells of dead sequences do.
TEST(Graphs, MaskedCellsMayHoldNonsense) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  for (const char* type : kTypes)
    for (float nonsense : {NAN, INFINITY, 300.0f}) {
      const ggml_backend_ptr ours = NewBackend({type, 32, 4, 0}), cpu = NewCpu();
      Cache cache(OurType(), d);
      Random random(Seed(815));
      Batch b = Causal(d, random, 200, 0);
      b.rows_f16 = true;  // so that nothing is clamped on the way in
      for (std::size_t row : {0u, 40u, 41u, 77u, 150u, 199u}) {
        for (std::size_t i = 0; i < 128; i += 3) b.k[row * 128 + i] = b.v[row * 128 + i] = nonsense;
        for (std::size_t t = 0; t < 200; ++t) b.mask[t * 256 + row] = ggml_fp32_to_fp16(-INFINITY);
      }
      std::vector<Half> k(256 * 128), v(256 * 128);
      Put(b, b.k, k);
      Put(b, b.v, v);
      EXPECT_LE(Nmse(RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b), Exact(d, b, k, v)),
                kExactBound)
          << type << ", " << nonsense;
      b.cells.clear();  // again over what was coded, many queries and one
      for (int n_tok : {200, 1}) {
        b.n_tok = n_tok;
        b.q = random.Normals(std::size_t{4 * 64} * static_cast<std::size_t>(n_tok));
        b.mask.erase(b.mask.begin(), b.mask.end() - n_tok * 256);
        const std::vector<double> exact = Exact(d, b, Get<Half>(cache.k[0]), Get<Half>(cache.v[0]));
        // One query's scales are folded into it and rounded to 15 bits of the largest, and a
        // channel's scale follows its largest value, dead or alive.
        const double bound = nonsense == 300.0f ? 3e-5 : kExactBound;
        EXPECT_LE(Nmse(RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b), exact), bound)
            << type << ", " << nonsense << ", " << n_tok << " queries";
      }
    }
}

// The host's own cache would hold infinities.
TEST(Graphs, RowsTooLargeForF16AreClamped) {
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

TEST(Graphs, CellOutsideTheCacheFails) {
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

TEST(Graphs, NodesWithoutComputeFlagAndEmptyNodesDoNothing) {
  const Dims d{.n_cells = 256};
  const ggml_backend_ptr ours = NewBackend();
  Cache cache(OurType(), d);
  Random random(Seed(820));
  Batch b = Causal(d, random, 8, 0);
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
  g.Add(ggml_set_rows(
      g.ctx(), ggml_view_2d(g.ctx(), cache.k[0], 128, 256, cache.k[0]->nb[1], 0),
      ggml_view_2d(g.ctx(), g.Input(GGML_TYPE_F32, {128, 1}, random.Normals(128)), 128, 0, 512, 0),
      ggml_view_1d(g.ctx(), g.Input(GGML_TYPE_I64, {1}, std::vector<std::int64_t>{5}), 0, 0)));
  const std::vector<std::uint8_t> before = Get(cache.k[0]);
  ASSERT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
  EXPECT_EQ(Get(cache.k[0]), before);
  EXPECT_EQ(UncompressedBytes(), 0u);
}

// A host keeps a graph for many tokens and only fills in new inputs.
TEST(Graphs, GraphIsReused) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  for (const char* type : {"f16", "k4v4"}) {
    const ggml_backend_ptr ours = NewBackend({type, 16, 4, 16}), cpu = NewCpu();
    Cache cache(OurType(), d);
    Random random(Seed(830));
    Batch b = Causal(d, random, 1, 0);
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
        ggml_permute(g.ctx(), CacheView(g, cache.v[0], d.dv, d.n_head_kv, b), 0, 2, 1, 3), mask,
        b.scale, 0, 0);
    g.Add(out);
    for (int token = 0; token < 100; ++token) {
      b = Causal(d, random, 1, token);
      std::vector<Half> k = Get<Half>(cache.k[0]), v = Get<Half>(cache.v[0]);
      Put(b, b.k, k);
      Put(b, b.v, v);
      Set(q, b.q);
      Set(k_row, b.k);
      Set(v_row, b.v);
      Set(idx, b.cells);
      Set(mask, b.mask);
      ASSERT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
      ASSERT_LE(Nmse(Get<float>(out), Exact(d, b, k, v)), kExactBound)
          << type << " token " << token;
    }
  }
}

// imatrix and others watch nodes: the scheduler then hands over our split in pieces.
TEST(Graphs, EvalCallbackCutsGraphsInPieces) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  const ggml_backend_ptr ours = NewBackend({"k4v4"}), cpu = NewCpu();
  Cache cache(OurType(), d);
  Random random(Seed(840));
  const Batch b = Causal(d, random, 200, 0);
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
  std::vector<Half> k(256 * 128), v(256 * 128);
  Put(b, b.k, k);
  Put(b, b.v, v);
  EXPECT_LE(Nmse(Get<float>(out), Exact(d, b, k, v)), kExactBound);
}

TEST(Graphs, AbortCallbackIsPolled) {
  const Dims d{.n_cells = 256};
  const ggml_backend_ptr ours = NewBackend();
  Cache cache(OurType(), d);
  Random random(Seed(850));
  const Batch b = Causal(d, random, 8, 0);
  auto set = Proc<ggml_backend_set_abort_callback_t>(Device(), "ggml_backend_set_abort_callback");
  Graph g;
  ggml_build_forward_expand(g.get(), SetRows(g, cache.k[0], b, b.k));
  bool stop = true;
  set(
      ours.get(), [](void* data) { return *static_cast<bool*>(data); }, &stop);
  EXPECT_EQ(g.Compute(ours.get()), GGML_STATUS_ABORTED);
  stop = false;
  EXPECT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
  set(ours.get(), nullptr, nullptr);
  EXPECT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
}

TEST(Graphs, ThreadsDoNotChangeTheAnswer) {
  const Dims d{.dk = 80, .dv = 96, .n_head_kv = 3, .n_cells = 512};
  for (const char* type : kTypes) {
    std::vector<float> one;
    for (int n_threads : {1, 2, 3, 7}) {
      const ggml_backend_ptr ours = NewBackend({type}, n_threads), cpu = NewCpu();
      Cache cache(OurType(), d);
      Random random(Seed(860));
      RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, Causal(d, random, 300, 0));
      RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, Causal(d, random, 33, 300));
      const std::vector<float> out =
          RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, Causal(d, random, 1, 333));
      if (one.empty()) one = out;
      EXPECT_LE(Nmse(out, one), 1e-10) << type << ", " << n_threads << " threads";
    }
  }
}

TEST(Graphs, ContextsAtOnceOnTheirOwnThreads) {
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 3; ++i)
    threads.emplace_back([i] {
      const Dims d{.dk = 64 + 16 * i, .dv = 64, .n_head_kv = 2, .n_cells = 256};
      ggml_backend_ptr ours(ggml_backend_dev_init(Device(), nullptr));
      const ggml_backend_ptr cpu = NewCpu();
      Cache cache(OurType(), d);
      Random random(880 + i);
      for (int at = 0; at < 200; at += 20) {
        const Batch b = Causal(d, random, 20, at);
        std::vector<Half> k = Get<Half>(cache.k[0]), v = Get<Half>(cache.v[0]);
        Put(b, b.k, k);
        Put(b, b.v, v);
        EXPECT_LE(Nmse(RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b), Exact(d, b, k, v)),
                  kExactBound);
        Stats();
      }
    });
  for (std::thread& t : threads) t.join();
}

// A host asks how full the cache is from wherever it likes, also while caches come and go.
TEST(Graphs, SnapshotsFromAnotherThread) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  const ggml_backend_ptr ours = NewBackend({"k4v4", 16, 4, 0}), cpu = NewCpu();
  std::atomic<bool> stop{false};
  std::uint64_t most_cells = 0, most_plain = 0;
  std::thread watcher([&] {
    while (!stop) {
      const nlohmann::json stats = Stats();
      most_cells = std::max<std::uint64_t>(most_cells, stats["cells_used"]);
      most_plain = std::max<std::uint64_t>(most_plain, stats["uncompressed_bytes"]);
    }
  });
  Random random(Seed(885));
  for (int i = 0; i < 20; ++i) {
    Cache cache(OurType(), d);
    for (int at = 0; at < 100; at += 20)
      RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, Causal(d, random, 20, at));
    ggml_backend_buffer_clear(cache.buffer.get(), 0);
    Graph g;  // one element: the layer becomes plain
    ggml_build_forward_expand(
        g.get(), ggml_set_rows(g.ctx(), ggml_reshape_2d(g.ctx(), cache.k[0], 1, 128 * 256),
                               g.Input(GGML_TYPE_F32, {1, 1}, std::vector<float>{1}),
                               g.Input(GGML_TYPE_I64, {1}, std::vector<std::int64_t>{i})));
    ASSERT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
  }
  stop = true;
  watcher.join();
  EXPECT_LE(most_cells, 100u);
  EXPECT_LE(most_plain, 2u * 128 * 256 * 2);
  EXPECT_EQ(Stats()["cells_used"], 0);
}

// Gemma 3n: a later layer attends over an earlier layer's cache, with queries normed by a weight of
// the CPU's. Attention must come to us, or the host turns flash attention off for all layers.
TEST(Graphs, LayersThatShareAnEarlierLayersCache) {
  const Dims d{.n_head_kv = 2, .n_cells = 256, .n_layers = 2};
  const ggml_backend_ptr ours = NewBackend({"f16", 32, 4, 32}), cpu = NewCpu();
  for (const bool rope : {false, true}) {
    for (const int layer : {1, 2}) {  // 1 has a cache of its own: its queries are the CPU's
      Cache cache(OurType(), d);
      Random random(Seed(886));
      RunLayer(Way::kSched, ours.get(), cpu.get(), cache, Causal(d, random, 100, 0));
      Batch b = Causal(d, random, 3, 97);
      b.cells.clear();
      Graph g;
      ggml_tensor* weight = g.Input(GGML_TYPE_F32, {64}, std::vector<float>(64, 1), true);
      ggml_format_name(weight, "blk.%d.attn_q_norm.weight", layer);
      ggml_tensor* q = ggml_mul(g.ctx(), g.OnCpu(Queries(g, b, d.dk)), weight);
      ggml_tensor* normed = q;
      if (rope)
        q = ggml_rope(g.ctx(), q, g.Input(GGML_TYPE_I32, {3}, std::vector<std::int32_t>(3, 0)), 64,
                      0);
      ggml_tensor* fa = Attend(g, b, q, CacheView(g, cache.k[0], d.dk, d.n_head_kv, b),
                               CacheView(g, cache.v[0], d.dv, d.n_head_kv, b));
      ggml_tensor* out = g.OnCpu(fa);
      g.Add(out);
      ASSERT_EQ(g.Compute(Way::kSched, ours.get(), cpu.get()), GGML_STATUS_SUCCESS);
      EXPECT_EQ(g.BackendOf(normed) == ours.get(), layer == 2);
      if (layer == 2) {
        EXPECT_EQ(g.BackendOf(q), ours.get());
        EXPECT_EQ(g.BackendOf(fa), ours.get());
        EXPECT_LE(Nmse(Get<float>(out), Exact(d, b, Get<Half>(cache.k[0]), Get<Half>(cache.v[0]))),
                  kF16Bound);
      }
    }
  }
}

TEST(Graphs, BackendGoesBeforeItsBuffers) {
  const Dims d{.n_cells = 256};
  Random random(Seed(890));
  const ggml_backend_ptr cpu = NewCpu();
  Cache first(OurType(), d), second(OurType(), d);
  ggml_backend_ptr ours = NewBackend({"k4v4"});
  const Batch b = Causal(d, random, 100, 0);
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
