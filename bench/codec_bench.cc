// What sealing costs: a page of one head coded, by format, head size and instruction set.
//
//   codec_bench --benchmark_filter='tcq3'
//   KVTAMP_CPU=avx2 codec_bench …        forces an instruction set
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "codec/codec.h"
#include "cpu/cpu.h"

namespace kvtamp::codec {
namespace {

void Encode(benchmark::State& state, const Format& format, Side side, std::uint32_t dim) {
  constexpr std::uint32_t kRows = 64;
  const Coding coding = CodingOf(format, side).value();
  const PageShape shape = ShapeOf(Resolve(format, side, dim).value(), side, dim, kRows);
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<half_t> rows(kRows * dim);
  for (half_t& h : rows) h = FloatToHalf(normal(rng));
  std::vector<float> weight(dim), mean(dim);
  for (float& w : weight) w = std::exp(normal(rng));
  const std::uint64_t valid[] = {~std::uint64_t{0}, 0};
  const EncodeInput in{rows.data(), dim, valid, weight.data()};
  std::vector<std::uint8_t> out(EncodedBytes(coding, shape).total);
  for (auto _ : state) {
    if (side == Side::kK) {
      EncodeK(coding, shape, in, mean.data(), out.data());
    } else {
      EncodeV(coding, shape, in, format.hadamard, out.data());
    }
    benchmark::DoNotOptimize(out.data());
  }
  state.counters["ns_per_token"] = benchmark::Counter(
      kRows * 1e-9, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void Register() {
  for (const char* name : {"k8v8", "k4v4", "k3.5v3", "k2v2"}) {
    const Pair pair = ParsePair(name).value();
    for (std::uint32_t dim : {64u, 128u}) {
      for (Side side : {Side::kK, Side::kV}) {
        const Format format = side == Side::kK ? pair.k : pair.v;
        benchmark::RegisterBenchmark(
            ("encode/" + FormatName(format) + "/dim:" + std::to_string(dim)).c_str(),
            [=](benchmark::State& state) { Encode(state, format, side, dim); });
      }
    }
  }
}

}  // namespace
}  // namespace kvtamp::codec

int main(int argc, char** argv) {
  const char* isa = std::getenv("KVTAMP_CPU");
  if (const kvtamp::Status s = kvtamp::cpu::ForceIsa(isa != nullptr ? isa : "auto"); !s.ok()) {
    std::fprintf(stderr, "codec_bench: %s\n", s.message().c_str());
    return 1;
  }
  kvtamp::codec::Register();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
