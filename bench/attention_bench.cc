// Attention over pages, without a host. Each line also reads the same pages once, plainly and with
// as many threads, since what a machine delivers differs by hour: compare GB/s with stream_GB/s.
//
//   attention_bench --benchmark_filter='decode/int4.*dim:128'
//   KVTAMP_CPU=avx2 attention_bench …        forces an instruction set
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "attention/attention.h"
#include "codec/codec.h"
#include "cpu/cpu.h"

namespace kvtamp::attention {
namespace {

using codec::Coding;

class OpenMp final : public Executor {
 public:
  explicit OpenMp(int n) : n_(n) {}
  int n_threads() const override { return n_; }
  void Run(void (*fn)(void*, int), void* arg) override {
#pragma omp parallel num_threads(n_)
    fn(arg, omp_get_thread_num());
  }

 private:
  int n_;
};

struct Case {
  const char* name;
  Coding k, v;
  std::uint32_t bits = 0;
};
constexpr Case kCases[] = {{"k4v4", Coding::kKPlanes, Coding::kVLm4, 4},
                           {"k3v3", Coding::kKPlanes, Coding::kVTrellis, 3},
                           {"k2v2", Coding::kKPlanes, Coding::kVTrellis, 2},
                           {"int4", Coding::kKInt4, Coding::kVLm4},
                           {"int8", Coding::kKInt8, Coding::kVInt8},
                           {"f16", Coding::kF16, Coding::kF16}};

// One stream of random pages; speed does not depend on what the codes are.
class Stream {
 public:
  Stream(const Case& c, std::uint32_t n_head_kv, std::uint32_t gqa, std::uint32_t dim,
         std::uint32_t length, std::uint32_t n_tok) {
    layer.n_head_kv = n_head_kv;
    layer.dim_k = layer.dim_v = dim;
    layer.v_group = dim % 64 == 0 ? 64 : dim;
    layer.v_hadamard = true;
    params.n_head = n_head_kv * gqa;
    params.scale = 1.0f / std::sqrt(static_cast<float>(dim));
    mean_ = Floats(std::size_t{n_head_kv} * dim);
    layer.k_mean = mean_.data();
    const codec::SideLayout* k_layout = Layout(c.k, dim, 0, c.bits);
    const codec::SideLayout* v_layout = Layout(c.v, dim, layer.v_group, c.bits);
    for (std::uint32_t cell = 0; cell < length; cell += layer.page_size) {
      Page page;
      page.rows = layer.page_size;
      page.first_cell = cell;
      page.k_layout = k_layout;
      page.v_layout = v_layout;
      page.k = Side(k_layout, dim);
      page.v = Side(v_layout, dim);
      pages_.push_back(page);
    }
    q_ = Floats(std::size_t{n_tok} * params.n_head * dim);
    out_.resize(q_.size());
    // Causal: the tokens are the last ones of the stream.
    mask_.assign(std::size_t{n_tok} * length, half_t{0});
    for (std::uint32_t t = 0; t < n_tok; ++t) {
      std::fill(mask_.begin() + std::size_t{t} * length + (length - n_tok + t + 1),
                mask_.begin() + std::size_t{t + 1} * length, half_t{0xFC00});
    }
    job.pages = pages_;
    job.q = q_.data();
    job.out = out_.data();
    job.q_head_stride = job.out_head_stride = dim;
    job.q_tok_stride = job.out_tok_stride = std::size_t{params.n_head} * dim;
    job.mask = mask_.data();
    job.mask_tok_stride = length;
    job.n_tok = n_tok;
    job.n_kv = length;
  }

  std::size_t bytes() const { return bytes_; }

  // Seconds to read every byte of the pages once.
  double ReadOnce(int threads) const {
    const auto start = std::chrono::steady_clock::now();
    std::uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) reduction(^ : sum)
    for (std::size_t i = 0; i < blobs_.size(); ++i) {
      for (const std::uint64_t x : blobs_[i]) sum ^= x;
    }
    benchmark::DoNotOptimize(sum);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  Layer layer;
  Params params;
  Job job;

 private:
  std::vector<float> Floats(std::size_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> v(n);
    for (float& x : v) x = normal(rng_);
    return v;
  }

  const codec::SideLayout* Layout(Coding coding, std::uint32_t dim, std::uint32_t group,
                                  std::uint32_t bits) {
    if (coding == Coding::kF16) return nullptr;
    codec::SideLayout& layout = layouts_.emplace_back();
    codec::PageShape shape{layer.page_size, dim, group};
    if (coding == Coding::kKPlanes) shape.budget = bits * dim;
    if (coding == Coding::kVTrellis) shape.rate8 = bits * 8;
    for (std::uint32_t h = 0; h < layer.n_head_kv; ++h) layout.Add(coding, shape);
    return &layout;
  }

