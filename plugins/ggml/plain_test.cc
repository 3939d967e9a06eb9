// What the store cannot hold: such tensors become plain memory, computed by ggml's own code, with
// the answers the CPU backend gives.
#include <functional>

#include "plugins/ggml/test_graph.h"

namespace kvtamp::ggml_plugin::test {
namespace {

// The same node code runs on the same bytes; only threads may cut sums differently.
constexpr double kSame = 1e-12;

const Way kWays[] = {Way::kDirect, Way::kSched};
const char* Name(Way way) { return way == Way::kDirect ? "direct" : "sched"; }

// Builds a graph on our tensors and on the CPU's, and compares what comes out.
using Build = std::function<ggml_tensor*(Graph&, const Cache&)>;
void ExpectSame(Way way, ggml_backend_t ours, ggml_backend_t cpu, const Cache& a, const Cache& c,
                const Build& build) {
  Graph ga, gc;
  ggml_tensor *out_a = build(ga, a), *out_c = build(gc, c);
  if (out_a != nullptr) ga.Add(out_a);
  if (out_c != nullptr) gc.Add(out_c);
  ASSERT_EQ(ga.Compute(way, ours, cpu), GGML_STATUS_SUCCESS);
  ASSERT_EQ(gc.Compute(cpu), GGML_STATUS_SUCCESS);
  if (out_a != nullptr) {
    const std::vector<float> truth = Get<float>(out_c);
    ASSERT_TRUE(std::any_of(truth.begin(), truth.end(), [](float x) { return x != 0; }));
    EXPECT_LE(Nmse(Get<float>(out_a), truth), kSame) << Name(way);
  }
  for (std::size_t i = 0; i < a.k.size(); ++i) EXPECT_EQ(Get(a.k[i]), Get(c.k[i])) << Name(way);
  for (std::size_t i = 0; i < a.v.size(); ++i) EXPECT_EQ(Get(a.v[i]), Get(c.v[i])) << Name(way);
}

void Write(Graph& g, const Cache& c, const Batch& b) {
  ggml_build_forward_expand(g.get(), SetRows(g, c.k[0], b, b.k));
  if (!c.v.empty()) ggml_build_forward_expand(g.get(), SetRows(g, c.v[0], b, b.v));
}

// Whole micro-batches with flash attention over a pair of tensors.
void PlayAttention(Way way, const Cache& a, const Cache& c, const Dims& d, unsigned seed) {
  const ggml_backend_ptr ours = NewBackend({"k4v4", 16, 4, 0}), cpu = NewCpu();
  Random random(seed);
  int at = 0;
  for (int n_tok : {40, 3, 1, 33}) {
    const Batch b = Causal(d, random, n_tok, at, d.n_head_kv * 2);
    at += n_tok;
    ExpectSame(way, ours.get(), cpu.get(), a, c, [&](Graph& g, const Cache& cache) {
      ggml_tensor* q = Queries(g, b, d.dk);
      if (way == Way::kSched) q = g.OnCpu(q);
      ggml_build_forward_expand(g.get(), q);
      Write(g, cache, b);
      ggml_tensor* fa = Attend(g, b, q, CacheView(g, cache.k[0], d.dk, d.n_head_kv, b),
                               CacheView(g, cache.v[0], d.dv, d.n_head_kv, b));
      return way == Way::kSched ? g.OnCpu(fa) : fa;
    });
  }
}

TEST(Plain, CacheTypesOtherThanF16) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  const std::pair<ggml_type, ggml_type> types[] = {
      {GGML_TYPE_Q8_0, GGML_TYPE_Q8_0}, {GGML_TYPE_Q4_0, GGML_TYPE_Q4_0},
      {GGML_TYPE_F32, GGML_TYPE_F32},   {GGML_TYPE_BF16, GGML_TYPE_BF16},
      {GGML_TYPE_Q8_0, GGML_TYPE_F16},  {GGML_TYPE_F16, GGML_TYPE_Q4_0}};
  for (const auto& [tk, tv] : types)
    for (Way way : kWays) {
      SCOPED_TRACE(std::string(ggml_type_name(tk)) + "/" + ggml_type_name(tv) + " " + Name(way));
      Cache a(OurType(), d, tk, tv), c(CpuType(), d, tk, tv);
      PlayAttention(way, a, c, d, Seed(1));
      EXPECT_EQ(UncompressedBytes(), ggml_nbytes(a.k[0]) + ggml_nbytes(a.v[0]));
      // State goes in and out as for any tensor.
      const std::vector<std::uint8_t> k = Get(a.k[0]);
      ggml_backend_buffer_clear(a.buffer.get(), 0);
      const std::vector<std::uint8_t> cleared = Get(a.k[0]);
      EXPECT_TRUE(
          std::all_of(cleared.begin(), cleared.end(), [](std::uint8_t x) { return x == 0; }));
      Set(a.k[0], k);
      EXPECT_EQ(Get(a.k[0]), k);
    }
}

// Quantised keys are shifted by reading all of them and writing all back.
TEST(Plain, QuantisedKShift) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  for (Way way : kWays) {
    Cache a(OurType(), d, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0),
        c(CpuType(), d, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0);
    PlayAttention(way, a, c, d, Seed(2));
    const ggml_backend_ptr ours = NewBackend(), cpu = NewCpu();
    ExpectSame(way, ours.get(), cpu.get(), a, c, [&](Graph& g, const Cache& cache) {
      ggml_tensor* k = ggml_view_3d(g.ctx(), cache.k[0], 64, 2, 256,
                                    ggml_row_size(GGML_TYPE_Q8_0, 64), cache.k[0]->nb[1], 0);
      ggml_tensor* x = ggml_cast(g.ctx(), k, GGML_TYPE_F32);
      x = ggml_rope_ext(g.ctx(), x,
                        g.Input(GGML_TYPE_I32, {256}, std::vector<std::int32_t>(256, -7)), nullptr,
                        64, GGML_ROPE_TYPE_NEOX, 2048, 1e4f, 1, 0, 1, 32, 1);
      ggml_build_forward_expand(g.get(), ggml_cpy(g.ctx(), x, k));
      return static_cast<ggml_tensor*>(nullptr);
    });
  }
}

