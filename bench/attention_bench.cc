// Attention of one layer, without a model: kvtamp's caches and ggml's own, over shapes, formats,
// instruction sets and threads. docs/benchmarks.md says what the columns mean.
//
//   attention_bench --benchmark_filter='decode/kvtamp:k4v4.*dim:128'
//   attention_bench --shapes 32/8/128:4096 --caches k4v4 --isa avx2,avx512 -t 2
//
// Each repetition of a line is one turn: a pass over memory, the cache, ggml's f16 cache of the
// same shape with as many threads. What else the machine does meets all three alike.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <omp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>

#include "bench/coded_attention.h"
#include "bench/ggml_attention.h"
#include "bench/read_bandwidth.h"
#include "bench/results.h"
#include "cpu/cpu.h"
#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/host_types.h"

namespace kvtamp::bench {
namespace {

constexpr std::uint32_t kLongestPrefill = 8192;  // unless shapes are given: it takes minutes

struct Options {
  std::vector<std::string> shapes{"32/8/128:4096", "32/8/128:32768", "9/3/64:4096", "12/2/128:4096",
                                  "12/2/128:8192"};
  std::vector<std::uint32_t> tokens{1, 512};
  std::vector<std::string> caches{"f16", "k8v8", "k4v4", "k3.5v3", "k2v2"};
  std::vector<std::string> host_types{"f16", "q8_0", "q4_0"};
  std::vector<std::string> isas;
  std::vector<int> threads;
  std::vector<std::uint32_t> observed{0};
  int repetitions = 5;
  bool shapes_given = false;
};

class OpenMp final : public Executor {
 public:
  explicit OpenMp(int n) : n_(n) {}
  int n_threads() const override { return n_; }
  void Run(void (*fn)(void*, int), void* arg) override {
    if (n_ == 1) return fn(arg, 0);
#pragma omp parallel num_threads(n_)
    for (int w = omp_get_thread_num(); w < n_; w += omp_get_num_threads()) fn(arg, w);
  }

 private:
  const int n_;
};

// One cache to measure: of kvtamp, or of ggml.
struct Subject {
  bool own = true;
  codec::Pair pair;
  std::uint32_t n_observed = 0;
  ggml_type type = GGML_TYPE_F16;
};

struct Session {
  int repetitions = 5;
  bool failed = false;
  std::vector<Row> rows;
  std::unique_ptr<ReadBuffer> memory;

