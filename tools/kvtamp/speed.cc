#include "tools/kvtamp/speed.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "tools/kvtamp/environment.h"

namespace kvtamp::tool {
namespace {

// What a cache holds at a depth, and going back to that.
class Subject {
 public:
  Subject(std::string name, Context context, const SpeedConfig& config, std::uint32_t depth)
      : name_(std::move(name)),
        context_(std::move(context)),
        config_(config),
        depth_(depth),
        batch_(config.n_batch),
        n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context_.get())))) {}

  // Any tokens do: speed does not depend on them.
  Status Run(std::uint32_t n, std::uint32_t at_once, double& seconds) {
    for (std::uint32_t left = n; left > 0;) {
      const std::uint32_t now = std::min(at_once, left);
      left -= now;
      batch_.Clear();
      for (std::uint32_t i = 0; i < now; ++i)
        batch_.Add(static_cast<llama_token>(rng_() % static_cast<std::uint32_t>(n_vocab_)), pos_++,
                   i + 1 == now);
      if (Status s = Decode(context_.get(), batch_, name_, seconds); !s.ok()) return s;
    }
    return Status::Ok();
  }
  // From an empty cache to the depth.
  Status Fill() {
    llama_memory_clear(llama_get_memory(context_.get()), false);
    pos_ = 0;
    double unused = 0;
    return Run(depth_, config_.n_batch, unused);
  }
  // The same from the state of another cache that is there, or this cache's into an empty `state`:
  // prefill to a great depth takes far longer than all tests. Caches whose states differ (the
  // host's quantised types) fill themselves.
  Status FillFrom(std::vector<std::uint8_t>& state) {
    llama_memory_clear(llama_get_memory(context_.get()), false);
    if (depth_ > 0 && !state.empty() &&
        llama_state_seq_set_data(context_.get(), state.data(), state.size(), 0) == state.size()) {
      pos_ = depth_;
      double unused = 0;  // what was restored is coded after it was attended once
      return Run(1, 1, unused);
    }
    if (Status s = Fill(); !s.ok() || depth_ == 0 || !state.empty()) return s;
    state.resize(llama_state_seq_get_size(context_.get(), 0));
    state.resize(llama_state_seq_get_data(context_.get(), state.data(), state.size(), 0));
    return Status::Ok();
  }
  // From beyond the depth. Windowed and recurrent caches cannot drop their last tokens: they are
  // filled again.
  Status Back() {
    if (depth_ == 0 || !llama_memory_seq_rm(llama_get_memory(context_.get()), 0,
                                            static_cast<llama_pos>(depth_), -1))
      return Fill();
    pos_ = depth_;
    return Status::Ok();
  }

 private:
  const std::string name_;
  Context context_;
  const SpeedConfig& config_;
  const std::uint32_t depth_;
  Batch batch_;
  const int n_vocab_;
  std::uint32_t pos_ = 0;
  std::mt19937 rng_{1};
};

class SpeedRun {
 public:
  SpeedRun(const ModelPair& models, const SpeedConfig& config, std::span<const TestedCache> caches,
           const ProgressCall& progress)
      : models_(models), config_(config), caches_(caches), progress_(progress) {
    for (const std::uint32_t depth : config.depths)
      total_ += static_cast<double>(caches.size()) *
                (depth + Longest() +
                 static_cast<double>(config.repetitions) * (config.n_prompt + config.n_gen));
  }

  Result<SpeedResult> All() {
    result_.model = FactsOf(models_.tested());
    for (const std::uint32_t depth : config_.depths) {
      if (Status s = AtDepth(depth); !s.ok()) return s;
      if (!go_on_) break;
    }
    return std::move(result_);
  }

 private:
  std::uint32_t Longest() const { return std::max(config_.n_prompt, config_.n_gen); }