// Flash attention off: V is stored transposed, element by element, and attention is made of single
// ops.
TEST(Plain, TransposedV) {
  const Dims d{.n_head_kv = 2, .n_cells = 256, .n_streams = 2};
  for (Way way : kWays) {
    Cache a(OurType(), d), c(CpuType(), d);
    const ggml_backend_ptr ours = NewBackend({"k4v4"}), cpu = NewCpu();
    Random random(Seed(4));
    int at = 0;
    for (int n_tok : {40, 1, 5}) {
      Batch b = Causal(d, random, n_tok, at, 4);
      b.s0 = 1;
      for (std::int64_t& cell : b.cells) cell += 256;
      at += n_tok;
      ExpectSame(way, ours.get(), cpu.get(), a, c, [&](Graph& g, const Cache& cache) {
        ggml_context* x = g.ctx();
        ggml_tensor* q = Queries(g, b, d.dk);
        if (way == Way::kSched) q = g.OnCpu(q);
        ggml_build_forward_expand(g.get(), q);
        ggml_build_forward_expand(g.get(), SetRows(g, cache.k[0], b, b.k));
        std::vector<std::int64_t> idx;
        for (std::int64_t cell : b.cells)
          for (std::int64_t j = 0; j < 128; ++j)
            idx.push_back(cell / 256 * 256 * 128 + j * 256 + cell % 256);
        const auto n = static_cast<std::int64_t>(idx.size());
        ggml_build_forward_expand(
            g.get(),
            ggml_set_rows(x, ggml_reshape_2d(x, cache.v[0], 1, ggml_nelements(cache.v[0])),
                          g.Input(GGML_TYPE_F32, {1, n}, b.v), g.Input(GGML_TYPE_I64, {n}, idx)));
        ggml_tensor* k = ggml_permute(x, CacheView(g, cache.k[0], 64, 2, b), 0, 2, 1, 3);
        ggml_tensor* v = ggml_view_4d(x, cache.v[0], b.n_kv, 2, 64, 1, 256 * 64 * 2, 256 * 2,
                                      256 * 128 * 2, 256 * 128 * 2);
        ggml_tensor* kq = ggml_mul_mat(x, k, ggml_permute(x, q, 0, 2, 1, 3));
        kq = ggml_soft_max_ext(x, kq, g.Input(GGML_TYPE_F16, {b.n_kv, b.n_tok, 1, 1}, b.mask),
                               b.scale, 0);
        return ggml_cont(x, ggml_mul_mat(x, ggml_permute(x, v, 0, 2, 1, 3), kq));
      });
    }
    EXPECT_EQ(UncompressedBytes(), ggml_nbytes(a.v[0]) + ggml_nbytes(a.k[0]));
  }
}

