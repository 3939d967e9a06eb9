// For the plug-in's tests: the device as a host loads it, a host's K/V cache, graphs over it, and
// attention in double precision. Only ggml's public API is used.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

namespace kvtamp::ggml_plugin::test {

inline ggml_backend_reg_t Load() {
  ggml_backend_load_all();
  return ggml_backend_load(KVTAMP_TEST_PLUGIN);
}

inline ggml_backend_dev_t Device() {
  static ggml_backend_dev_t device = [] {
    ggml_backend_reg_t reg = Load();
    return reg == nullptr ? nullptr : ggml_backend_reg_dev_get(reg, 0);
  }();
  return device;
}
inline ggml_backend_buffer_type_t OurType() { return ggml_backend_dev_buffer_type(Device()); }
inline ggml_backend_buffer_type_t CpuType() { return ggml_backend_cpu_buffer_type(); }

template <class F>
F Proc(ggml_backend_dev_t dev, const char* name) {
  return reinterpret_cast<F>(
      ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), name));
}

inline void SetThreads(ggml_backend_t backend, int n) {
  auto set = Proc<ggml_backend_set_n_threads_t>(ggml_backend_get_device(backend),
                                                "ggml_backend_set_n_threads");
  set(backend, n);
}

// What KVTAMP_CACHE_… say. A cache keeps what was in force when its first row came.
struct Setting {
  std::string type = "f16";
  int page_size = 64, n_sink = 4, residual_length = 64;
  std::string residual_type = "f16";
};

inline ggml_backend_ptr NewBackend(const Setting& s = {}, int n_threads = 1) {
  setenv("KVTAMP_CACHE_TYPE", s.type.c_str(), 1);
  setenv("KVTAMP_CACHE_PAGE_SIZE", std::to_string(s.page_size).c_str(), 1);
  setenv("KVTAMP_CACHE_N_SINK", std::to_string(s.n_sink).c_str(), 1);
  setenv("KVTAMP_CACHE_RESIDUAL_LENGTH", std::to_string(s.residual_length).c_str(), 1);
  setenv("KVTAMP_CACHE_RESIDUAL_TYPE", s.residual_type.c_str(), 1);
  ggml_backend_ptr b(ggml_backend_dev_init(Device(), nullptr));
  SetThreads(b.get(), n_threads);
  return b;
}

inline ggml_backend_ptr NewCpu(int n_threads = 1) {
  ggml_backend_ptr b(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
  SetThreads(b.get(), n_threads);
  return b;
}

// What the plug-in says of itself.
inline nlohmann::json Stats() {
  return nlohmann::json::parse(Proc<const char* (*)()>(Device(), "kvtamp_stats_json")());
}
inline std::uint64_t UncompressedBytes() { return Stats()["uncompressed_bytes"]; }

inline ggml_context_ptr NewContext(std::size_t n_tensors = 512) {
  return ggml_context_ptr(ggml_init({n_tensors * ggml_tensor_overhead(), nullptr, true}));
}

// --- numbers ------------------------------------------------------------------------------------

using Half = ggml_fp16_t;

// One seed for each use; TEST_SEED (a number) shifts them all.
inline unsigned Seed(unsigned n) {
  const char* text = std::getenv("TEST_SEED");
  const unsigned seed = n + 7919u * static_cast<unsigned>(text == nullptr ? 0 : std::atoi(text));
  ::testing::Test::RecordProperty("seed", static_cast<int>(seed));
  return seed;
}

class Random {
 public:
  explicit Random(unsigned seed) : rng_(seed) {}
  int Int(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng_); }
  bool Chance(double p) { return std::uniform_real_distribution<double>(0, 1)(rng_) < p; }
  template <class T>
  T OneOf(std::initializer_list<T> list) {
    return *(list.begin() + Int(0, static_cast<int>(list.size()) - 1));
  }
  float Normal() { return normal_(rng_); }
  std::vector<float> Normals(std::size_t n) {
    std::vector<float> x(n);
    for (float& f : x) f = Normal();
    return x;
  }
  std::mt19937& rng() { return rng_; }

 private:
  std::mt19937 rng_;
  std::normal_distribution<float> normal_;
};

inline std::vector<Half> ToHalf(const std::vector<float>& x) {
  std::vector<Half> h(x.size());
  ggml_fp32_to_fp16_row(x.data(), h.data(), static_cast<std::int64_t>(x.size()));
  return h;
}
inline std::vector<float> ToFloat(const std::vector<Half>& h) {
  std::vector<float> x(h.size());
  ggml_fp16_to_fp32_row(h.data(), x.data(), static_cast<std::int64_t>(h.size()));
  return x;
}

