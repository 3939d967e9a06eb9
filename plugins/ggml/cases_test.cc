// Faults that users of other KV caches met in public, as checks of ours: shapes of models,
// arithmetic of attention, positions. The names are those of the faults' list that the project
// keeps (GE-1, NU-2, …).
#include "plugins/ggml/test_graph.h"

namespace kvtamp::ggml_plugin::test {
namespace {

// GE-1: head sizes that are no multiple of a block were refused by assertion, or gave NaN.
TEST(Case, GE1HeadSizesOfEveryKind) {
  for (std::int64_t dim : {40, 64, 72, 80, 96, 100, 112, 128, 192, 256, 512, 576})
    for (std::int64_t heads : {1, 2, 3, 8})
      for (const char* type : kTypes) {
        SCOPED_TRACE(std::to_string(dim) + " x " + std::to_string(heads) + ", " + type);
        const Dims d{.dk = dim, .dv = dim, .n_head_kv = heads, .n_cells = 512};
        const ggml_backend_ptr ours = NewBackend({type, 32, 4, 32}), cpu = NewCpu();
        Random random(Seed(60));
        Cache cache(OurType(), d);
        for (int at = 0; at < 299; at += 100)
          RunLayer(Way::kDirect, ours.get(), cpu.get(), cache,
                   Causal(d, random, std::min(100, 299 - at), at));
        const Batch b = Causal(d, random, 1, 299);
        const std::vector<float> got = RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b);
        // 100 is no multiple of 8: kept as the host lays it out and computed by its code, said
        // once.
        const bool plain = dim % 8 != 0;
        EXPECT_EQ(UncompressedBytes() != 0, plain);
        EXPECT_LE(Nmse(got, Exact(d, b, Get<Half>(cache.k[0]), Get<Half>(cache.v[0]))),
                  plain ? kCpuBound : kExactBound);
      }
}

// GE-5: models of more layers overran a fixed table.
TEST(Case, GE5ManyLayersAndStreams) {
  for (const auto& [layers, streams] : {std::pair(1, 1), std::pair(2, 64), std::pair(61, 16),
                                        std::pair(128, 4), std::pair(512, 1)}) {
    SCOPED_TRACE(std::to_string(layers) + " layers");
    const Dims d{.n_head_kv = 1, .n_cells = 256, .n_streams = streams, .n_layers = layers};
    const ggml_backend_ptr ours = NewBackend({"k4v4", 16, 0, 0}), cpu = NewCpu();
    Random random(Seed(61));
    Cache cache(OurType(), d);
    for (int il : {0, layers / 2, layers - 1}) {
      Batch b = Causal(d, random, 40, 0);
      b.s0 = streams - 1;
      for (std::int64_t& cell : b.cells) cell += b.s0 * d.n_cells;
      RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b, il);
      b.cells.clear();
      const auto l = static_cast<std::size_t>(il);
      const std::vector<float> got = RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b, il);
      EXPECT_LE(Nmse(got, Exact(d, b, Get<Half>(cache.k[l]), Get<Half>(cache.v[l]))), kExactBound);
    }
  }
}

// NU-1: rows with every key masked came out NaN, since -inf minus -inf was taken.
TEST(Case, NU1RowsThatSeeNothing) {
  for (const char* type : kTypes) {
    SCOPED_TRACE(type);
    const Dims d{.n_cells = 256};
    const ggml_backend_ptr ours = NewBackend({type, 16, 0, 0}), cpu = NewCpu();
    Random random(Seed(62));
    Cache cache(OurType(), d);
    RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, Causal(d, random, 256, 0));
    Batch b = Causal(d, random, 4, 252);
    b.cells.clear();
    Batch masked = b;
    std::fill_n(masked.mask.begin() + 2 * 256, 256, ggml_fp32_to_fp16(-INFINITY));
    const std::vector<float> all = RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b);
    const std::vector<float> got = RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, masked);
    const std::size_t n = all.size() / 4;
    for (std::size_t i = 0; i < all.size(); ++i)
      ASSERT_EQ(got[i], i / n == 2 ? 0 : all[i]) << "row " << i / n;

    Batch one = Causal(d, random, 1, 255);  // a single open cell: its value comes out
    one.cells.clear();
    std::fill_n(one.mask.begin(), 255, ggml_fp32_to_fp16(-INFINITY));
    const std::vector<float> out = RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, one);
    const std::vector<float> v = ToFloat(Get<Half>(cache.v[0]));
    std::vector<double> want;
    for (std::int64_t h = 0; h < one.n_head; ++h)
      for (std::int64_t i = 0; i < d.dv; ++i)
        want.push_back(v[static_cast<std::size_t>(255 * d.n_embd_v() + h / 2 * d.dv + i)]);
    EXPECT_LE(Nmse(out, want), std::string(type) == "f16" ? 1e-10 : 1e-7);
  }
}