// Flash attention off although V lies as usual (the host's automatic choice, when it fails): rows
// are kept by the store, exact as long as nobody told it of heads, and read by the CPU.
TEST(Plain, SingleOpsReadTheStore) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  Cache a(OurType(), d), c(CpuType(), d);
  const ggml_backend_ptr ours = NewBackend({"k4v4", 16, 4, 0}), cpu = NewCpu();
  Random random(Seed(5));
  int at = 0;
  for (int n_tok : {80, 1, 5}) {
    const Batch b = Causal(d, random, n_tok, at, 4);
    at += n_tok;
    ExpectSame(Way::kSched, ours.get(), cpu.get(), a, c, [&](Graph& g, const Cache& cache) {
      ggml_context* x = g.ctx();
      ggml_tensor* q = g.OnCpu(Queries(g, b, d.dk));
      ggml_build_forward_expand(g.get(), q);
      Write(g, cache, b);
      ggml_tensor* k = ggml_permute(x, CacheView(g, cache.k[0], 64, 2, b), 0, 2, 1, 3);
      ggml_tensor* v = ggml_permute(x, CacheView(g, cache.v[0], 64, 2, b), 0, 2, 1, 3);
      ggml_tensor* kq = ggml_mul_mat(x, k, ggml_permute(x, q, 0, 2, 1, 3));
      kq = ggml_soft_max_ext(x, kq, g.Input(GGML_TYPE_F16, {b.n_kv, b.n_tok, 1, 1}, b.mask),
                             b.scale, 0);
      return ggml_mul_mat(x, ggml_cont(x, ggml_transpose(x, v)), kq);
    });
  }
  EXPECT_EQ(UncompressedBytes(), 0u);
}

// A middle slice of each row, through a strided view; rows already in the store move out unharmed.
TEST(Plain, RowsWrittenInParts) {
  const Dims d{.n_head_kv = 2, .n_cells = 256, .n_streams = 2};
  for (Way way : kWays) {
    Cache a(OurType(), d), c(CpuType(), d);
    const ggml_backend_ptr ours = NewBackend({"f16"}), cpu = NewCpu();
    Random random(Seed(6));
    const Batch b = Causal(d, random, 100, 0, 2);
    ExpectSame(way, ours.get(), cpu.get(), a, c, [&](Graph& g, const Cache& cache) {
      Write(g, cache, b);
      return static_cast<ggml_tensor*>(nullptr);
    });
    EXPECT_EQ(UncompressedBytes(), 0u);
    const std::vector<float> slices = random.Normals(32 * 10);
    ExpectSame(way, ours.get(), cpu.get(), a, c, [&](Graph& g, const Cache& cache) {
      ggml_tensor* part = ggml_view_2d(g.ctx(), cache.k[0], 32, 512, cache.k[0]->nb[1], 40 * 2);
      ggml_build_forward_expand(
          g.get(),
          ggml_set_rows(g.ctx(), part, g.Input(GGML_TYPE_F32, {32, 10}, slices),
                        g.Input(GGML_TYPE_I64, {10},
                                std::vector<std::int64_t>{3, 99, 100, 7, 50, 51, 52, 300, 8, 9})));
      return static_cast<ggml_tensor*>(nullptr);
    });
    PlayAttention(way, a, c, d, Seed(7));
  }
}

