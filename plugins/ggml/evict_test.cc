// A policy through the plug-in: entries go, a state says which, caches of sliding windows keep all.
#include "plugins/ggml/test_graph.h"

namespace kvtamp::ggml_plugin::test {
namespace {

class Evict : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("KVTAMP_EVICT_POLICY", "snapkv", 1);
    setenv("KVTAMP_EVICT_KEEP_RATIO", "0.5", 1);
    setenv("KVTAMP_EVICT_THEN", "drop", 1);
  }
  void TearDown() override {
    for (const char* name : {"POLICY", "KEEP_RATIO", "THEN"})
      unsetenv((std::string("KVTAMP_EVICT_") + name).c_str());
    NewBackend();  // so that the plug-in reads that there is none
  }
  static std::int64_t Entries(const char* what) {
    const nlohmann::json stats = Stats();
    return stats.contains("entries") ? stats["entries"][what].get<std::int64_t>() : 0;
  }
  // Micro-batches of 128 tokens.
  static void Fill(const Cache& cache, ggml_backend_t ours, Random& random, int n, int il = 0) {
    for (int at = 0; at < n; at += 128)
      RunLayer(Way::kDirect, ours, nullptr, cache, Causal(cache.dims, random, 128, at), il);
  }
};

TEST_F(Evict, ASavedStateSaysWhatIsGone) {
  const Dims d{.n_head_kv = 2, .n_cells = 1024};
  for (const char* type : {"f16", "k4v4"}) {
    const ggml_backend_ptr ours = NewBackend({type, 64, 4, 64});
    Random random(Seed(900));
    Cache cache(OurType(), d);
    Fill(cache, ours.get(), random, 768);
    const std::int64_t evicted = Entries("evicted");
    EXPECT_GT(evicted, 2 * 300) << type;
    const std::vector<Half> k = Get<Half>(cache.k[0]), v = Get<Half>(cache.v[0]);
    std::int64_t read_as_gone = 0;
    for (std::size_t at = 0; at < k.size(); at += 64)
      read_as_gone += std::all_of(&k[at], &k[at] + 64, [](Half h) { return h == 0x8000; });
    EXPECT_EQ(read_as_gone, evicted);
    for (Half h : k) ASSERT_TRUE(std::isfinite(ggml_fp16_to_fp32(h)));

    Cache other(OurType(), d);
    Set(other.k[0], k);
    Set(other.v[0], v);
    // What is restored is attended as it was, though where heads lie shows only now.
    Batch b = Causal(d, random, 1, 767);
    b.cells.clear();
    const std::vector<float> x = RunLayer(Way::kDirect, ours.get(), nullptr, cache, b);
    const std::vector<float> y = RunLayer(Way::kDirect, ours.get(), nullptr, other, b);
    // A few more may go at once: what was pinned as sinks counts among its rows now.
    EXPECT_GE(Entries("evicted"), 2 * evicted);
    EXPECT_LE(Entries("evicted"), 2 * evicted + 8);
    EXPECT_LE(Nmse(x, y), std::string(type) == "f16" ? 1e-5 : 2e-2) << type;  // coded once more
  }
}

// The host gives layers of sliding windows a cache of their own, a smaller one.
TEST_F(Evict, CachesOfSlidingWindowsKeepAll) {
  const ggml_backend_ptr ours = NewBackend({"k4v4", 64, 4, 64});
  Random random(Seed(910));
  Cache base(OurType(), {.n_head_kv = 2, .n_cells = 1024});
  Cache window(OurType(), {.n_head_kv = 2, .n_cells = 768, .first_layer = 1});
  Fill(window, ours.get(), random, 768);
  EXPECT_EQ(Entries("evicted"), 0);
  Fill(base, ours.get(), random, 768);
  EXPECT_GT(Entries("evicted"), 600);
}

}  // namespace
}  // namespace kvtamp::ggml_plugin::test