// NU-2: learned sinks were dropped on some cache types.
TEST(Case, NU2SinksInTheDenominator) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  for (const char* type : kTypes) {
    for (int n_threads : {1, 2}) {
      const ggml_backend_ptr ours = NewBackend({type, 16, 0, 0}, n_threads), cpu = NewCpu();
      Random random(Seed(63));
      Cache cache(OurType(), d);
      Batch b = Causal(d, random, 1, 0, 4);
      std::fill(b.q.begin(), b.q.end(), 0.0f);
      std::fill(b.v.begin(), b.v.end(), 1.0f);
      b.sinks = {0, std::log(3.0f), -1e30f, std::log(7.0f)};
      const std::vector<float> out = RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b);
      const float want[] = {0.5f, 0.25f, 1.0f, 0.125f};
      for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], want[i / 64], 1e-6) << type;
    }
  }
}

// NU-4: bad values must be seen, not hidden, and must not spoil their neighbours.
TEST(Case, NU4ValuesThatF16CannotHold) {
  for (const char* type : kTypes) {
    SCOPED_TRACE(type);
    const Dims d{.n_cells = 512};
    const ggml_backend_ptr ours = NewBackend({type, 64, 4, 0}), cpu = NewCpu();
    std::vector<Half> rows[2];
    for (const bool bad : {false, true}) {
      Random random(Seed(64));
      Cache cache(OurType(), d);
      Batch b = Causal(d, random, 256, 0);
      if (bad) {
        b.k[70 * 128 + 5] = INFINITY;
        b.k[71 * 128 + 9] = NAN;
        b.k[200 * 128] = 7e4f;
      }
      RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b);
      EXPECT_EQ(Stats()["values_clamped_total"], bad ? 3 : 0);
      rows[bad] = Get<Half>(cache.k[0]);
    }
    // The rule: beyond f16 is clamped to 65504, NaN is 0, and such a row keeps its other values as
    // they were; the rest of its page is coded without it.
    EXPECT_EQ(rows[1][70 * 128 + 5], ggml_fp32_to_fp16(65504));
    EXPECT_EQ(rows[1][71 * 128 + 9], 0);
    EXPECT_EQ(rows[1][200 * 128], ggml_fp32_to_fp16(65504));
    for (std::size_t bad : {70u, 71u, 200u})
      std::copy_n(rows[0].begin() + static_cast<std::ptrdiff_t>(bad * 128), 128,
                  rows[1].begin() + static_cast<std::ptrdiff_t>(bad * 128));
    if (std::string(type) == "f16") {
      EXPECT_EQ(rows[1], rows[0]);
    } else {
      EXPECT_LE(Nmse(ToFloat(rows[1]), ToFloat(rows[0])),
                std::string(type) == "k8v8" ? 1e-4 : 1e-2);
    }
  }
}

// SC-1: a copy asserted once a cache tensor passed 2^31 bytes.
TEST(Case, SC1TensorsBeyondTwoGigabytes) {
  const Dims d{.dk = 128, .dv = 128, .n_head_kv = 8, .n_cells = 1048600};
  const ggml_backend_ptr ours = NewBackend({"f16"});
  Random random(Seed(65));
  Cache cache(OurType(), d);
  const std::vector<std::int64_t> cells = {0, 1048575, 1048576, 1048599};
  const std::vector<Half> rows = ToHalf(random.Normals(cells.size() * 1024));
  for (std::size_t i = 0; i < cells.size(); ++i)
    ggml_backend_tensor_set(cache.k[0], rows.data() + i * 1024,
                            static_cast<std::size_t>(cells[i]) * 2048, 2048);
  std::vector<Half> row(1024);
  const auto read = [&](std::int64_t cell) {
    ggml_backend_tensor_get(cache.k[0], row.data(), static_cast<std::size_t>(cell) * 2048, 2048);
    return row;
  };
  for (std::size_t i = 0; i < cells.size(); ++i)
    EXPECT_TRUE(std::equal(rows.begin() + static_cast<std::ptrdiff_t>(i * 1024),
                           rows.begin() + static_cast<std::ptrdiff_t>((i + 1) * 1024),
                           read(cells[i]).begin()));
  for (std::int64_t cell : {1, 1048574, 1048577, 1048598})
    EXPECT_EQ(read(cell), std::vector<Half>(1024, 0)) << cell;
}