template <class A, class B>
double Nmse(const std::vector<A>& x, const std::vector<B>& truth) {
  EXPECT_EQ(x.size(), truth.size());
  double error = 0, power = 0;
  for (std::size_t i = 0; i < std::min(x.size(), truth.size()); ++i) {
    const double d = static_cast<double>(x[i]) - static_cast<double>(truth[i]);
    error += d * d;
    power += static_cast<double>(truth[i]) * static_cast<double>(truth[i]);
  }
  if (error == 0) return 0;
  return power == 0 ? INFINITY : error / power;  // NaN of x is NaN: no bound holds
}

template <class T = std::uint8_t>
std::vector<T> Get(const ggml_tensor* t) {
  std::vector<T> out(ggml_nbytes(t) / sizeof(T));
  ggml_backend_tensor_get(t, out.data(), 0, ggml_nbytes(t));
  return out;
}
template <class T>
void Set(ggml_tensor* t, const std::vector<T>& x) {
  ASSERT_EQ(x.size() * sizeof(T), ggml_nbytes(t));
  ggml_backend_tensor_set(t, x.data(), 0, ggml_nbytes(t));
}

// --- bounds -------------------------------------------------------------------------------------

inline const char* const kTypes[] = {"f16", "k8v8", "k4v4"};

// Our answer against attention in double over the rows the cache says it holds: f16 rows are
// attended in single precision; coded rows read back are rounded to f16 (relative error 2^-12 rms:
// 6e-8), and queries and probabilities are rounded to 15 bits on the way.
inline constexpr double kF16Bound = 1e-10;
inline constexpr double kExactBound = 1e-6;
// ggml's CPU code rounds q and, for less than a tile of queries, every partial sum of V to f16: it
// is off by 6e-7 at 33 cells and 1.2e-5 at 500 by itself.
inline constexpr double kCpuBound = 3e-5;

// --- the host's cache ---------------------------------------------------------------------------

struct Dims {
  std::int64_t dk = 64, dv = 64, n_head_kv = 2, n_cells = 512, n_streams = 1;
  int n_layers = 1, first_layer = 0;
  std::int64_t n_embd_k() const { return dk * n_head_kv; }
  std::int64_t n_embd_v() const { return dv * n_head_kv; }
};

// As llama_kv_cache makes it: one buffer for all layers, a 2-D view for each stream, cleared.
struct Cache {
  Cache(ggml_backend_buffer_type_t buft, const Dims& d, ggml_type type_k = GGML_TYPE_F16,
        ggml_type type_v = GGML_TYPE_F16, const std::string& prefix = "cache")
      : dims(d) {
    for (int il = 0; il < d.n_layers; ++il) {
      const std::string layer = "_l" + std::to_string(d.first_layer + il);
      k.push_back(Add(prefix + "_k" + layer, type_k, d.n_embd_k(), k_stream));
      if (d.dv != 0) v.push_back(Add(prefix + "_v" + layer, type_v, d.n_embd_v(), v_stream));
    }
    buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
    ggml_backend_buffer_clear(buffer.get(), 0);
  }

  Dims dims;
  ggml_context_ptr ctx = NewContext(4096);
  ggml_backend_buffer_ptr buffer;
  std::vector<ggml_tensor*> k, v;                             // by layer
  std::vector<std::vector<ggml_tensor*>> k_stream, v_stream;  // by layer and stream

 private:
  ggml_tensor* Add(const std::string& name, ggml_type type, std::int64_t n_embd,
                   std::vector<std::vector<ggml_tensor*>>& streams) {
    ggml_tensor* t = ggml_new_tensor_3d(ctx.get(), type, n_embd, dims.n_cells, dims.n_streams);
    ggml_set_name(t, name.c_str());
    streams.emplace_back();
    for (std::int64_t s = 0; s < dims.n_streams; ++s)
      streams.back().push_back(ggml_view_2d(ctx.get(), t, n_embd, dims.n_cells, t->nb[1],
                                            static_cast<std::size_t>(s) * t->nb[2]));
    return t;
  }
};

// --- graphs -------------------------------------------------------------------------------------

enum class Way {
  kDirect,  // the graph goes to one backend, results lie in its buffers
  kSched,   // as a host does it: ggml's scheduler splits it between kvtamp and the CPU
};

