#include "tools/kvtamp/stored_size.h"

#include <algorithm>

#include "base/half.h"
#include "control/store_options.h"
#include "store/cache.h"

namespace kvtamp::tool {
namespace {

using codec::Side;

std::uint64_t Pad(std::uint64_t n) { return (n + kCellsPad - 1) / kCellsPad * kCellsPad; }

// Rows of all layers that a curve is filled with: a fraction of a second.
constexpr std::uint64_t kRowsOfCurve = 1u << 19;
constexpr std::uint64_t kMinOfCurve = 2048, kMaxOfCurve = 16384;

// Tokens from one sample of a curve to the next.
std::uint64_t StepOf(const Sharing& sharing) {
  return std::min<std::uint64_t>(Pad(sharing.n_ubatch), 4096);
}

bool IsWeighted(const control::Settings& settings, std::uint32_t layer) {
  const auto heads = settings.TypesOfHeads(layer);
  return settings.TypeOfLayer(layer).k.weighted ||
         std::any_of(heads.begin(), heads.end(), [](const auto& h) { return h.k.weighted; });
}

store::Options Hollow(const control::Settings& settings) {
  store::Options options = control::StoreOptions(settings);
  options.hollow = true;
  return options;
}

Status AddLayer(store::Cache& cache, const LayerLayout& l, const control::Settings& settings) {
  const Status s = cache.AddLayer(l.layer, static_cast<std::uint32_t>(l.elements_k()),
                                  static_cast<std::uint32_t>(l.elements_v()),
                                  settings.TypeOfLayer(l.layer), settings.TypesOfHeads(l.layer));
  return s.ok() ? cache.SetHeads(l.layer, l.n_head_kv) : s;
}

// One of the host's caches with one sequence, of all layers that are held by the store: those of
// full attention or those of the sliding window.
class Filled {
 public:
  Filled(const ModelLayout& layout, const control::Settings& settings, bool swa,
         std::uint64_t n_cells)
      : cache_(Hollow(settings), 1, static_cast<std::uint32_t>(n_cells)), n_cells_(n_cells) {
    for (const LayerLayout& l : layout.layers)
      if (l.swa == swa && l.n_head_kv != 0 && l.why_plain.empty()) layers_.push_back(l);
    for (const LayerLayout& l : layers_)
      if (IsWeighted(settings, l.layer)) weights_ += l.elements_k();
  }
  bool empty() const { return layers_.empty(); }
  Status AddLayers(const control::Settings& settings) {
    for (const LayerLayout& l : layers_)
      if (Status s = AddLayer(cache_, l, settings); !s.ok()) return s;
    return Status::Ok();
  }

  // So many tokens more, as one micro-batch.
  Status Write(std::uint32_t n) {
    std::vector<std::uint64_t> cells(n);
    for (std::uint64_t& cell : cells) cell = n_tokens_++ % n_cells_;
    for (const LayerLayout& l : layers_) {
      for (Side side : {Side::kK, Side::kV}) {
        const std::uint64_t elements = side == Side::kK ? l.elements_k() : l.elements_v();
        if (elements == 0) continue;
        Status s =
            cache_.Write(l.layer, side, cells, static_cast<const half_t*>(nullptr), elements);
        if (!s.ok()) return s;
      }
      if (Status s = cache_.Maintain(l.layer, executor_); !s.ok()) return s;
    }
    return Status::Ok();
  }
  // The same up to so many in all.
  Status WriteTo(std::uint64_t n_tokens, std::uint32_t n_ubatch) {
    while (n_tokens_ < n_tokens) {
      Status s = Write(
          static_cast<std::uint32_t>(std::min<std::uint64_t>(n_ubatch, n_tokens - n_tokens_)));
      if (!s.ok()) return s;
    }
    return Status::Ok();
  }

  StoredBytes bytes() {
    const store::CacheBytes b = cache_.bytes();
    StoredBytes out;
    out.slack = static_cast<double>(b.allocator_slack);
    // Queries leave a float for each channel of K, where widths depend on them.
    out.index = static_cast<double>(b.shared_index + weights_ * sizeof(float));
    double all = 0, scales = 0;
    for (const store::LayerBytes& l : b.layers) {
      for (int side = 0; side < 2; ++side) {
        out.logical += static_cast<double>(l.logical[side]);
        all += static_cast<double>(l.sum.coded[side] + l.sum.scales[side] + l.sum.open[side]);
        scales += static_cast<double>(l.sum.scales[side]);
      }
      out.sinks += static_cast<double>(l.sum.sinks);
      out.window += static_cast<double>(l.sum.window);
      out.filling += static_cast<double>(l.sum.filling);
      out.index += static_cast<double>(l.sum.index);
      out.slack += static_cast<double>(l.sum.slack);
    }
    out.scales = scales;
    out.codes = all - scales - out.sinks - out.window - out.filling;
    return out;
  }

