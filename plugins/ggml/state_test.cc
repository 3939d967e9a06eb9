// What a cache keeps: reading and writing any bytes of it, copying streams, clearing, shifting
// keys, and how little an empty one costs.
#include <unistd.h>

#include <fstream>

#include "plugins/ggml/test_graph.h"

namespace kvtamp::ggml_plugin::test {
namespace {

// A cache with rows in it, most of them coded where the type is.
struct Filled {
  Filled(const Setting& setting, const Dims& d, unsigned seed, int n_rows)
      : random(seed), ours(NewBackend(setting)), cpu(NewCpu()), cache(OurType(), d) {
    k.resize(static_cast<std::size_t>(d.n_embd_k() * d.n_cells * d.n_streams));
    v.resize(static_cast<std::size_t>(d.n_embd_v() * d.n_cells * d.n_streams));
    for (std::int64_t s = 0; s < d.n_streams; ++s)
      for (int at = 0; at < n_rows; at += 50) Fill(s, at, std::min(50, n_rows - at));
  }

  void Fill(std::int64_t stream, int first, int n) {
    Batch b = Causal(cache.dims, random, n, first);
    b.s0 = stream;
    for (std::int64_t& cell : b.cells) cell += stream * cache.dims.n_cells;
    RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b);
    Put(b, b.k, k);
    Put(b, b.v, v);
  }

  // Attention of one query over all rows of a stream, and over what the stream says it holds.
  void ExpectAttends(std::int64_t stream, int n_rows) {
    const Dims& d = cache.dims;
    Batch b;
    b.n_head = d.n_head_kv * 2;
    b.n_tok = 1;
    b.s0 = stream;
    b.n_kv = d.n_cells;
    b.scale = 0.1f;
    b.q = random.Normals(static_cast<std::size_t>(b.n_head * d.dk));
    b.mask.assign(static_cast<std::size_t>(d.n_cells), ggml_fp32_to_fp16(-INFINITY));
    std::fill_n(b.mask.begin(), n_rows, Half{0});
    const std::vector<double> exact = Exact(d, b, Get<Half>(cache.k[0]), Get<Half>(cache.v[0]));
    EXPECT_LE(Nmse(RunLayer(Way::kDirect, ours.get(), cpu.get(), cache, b), exact), kExactBound);
  }