class Graph {
 public:
  ggml_context* ctx() { return ctx_.get(); }

  // A tensor in CPU memory, filled at once.
  template <class T>
  ggml_tensor* Input(ggml_type type, std::vector<std::int64_t> ne, const std::vector<T>& data,
                     bool weight = false) {
    ggml_tensor* t = ggml_new_tensor(ctx(), type, static_cast<int>(ne.size()), ne.data());
    buffers_.emplace_back(ggml_backend_buft_alloc_buffer(CpuType(), ggml_nbytes(t)));
    ggml_backend_tensor_alloc(buffers_.back().get(), t,
                              ggml_backend_buffer_get_base(buffers_.back().get()));
    if (weight) {
      ggml_backend_buffer_set_usage(buffers_.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    } else {
      ggml_set_input(t);
    }
    Set(t, data);
    return t;
  }
  // x times a weight of ones: a node the scheduler gives to the CPU, as it does the projections
  // around attention.
  ggml_tensor* OnCpu(ggml_tensor* x) {
    return ggml_mul(ctx(), x,
                    Input(GGML_TYPE_F32, {x->ne[0]}, std::vector<float>(x->ne[0], 1), true));
  }

  void Add(ggml_tensor* t) {
    ggml_build_forward_expand(graph_, t);
    ggml_set_output(t);
  }
  ggml_cgraph* get() { return graph_; }

  ggml_status Compute(ggml_backend_t backend) {
    if (alloc_ == nullptr) {
      alloc_.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)));
      if (!ggml_gallocr_alloc_graph(alloc_.get(), graph_)) return GGML_STATUS_ALLOC_FAILED;
    }
    return ggml_backend_graph_compute(backend, graph_);
  }
  ggml_status Compute(ggml_backend_t ours, ggml_backend_t cpu,
                      ggml_backend_sched_eval_callback callback = nullptr) {
    if (sched_ == nullptr) {
      ggml_backend_t backends[] = {ours, cpu};
      sched_.reset(ggml_backend_sched_new(backends, nullptr, 2, 1024, false, true));
      if (!ggml_backend_sched_alloc_graph(sched_.get(), graph_)) return GGML_STATUS_ALLOC_FAILED;
    }
    ggml_backend_sched_set_eval_callback(sched_.get(), callback, nullptr);
    return ggml_backend_sched_graph_compute(sched_.get(), graph_);
  }
  ggml_status Compute(Way way, ggml_backend_t ours, ggml_backend_t cpu) {
    return way == Way::kDirect ? Compute(ours) : Compute(ours, cpu);
  }
  ggml_backend_t BackendOf(ggml_tensor* t) {
    return ggml_backend_sched_get_tensor_backend(sched_.get(), t);
  }

 private:
  ggml_context_ptr ctx_{ggml_init(
      {1024 * ggml_tensor_overhead() + ggml_graph_overhead_custom(1024, false), nullptr, true})};
  ggml_cgraph* graph_ = ggml_new_graph_custom(ctx_.get(), 1024, false);
  std::vector<ggml_backend_buffer_ptr> buffers_;
  ggml_gallocr_ptr alloc_;
  ggml_backend_sched_ptr sched_;
};

// --- a micro-batch ------------------------------------------------------------------------------

struct Batch {
  // Rows to write: row i goes to cells[i] = stream * n_cells + cell.
  std::vector<std::int64_t> cells;
  std::vector<float> k, v;
  bool idx32 = false, rows_f16 = false;
  std::int64_t row_pad = 0;  // elements between rows

  // Attention of n_tok queries in each of ns streams from s0 on.
  std::int64_t n_head = 0, n_tok = 0, s0 = 0, ns = 1, n_kv = 0;
  std::vector<float> q;    // [ns][n_tok][n_head][dk]
  std::vector<Half> mask;  // [ns][n_tok][n_kv]
  std::vector<float> sinks;
  float scale = 0, max_bias = 0, softcap = 0;
};