TEST(Plain, CodedRowsMoveOutAsTheyRead) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  const ggml_backend_ptr ours = NewBackend({"k4v4", 16, 4, 0}), cpu = NewCpu();
  Cache cache(OurType(), d);
  Random random(Seed(15));
  Batch b = Causal(d, random, 100, 0, 2);
  RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b);
  EXPECT_GT(Stats()["pages"]["sealed"], 0);
  std::vector<Half> k = Get<Half>(cache.k[0]);
  const std::vector<Half> v = Get<Half>(cache.v[0]);
  std::vector<Half> written(v.size());
  Put(b, b.v, written);
  EXPECT_GT(Nmse(ToFloat(v), ToFloat(written)), 1e-4);
  const std::vector<float> part = random.Normals(32);
  Graph g;
  ggml_build_forward_expand(
      g.get(),
      ggml_set_rows(g.ctx(), ggml_view_2d(g.ctx(), cache.k[0], 32, 256, cache.k[0]->nb[1], 80),
                    g.Input(GGML_TYPE_F32, {32, 1}, part),
                    g.Input(GGML_TYPE_I64, {1}, std::vector<std::int64_t>{20})));
  ASSERT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
  EXPECT_GT(UncompressedBytes(), 0u);
  const std::vector<Half> halves = ToHalf(part);
  std::copy(halves.begin(), halves.end(), k.begin() + 20 * 128 + 40);
  EXPECT_EQ(Get<Half>(cache.k[0]), k);
  EXPECT_EQ(Get<Half>(cache.v[0]), v);
  b.cells.clear();
  EXPECT_LE(Nmse(RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b), Exact(d, b, k, v)),
            kCpuBound);
}

// Nothing says that names are unique.
TEST(Plain, TwoTensorsOfOneName) {
  const ggml_backend_ptr ours = NewBackend({"f16"}), cpu = NewCpu();
  const ggml_context_ptr ctx = NewContext(8);
  ggml_tensor* t[4];
  for (int i = 0; i < 4; ++i) {
    t[i] = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, 128, 256, 1);
    ggml_set_name(t[i], i % 2 ? "cache_v_l0" : "cache_k_l0");
  }
  const ggml_backend_buffer_ptr buffer(
      ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), OurType()));
  ggml_backend_buffer_clear(buffer.get(), 0);
  Random random(Seed(16));
  std::vector<Half> rows[4];
  for (int i = 0; i < 4; ++i) {
    rows[i] = ToHalf(random.Normals(128 * 256));
    if (i % 2) {
      Set(t[i], rows[i]);
      continue;
    }
    Graph g;
    std::vector<std::int64_t> cells(256);
    for (std::size_t c = 0; c < 256; ++c) cells[c] = static_cast<std::int64_t>(c);
    ggml_build_forward_expand(g.get(),
                              ggml_set_rows(g.ctx(), ggml_reshape_2d(g.ctx(), t[i], 128, 256),
                                            g.Input(GGML_TYPE_F16, {128, 256}, rows[i]),
                                            g.Input(GGML_TYPE_I64, {256}, cells)));
    ASSERT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
  }
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Get<Half>(t[i]), rows[i]) << i;
}