  Random random;
  ggml_backend_ptr ours, cpu;
  Cache cache;
  std::vector<Half> k, v;  // as written
};

template <class T>
std::vector<T> Slice(const std::vector<T>& x, std::size_t at, std::size_t n) {
  return {x.begin() + static_cast<std::ptrdiff_t>(at),
          x.begin() + static_cast<std::ptrdiff_t>(at + n)};
}

bool AllZero(const std::vector<std::uint8_t>& x) {
  return std::all_of(x.begin(), x.end(), [](std::uint8_t b) { return b == 0; });
}

// --- reading and writing
// What coding rows once costs at most, as NMSE. A long run of rows set from outside, as a restored
// state is, may be coded at once.
double CodingError(const std::string& type) {
  return type == "f16" ? 0 : type == "k8v8" ? 1e-4 : 2e-2;
}

double ByteNmse(const std::vector<std::uint8_t>& x, const std::vector<std::uint8_t>& truth) {
  auto floats = [](const std::vector<std::uint8_t>& bytes) {
    std::vector<Half> halves(bytes.size() / 2);
    std::memcpy(halves.data(), bytes.data(), bytes.size());
    return ToFloat(halves);
  };
  return Nmse(floats(x), floats(truth));
}

// -----------------------------------------------------------------------------

TEST(State, AnyRangeOfAnyViewReadsAsTheWhole) {
  for (const char* type : kTypes) {
    Filled f({type, 32, 4, 32}, {.n_head_kv = 3, .n_cells = 256, .n_streams = 2}, Seed(1), 230);
    for (const auto& [t, streams] : {std::pair(f.cache.k[0], f.cache.k_stream[0]),
                                     std::pair(f.cache.v[0], f.cache.v_stream[0])}) {
      const std::vector<std::uint8_t> all = Get(t);
      EXPECT_FALSE(AllZero(all));
      for (int i = 0; i < 200; ++i) {
        const std::size_t s = static_cast<std::size_t>(f.random.Int(0, 2));
        ggml_tensor* view = s == 2 ? t : streams[s];  // the whole, or a stream
        const std::size_t size = ggml_nbytes(view), base = s == 2 ? 0 : s * size;
        const auto at = static_cast<std::size_t>(f.random.Int(0, static_cast<int>(size) - 1));
        const auto n = static_cast<std::size_t>(f.random.Int(1, f.random.OneOf({3, 500, 100000})));
        std::vector<std::uint8_t> part(std::min(n, size - at));
        ggml_backend_tensor_get(view, part.data(), at, part.size());
        ASSERT_EQ(part, Slice(all, base + at, part.size())) << type << " at " << at;
      }
    }
  }
}

TEST(State, WhatIsSetIsReadBackExactly) {
  for (const char* type : kTypes) {
    Filled f({type, 32, 4, 32}, {.n_head_kv = 2, .n_cells = 256, .n_streams = 2}, Seed(2), 150);
    std::vector<std::uint8_t> k = Get(f.cache.k[0]);
    const std::size_t row = f.cache.k[0]->nb[1];
    auto put = [&](ggml_tensor* view, std::size_t base, std::size_t at, std::size_t n) {
      std::vector<Half> halves = ToHalf(f.random.Normals(n / 2 + 1));
      ggml_backend_tensor_set(view, halves.data(), at, n);
      std::memcpy(k.data() + base + at, halves.data(), n);
      // All of it: neighbours must not move either.
      ASSERT_EQ(Get(f.cache.k[0]), k) << type << ": " << n << " bytes at " << base + at;
    };
    const std::size_t stream = ggml_nbytes(f.cache.k_stream[0][0]);
    put(f.cache.k[0], 0, 0, row);                                  // a sink
    put(f.cache.k_stream[0][0], 0, 40 * row, 17 * row);            // rows that are coded
    put(f.cache.k_stream[0][1], stream, 200 * row, 9 * row);       // rows never written
    put(f.cache.k_stream[0][1], stream, 60 * row + 34, 40);        // inside a coded row
    put(f.cache.k_stream[0][1], stream, 70 * row + 100, 3 * row);  // across rows, cut at both ends
    put(f.cache.k[0], 0, stream - row - 6, 2 * row);               // across streams
    f.ExpectAttends(0, 150);
    k = Get(f.cache.k[0]);       // what was due has been coded
    put(f.cache.k[0], 0, 3, 5);  // half an element
    for (int i = 0; i < 20; ++i) {
      const auto at =
          static_cast<std::size_t>(f.random.Int(0, static_cast<int>(2 * stream - 4 * row)));
      put(f.cache.k[0], 0, at,
          static_cast<std::size_t>(f.random.Int(1, static_cast<int>(4 * row))));
    }
    EXPECT_EQ(UncompressedBytes(), 0u);
  }
}

// As a sequence's state is saved and restored: all K of a run of cells, then V, into other cells.
TEST(State, SavedAndRestoredElsewhere) {
  for (const char* type : kTypes) {
    Filled f({type, 32, 4, 32}, {.n_head_kv = 2, .n_cells = 512, .n_streams = 2}, Seed(3), 200);
    Batch ask;  // one query over all 200 rows
    ask.n_head = 4;
    ask.n_tok = 1;
    ask.n_kv = 512;
    ask.scale = 0.1f;
    ask.q = f.random.Normals(4 * 64);
    ask.mask.assign(512, ggml_fp32_to_fp16(-INFINITY));
    std::fill_n(ask.mask.begin(), 200, Half{0});
    const std::vector<float> before =
        RunLayer(Way::kDirect, f.ours.get(), f.cpu.get(), f.cache, ask);

    const std::size_t k_row = f.cache.k[0]->nb[1], v_row = f.cache.v[0]->nb[1];
    std::vector<std::uint8_t> k(200 * k_row), v(200 * v_row);
    ggml_backend_tensor_get(f.cache.k_stream[0][0], k.data(), 0, k.size());
    ggml_backend_tensor_get(f.cache.v_stream[0][0], v.data(), 0, v.size());
    // Two runs, behind what stream 1 has.
    ggml_tensor *to_k = f.cache.k_stream[0][1], *to_v = f.cache.v_stream[0][1];
    ggml_backend_tensor_set(to_k, k.data(), 210 * k_row, 120 * k_row);
    ggml_backend_tensor_set(to_k, k.data() + 120 * k_row, 400 * k_row, 80 * k_row);
    ggml_backend_tensor_set(to_v, v.data(), 210 * v_row, 120 * v_row);
    ggml_backend_tensor_set(to_v, v.data() + 120 * v_row, 400 * v_row, 80 * v_row);
    std::vector<std::uint8_t> k_back(200 * k_row), v_back(200 * v_row);
    ggml_backend_tensor_get(to_k, k_back.data(), 210 * k_row, 120 * k_row);
    ggml_backend_tensor_get(to_k, k_back.data() + 120 * k_row, 400 * k_row, 80 * k_row);
    ggml_backend_tensor_get(to_v, v_back.data(), 210 * v_row, 120 * v_row);
    ggml_backend_tensor_get(to_v, v_back.data() + 120 * v_row, 400 * v_row, 80 * v_row);

    // The same question to both gives the same answer, but for what coding again costs.
    const double again = CodingError(type);
    EXPECT_LE(ByteNmse(k_back, k), again) << type;
    EXPECT_LE(ByteNmse(v_back, v), again) << type;
    EXPECT_EQ(Slice(k_back, 0, 4 * k_row), Slice(k, 0, 4 * k_row)) << "its first tokens, " << type;
    EXPECT_EQ(Slice(v_back, 0, 4 * v_row), Slice(v, 0, 4 * v_row)) << "its first tokens, " << type;
    ask.s0 = 1;
    std::fill(ask.mask.begin(), ask.mask.end(), ggml_fp32_to_fp16(-INFINITY));
    std::fill_n(ask.mask.begin() + 210, 120, Half{0});
    std::fill_n(ask.mask.begin() + 400, 80, Half{0});
    const std::vector<double> exact =
        Exact(f.cache.dims, ask, Get<Half>(f.cache.k[0]), Get<Half>(f.cache.v[0]));
    const std::vector<float> after =
        RunLayer(Way::kDirect, f.ours.get(), f.cpu.get(), f.cache, ask);
    EXPECT_LE(Nmse(after, exact), kExactBound) << type;
    EXPECT_LE(Nmse(after, before), 1e-6 + 2 * again) << type;
    // Restored rows are coded in their turn, at the latest when the next token comes.
    f.Fill(1, 200, 10);
    std::vector<std::uint8_t> later(120 * k_row);
    ggml_backend_tensor_get(to_k, later.data(), 210 * k_row, 120 * k_row);
    EXPECT_EQ(later == Slice(k, 0, 120 * k_row), again == 0) << type;
    EXPECT_EQ(UncompressedBytes(), 0u);
  }
}

TEST(State, Clear) {
  for (const char* type : kTypes) {
    Filled f({type, 32, 4, 32}, {.n_head_kv = 2, .n_cells = 256, .n_streams = 2}, Seed(4), 200);
    EXPECT_FALSE(AllZero(Get(f.cache.k[0])));
    EXPECT_GT(Stats()["cells_used"], 0);
    ggml_backend_buffer_clear(f.cache.buffer.get(), 0);
    EXPECT_TRUE(AllZero(Get(f.cache.k[0])));
    EXPECT_TRUE(AllZero(Get(f.cache.v[0])));
    EXPECT_EQ(Stats()["cells_used"], 0);
    f.Fill(1, 0, 100);  // and it is as new
    f.ExpectAttends(1, 100);
    ggml_backend_buffer_clear(f.cache.buffer.get(), 0x3c);
    const std::vector<std::uint8_t> v = Get(f.cache.v[0]);
    EXPECT_EQ(std::count(v.begin(), v.end(), 0x3c), static_cast<std::ptrdiff_t>(v.size()));
    ggml_backend_buffer_clear(f.cache.buffer.get(), 0);
    EXPECT_TRUE(AllZero(Get(f.cache.v[0])));
  }
}

TEST(State, MemsetOfAnyRange) {
  for (const char* type : kTypes) {
    Filled f({type, 32, 4, 32}, {.n_head_kv = 2, .n_cells = 256, .n_streams = 2}, Seed(5), 200);
    std::vector<std::uint8_t> v = Get(f.cache.v[0]);
    const std::size_t row = f.cache.v[0]->nb[1], stream = f.cache.v[0]->nb[2];
    auto fill = [&](ggml_tensor* t, std::size_t base, std::uint8_t value, std::size_t at,
                    std::size_t n) {
      ggml_backend_tensor_memset(t, value, at, n);
      std::fill_n(v.begin() + static_cast<std::ptrdiff_t>(base + at), n, value);
      ASSERT_EQ(Get(f.cache.v[0]), v) << type;
    };
    fill(f.cache.v[0], 0, 0, 50 * row, 20 * row);
    fill(f.cache.v[0], 0, 0, 100 * row + 10, 5 * row);
    fill(f.cache.v_stream[0][1], stream, 0x11, 190 * row - 3, 20 * row);
    fill(f.cache.v_stream[0][1], stream, 0, 0, stream);
  }
}

TEST(State, StreamCopies) {
  for (const char* type : kTypes) {
    SCOPED_TRACE(type);
    Filled f({type, 32, 4, 32}, {.n_head_kv = 2, .n_cells = 256, .n_streams = 3}, Seed(6), 0);
    f.Fill(0, 0, 200);
    f.Fill(1, 0, 50);
    auto &ks = f.cache.k_stream[0], &vs = f.cache.v_stream[0];
    const std::vector<std::uint8_t> k0 = Get(ks[0]), v0 = Get(vs[0]);
    // As the host does: K, then V.
    ggml_backend_tensor_copy(ks[0], ks[1]);
    ggml_backend_tensor_copy(vs[0], vs[1]);
    EXPECT_EQ(Get(ks[1]), k0);
    EXPECT_EQ(Get(vs[1]), v0);
    EXPECT_EQ(Get(ks[0]), k0);
    f.ExpectAttends(1, 200);
    // One side alone, and a copy from an empty stream.
    ggml_backend_tensor_copy(vs[1], vs[2]);
    EXPECT_EQ(Get(vs[2]), v0);
    EXPECT_TRUE(AllZero(Get(ks[2])));
    ggml_backend_tensor_copy(ks[1], ks[2]);
    EXPECT_EQ(Get(ks[2]), k0);
    f.ExpectAttends(2, 200);
    // The copy goes its own way.
    f.Fill(1, 200, 30);
    f.Fill(1, 10, 20);
    EXPECT_EQ(Get(ks[0]), k0);
    EXPECT_EQ(Get(vs[0]), v0);
    EXPECT_EQ(Get(vs[2]), v0);
    f.ExpectAttends(1, 230);
    f.ExpectAttends(0, 200);
    // K of one pair, then of another, before any V.
    const std::vector<std::uint8_t> k1_now = Get(ks[1]), v1_now = Get(vs[1]);
    ggml_backend_tensor_copy(ks[1], ks[0]);
    ggml_backend_tensor_copy(ks[1], ks[2]);
    ggml_backend_tensor_memset(ks[1], 0, 0, ggml_nbytes(ks[1]));  // too late to change the copies
    ggml_backend_tensor_copy(vs[1], vs[0]);
    EXPECT_EQ(Get(ks[0]), k1_now);
    EXPECT_EQ(Get(ks[2]), k1_now);
    EXPECT_EQ(Get(vs[0]), v1_now);
    EXPECT_EQ(Get(vs[2]), v0);
    EXPECT_TRUE(AllZero(Get(ks[1])));
    if (type == std::string("f16")) {
      ggml_backend_tensor_copy(ks[0], ks[1]);
      f.Fill(0, 5, 1);
      EXPECT_EQ(Get(ks[1]), k1_now);
      EXPECT_NE(Get(ks[0]), k1_now);
    }
    EXPECT_EQ(UncompressedBytes(), 0u);
  }
}

TEST(State, CopiesToAndFromPlainTensors) {
  for (const char* type : kTypes) {
    Filled f({type, 32, 4, 32}, {.n_head_kv = 2, .n_cells = 256, .n_streams = 2}, Seed(7), 200);
    const std::vector<std::uint8_t> k0 = Get(f.cache.k_stream[0][0]),
                                    k1 = Get(f.cache.k_stream[0][1]);
    for (ggml_backend_buffer_type_t buft : {CpuType(), OurType()}) {
      const ggml_context_ptr ctx = NewContext(8);
      ggml_tensor* t = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, 128, 256);  // unnamed
      const ggml_backend_buffer_ptr buffer(
          ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
      ggml_backend_tensor_copy(f.cache.k_stream[0][0], t);
      EXPECT_EQ(Get(t), k0);
      ggml_backend_tensor_copy(t, f.cache.k_stream[0][1]);
      EXPECT_LE(ByteNmse(Get(f.cache.k_stream[0][1]), k0), CodingError(type)) << type;
      ggml_backend_tensor_set(f.cache.k_stream[0][1], k1.data(), 0, k1.size());
      EXPECT_LE(ByteNmse(Get(f.cache.k_stream[0][1]), k1), CodingError(type)) << type;
    }
    // To another cache of ours.
    Cache other(OurType(), f.cache.dims);
    ggml_backend_tensor_copy(f.cache.k_stream[0][0], other.k_stream[0][0]);
    EXPECT_EQ(Get(other.k_stream[0][0]), k0);
    EXPECT_TRUE(AllZero(Get(other.k_stream[0][1])));
  }
}

// Ten rounds of saving all and loading it again, as a host does: cleared in between. The encoder
// must recognise what it once decoded.
TEST(State, TenRoundsOfSaveAndLoadChangeNothing) {
  for (const char* type : kTypes) {
    SCOPED_TRACE(type);
    const Dims d{.n_cells = 1024};
    Filled f({type, 64, 4, 64}, d, Seed(14), 900);
    const std::vector<Half> k0 = Get<Half>(f.cache.k[0]), v0 = Get<Half>(f.cache.v[0]);
    const std::size_t bytes = 900 * f.cache.k[0]->nb[1];
    for (int round = 0; round < 10; ++round) {
      std::vector<std::uint8_t> k(bytes), v(bytes);
      ggml_backend_tensor_get(f.cache.k[0], k.data(), 0, bytes);
      ggml_backend_tensor_get(f.cache.v[0], v.data(), 0, bytes);
      ggml_backend_buffer_clear(f.cache.buffer.get(), 0);
      ggml_backend_tensor_set(f.cache.k[0], k.data(), 0, bytes);
      ggml_backend_tensor_set(f.cache.v[0], v.data(), 0, bytes);
      f.ExpectAttends(0, 900);
    }
    const double coding = Nmse(ToFloat(k0), ToFloat(f.k));
    for (const auto& [before, after] :
         {std::pair(k0, Get<Half>(f.cache.k[0])), std::pair(v0, Get<Half>(f.cache.v[0]))}) {
      const double error = Nmse(ToFloat(after), ToFloat(before));
      std::printf("%s: ten rounds %.3g, coding itself %.3g\n", type, error, coding);
      EXPECT_LE(error, std::string(type) == "f16" ? 0 : 0.1 * coding);
    }
  }
}

// A state comes in runs of rows from a sequence's first token on; those first ones are its sinks.
TEST(State, FirstRowsOfARestoredRunStayExact) {
  const Dims d{.n_cells = 1024};
  const ggml_backend_ptr ours = NewBackend({"k4v4", 64, 4, 0});
  Random random(Seed(13));
  Cache cache(OurType(), d);
  RunLayer(Way::kDirect, ours.get(), nullptr, cache, Causal(d, random, 90, 0));  // another sequence
  const std::vector<Half> rows = ToHalf(random.Normals(128 * 500));
  const std::size_t at = 100 * cache.k[0]->nb[1];
  for (ggml_tensor* t : {cache.k[0], cache.v[0]})
    ggml_backend_tensor_set(t, rows.data(), at, rows.size() * 2);
  for (ggml_tensor* t : {cache.k[0], cache.v[0]}) {
    const std::vector<Half> got = Slice(Get<Half>(t), 100 * 128, 500 * 128);
    EXPECT_EQ(Slice(got, 0, 4 * 128), Slice(rows, 0, 4 * 128));
    EXPECT_NE(Slice(got, 4 * 128, 4 * 128), Slice(rows, 4 * 128, 4 * 128));
  }
}

// --- K-shift ------------------------------------------------------------------------------------

struct Rope {
  const char* name;
  int mode, n_rot;
  float freq_scale = 1, ext_factor = 0, attn_factor = 1;
  bool factors = false;
};

// llama_kv_cache::build_graph_shift
ggml_status Shift(Way way, ggml_backend_t ours, ggml_backend_t cpu, const Cache& cache,
                  const Rope& r, const std::vector<std::int32_t>& shifts) {
  Graph g;
  const Dims& d = cache.dims;
  ggml_tensor* shift = g.Input(GGML_TYPE_I32, {static_cast<std::int64_t>(shifts.size())}, shifts);
  ggml_tensor* factors = nullptr;
  if (r.factors) {
    std::vector<float> x(static_cast<std::size_t>(r.n_rot / 2));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 1.0f + 0.1f * static_cast<float>(i);
    factors = g.Input(GGML_TYPE_F32, {r.n_rot / 2}, x, true);
  }
  for (ggml_tensor* k : cache.k) {
    ggml_tensor* heads = ggml_view_3d(g.ctx(), k, r.n_rot, d.n_head_kv, d.n_cells * d.n_streams,
                                      ggml_row_size(k->type, d.dk), k->nb[1], 0);
    g.Add(ggml_rope_ext_inplace(g.ctx(), heads, shift, factors, r.n_rot, r.mode, 2048, 10000.0f,
                                r.freq_scale, r.ext_factor, r.attn_factor, 32.0f, 1.0f));
  }
  return g.Compute(way, ours, cpu);
}

TEST(KShift, AsTheHostDoes) {
  const Rope ropes[] = {
      {"standard", GGML_ROPE_TYPE_NORMAL, 64},
      {"neox", GGML_ROPE_TYPE_NEOX, 64},
      {"standard, 32 of 64", GGML_ROPE_TYPE_NORMAL, 32},
      {"neox, 48 of 64, factors", GGML_ROPE_TYPE_NEOX, 48, 1, 0, 1, true},
      // As the host sets it, so that rows keep their length.
      {"neox, yarn", GGML_ROPE_TYPE_NEOX, 64, 0.25f, 1, 1 / (1 + 0.1f * std::log(4.0f))}};
  for (const char* type : kTypes)
    for (const Rope& rope : ropes)
      for (Way way : {Way::kDirect, Way::kSched}) {
        SCOPED_TRACE(std::string(type) + ", " + rope.name);
        const Dims d{.n_head_kv = 2, .n_cells = 512, .n_streams = 2, .n_layers = 1};
        Filled f({type, 32, 4, 32}, d, Seed(8), 400);
        const std::vector<Half> k_before = Get<Half>(f.cache.k[0]);
        const std::vector<std::uint8_t> v_before = Get(f.cache.v[0]);
        // Stream 0: a whole page not shifted, then single cells not shifted; stream 1: all, but
        // those never written.
        std::vector<std::int32_t> shifts(1024, 0);
        for (std::size_t c = 64; c < 400; ++c)
          shifts[c] = c % 5 == 0 ? 0 : -static_cast<int>(c % 60) - 1;
        for (std::size_t c = 0; c < 400; ++c) shifts[512 + c] = -40;

        Cache plain(CpuType(), d);  // the same from the rows as they were written
        Set(plain.k[0], f.k);
        ASSERT_EQ(Shift(Way::kDirect, f.cpu.get(), nullptr, plain, rope, shifts),
                  GGML_STATUS_SUCCESS);
        ASSERT_EQ(Shift(way, f.ours.get(), f.cpu.get(), f.cache, rope, shifts),
                  GGML_STATUS_SUCCESS);

        EXPECT_EQ(UncompressedBytes(), 0u);
        EXPECT_EQ(Get(f.cache.v[0]), v_before);
        const std::vector<Half> k_after = Get<Half>(f.cache.k[0]), want = Get<Half>(plain.k[0]);
        ASSERT_GT(Nmse(ToFloat(want), ToFloat(f.k)), 0.1);                     // it does turn
        EXPECT_EQ(Slice(k_after, 0, 32 * 128), Slice(k_before, 0, 32 * 128));  // pages not touched
        if (std::string(type) == "f16") {
          EXPECT_LE(Nmse(ToFloat(k_after), ToFloat(want)), 1e-7);
        } else {
          const double once = Nmse(ToFloat(k_before), ToFloat(f.k));
          const double after = Nmse(ToFloat(k_after), ToFloat(want));
          EXPECT_GT(once, 0);
          // Of sixty shifts to a page, all but stream 0's first are coded again: two errors of one
          // size, in quadrature, in stream 0; none is added in stream 1.
          EXPECT_LE(after, 1.7 * once);
          const auto of_1 = [](const std::vector<Half>& x) {
            return ToFloat(Slice(x, x.size() / 2, x.size() / 2));
          };
          EXPECT_LE(Nmse(of_1(k_after), of_1(want)), 1.02 * Nmse(of_1(k_before), of_1(f.k)) + 1e-7);
        }
        f.ExpectAttends(0, 400);
        f.ExpectAttends(1, 400);
      }
}

// With YaRN the host's shift scales the keys once more each time; ours only turns them.
TEST(KShift, YarnDoesNotScaleKeysAgain) {
  const float scaled = 1 + 0.1f * std::log(4.0f);
  const Rope host{"", GGML_ROPE_TYPE_NEOX, 64, 0.25f, 1, 1};           // what the host asks for
  const Rope turn{"", GGML_ROPE_TYPE_NEOX, 64, 0.25f, 1, 1 / scaled};  // the same turn alone
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  Filled f({"k4v4", 32, 4, 32}, d, Seed(15), 200);
  // In f32: turns too small for f16 would be lost one by one.
  Cache plain(CpuType(), d, GGML_TYPE_F32);
  Set(plain.k[0], ToFloat(Get<Half>(f.cache.k[0])));
  const std::vector<std::int32_t> shifts(256, -9);
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(Shift(Way::kDirect, f.ours.get(), nullptr, f.cache, host, shifts),
              GGML_STATUS_SUCCESS);
    ASSERT_EQ(Shift(Way::kDirect, f.cpu.get(), nullptr, plain, turn, shifts), GGML_STATUS_SUCCESS);
  }
  EXPECT_LE(Nmse(ToFloat(Get<Half>(f.cache.k[0])), Get<float>(plain.k[0])), 1e-6);
}

