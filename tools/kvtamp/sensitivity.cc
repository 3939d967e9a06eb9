#include "tools/kvtamp/sensitivity.h"

#include <fmt/format.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <map>
#include <span>
#include <thread>

#include "tools/kvtamp/divergence.h"

namespace kvtamp::tool {
namespace {

using codec::Side;

constexpr std::uint32_t kAllHeads = 0xFFFFFFFF;

// What one run codes coarsely: heads of a layer and side.
struct Unit {
  const LayerLayout* layer = nullptr;  // null: nothing
  Side side = Side::kK;
  std::uint32_t head = kAllHeads;
};

// A profile file that gives every head its format, in a folder of its own.
class RunProfile {
 public:
  RunProfile() {
    std::string name = (std::filesystem::temp_directory_path() / "kvtamp-XXXXXX").string();
    if (::mkdtemp(name.data()) != nullptr) folder_ = name;
  }
  ~RunProfile() {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  Status Write(const ModelLayout& layout, const Unit& unit) const {
    const codec::Pair fine = codec::ParsePair("k8v8").value(),
                      coarse = codec::ParsePair("k1v1").value();
    control::Profile profile;
    for (const LayerLayout& l : layout.layers) {
      control::ProfileLayer layer{
          l.layer, l.head_size_k, l.head_size_v, {}, {}, std::vector(l.n_head_kv, fine.k), {}};
      if (l.head_size_v != 0) layer.type_v.assign(l.n_head_kv, fine.v);
      for (std::uint32_t h = 0; unit.layer == &l && h < l.n_head_kv; ++h) {
        if (unit.head != kAllHeads && unit.head != h) continue;
        (unit.side == Side::kK ? layer.type_k : layer.type_v)[h] =
            unit.side == Side::kK ? coarse.k : coarse.v;
      }
      profile.layers.push_back(std::move(layer));
    }
    return control::WriteProfile(path(), profile);
  }
  std::string path() const { return folder_ + "/profile.toml"; }
  bool ok() const { return !folder_.empty(); }

 private:
  std::string folder_;
};

class Runner {
 public:
  Runner(const SensitivityConfig& config, const ModelLayout& layout, Model model)
      : config_(config), layout_(layout), batch_(config.n_ubatch), model_(std::move(model)) {}

  Status Begin(llama_model* base_model) {
    if (!run_profile_.ok()) return Status::Invalid("cannot make a folder for temporary files");
    const llama_vocab* vocab = llama_model_get_vocab(model_.get());
    n_vocab_ = static_cast<std::size_t>(llama_vocab_n_tokens(vocab));
    tokens_ = Tokenize(vocab, config_.text);
    if (tokens_.size() <= config_.n_tokens) {
      return Status::Invalid(fmt::format("the text has {} tokens, {} are needed", tokens_.size(),
                                         config_.n_tokens + 1));
    }
    const Context base = MakeContext(base_model, Shape());
    if (!base) return HostError("cannot make a context");
    base_logits_.resize(std::size_t{config_.n_scored} * n_vocab_);
    return Run(base.get(), [&](std::size_t row, const float* logits) {
      std::copy_n(logits, n_vocab_, base_logits_.data() + row * n_vocab_);
    });
  }

  // Mean KL divergence of a run with this unit coarse.
  Result<double> Divergence(const Unit& unit) {
    if (Status s = run_profile_.Write(layout_, unit); !s.ok()) return s;
    ::setenv("KVTAMP_CACHE_TYPE", "k8v8", 1);
    ::setenv("KVTAMP_CACHE_PROFILE", run_profile_.path().c_str(), 1);
    const Context context = MakeContext(model_.get(), Shape());
    if (!context) return HostError("cannot make a context");
    double sum = 0;
    if (Status s = Run(context.get(),
                       [&](std::size_t row, const float* logits) {
                         sum += ScoreLogits({base_logits_.data() + row * n_vocab_, n_vocab_},
                                            {logits, n_vocab_}, 0)
                                    .kld;
                       });
        !s.ok())
      return s;
    runs_++;
    return sum / config_.n_scored;
  }