TEST(Plain, OtherOpsOnTheCache) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  for (Way way : kWays) {
    Cache a(OurType(), d), c(CpuType(), d);
    const ggml_backend_ptr ours = NewBackend({"f16"}), cpu = NewCpu();
    Random random(Seed(8));
    const Batch b = Causal(d, random, 100, 0, 2);
    ExpectSame(way, ours.get(), cpu.get(), a, c, [&](Graph& g, const Cache& cache) {
      Write(g, cache, b);
      // A gather of rows (sparse attention).
      return ggml_get_rows(g.ctx(), ggml_reshape_2d(g.ctx(), cache.k[0], 128, 256),
                           g.Input(GGML_TYPE_I32, {5}, std::vector<std::int32_t>{99, 0, 7, 7, 50}));
    });
    const std::vector<float> all = random.Normals(128 * 256);
    ExpectSame(way, ours.get(), cpu.get(), a, c, [&](Graph& g, const Cache& cache) {
      ggml_build_forward_expand(g.get(), ggml_cpy(g.ctx(), g.Input(GGML_TYPE_F32, {128, 256}, all),
                                                  ggml_reshape_2d(g.ctx(), cache.v[0], 128, 256)));
      return ggml_cpy(g.ctx(), ggml_reshape_2d(g.ctx(), cache.k[0], 128, 256),
                      ggml_new_tensor_2d(g.ctx(), GGML_TYPE_F32, 128, 256));
    });
    ExpectSame(way, ours.get(), cpu.get(), a, c, [&](Graph& g, const Cache& cache) {
      ggml_tensor* bias = g.Input(GGML_TYPE_F32, {128}, std::vector<float>(128, 0.5f));
      ggml_build_forward_expand(g.get(), ggml_add_inplace(g.ctx(), cache.v[0], bias));
      return static_cast<ggml_tensor*>(nullptr);
    });
    PlayAttention(way, a, c, d, Seed(9));
  }
}

// Tensors under names we do not know are plain from the start.
TEST(Plain, UnknownNames) {
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  for (Way way : kWays) {
    Cache a(OurType(), d, GGML_TYPE_F16, GGML_TYPE_F16, "mine"), c(CpuType(), d);
    PlayAttention(way, a, c, d, Seed(10));
  }
}

// Plain tensors beside K and V, in one buffer.
TEST(Plain, NeighboursOfTheCache) {
  const ggml_backend_ptr ours = NewBackend({"f16"}), cpu = NewCpu();
  for (bool first : {true, false}) {
    const ggml_context_ptr ctx = NewContext(8);
    ggml_tensor* r = first ? ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 1000) : nullptr;
    ggml_tensor* k = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, 128, 256, 1);
    ggml_tensor* v = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, 128, 256, 1);
    if (!first) r = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 1000);
    ggml_set_name(k, "cache_k_l0");
    ggml_set_name(v, "cache_v_l0");
    const ggml_backend_buffer_ptr buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), OurType()));
    ggml_backend_buffer_clear(buffer.get(), 0);
    Random random(Seed(11));
    const std::vector<float> x = random.Normals(1000);
    Set(r, x);
    std::vector<Half> rows = ToHalf(random.Normals(128 * 256));
    Set(k, rows);
    EXPECT_EQ(Get<float>(r), x);
    EXPECT_EQ(Get<Half>(k), rows);
    Graph g;
    ggml_build_forward_expand(g.get(), ggml_scale_inplace(g.ctx(), r, 2));
    ASSERT_EQ(g.Compute(ours.get()), GGML_STATUS_SUCCESS);
    EXPECT_EQ(Get<float>(r)[999], 2 * x[999]);
    EXPECT_EQ(Get<Half>(k), rows);
    ggml_backend_buffer_clear(buffer.get(), 0);
    EXPECT_EQ(Get<float>(r), std::vector<float>(1000, 0.0f)) << (first ? "before K" : "after V");
    EXPECT_EQ(Get<Half>(k), std::vector<Half>(128 * 256, 0));
    ggml_backend_buffer_clear(buffer.get(), 1);
    EXPECT_EQ(Get(r), std::vector<std::uint8_t>(4000, 1));
    EXPECT_EQ(Get(k), std::vector<std::uint8_t>(128 * 256 * 2, 1));
  }
}

// --- recurrent state ----------------------------------------------------------------------------

// A buffer of one tensor, as llama_memory_recurrent makes its states.
struct State {
  State(ggml_backend_buffer_type_t buft, const char* name, std::int64_t size, std::int64_t slots) {
    t = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, size, slots);
    ggml_set_name(t, name);
    buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
    ggml_backend_buffer_clear(buffer.get(), 0);
  }
  ggml_context_ptr ctx = NewContext(8);
  ggml_tensor* t = nullptr;
  ggml_backend_buffer_ptr buffer;
};