TEST(KShift, ZeroShiftsAndEmptyCachesAreLeftAlone) {
  const Rope rope{"", GGML_ROPE_TYPE_NEOX, 64};
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  Filled f({"k4v4", 32, 4, 32}, d, Seed(9), 200);
  const std::vector<std::uint8_t> k = Get(f.cache.k[0]);
  ASSERT_EQ(
      Shift(Way::kDirect, f.ours.get(), nullptr, f.cache, rope, std::vector<std::int32_t>(256, 0)),
      GGML_STATUS_SUCCESS);
  EXPECT_EQ(Get(f.cache.k[0]), k);
  Cache empty(OurType(), d);
  ASSERT_EQ(
      Shift(Way::kDirect, f.ours.get(), nullptr, empty, rope, std::vector<std::int32_t>(256, -9)),
      GGML_STATUS_SUCCESS);
  EXPECT_TRUE(AllZero(Get(empty.k[0])));
}

// Context shifts while text goes on: the error of attention against exact keys after 50 of them is
// that of none, within its scatter.
TEST(KShift, ErrorIsFlatInTheNumberOfShifts) {
  const Rope rope{"", GGML_ROPE_TYPE_NEOX, 64};
  for (const char* type : {"k8v8", "k4v4"}) {
    const Dims d{.n_head_kv = 2, .n_cells = 512};
    Filled f({type, 64, 4, 64}, d, Seed(11), 500);
    // The truth in double: written rows, turned by all shifts at once.
    const auto error = [&](int shift) {
      const int n_pairs = 32;
      std::vector<double> k(f.k.size());
      for (std::size_t at = 0; at < f.k.size(); at += 64)
        for (int i = 0; i < n_pairs; ++i) {
          const std::size_t cell = at / static_cast<std::size_t>(d.n_embd_k());
          const double angle = cell < 4 ? 0 : shift * std::pow(10000.0, -i / 32.0);
          const double x = ggml_fp16_to_fp32(f.k[at + i]),
                       y = ggml_fp16_to_fp32(f.k[at + i + n_pairs]);
          k[at + i] = std::cos(angle) * x - std::sin(angle) * y;
          k[at + i + n_pairs] = std::sin(angle) * x + std::cos(angle) * y;
        }
      double sum = 0, size = 0;
      Random random(12);
      for (int n = 0; n < 64; ++n) {
        Batch b;
        b.n_head = 4;
        b.n_tok = 1;
        b.n_kv = 512;
        b.scale = 0.125f;
        b.q = random.Normals(4 * 64);
        b.mask.assign(512, ggml_fp32_to_fp16(-INFINITY));
        std::fill_n(b.mask.begin(), 500, Half{0});
        const std::vector<float> got =
            RunLayer(Way::kDirect, f.ours.get(), f.cpu.get(), f.cache, b);
        for (int h = 0; h < 4; ++h) {
          std::vector<double> out(64), p(500);
          double total = 0;
          for (int c = 0; c < 500; ++c) {
            double s = 0;
            for (int i = 0; i < 64; ++i) s += b.q[h * 64 + i] * k[(c * 2 + h / 2) * 64 + i];
            total += p[c] = std::exp(s * b.scale);
          }
          for (int c = 0; c < 500; ++c)
            for (int i = 0; i < 64; ++i)
              out[i] += p[c] / total * ggml_fp16_to_fp32(f.v[(c * 2 + h / 2) * 64 + i]);
          for (int i = 0; i < 64; ++i) {
            sum += (got[h * 64 + i] - out[i]) * (got[h * 64 + i] - out[i]);
            size += out[i] * out[i];
          }
        }
      }
      return sum / size;
    };
    const double before = error(0);
    EXPECT_GT(before, 1e-8);
    std::vector<std::int32_t> shifts(512, -7);
    std::fill_n(shifts.begin(), 4, 0);
    for (int n = 1; n <= 50; ++n) {
      ASSERT_EQ(Shift(Way::kDirect, f.ours.get(), nullptr, f.cache, rope, shifts),
                GGML_STATUS_SUCCESS);
      if (n == 1 || n == 10 || n == 50) {
        const double after = error(-7 * n);
        std::printf("%s: attention error after %d shifts %.3g, before %.3g\n", type, n, after,
                    before);
        EXPECT_LE(after, 1.3 * before) << n;
        EXPECT_GE(after, 0.7 * before) << n;
      }
    }
    EXPECT_EQ(UncompressedBytes(), 0u);
  }
}