// n_tok new tokens of stream 0, each sees those before it and itself.
inline Batch Causal(const Dims& d, Random& random, int n_tok, int first_cell,
                    std::int64_t n_head = 0) {
  Batch b;
  b.n_head = n_head == 0 ? d.n_head_kv * 2 : n_head;
  b.n_tok = n_tok;
  b.n_kv = d.n_cells;
  b.scale = 0.1f;
  for (int i = 0; i < n_tok; ++i) b.cells.push_back(first_cell + i);
  b.k = random.Normals(b.cells.size() * static_cast<std::size_t>(d.n_embd_k()));
  b.v = random.Normals(b.cells.size() * static_cast<std::size_t>(d.n_embd_v()));
  b.q = random.Normals(static_cast<std::size_t>(n_tok * b.n_head * d.dk));
  b.mask.assign(static_cast<std::size_t>(n_tok * b.n_kv), ggml_fp32_to_fp16(-INFINITY));
  for (int t = 0; t < n_tok; ++t)
    std::fill_n(b.mask.begin() + t * b.n_kv, first_cell + t + 1, Half{0});
  return b;
}

// What a cache holds once a batch's rows of one side are in it.
inline void Put(const Batch& b, const std::vector<float>& rows, std::vector<Half>& all) {
  const std::vector<Half> halves = ToHalf(rows);
  const auto n_embd = static_cast<std::int64_t>(rows.size() / b.cells.size());
  for (std::size_t i = 0; i < b.cells.size(); ++i)
    std::copy_n(halves.begin() + static_cast<std::int64_t>(i) * n_embd, n_embd,
                all.begin() + b.cells[i] * n_embd);
}

// llama_kv_cache::cpy_k
inline ggml_tensor* SetRows(Graph& g, ggml_tensor* cache, const Batch& b,
                            const std::vector<float>& x) {
  const std::int64_t n_embd = cache->ne[0], n = static_cast<std::int64_t>(b.cells.size());
  const std::int64_t stride = n_embd + b.row_pad;
  std::vector<float> padded(static_cast<std::size_t>(stride * n), NAN);
  for (std::int64_t i = 0; i < n; ++i)
    std::copy_n(x.begin() + i * n_embd, n_embd, padded.begin() + i * stride);
  ggml_tensor* rows = b.rows_f16 ? g.Input(GGML_TYPE_F16, {stride, n}, ToHalf(padded))
                                 : g.Input(GGML_TYPE_F32, {stride, n}, padded);
  rows = ggml_view_2d(g.ctx(), rows, n_embd, n, rows->nb[1], 0);
  ggml_tensor* idx = b.idx32 ? g.Input(GGML_TYPE_I32, {n},
                                       std::vector<std::int32_t>(b.cells.begin(), b.cells.end()))
                             : g.Input(GGML_TYPE_I64, {n}, b.cells);
  if (cache->ne[2] > 1)
    cache = ggml_reshape_2d(g.ctx(), cache, n_embd, cache->ne[1] * cache->ne[2]);
  return ggml_set_rows(g.ctx(), cache, rows, idx);
}

// llama_kv_cache::get_k
inline ggml_tensor* CacheView(Graph& g, ggml_tensor* t, std::int64_t dim, std::int64_t n_head_kv,
                              const Batch& b) {
  return ggml_view_4d(g.ctx(), t, dim, n_head_kv, b.n_kv, b.ns, ggml_row_size(t->type, dim),
                      t->nb[1], t->nb[2], t->nb[2] * static_cast<std::size_t>(b.s0));
}

inline ggml_tensor* Queries(Graph& g, const Batch& b, std::int64_t dk) {
  return g.Input(GGML_TYPE_F32, {dk, b.n_head, b.n_tok, b.ns}, b.q);
}

// llm_graph_context::build_attn_mha
inline ggml_tensor* Attend(Graph& g, const Batch& b, ggml_tensor* q, ggml_tensor* k,
                           ggml_tensor* v) {
  ggml_context* ctx = g.ctx();
  ggml_tensor* mask =
      b.mask.empty() ? nullptr : g.Input(GGML_TYPE_F16, {b.n_kv, b.n_tok, 1, b.ns}, b.mask);
  ggml_tensor* out =
      ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), ggml_permute(ctx, k, 0, 2, 1, 3),
                          ggml_permute(ctx, v, 0, 2, 1, 3), mask, b.scale, b.max_bias, b.softcap);
  if (!b.sinks.empty())
    ggml_flash_attn_ext_add_sinks(out, g.Input(GGML_TYPE_F32, {b.n_head}, b.sinks, true));
  ggml_prec_set_acc(out, GGML_PREC_F32);
  return out;
}