// llm_graph_context::build_rs and a convolution, as Mamba has them.
TEST(Plain, RecurrentConvState) {
  constexpr std::int64_t kChannels = 32, kConv = 4, kSlots = 4, kState = (kConv - 1) * kChannels;
  for (Way way : kWays) {
    SCOPED_TRACE(Name(way));
    State a(OurType(), "cache_r_l0", kState, kSlots), c(CpuType(), "cache_r_l0", kState, kSlots);
    const ggml_backend_ptr ours = NewBackend(), cpu = NewCpu();
    Random random(Seed(12));
    for (int i = 0; i < 4; ++i) {
      const std::vector<float> x = random.Normals(5 * kChannels * 2),
                               w = random.Normals(kConv * kChannels);
      std::vector<float> out[2];
      for (int which = 0; which < 2; ++which) {
        Graph g;
        ggml_context* ctx = g.ctx();
        ggml_tensor* s = (which == 0 ? a : c).t;
        // Slot 3 starts anew in the first step; later the view is empty.
        ggml_tensor* zero = ggml_view_1d(ctx, s, i == 0 ? kState : 0, 3 * s->nb[1]);
        ggml_build_forward_expand(g.get(), ggml_scale_inplace(ctx, zero, 0));
        ggml_tensor* got = ggml_get_rows(
            ctx, s, g.Input(GGML_TYPE_I32, {2}, std::vector<std::int32_t>{1, 2 + i % 2}));
        ggml_build_forward_expand(g.get(), got);
        ggml_tensor* extra =
            ggml_get_rows(ctx, s, g.Input(GGML_TYPE_I32, {1}, std::vector<std::int32_t>{3}));
        ggml_build_forward_expand(
            g.get(), ggml_cpy(ctx, extra, ggml_view_2d(ctx, s, kState, 1, s->nb[1], 0)));
        ggml_tensor* conv = ggml_concat(ctx, ggml_reshape_3d(ctx, got, kConv - 1, kChannels, 2),
                                        g.Input(GGML_TYPE_F32, {5, kChannels, 2}, x), 0);
        ggml_tensor* last = ggml_view_3d(ctx, conv, kConv - 1, kChannels, 2, conv->nb[1],
                                         conv->nb[2], 5 * conv->nb[0]);
        ggml_build_forward_expand(g.get(),
                                  ggml_cpy(ctx, last, ggml_view_1d(ctx, s, kState * 2, s->nb[1])));
        ggml_tensor* y =
            ggml_ssm_conv(ctx, conv, g.Input(GGML_TYPE_F32, {kConv, kChannels}, w, true));
        g.Add(y);
        ASSERT_EQ(which == 0 ? g.Compute(way, ours.get(), cpu.get()) : g.Compute(cpu.get()),
                  GGML_STATUS_SUCCESS);
        out[which] = Get<float>(y);
      }
      EXPECT_EQ(out[0], out[1]) << "step " << i;
      const std::vector<float> state = Get<float>(c.t);
      EXPECT_EQ(Get<float>(a.t), state) << "step " << i;
      EXPECT_TRUE(std::any_of(state.begin(), state.end(), [](float f) { return f != 0; }));
    }
    // Saved and restored.
    std::vector<float> row(kState);
    ggml_backend_tensor_get(a.t, row.data(), a.t->nb[1], row.size() * 4);
    ggml_backend_tensor_set(a.t, row.data(), 3 * a.t->nb[1], row.size() * 4);
    const std::vector<float> all = Get<float>(a.t);
    EXPECT_TRUE(std::equal(row.begin(), row.end(), all.begin() + 3 * kState));
    ggml_backend_tensor_memset(a.t, 0, 0, 2 * a.t->nb[1]);
    EXPECT_EQ(Get<float>(a.t)[kState], 0);
  }
}