  Result<std::unique_ptr<Subject>> Make(const TestedCache& cache, std::uint32_t depth) {
    const Environment environment(cache.environment);
    ContextShape shape;
    shape.n_ctx = depth + Longest();
    shape.n_batch = config_.n_batch;
    shape.n_ubatch = std::min(config_.n_ubatch, config_.n_batch);
    shape.n_threads = config_.n_threads;
    shape.type_k = cache.type_k;
    shape.type_v = cache.type_v;
    Context context = MakeContext(cache.host ? models_.base.get() : models_.own.get(), shape);
    if (!context) {
      return HostError(
          fmt::format("cannot make the {} context of {} tokens", cache.name, shape.n_ctx));
    }
    return std::make_unique<Subject>(cache.name, std::move(context), config_, depth);
  }

  // False in go_on_ when the user wants an end.
  void Did(std::uint32_t n, const std::string& what) {
    done_ += n;
    go_on_ = progress_(std::min(1.0, done_ / total_), what) && go_on_;
  }

  // Ours first: they get there sooner.
  Status FillAll(std::span<std::unique_ptr<Subject>> subjects, std::uint32_t depth) {
    std::vector<std::uint8_t> state;
    for (const bool host : {false, true}) {
      for (std::size_t c = 0; c < subjects.size() && go_on_; ++c) {
        if (caches_[c].host != host) continue;
        if (Status s = subjects[c]->FillFrom(state); !s.ok()) return s;
        Did(depth, fmt::format("depth {}: filling", depth));
      }
    }
    return Status::Ok();
  }

  Status AtDepth(std::uint32_t depth) {
    std::vector<std::unique_ptr<Subject>> subjects;
    for (const TestedCache& cache : caches_) {
      auto subject = Make(cache, depth);
      if (!subject.ok()) return subject.status();
      subjects.push_back(std::move(subject.value()));
      // Weights and scratch into memory.
      double unused = 0;
      if (Status s = subjects.back()->Run(Longest(), config_.n_batch, unused); !s.ok()) return s;
      Did(Longest(), fmt::format("depth {}: warming up", depth));
      if (!go_on_) return Status::Ok();
    }
    if (Status s = FillAll(subjects, depth); !s.ok() || !go_on_) return s;
    const std::size_t first = result_.tests.size();
    for (const bool prompt : {true, false}) {
      SpeedTest test;
      test.n_depth = depth;
      (prompt ? test.n_prompt : test.n_gen) = prompt ? config_.n_prompt : config_.n_gen;
      test.time = std::time(nullptr);
      test.seconds.resize(caches_.size());
      if (test.n_tokens() > 0) result_.tests.push_back(std::move(test));
    }
    for (std::uint32_t r = 0; r < config_.repetitions && go_on_; ++r) {
      for (std::size_t t = first; t < result_.tests.size() && go_on_; ++t) {
        if (Status s = Once(result_.tests[t], r, subjects); !s.ok()) return s;
      }
    }
    return Status::Ok();
  }

  // Each in turn, another one first each time.
  Status Once(SpeedTest& test, std::uint32_t r, std::span<std::unique_ptr<Subject>> subjects) {
    const std::uint32_t at_once = test.n_gen > 0 ? 1 : config_.n_batch;
    std::vector<double> seconds(subjects.size());
    for (std::size_t i = 0; i < subjects.size(); ++i) {
      const std::size_t c = (i + r) % subjects.size();
      if (Status s = subjects[c]->Back(); !s.ok()) return s;
      if (Status s = subjects[c]->Run(test.n_tokens(), at_once, seconds[c]); !s.ok()) return s;
      Did(test.n_tokens(),
          fmt::format("depth {}: {} {} of {}", test.n_depth, test.n_gen > 0 ? "decode" : "prefill",
                      r + 1, config_.repetitions));
    }
    for (std::size_t c = 0; c < subjects.size(); ++c) test.seconds[c].push_back(seconds[c]);
    return Status::Ok();
  }

  const ModelPair& models_;
  const SpeedConfig& config_;
  const std::span<const TestedCache> caches_;
  const ProgressCall& progress_;
  SpeedResult result_;
  double done_ = 0, total_ = 0;
  bool go_on_ = true;
};

}  // namespace

Result<SpeedResult> MeasureSpeed(const ModelPair& models, const SpeedConfig& config,
                                 std::span<const TestedCache> caches,
                                 const ProgressCall& progress) {
  return SpeedRun(models, config, caches, progress).All();
}

}  // namespace kvtamp::tool