// There and back again and again: the error must not grow with the number of shifts without bound.
TEST(KShift, ManyShiftsInF16) {
  const Rope rope{"", GGML_ROPE_TYPE_NEOX, 64};
  const Dims d{.n_head_kv = 2, .n_cells = 256};
  Filled f({"f16"}, d, Seed(10), 200);
  Cache plain(CpuType(), d);
  Set(plain.k[0], f.k);
  for (int i = 0; i < 10; ++i) {
    const std::vector<std::int32_t> shifts(256, i % 2 ? 17 : -30);
    ASSERT_EQ(Shift(Way::kDirect, f.ours.get(), nullptr, f.cache, rope, shifts),
              GGML_STATUS_SUCCESS);
    ASSERT_EQ(Shift(Way::kDirect, f.cpu.get(), nullptr, plain, rope, shifts), GGML_STATUS_SUCCESS);
  }
  EXPECT_LE(Nmse(ToFloat(Get<Half>(f.cache.k[0])), ToFloat(Get<Half>(plain.k[0]))), 1e-6);
}

// --- address space ------------------------------------------------------------------------------

// Under a sanitizer freed memory stays in its quarantine and every byte has a shadow, so what the
// process holds says nothing about us; the release build of this test does.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kResidentIsOurs = false;
#else
constexpr bool kResidentIsOurs = true;
#endif