// One layer's part of a host's graph: write, then attend.
inline std::vector<float> RunLayer(Way way, ggml_backend_t ours, ggml_backend_t cpu,
                                   const Cache& cache, const Batch& b, int il = 0) {
  Graph g;
  const Dims& d = cache.dims;
  ggml_tensor *k = cache.k[static_cast<std::size_t>(il)],
              *v = cache.v[static_cast<std::size_t>(il)];
  ggml_tensor* q = nullptr;
  if (b.n_tok > 0) {
    q = Queries(g, b, d.dk);
    if (way == Way::kSched) q = g.OnCpu(q);
    ggml_build_forward_expand(g.get(), q);
  }
  if (!b.cells.empty()) {
    ggml_build_forward_expand(g.get(), SetRows(g, k, b, b.k));
    ggml_build_forward_expand(g.get(), SetRows(g, v, b, b.v));
  }
  ggml_tensor *fa = nullptr, *out = nullptr;
  if (b.n_tok > 0) {
    fa = Attend(g, b, q, CacheView(g, k, d.dk, d.n_head_kv, b),
                CacheView(g, v, d.dv, d.n_head_kv, b));
    out = way == Way::kSched ? g.OnCpu(fa) : fa;
    g.Add(out);
  }
  EXPECT_EQ(g.Compute(way, ours, cpu), GGML_STATUS_SUCCESS);
  if (out == nullptr) return {};
  if (way == Way::kSched) {
    EXPECT_EQ(g.BackendOf(fa), ours) << "the scheduler gave attention to the CPU";
    EXPECT_EQ(g.BackendOf(out), cpu);
  }
  return Get<float>(out);
}

// The same in double, over rows [n_streams * n_cells][n_embd].
inline std::vector<double> Exact(const Dims& d, const Batch& b, const std::vector<float>& k,
                                 const std::vector<float>& v) {
  std::vector<double> out(static_cast<std::size_t>(b.ns * b.n_tok * b.n_head * d.dv), 0.0);
  const std::int64_t gqa = b.n_head / d.n_head_kv;
  const double log2 = std::exp2(std::floor(std::log2(static_cast<double>(b.n_head))));
  std::vector<std::pair<std::int64_t, double>> open;
  for (std::int64_t s = 0; s < b.ns; ++s)
    for (std::int64_t t = 0; t < b.n_tok; ++t)
      for (std::int64_t h = 0; h < b.n_head; ++h) {
        const std::int64_t token = s * b.n_tok + t;
        const float* q = b.q.data() + (token * b.n_head + h) * d.dk;
        const double hd = static_cast<double>(h);
        const double slope = b.max_bias == 0 ? 1.0
                             : hd < log2
                                 ? std::exp2(-b.max_bias / log2 * (hd + 1))
                                 : std::exp2(-b.max_bias / 2 / log2 * (2 * (hd - log2) + 1));
        open.clear();
        double max = b.sinks.empty() ? -INFINITY : b.sinks[static_cast<std::size_t>(h)];
        for (std::int64_t c = 0; c < b.n_kv; ++c) {
          const double m = ggml_fp16_to_fp32(b.mask[static_cast<std::size_t>(token * b.n_kv + c)]);
          if (m == -INFINITY) continue;
          const float* row =
              k.data() + ((b.s0 + s) * d.n_cells + c) * d.n_embd_k() + h / gqa * d.dk;
          double dot = 0;
          for (std::int64_t i = 0; i < d.dk; ++i) dot += static_cast<double>(q[i]) * row[i];
          double score = dot * b.scale;
          if (b.softcap != 0) score = b.softcap * std::tanh(score / b.softcap);
          score += slope * m;
          max = std::max(max, score);
          open.emplace_back(c, score);
        }
        if (open.empty()) continue;
        double sum = b.sinks.empty() ? 0 : std::exp(b.sinks[static_cast<std::size_t>(h)] - max);
        double* o = out.data() + (token * b.n_head + h) * d.dv;
        for (const auto& [c, score] : open) {
          const double p = std::exp(score - max);
          const float* row =
              v.data() + ((b.s0 + s) * d.n_cells + c) * d.n_embd_v() + h / gqa * d.dv;
          for (std::int64_t i = 0; i < d.dv; ++i) o[i] += p * row[i];
          sum += p;
        }
        for (std::int64_t i = 0; i < d.dv; ++i) o[i] /= sum;
      }
  return out;
}

inline std::vector<double> Exact(const Dims& d, const Batch& b, const std::vector<Half>& k,
                                 const std::vector<Half>& v) {
  return Exact(d, b, ToFloat(k), ToFloat(v));
}

}  // namespace kvtamp::ggml_plugin::test