  const std::uint8_t* Side(const codec::SideLayout* layout, std::uint32_t dim) {
    const std::size_t total = layout != nullptr
                                  ? layout->bytes
                                  : std::size_t{layer.page_size} * layer.n_head_kv * dim * 2;
    std::vector<std::uint64_t>& words = blobs_.emplace_back((total + 7) / 8);
    for (std::uint64_t& w : words) w = rng_();
    auto* bytes = reinterpret_cast<std::uint8_t*>(words.data());
    bytes_ += total;
    if (layout == nullptr) {
      auto* halves = reinterpret_cast<half_t*>(bytes);
      for (std::size_t i = 0; i < total / 2; ++i) halves[i] = (halves[i] & 0x83FF) | 0x3800;
      return bytes;
    }
    for (const auto& head : layout->heads) {  // values near 1, minima near -scale * mid
      std::uint8_t* scales = bytes + head.offset;
      const bool is_k = head.shape.group == 0;
      const std::size_t n = is_k ? dim : head.scales;
      std::fill_n(scales, n, static_cast<std::uint8_t>(is_k ? 112 : 120));
      std::fill(scales + n, scales + head.scales, std::uint8_t{0});
      if (head.coding != Coding::kKPlanes) continue;
      // Widths spread as those of real keys are: by threes around the mean.
      const std::uint32_t bits = head.shape.budget / dim;
      for (std::uint32_t c = 0; c < dim; ++c) {
        const std::uint32_t width = c % 4 == 0 ? bits + 2 : c % 4 == 1 ? bits - 2 : bits;
        scales[2 * dim + c / 2] |= static_cast<std::uint8_t>(width << (c % 2 * 4));
      }
    }
    return bytes;
  }

  std::mt19937_64 rng_{1};
  std::vector<float> mean_, q_, out_;
  std::vector<half_t> mask_;
  std::vector<Page> pages_;
  std::vector<std::vector<std::uint64_t>> blobs_;
  std::deque<codec::SideLayout> layouts_;
  std::size_t bytes_ = 0;
};

// Arguments: KV heads, query heads per KV head, head size, tokens stored, tokens asked, threads.
void Run(benchmark::State& state, const Case& c) {
  const auto arg = [&](int i) { return static_cast<std::uint32_t>(state.range(i)); };
  const Stream stream(c, arg(0), arg(1), arg(2), arg(3), arg(4));
  OpenMp executor(static_cast<int>(arg(5)));
  Workspace workspace;
  std::vector<double> read, attend;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    if (!Attend(stream.layer, {&stream.job, 1}, stream.params, workspace, executor).ok()) {
      state.SkipWithError("Attend failed");
      break;
    }
    attend.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    state.SetIterationTime(attend.back());
    read.push_back(stream.ReadOnce(executor.n_threads()));
  }
  if (read.empty()) return;
  const auto median = [](std::vector<double>& v) {
    std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
    return v[v.size() / 2];
  };
  const double bytes = static_cast<double>(stream.bytes()), seconds = median(attend);
  state.counters["GB/s"] = bytes / seconds * 1e-9;
  state.counters["stream_GB/s"] = bytes / median(read) * 1e-9;
  state.counters["GFLOP/s"] = 4.0 * arg(0) * arg(1) * arg(2) * arg(3) * arg(4) / seconds * 1e-9;
}

void Register() {
  const std::vector<std::string> names = {"kv", "gqa", "dim", "len", "tok", "thr"};
  const int all = std::min(omp_get_max_threads(), 16);
  for (const Case& c : kCases) {
    auto* decode = benchmark::RegisterBenchmark((std::string("decode/") + c.name).c_str(), Run, c);
    auto* prefill =
        benchmark::RegisterBenchmark((std::string("prefill/") + c.name).c_str(), Run, c);
    for (auto* b : {decode, prefill})
      b->ArgNames(names)->UseManualTime()->Unit(benchmark::kMillisecond);
    for (const int threads : {1, all}) {
      for (const std::int64_t length : {4096, 32768}) {
        decode->Args({8, 4, 128, length, 1, threads});
        decode->Args({3, 3, 64, length, 1, threads});
        decode->Args({2, 6, 128, length, 1, threads});
        decode->Args({1, 4, 256, length, 1, threads});
        decode->Args({8, 1, 80, length, 1, threads});
      }
      decode->Args({8, 4, 128, 4096, 6, threads});  // the most rows the integer path takes
      for (const std::int64_t length : {4096, 8192}) {
        prefill->Args({8, 4, 128, length, 512, threads});
        prefill->Args({3, 3, 64, length, 512, threads});
      }
      prefill->Args({8, 4, 128, 4096, 7, threads});  // the fewest it does not
      if (all == 1) break;
    }
  }
}

}  // namespace
}  // namespace kvtamp::attention

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  if (const char* isa = std::getenv("KVTAMP_CPU"); isa != nullptr) {
    if (const kvtamp::Status status = kvtamp::cpu::ForceIsa(isa); !status.ok()) {
      std::fprintf(stderr, "%s\n", status.message().c_str());
      return 1;
    }
  }
  benchmark::AddCustomContext("kvtamp_cpu", kvtamp::cpu::ActiveIsa());
  kvtamp::attention::Register();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