// SH-2: a shift died where the head size does not divide by 64, or turned the wrong columns.
TEST(Case, SH2ShiftsOfEveryHeadSizeAndOrder) {
  for (std::int64_t dim : {64, 80, 96, 112, 128, 192, 256})
    for (int mode : {GGML_ROPE_TYPE_NORMAL, GGML_ROPE_TYPE_NEOX})
      for (std::int64_t n_rot : {dim, std::int64_t{32}})
        for (const char* type : kTypes) {
          SCOPED_TRACE(std::to_string(dim) + ", " + std::to_string(n_rot) + ", " + type);
          const Dims d{.dk = dim, .dv = dim, .n_head_kv = 2, .n_cells = 256};
          const ggml_backend_ptr ours = NewBackend({type, 32, 4, 0}), cpu = NewCpu();
          Random random(Seed(66));
          Cache cache(OurType(), d), plain(CpuType(), d);
          RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, Causal(d, random, 128, 0));
          const std::vector<Half> before = Get<Half>(cache.k[0]), v = Get<Half>(cache.v[0]);
          Set(plain.k[0], before);
          for (const auto& [c, backend] :
               {std::pair(&cache, ours.get()), std::pair(&plain, cpu.get())}) {
            Graph g;
            ggml_tensor* k = ggml_view_3d(g.ctx(), c->k[0], n_rot, 2, 256,
                                          ggml_row_size(GGML_TYPE_F16, dim), c->k[0]->nb[1], 0);
            g.Add(ggml_rope_ext_inplace(
                g.ctx(), k, g.Input(GGML_TYPE_I32, {256}, std::vector<std::int32_t>(256, -16)),
                nullptr, static_cast<int>(n_rot), mode, 2048, 1e4f, 1, 0, 1, 32, 1));
            ASSERT_EQ(g.Compute(backend), GGML_STATUS_SUCCESS);
          }
          const std::vector<Half> after = Get<Half>(cache.k[0]);
          EXPECT_LE(Nmse(ToFloat(after), ToFloat(Get<Half>(plain.k[0]))), 1e-6);
          EXPECT_EQ(Get<Half>(cache.v[0]), v);
          for (std::size_t i = 0; i < after.size(); ++i) {
            if (static_cast<std::int64_t>(i) % dim < n_rot) continue;
            ASSERT_EQ(after[i], before[i]);
          }
          EXPECT_EQ(UncompressedBytes(), 0u);
        }
}

// SQ-1: garbage right after cells were moved.
TEST(Case, SQ1MovedCells) {
  for (const char* type : kTypes) {
    const Dims d{.n_cells = 256};
    const ggml_backend_ptr ours = NewBackend({type, 16, 4, 0}), cpu = NewCpu();
    Random random(Seed(67));
    Cache cache(OurType(), d);
    RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, Causal(d, random, 200, 0));
    const std::vector<Half> k = Get<Half>(cache.k[0]), v = Get<Half>(cache.v[0]);
    Graph g;
    for (ggml_tensor* t : {cache.k[0], cache.v[0]})
      g.Add(ggml_cpy(g.ctx(), ggml_view_2d(g.ctx(), t, 128, 64, t->nb[1], 100 * t->nb[1]),
                     ggml_view_2d(g.ctx(), t, 128, 64, t->nb[1], 0)));
    ASSERT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
    const std::vector<Half> k2 = Get<Half>(cache.k[0]), v2 = Get<Half>(cache.v[0]);
    const auto rows = [](std::size_t n) { return static_cast<std::ptrdiff_t>(n * 128); };
    EXPECT_TRUE(std::equal(k2.begin(), k2.begin() + rows(64), k.begin() + rows(100))) << type;
    EXPECT_TRUE(std::equal(v2.begin(), v2.begin() + rows(64), v.begin() + rows(100))) << type;
    EXPECT_TRUE(std::equal(k2.begin() + rows(64), k2.end(), k.begin() + rows(64))) << type;
    Batch b = Causal(d, random, 1, 199);
    b.cells.clear();
    EXPECT_LE(Nmse(RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b), Exact(d, b, k2, v2)),
              kCpuBound);
  }
}

}  // namespace
}  // namespace kvtamp::ggml_plugin::test