std::size_t ResidentBytes() {
  std::ifstream in("/proc/self/statm");
  std::size_t total = 0, resident = 0;
  in >> total >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

TEST(AddressSpace, AMillionCellsCostNothingUntilWritten) {
  constexpr std::int64_t kCells = 1 << 20;
  constexpr std::size_t kMiB = 1 << 20;
  const Dims d{.n_head_kv = 3, .n_cells = kCells, .n_layers = 30};
  for (const char* type : {"f16", "k4v4"}) {
    const ggml_backend_ptr ours = NewBackend({type}), cpu = NewCpu();
    const std::size_t before = ResidentBytes();
    Cache cache(OurType(), d);
    EXPECT_EQ(ggml_backend_buffer_get_size(cache.buffer.get()), 30u * 2 * kCells * 192 * 2);
    std::vector<std::uint8_t> row(384, 1);
    ggml_backend_tensor_get(cache.k[29], row.data(), (kCells - 1) * 384, 384);
    EXPECT_TRUE(AllZero(row));
    if (kResidentIsOurs) {
      EXPECT_LT(ResidentBytes(), before + 8 * kMiB);
    }

    Random random(Seed(11));
    Batch b;
    b.n_head = 9;
    b.n_tok = 3;
    b.n_kv = kCells;
    b.scale = 0.1f;
    b.cells = {0, 1000, kCells - 1};
    b.k = random.Normals(3 * 192);
    b.v = random.Normals(3 * 192);
    b.q = random.Normals(3 * 9 * 64);
    b.mask.assign(3 * kCells, ggml_fp32_to_fp16(-INFINITY));
    for (std::size_t t = 0; t < 3; ++t)
      for (std::int64_t c : b.cells) b.mask[t * kCells + static_cast<std::size_t>(c)] = 0;
    const std::vector<float> out = RunLayer(Way::kSched, ours.get(), cpu.get(), cache, b, 29);
    const std::vector<Half> k = ToHalf(b.k), v = ToHalf(b.v);
    std::vector<Half> back(192);
    for (std::size_t i = 0; i < 3; ++i) {
      const auto at = static_cast<std::size_t>(b.cells[i]) * 384;
      ggml_backend_tensor_get(cache.k[29], back.data(), at, 384);
      EXPECT_EQ(back, Slice(k, i * 192, 192));
      ggml_backend_tensor_get(cache.v_stream[29][0], back.data(), at, 384);
      EXPECT_EQ(back, Slice(v, i * 192, 192));
    }
    // The same over a cache of three cells.
    Batch small = b;
    small.cells = {0, 1, 2};
    small.n_kv = 3;
    small.mask.assign(9, 0);
    const std::vector<double> exact = Exact({.n_head_kv = 3, .n_cells = 3}, small, k, v);
    EXPECT_LE(Nmse(out, exact), kExactBound);
    ggml_backend_buffer_clear(cache.buffer.get(), 0);
    if (kResidentIsOurs) {
      EXPECT_LT(ResidentBytes(), before + 24 * kMiB);  // masks came and went
    }
  }
}

}  // namespace
}  // namespace kvtamp::ggml_plugin::test