  std::uint32_t runs() const { return runs_; }

 private:
  ContextShape Shape() const {
    return {config_.n_tokens, config_.n_ubatch, config_.n_ubatch, config_.n_threads};
  }

  template <class F>
  Status Run(llama_context* context, F&& row) {
    const std::uint32_t first = config_.n_tokens - config_.n_scored;
    double seconds = 0;
    for (std::uint32_t start = 0; start < config_.n_tokens; start += config_.n_ubatch) {
      const std::uint32_t end = std::min(start + config_.n_ubatch, config_.n_tokens);
      batch_.Clear();
      for (std::uint32_t pos = start; pos < end; ++pos) batch_.Add(tokens_[pos], pos, pos >= first);
      if (Status s = Decode(context, batch_, "tested", seconds); !s.ok()) return s;
      const float* logits = end > first ? llama_get_logits(context) : nullptr;
      for (std::uint32_t pos = std::max(start, first); pos < end; ++pos, logits += n_vocab_)
        row(pos - first, logits);
    }
    return Status::Ok();
  }

  const SensitivityConfig& config_;
  const ModelLayout& layout_;
  RunProfile run_profile_;
  Batch batch_;
  Model model_;
  std::size_t n_vocab_ = 0;
  std::vector<llama_token> tokens_;
  std::vector<float> base_logits_;
  std::uint32_t runs_ = 0;
};

std::string Name(const Unit& unit) {
  if (unit.layer == nullptr) return "all at eight bits";
  return fmt::format("layer {} {}{}", unit.layer->layer, unit.side == Side::kK ? "K" : "V",
                     unit.head == kAllHeads ? "" : fmt::format(" head {}", unit.head));
}

}  // namespace

Result<SensitivityResult> MeasureSensitivity(ModelPair models, const SensitivityConfig& config,
                                             const ModelLayout& layout,
                                             const ProgressCall& progress) {
  Runner runner(config, layout, std::move(models.own));
  if (Status s = runner.Begin(models.base.get()); !s.ok()) return s;
  models.base.reset();
  SensitivityResult result;
  result.profile.model = layout.name;
  const auto measure = [&](const Unit& unit, double done) -> Result<double> {
    if (!progress(done, fmt::format("{} runs, {}", runner.runs(), Name(unit))))
      return Status::Invalid("interrupted");
    return runner.Divergence(unit);
  };
  const auto floor = measure({}, 0);
  if (!floor.ok()) return floor.status();
  result.floor = floor.value();
  std::size_t done = 0;
  for (const LayerLayout& l : layout.layers) {
    control::ProfileLayer layer{l.layer, l.head_size_k, l.head_size_v, {}, {}, {}, {}};
    if (l.swa) layer.window = layout.n_swa;
    for (Side side : {Side::kK, Side::kV}) {
      const double share =
          static_cast<double>(done++) / (2.0 * static_cast<double>(layout.layers.size()));
      if (side == Side::kV && l.head_size_v == 0) continue;
      std::vector<double>& heads = side == Side::kK ? layer.k : layer.v;
      const auto all = measure({&l, side}, share);
      if (!all.ok()) return all.status();
      const double worth = std::max(0.0, all.value() - result.floor);
      heads.assign(l.n_head_kv, worth / l.n_head_kv);
      if (l.n_head_kv == 1 || worth <= config.split_above) continue;
      for (std::uint32_t h = 0; h < l.n_head_kv; ++h) {
        const auto one = measure({&l, side, h}, share);
        if (!one.ok()) return one.status();
        heads[h] = std::max(0.0, one.value() - result.floor);
      }
    }
    result.profile.layers.push_back(std::move(layer));
  }
  result.n_runs = runner.runs();
  return result;
}

}  // namespace kvtamp::tool