  ReadBuffer& Memory(int n_threads) {
    if (memory == nullptr || memory->n_threads() != n_threads) {
      memory.reset();  // there need not be room for two
      memory = std::make_unique<ReadBuffer>(ReadBuffer::DefaultBytes(), n_threads);
    }
    return *memory;
  }
};

Result<std::unique_ptr<Attention>> MakeGgml(const Shape& shape, ggml_type type, int n_threads) {
  auto made = GgmlAttention::Make(
      shape, type, LayersFor(GgmlLayerBytes(shape, type), shape.decode()), n_threads);
  if (!made.ok()) return made.status();
  return std::unique_ptr<Attention>(std::move(made.value()));
}

// Sets line.layer_bytes as well.
Result<std::unique_ptr<Attention>> Make(const Subject& subject, Line& line, Executor& executor) {
  if (!subject.own) {
    line.layer_bytes = GgmlLayerBytes(line.shape, subject.type);
    return MakeGgml(line.shape, subject.type, line.n_threads);
  }
  const auto format = MakeCodedFormat(line.shape, subject.pair);
  if (!format.ok()) return format.status();
  line.layer_bytes = format.value().layer_bytes(line.shape);
  auto made = CodedAttention::Make(line.shape, format.value(),
                                   LayersFor(line.layer_bytes, line.shape.decode()),
                                   subject.n_observed, executor);
  if (!made.ok()) return made.status();
  return std::unique_ptr<Attention>(std::move(made.value()));
}

Status TimedStep(Attention& attention, std::vector<double>& seconds_of_layer) {
  const auto start = std::chrono::steady_clock::now();
  if (Status s = attention.Step(); !s.ok()) return s;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  seconds_of_layer.push_back(took.count() / attention.n_layers());
  return Status::Ok();
}

Status Turn(Attention& tested, Attention& peer, ReadBuffer& memory, Turns& turns) {
  turns.read.push_back(memory.Pass());
  // Another one first each time.
  const bool tested_first = turns.read.size() % 2 == 1;
  if (tested_first)
    if (Status s = TimedStep(tested, turns.seconds); !s.ok()) return s;
  if (Status s = TimedStep(peer, turns.peer_seconds); !s.ok()) return s;
  return tested_first ? Status::Ok() : TimedStep(tested, turns.seconds);
}

Status MeasureLine(benchmark::State& state, Session& session, const Subject& subject, Line& line,
                   Turns& turns) {
  if (line.isa != "host")
    if (Status s = cpu::ForceIsa(line.isa); !s.ok()) return s;
  OpenMp executor(line.n_threads);
  const auto tested = Make(subject, line, executor);
  if (!tested.ok()) return tested.status();
  const auto peer = MakeGgml(line.shape, GGML_TYPE_F16, line.n_threads);
  if (!peer.ok()) return peer.status();
  ReadBuffer& memory = session.Memory(line.n_threads);
  if (!memory.ok()) return Status::OutOfMemory("no memory for the read bandwidth's buffer");
  Attention &own = *tested.value(), &other = *peer.value();
  for (Attention* warmed_up : {&own, &other})
    if (Status s = warmed_up->Step(); !s.ok()) return s;
  for (auto _ : state) {
    if (Status s = Turn(own, other, memory, turns); !s.ok()) return s;
    state.SetIterationTime(turns.seconds.back());
  }
  return Status::Ok();
}

void RunLine(benchmark::State& state, Session& session, const Subject& subject, Line line) {
  Turns turns;
  if (const Status s = MeasureLine(state, session, subject, line, turns); !s.ok()) {
    state.SkipWithError(s.message().c_str());
    session.failed = true;
    return;
  }
  const Figures f = FiguresOf(line, turns);
  session.rows.push_back({line, f});
  state.counters["GB/s"] = 1e-9 * f.coded_rate;
  state.counters["read_GB/s"] = 1e-9 * f.read_rate;
  state.counters["of_read"] = f.share;
  state.counters["GFLOP/s"] = 1e-9 * f.flop_rate;
  state.counters["of_ggml_f16"] = f.ratio;
}

void RegisterLine(Session& session, const Subject& subject, Line line) {
  const Shape& s = line.shape;
  std::string cache = line.cache;
  std::replace(cache.begin(), cache.end(), ' ', ':');
  const std::string name =
      fmt::format("{}/{}/heads:{}/kv:{}/dim:{}/len:{}/tok:{}/isa:{}/threads:{}",
                  s.decode() ? "decode" : "prefill", cache, s.n_head, s.n_head_kv, s.dim, s.length,
                  s.n_tok, line.isa, line.n_threads);
  benchmark::RegisterBenchmark(name.c_str(),
                               [&session, subject, line](benchmark::State& state) {
                                 RunLine(state, session, subject, line);
                               })
      ->UseManualTime()
      ->Iterations(session.repetitions)
      ->Unit(benchmark::kMillisecond);
}

// What the flags' words mean; the first that means nothing is the error.
struct Plan {
  std::vector<Shape> shapes;  // times tokens
  std::vector<std::pair<std::string, Subject>> subjects;
};

Status PlanShapes(const Options& o, Plan& plan) {
  for (const std::uint32_t n_tok : o.tokens) {
    for (const std::string& text : o.shapes) {
      auto shape = ParseShape(text);
      if (!shape.ok()) return Status::Invalid("--shapes " + shape.status().message());
      shape.value().n_tok = n_tok;
      if (n_tok > shape.value().length)
        return Status::Invalid(fmt::format("--tokens {}: more than {} stores", n_tok, text));
      if (n_tok > 1 && !o.shapes_given && shape.value().length > kLongestPrefill) continue;
      plan.shapes.push_back(shape.value());
    }
  }
  return Status::Ok();
}

Status PlanSubjects(const Options& o, Plan& plan) {
  for (const std::string& text : o.host_types) {
    const auto type = tool::HostType(text, "--host-types");
    if (!type.ok()) return type.status();
    plan.subjects.emplace_back("ggml " + text, Subject{false, {}, 0, type.value()});
  }
  for (const std::string& text : o.caches) {
    const auto pair = codec::ParsePair(text);
    if (!pair.ok()) return Status::Invalid("--caches " + pair.status().message());
    for (const std::uint32_t n : o.observed)
      plan.subjects.emplace_back(
          n == 0 ? "kvtamp " + text : fmt::format("kvtamp {} observing {}", text, n),
          Subject{true, pair.value(), n});
  }
  return Status::Ok();
}

void Register(const Options& o, const Plan& plan, Session& session) {
  session.repetitions = o.repetitions;
  for (const Shape& shape : plan.shapes) {
    for (const int n_threads : o.threads) {
      for (const auto& [name, subject] : plan.subjects) {
        // ggml's is the one it was built for.
        const std::vector<std::string> isas =
            subject.own ? o.isas : std::vector<std::string>{"host"};
        for (const std::string& isa : isas)
          RegisterLine(session, subject, {name, isa, shape, n_threads, 0});
      }
    }
  }
}

void AddOptions(CLI::App& app, Options& o) {
  const auto list = [&](const char* name, auto& to, const char* type, const char* help) {
    return app.add_option(name, to, help)->delimiter(',')->type_name(type)->capture_default_str();
  };
  list("--shapes", o.shapes, "H/KV/DIM:LEN",
       "query heads, KV heads, head size, tokens stored. Without it, prompts over more than 8192 "
       "are left out");
  list("--tokens", o.tokens, "N", "tokens that ask, the last ones: 1 is decode")
      ->check(CLI::Range(1u, 1u << 16));
  list("--caches", o.caches, "CACHE", "kvtamp's, see kvtamp formats");
  list("--host-types", o.host_types, "TYPE", "ggml's");
  list("--isa", o.isas, "ISA",
       "kvtamp's instruction sets; without it that of KVTAMP_CPU, or the best");
  list("-t,--threads", o.threads, "N", "without it 1 and all cores")->check(CLI::Range(1, 1024));
  list("--observe", o.observed, "N",
       "tokens whose attention is added up by cell as well, as pruning needs it, the last ones");
  app.add_option("-r,--repetitions", o.repetitions, "turns of each line")
      ->type_name("N")
      ->capture_default_str()
      ->check(CLI::Range(1, 10000));
  app.allow_extras();
  app.footer(
      "\nThe rest is Google Benchmark's: --benchmark_filter=REGEX, --benchmark_list_tests,\n"
      "--benchmark_out=FILE with --benchmark_out_format=json|csv, …");
}

Status Complete(Options& o) {
  const char* forced = std::getenv("KVTAMP_CPU");
  if (o.isas.empty()) {
    if (forced != nullptr)
      if (Status s = cpu::ForceIsa(forced); !s.ok()) return s;
    o.isas = {cpu::ActiveIsa()};
  }
  for (const std::string& isa : o.isas)
    if (Status s = cpu::ForceIsa(isa); !s.ok()) return s;
  if (o.threads.empty()) {
    o.threads = {1};
    if (const auto all = static_cast<int>(std::thread::hardware_concurrency()); all > 1)
      o.threads.push_back(all);
  }
  return Status::Ok();
}

bool PlainOutput(const std::vector<std::string>& flags) {
  return std::none_of(flags.begin(), flags.end(), [](const std::string& flag) {
    return flag.starts_with("--benchmark_format=") && flag != "--benchmark_format=console";
  });
}

int Usage(const std::string& message) {
  fmt::print(stderr, "attention_bench: {}\n", message);
  return 2;
}

int Main(int argc, char** argv) {
  CLI::App app("Attention of one layer: kvtamp's caches beside ggml's own", "attention_bench");
  Options o;
  AddOptions(app, o);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  o.shapes_given = app.count("--shapes") > 0;
  const std::vector<std::string> rest = app.remaining();
  std::vector<char*> flags{argv[0]};
  for (const std::string& flag : rest) flags.push_back(const_cast<char*>(flag.c_str()));
  int n_flags = static_cast<int>(flags.size());
  benchmark::Initialize(&n_flags, flags.data());
  if (benchmark::ReportUnrecognizedArguments(n_flags, flags.data())) return 2;

  Plan plan;
  for (const Status& s : {Complete(o), PlanShapes(o, plan), PlanSubjects(o, plan)})
    if (!s.ok()) return Usage(s.message());
  Session session;
  Register(o, plan, session);
  benchmark::AddCustomContext("cpu", tool::CpuInfo());
  benchmark::AddCustomContext("kvtamp_isas", fmt::format("{}", fmt::join(o.isas, ",")));
  benchmark::AddCustomContext("ggml", fmt::format("{} {}", ggml_version(), ggml_commit()));
  benchmark::AddCustomContext(
      "read_buffer", fmt::format("{} MiB, last-level cache {} MiB",
                                 ReadBuffer::DefaultBytes() >> 20, LastLevelCacheBytes() >> 20));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  if (!session.rows.empty() && PlainOutput(rest)) fmt::print("\n{}", Markdown(session.rows));
  return session.failed ? 1 : 0;
}

}  // namespace
}  // namespace kvtamp::bench

int main(int argc, char** argv) { return kvtamp::bench::Main(argc, argv); }