 private:
  store::Cache cache_;
  std::uint64_t n_cells_;
  std::uint64_t n_tokens_ = 0, weights_ = 0;
  std::vector<LayerLayout> layers_;
  SerialExecutor executor_;
};

}  // namespace

Result<CacheSize> StoredSize(const ModelLayout& layout, const control::Settings& settings,
                             std::uint32_t n_tokens, std::uint32_t n_ubatch) {
  CacheSize size;
  for (const bool swa : {false, true}) {
    Filled filled(layout, settings, swa,
                  swa ? SwaCells(layout.n_swa, {1, false, n_ubatch}, n_tokens) : Pad(n_tokens));
    if (filled.empty()) continue;
    Status s = filled.AddLayers(settings);
    if (s.ok()) s = filled.WriteTo(n_tokens, n_ubatch);
    if (!s.ok()) return s;
    const StoredBytes bytes = filled.bytes();
    size += {bytes.logical, bytes.stored(), bytes.stored()};
  }
  return size;
}

std::string WhyNotStored(const LayerLayout& layer, const control::Settings& settings) {
  store::Cache cache(Hollow(settings), 1, settings.page_size);
  const Status s = AddLayer(cache, layer, settings);
  const std::string prefix = "layer " + std::to_string(layer.layer) + ": ";
  return s.ok() || !s.message().starts_with(prefix) ? s.message()
                                                    : s.message().substr(prefix.size());
}

StoredBytes& StoredBytes::operator+=(const StoredBytes& o) {
  logical += o.logical;
  codes += o.codes;
  scales += o.scales;
  sinks += o.sinks;
  window += o.window;
  filling += o.filling;
  index += o.index;
  slack += o.slack;
  return *this;
}

StoredBytes& StoredBytes::operator*=(double f) {
  for (double* x : {&logical, &codes, &scales, &sinks, &window, &filling, &index, &slack}) *x *= f;
  return *this;
}

std::uint64_t SwaCells(std::uint32_t n_swa, const Sharing& sharing, std::uint64_t n_tokens) {
  const std::uint64_t users = sharing.n_users, all = sharing.unified ? users : 1;
  return Pad(std::min(n_tokens * all, std::uint64_t{n_swa} * all + sharing.n_ubatch)) / all;
}

// --- SizeCurve ----------------------------------------------------------------------------------

Status SizeCurve::Fill(const ModelLayout& layout, const control::Settings& settings,
                       const Sharing& sharing, bool swa, std::uint64_t n_tokens, Part& part) {
  const std::uint64_t cells = SwaCells(layout.n_swa, sharing, kMaxContext);
  bool round = false;  // once and more
  if (swa) {
    const std::uint64_t step = StepOf(sharing);
    const std::uint64_t rounds = (std::max(kMaxOfCurve, 3 * cells) + step - 1) / step * step;
    round = rounds <= 2 * kMaxOfCurve;
    part.n_most = round ? rounds : Pad(cells);
    n_tokens = std::min(part.n_most, 2 * kMaxOfCurve);
  }
  Filled filled(layout, settings, swa, swa ? cells : Pad(n_tokens));
  if (filled.empty()) return Status::Ok();
  if (Status s = filled.AddLayers(settings); !s.ok()) return s;
  double row = 0;  // a token of all its layers in f16
  for (const LayerLayout& l : layout.layers)
    if (l.swa == swa && l.why_plain.empty())
      row += 2.0 * static_cast<double>(l.elements_k() + l.elements_v());
  // Whole micro-batches, as the host writes them: which blocks are free together, and in a window
  // that is written again which rows die together, depends on them. Between two it is the mean.
  const std::uint64_t step = StepOf(sharing);
  double peak = 0;
  for (std::uint64_t n = kCellsPad; n <= Pad(n_tokens); n += kCellsPad) {
    if (n > step && n % step != 0) continue;
    if (Status s = filled.WriteTo(n, sharing.n_ubatch); !s.ok()) return s;
    const StoredBytes bytes = filled.bytes();
    // A token before its last page is full, that page is f16.
    const double open = n > cells && swa ? 0 : row * (settings.page_size - 1);
    peak = std::max(peak, bytes.stored() + open);
    const std::size_t i = n / kCellsPad - 1;
    while (part.samples.size() < i) {
      Sample between = part.samples.back();
      const double share = 1.0 / static_cast<double>(i + 1 - part.samples.size());
      between.bytes *= 1 - share;
      StoredBytes rest = bytes;
      rest *= share;
      between.bytes += rest;
      between.peak += share * (peak - between.peak);
      part.samples.push_back(between);
    }
    part.samples.push_back({bytes, peak});
  }
  if (round) {
    // How full the open page is after a round drifts. What lies beyond is the mean.
    const std::size_t half = part.samples.size() / 2;
    StoredBytes mean;
    for (std::size_t i = half; i < part.samples.size(); ++i) mean += part.samples[i].bytes;
    mean *= 1.0 / static_cast<double>(part.samples.size() - half);
    part.samples.push_back({mean, peak});
    part.n_most += kCellsPad;
  }
  return Status::Ok();
}

SizeCurve::Sample SizeCurve::Part::At(std::uint64_t n_tokens) const {
  if (samples.empty() || n_tokens == 0) return {};
  const std::uint64_t n = std::min(n_tokens, n_most);
  const std::uint64_t i = (n + kCellsPad - 1) / kCellsPad - 1;
  if (i < samples.size()) return samples[i];
  // A page after the other, each as those of the second half of what was filled.
  const Sample& last = samples.back();
  const std::size_t half = samples.size() / 2;
  const double steps =
      static_cast<double>(i - (samples.size() - 1)) / static_cast<double>(samples.size() - half);
  StoredBytes grown = samples[half - 1].bytes;
  grown *= -1;
  grown += last.bytes;
  grown *= steps;
  Sample out = last;
  out.bytes += grown;
  out.peak += grown.stored();
  return out;
}

StoredBytes SizeCurve::At(std::uint64_t n_tokens) const {
  StoredBytes bytes = full_.At(n_tokens).bytes;
  bytes += swa_.At(n_tokens).bytes;
  bytes.index += interleaved_ * static_cast<double>(n_tokens);
  return bytes;
}

double SizeCurve::Peak(std::uint64_t n_tokens) const {
  return full_.At(n_tokens).peak + swa_.At(n_tokens).peak +
         interleaved_ * static_cast<double>(n_tokens);
}

double SizeCurve::Plain(std::uint64_t n_tokens) const {
  return plain_full_ * static_cast<double>(n_tokens) +
         plain_swa_ * static_cast<double>(std::min(n_tokens, SwaCells(n_swa_, sharing_, n_tokens)));
}

Result<SizeCurve> SizeCurve::Make(const ModelLayout& layout, const control::Settings& settings,
                                  const Sharing& sharing) {
  SizeCurve curve;
  curve.n_swa_ = layout.n_swa;
  curve.sharing_ = sharing;
  ModelLayout held = layout;
  std::uint64_t n_held = 0;
  double row[2] = {};  // of the largest layer's token in f16, by cache of the host
  for (LayerLayout& l : held.layers) {
    if (l.why_plain.empty()) l.why_plain = WhyNotStored(l, settings);
    const double f16 = 2.0 * static_cast<double>(l.elements_k() + l.elements_v());
    if (l.why_plain.empty()) {
      n_held++;
      row[l.swa] = std::max(row[l.swa], f16);
    } else {
      (l.swa ? curve.plain_swa_ : curve.plain_full_) += f16;
    }
  }
  curve.in_flight_ = (row[0] + row[1]) * sharing.n_ubatch;
  // Users of one pool write their tokens between each other's: a page's cells are listed then (a
  // number each), and the index lists them too.
  if (sharing.unified && sharing.n_users > 1)
    curve.interleaved_ = 2 * sizeof(std::uint32_t) * static_cast<double>(n_held);
  const std::uint64_t step = StepOf(sharing);
  std::uint64_t most =
      std::clamp(kRowsOfCurve / std::max<std::uint64_t>(n_held, 1), kMinOfCurve, kMaxOfCurve);
  most = std::max<std::uint64_t>(most / step, 4) * step;
  for (const bool swa : {false, true}) {
    Status s = Fill(held, settings, sharing, swa, most, swa ? curve.swa_ : curve.full_);
    if (!s.ok()) return s;
  }
  return curve;
}

}  // namespace kvtamp::tool
