// Latent attention (MLA): one row per token, V is the first channels of K.
#include "plugins/ggml/test_graph.h"

namespace kvtamp::ggml_plugin::test {
namespace {

const Dims kDims{.dk = 576, .dv = 0, .n_head_kv = 1, .n_cells = 512};
constexpr std::int64_t kDimV = 512;

std::vector<float> RunLatent(Way way, ggml_backend_t ours, ggml_backend_t cpu, const Cache& cache,
                             const Batch& b, std::int64_t dv = kDimV) {
  Graph g;
  ggml_tensor* q = Queries(g, b, kDims.dk);
  if (way == Way::kSched) q = g.OnCpu(q);
  ggml_build_forward_expand(g.get(), q);
  if (!b.cells.empty()) ggml_build_forward_expand(g.get(), SetRows(g, cache.k[0], b, b.k));
  ggml_tensor* k = CacheView(g, cache.k[0], kDims.dk, 1, b);
  ggml_tensor* v = ggml_view_4d(g.ctx(), k, dv, 1, b.n_kv, b.ns, k->nb[1], k->nb[2], k->nb[3], 0);
  ggml_tensor* out = Attend(g, b, q, k, v);
  if (way == Way::kSched) out = g.OnCpu(out);
  g.Add(out);
  EXPECT_EQ(g.Compute(way, ours, cpu), GGML_STATUS_SUCCESS);
  return Get<float>(out);
}

// In double, over the rows as the cache says it holds them.
std::vector<double> Truth(const Batch& b, const std::vector<Half>& rows, std::int64_t dv = kDimV) {
  Dims d = kDims;
  d.dv = dv;
  std::vector<Half> v;
  for (std::size_t at = 0; at < rows.size(); at += static_cast<std::size_t>(kDims.dk))
    v.insert(v.end(), rows.begin() + static_cast<std::ptrdiff_t>(at),
             rows.begin() + static_cast<std::ptrdiff_t>(at) + dv);
  return Exact(d, b, rows, v);
}

TEST(Latent, AttendsOverWhatItHolds) {
  for (const char* type : kTypes) {
    for (Way way : {Way::kDirect, Way::kSched}) {
      SCOPED_TRACE(type);
      Cache cache(OurType(), kDims);
      const ggml_backend_ptr ours = NewBackend({type, 32, 4, 32}), cpu = NewCpu();
      Random random(Seed(30));
      int at = 0;
      for (int n_tok : {150, 1, 5, 100, 1}) {
        Batch b = Causal(kDims, random, n_tok, at, 16);
        at += n_tok;
        const std::vector<float> got = RunLatent(way, ours.get(), cpu.get(), cache, b);
        if (n_tok > 1) continue;  // a lone query's rows stay as they are for the moment
        EXPECT_LE(Nmse(got, Truth(b, Get<Half>(cache.k[0]))), kExactBound);
      }
      EXPECT_EQ(UncompressedBytes(), 0u);
      if (std::string(type) != "f16") {
        EXPECT_GT(Stats()["pages"]["sealed"], 0);
      }
    }
  }
}

TEST(Latent, CodingCostsWhatKeysCost) {
  for (const char* type : {"k8v8", "k4v4"}) {
    Cache cache(OurType(), kDims);
    const ggml_backend_ptr ours = NewBackend({type, 64, 4, 0}), cpu = NewCpu();
    Random random(Seed(31));
    std::vector<Half> rows(static_cast<std::size_t>(kDims.dk * kDims.n_cells));
    for (int at = 0; at < 448; at += 64) {
      const Batch b = Causal(kDims, random, 64, at, 16);
      RunLatent(Way::kDirect, ours.get(), cpu.get(), cache, b);
      Put(b, b.k, rows);
    }
    Batch b = Causal(kDims, random, 1, 448, 16);
    Put(b, b.k, rows);
    const double error =
        Nmse(RunLatent(Way::kDirect, ours.get(), cpu.get(), cache, b), Truth(b, rows));
    const double least = std::string(type) == "k8v8" ? 1e-6 : 3e-4;
    EXPECT_GT(error, least) << type;
    EXPECT_LT(error, 300 * least) << type;
  }
}

// DeepSeek-V4's raw cache: V is all of K.
TEST(Latent, ValuesAreWholeKeys) {
  Cache cache(OurType(), kDims);
  const ggml_backend_ptr ours = NewBackend({"k8v8", 32, 4, 0}), cpu = NewCpu();
  Random random(Seed(32));
  RunLatent(Way::kDirect, ours.get(), cpu.get(), cache, Causal(kDims, random, 200, 0, 4), kDims.dk);
  const Batch b = Causal(kDims, random, 1, 200, 4);
  const std::vector<float> got = RunLatent(Way::kDirect, ours.get(), cpu.get(), cache, b, kDims.dk);
  EXPECT_LE(Nmse(got, Truth(b, Get<Half>(cache.k[0]), kDims.dk)), kExactBound);
  EXPECT_EQ(UncompressedBytes(), 0u);
}

// The rotary part lies behind the latent one: values do not turn.
TEST(Latent, KShiftTurnsTheRotaryPartAlone) {
  for (const char* type : kTypes) {
    SCOPED_TRACE(type);
    Cache cache(OurType(), kDims), plain(CpuType(), kDims);
    const ggml_backend_ptr ours = NewBackend({type, 32, 4, 32}), cpu = NewCpu();
    Random random(Seed(33));
    RunLatent(Way::kDirect, ours.get(), cpu.get(), cache, Causal(kDims, random, 300, 0, 4));
    const std::vector<Half> before = Get<Half>(cache.k[0]);
    Set(plain.k[0], before);
    std::vector<std::int32_t> shifts(512, -5);
    std::fill_n(shifts.begin(), 70, 0);
    for (const auto& [c, backend] : {std::pair(&cache, ours.get()), std::pair(&plain, cpu.get())}) {
      Graph g;
      ggml_tensor* k = ggml_view_3d(g.ctx(), c->k[0], 64, 1, 512, 576 * 2, 576 * 2, kDimV * 2);
      g.Add(ggml_rope_ext_inplace(g.ctx(), k, g.Input(GGML_TYPE_I32, {512}, shifts), nullptr, 64,
                                  GGML_ROPE_TYPE_NORMAL, 2048, 1e4f, 1, 0, 1, 32, 1));
      ASSERT_EQ(g.Compute(backend), GGML_STATUS_SUCCESS);
    }
    EXPECT_LE(Nmse(ToFloat(Get<Half>(cache.k[0])), ToFloat(Get<Half>(plain.k[0]))), 1e-7);
    const Batch b = Causal(kDims, random, 1, 300, 4);
    const std::vector<float> got = RunLatent(Way::kDirect, ours.get(), cpu.get(), cache, b);
    EXPECT_LE(Nmse(got, Truth(b, Get<Half>(cache.k[0]))), kExactBound);
    EXPECT_EQ(UncompressedBytes(), 0u);
  }
}

}  // namespace
}  // namespace kvtamp::ggml_plugin::test