TEST(Plain, RecurrentSsmScan) {
  constexpr std::int64_t kN = 16, kDim = 8, kHeads = 4, kTok = 5, kSlots = 3,
                         kState = kN * kDim * kHeads;
  for (Way way : kWays) {
    SCOPED_TRACE(Name(way));
    State a(OurType(), "cache_s_l0", kState, kSlots), c(CpuType(), "cache_s_l0", kState, kSlots);
    const ggml_backend_ptr ours = NewBackend(), cpu = NewCpu();
    Random random(Seed(13));
    for (int i = 0; i < 3; ++i) {
      const std::vector<float> x = random.Normals(kDim * kHeads * kTok),
                               dt = random.Normals(kHeads * kTok), wb = random.Normals(kN * kTok),
                               wc = random.Normals(kN * kTok), wa(kN * kHeads, -0.5f);
      std::vector<float> out[2];
      for (int which = 0; which < 2; ++which) {
        Graph g;
        ggml_context* ctx = g.ctx();
        ggml_tensor* s = (which == 0 ? a : c).t;
        ggml_tensor* y =
            ggml_ssm_scan(ctx, ggml_reshape_4d(ctx, s, kN, kDim, kHeads, kSlots),
                          g.Input(GGML_TYPE_F32, {kDim, kHeads, kTok, 1}, x),
                          g.Input(GGML_TYPE_F32, {kHeads, kTok, 1}, dt),
                          g.Input(GGML_TYPE_F32, {kN, kHeads}, wa, true),
                          g.Input(GGML_TYPE_F32, {kN, 1, kTok, 1}, wb),
                          g.Input(GGML_TYPE_F32, {kN, 1, kTok, 1}, wc),
                          g.Input(GGML_TYPE_I32, {1}, std::vector<std::int32_t>{1}), 1);
        g.Add(y);
        ggml_build_forward_expand(
            g.get(),
            ggml_cpy(ctx, ggml_view_1d(ctx, y, kState, kDim * kHeads * kTok * sizeof(float)),
                     ggml_view_1d(ctx, s, kState, s->nb[1])));
        ASSERT_EQ(which == 0 ? g.Compute(way, ours.get(), cpu.get()) : g.Compute(cpu.get()),
                  GGML_STATUS_SUCCESS);
        out[which] = Get<float>(y);
      }
      EXPECT_LE(Nmse(out[0], out[1]), kSame);
      EXPECT_LE(Nmse(Get<float>(a.t), Get<float>(c.t)), kSame) << "step " << i;
      EXPECT_NE(Get<float>(a.t)[kState + 1], 0);
    }
  }
}

// --- weights put upon us ------------------------------------------------------------------------

TEST(Plain, ForcedWeights) {
  const ggml_backend_ptr ours = NewBackend(), cpu = NewCpu();
  Random random(Seed(14));
  const std::vector<float> w = random.Normals(64 * 32), x = random.Normals(64 * 5);
  for (bool unknown_usage : {false, true}) {
    const ggml_context_ptr ctx = NewContext(8);
    ggml_tensor* t = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 64, 32);
    const ggml_backend_buffer_ptr buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), OurType()));
    if (!unknown_usage)
      ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    Set(t, w);
    Graph g, gc;
    ggml_tensor* y = ggml_mul_mat(g.ctx(), t, g.Input(GGML_TYPE_F32, {64, 5}, x));
    ggml_tensor* rows = ggml_get_rows(
        g.ctx(), t, g.Input(GGML_TYPE_I32, {3}, std::vector<std::int32_t>{31, 0, 31}));
    g.Add(y);
    g.Add(rows);
    ASSERT_EQ(g.Compute(ours.get(), cpu.get()), GGML_STATUS_SUCCESS);
    ggml_tensor* yc = ggml_mul_mat(gc.ctx(), gc.Input(GGML_TYPE_F32, {64, 32}, w),
                                   gc.Input(GGML_TYPE_F32, {64, 5}, x));
    gc.Add(yc);
    ASSERT_EQ(gc.Compute(cpu.get()), GGML_STATUS_SUCCESS);
    EXPECT_LE(Nmse(Get<float>(y), Get<float>(yc)), kSame);
    const std::vector<float> got = Get<float>(rows);
    EXPECT_TRUE(std::equal(w.end() - 64, w.end(), got.begin()));
    EXPECT_TRUE(std::equal(w.begin(), w.begin() + 64, got.begin() + 64));
  }
}

}  // namespace
}  // namespace kvtamp::ggml_plugin::test
