// What dies, and what must not (docs/reclaim.md): removal shows only by overwriting, by clearing,
// by n_kv and by zeros over a state that failed to load.
#include "plugins/ggml/test_graph.h"

namespace kvtamp::ggml_plugin::test {
namespace {

// Of pages; scratch is apart.
std::uint64_t Resident() {
  const nlohmann::json stats = Stats();
  return stats["resident_total_bytes"].get<std::uint64_t>() -
         stats["resident_bytes"]["scratch"].get<std::uint64_t>();
}
std::int64_t Live() { return Stats()["cells_used"]; }

// Rows of cells [first, first + n), attended with as many cells as the host would show: up to the
// highest used one, in steps of 256.
void Fill(const Cache& cache, ggml_backend_t ours, Random& random, int n, int first, int highest) {
  for (int at = first; at < first + n; at += 64) {
    Batch b = Causal(cache.dims, random, std::min(64, first + n - at), at);
    const std::int64_t n_kv = (std::max(highest, std::min(at + 64, first + n)) + 255) / 256 * 256;
    std::vector<Half> mask;
    for (std::int64_t t = 0; t < b.n_tok; ++t)
      mask.insert(mask.end(), b.mask.begin() + t * b.n_kv, b.mask.begin() + t * b.n_kv + n_kv);
    b.mask = mask;
    b.n_kv = n_kv;
    RunLayer(Way::kDirect, ours, nullptr, cache, b);
  }
}

TEST(Reclaim, CellsFromNkvOnAreGone) {
  for (const char* type : kTypes) {
    SCOPED_TRACE(type);
    const Dims d{.n_head_kv = 8, .n_cells = 4096};
    const ggml_backend_ptr ours = NewBackend({type, 64, 4, 64});
    Random random(Seed(50));
    Cache cache(OurType(), d);
    Fill(cache, ours.get(), random, 512, 0, 0);
    Fill(cache, ours.get(), random, 1, 500, 0);  // as below, so that the two can be compared
    const std::uint64_t small = Resident();
    Fill(cache, ours.get(), random, 3000, 512, 0);
    EXPECT_EQ(Live(), 3512);
    const std::uint64_t large = Resident();
    EXPECT_GT(large, 2 * small);
    // seq_rm of everything behind 500, then one token more: n_kv tells.
    const std::vector<Half> before = Get<Half>(cache.k[0]);
    Fill(cache, ours.get(), random, 1, 500, 0);
    EXPECT_EQ(Live(), 512);
    EXPECT_LT(Resident(), small + (large - small) / 20);
    const std::vector<Half> after = Get<Half>(cache.k[0]);
    const auto n = static_cast<std::ptrdiff_t>(500 * d.n_embd_k());
    EXPECT_TRUE(std::equal(after.begin(), after.begin() + n, before.begin()));
  }
}

// An idle sequence is masked in every row, and must come back unharmed.
TEST(Reclaim, MaskedCellsBelowNkvStay) {
  const Dims d{.n_cells = 1024};
  const ggml_backend_ptr ours = NewBackend({"k4v4", 64, 4, 64});
  Random random(Seed(51));
  Cache cache(OurType(), d);
  Fill(cache, ours.get(), random, 700, 0, 0);
  const std::vector<Half> before = Get<Half>(cache.k[0]);
  for (int i = 0; i < 50; ++i) {  // another sequence, in cells of its own
    Batch b = Causal(d, random, 1, 700 + i);
    std::fill_n(b.mask.begin(), 700, ggml_fp32_to_fp16(-INFINITY));
    RunLayer(Way::kDirect, ours.get(), nullptr, cache, b);
  }
  const std::vector<Half> after = Get<Half>(cache.k[0]);
  // Nothing but coding happened to them, which may well make one element a zero.
  EXPECT_LT(Nmse(ToFloat({after.begin(), after.begin() + 700 * 128}),
                 ToFloat({before.begin(), before.begin() + 700 * 128})),
            0.02);
  for (std::size_t row = 0; row < 700; ++row) {
    const auto first = after.begin() + static_cast<std::ptrdiff_t>(row * 128);
    EXPECT_FALSE(std::all_of(first, first + 128, [](Half h) { return h == 0; })) << row;
  }
  EXPECT_EQ(Live(), 750);
}

// A draft's rejected tokens are removed from the tail and their cells written again: no page is
// left half empty for it.
TEST(Reclaim, RolledBackTokensLeaveNothing) {
  const Dims d{.n_cells = 1024};
  const ggml_backend_ptr ours = NewBackend({"k4v4", 64, 4, 64});
  Random random(Seed(52));
  Cache a(OurType(), d);
  Fill(a, ours.get(), random, 300, 0, 0);
  for (int at = 300; at < 600; at += 3) Fill(a, ours.get(), random, 8, at, 0);  // 3 of 8 are kept
  const nlohmann::json stats = Stats();
  EXPECT_LE(stats["rows_dead"], 64);
  EXPECT_EQ(Live(), 605);
}

TEST(Reclaim, ZerosOverAFailedStateKeepNoBytes) {
  const Dims d{.n_cells = 2048, .n_layers = 2};
  const ggml_backend_ptr ours = NewBackend({"k4v4", 64, 4, 64});
  Random random(Seed(53));
  Cache cache(OurType(), d);
  const std::size_t row = cache.k[0]->nb[1];
  const std::vector<Half> rows = ToHalf(random.Normals(128 * 1500));
  for (const auto& side : {cache.k, cache.v})
    for (ggml_tensor* t : side) ggml_backend_tensor_set(t, rows.data(), 0, rows.size() * 2);
  const std::uint64_t full = Resident();
  const std::vector<Half> zeros(128 * 1500, Half{0});
  std::uint64_t peak = 0;
  for (const auto& side :
       {cache.k, cache.v})  // llama_kv_cache's state_clear: K of all layers first
    for (ggml_tensor* t : side) {
      ggml_backend_tensor_set(t, zeros.data(), 100 * row, zeros.size() * 2 - 100 * row);
      peak = std::max(peak, Resident());
    }
  EXPECT_LE(peak, full + full / 20);
  EXPECT_LT(Resident(), full / 5) << Stats().dump();
  EXPECT_EQ(Live(), 100);
  EXPECT_EQ(Get(cache.k[1]), [&] {  // reads as zeros, the rest as before
    std::vector<std::uint8_t> k = Get(cache.k[1]);
    std::fill(k.begin() + static_cast<std::ptrdiff_t>(100 * row), k.end(), std::uint8_t{0});
    return k;
  }());

  // And yet such rows are attended where the mask says so, as the host's zeros are.
  Batch b = Causal(d, random, 1, 1999);
  b.cells.clear();
  const std::vector<Half> k = Get<Half>(cache.k[0]), v = Get<Half>(cache.v[0]);
  std::fill(b.mask.begin() + 1500, b.mask.end(), ggml_fp32_to_fp16(-INFINITY));
  EXPECT_LE(Nmse(RunLayer(Way::kDirect, ours.get(), nullptr, cache, b), Exact(d, b, k, v)),
            kExactBound);

  // Written again, they are rows like others.
  Fill(cache, ours.get(), random, 64, 400, 1500);
  EXPECT_FALSE(Get<Half>(cache.k[0])[450 * 128] == 0);
}

// The halves of a row are zeroed apart, and one may be written again in between.
TEST(Reclaim, HalfZeroedRows) {
  for (const char* type : kTypes) {
    const Dims d{.n_cells = 512};
    const ggml_backend_ptr ours = NewBackend({type, 32, 4, 32});
    Random random(Seed(54));
    Cache cache(OurType(), d);
    Fill(cache, ours.get(), random, 300, 0, 0);
    const std::size_t row = cache.k[0]->nb[1];
    const std::vector<Half> zeros(128 * 100, Half{0});
    std::vector<Half> k = Get<Half>(cache.k[0]), v = Get<Half>(cache.v[0]);
    ggml_backend_tensor_set(cache.k[0], zeros.data(), 50 * row, 100 * row);
    std::fill_n(k.begin() + 50 * 128, 100 * 128, Half{0});
    const std::vector<Half> fresh = ToHalf(random.Normals(128 * 10));
    ggml_backend_tensor_set(cache.k[0], fresh.data(), 60 * row, 10 * row);
    std::copy(fresh.begin(), fresh.end(), k.begin() + 60 * 128);
    ggml_backend_tensor_set(cache.v[0], zeros.data(), 55 * row, 8 * row);
    std::fill_n(v.begin() + 55 * 128, 8 * 128, Half{0});
    EXPECT_EQ(Get<Half>(cache.k[0]), k) << type;
    EXPECT_EQ(Get<Half>(cache.v[0]), v) << type;
    Batch b = Causal(d, random, 1, 299);
    b.cells.clear();
    EXPECT_LE(Nmse(RunLayer(Way::kDirect, ours.get(), nullptr, cache, b), Exact(d, b, k, v)),
              kExactBound)
        << type;
  }
}

// Copies share what is coded, and part where one side is written.
TEST(Reclaim, CopiedStreamsShareCodedPages) {
  const Dims d{.n_cells = 2048, .n_streams = 4};
  const ggml_backend_ptr ours = NewBackend({"k4v4", 64, 4, 64});
  Random random(Seed(55));
  Cache cache(OurType(), d);
  Fill(cache, ours.get(), random, 2000, 0, 0);
  const std::uint64_t one = Resident();
  for (std::size_t to : {1u, 2u, 3u}) {
    ggml_backend_tensor_copy(cache.k_stream[0][0], cache.k_stream[0][to]);
    ggml_backend_tensor_copy(cache.v_stream[0][0], cache.v_stream[0][to]);
  }
  EXPECT_LT(Resident(), one * 2);  // windows and the open page are apart
  const std::vector<Half> k = Get<Half>(cache.k[0]);
  const std::size_t n = k.size() / 4;
  for (std::size_t to = 1; to < 4; ++to)
    EXPECT_TRUE(std::equal(k.begin(), k.begin() + static_cast<std::ptrdiff_t>(n),
                           k.begin() + static_cast<std::ptrdiff_t>(n * to)));
  // Overwriting cells of one stream, and shifting another's keys, leaves the rest alone.
  const std::vector<Half> fresh = ToHalf(random.Normals(128 * 500));
  ggml_backend_tensor_set(cache.k_stream[0][1], fresh.data(), 0, fresh.size() * 2);
  ggml_backend_tensor_set(cache.v_stream[0][1], fresh.data(), 0, fresh.size() * 2);
  const std::vector<Half> after = Get<Half>(cache.k[0]);
  for (std::size_t s : {0u, 2u, 3u})
    EXPECT_TRUE(std::equal(after.begin() + static_cast<std::ptrdiff_t>(n * s),
                           after.begin() + static_cast<std::ptrdiff_t>(n * (s + 1)), k.begin()))
        << s;
  ggml_backend_buffer_clear(cache.buffer.get(), 0);
  EXPECT_EQ(Live(), 0);
}

}  // namespace
}  // namespace kvtamp::ggml_plugin::test
