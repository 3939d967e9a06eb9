#include "tools/kvtamp/stored_size.h"

#include <algorithm>
#include <random>
#include <vector>

#include "base/half.h"
#include "control/store_options.h"
#include "store/cache.h"

namespace kvtamp::tool {
namespace {

using codec::Side;

constexpr std::uint32_t kPad = 256;  // the host's caches have cells by so many

// The layers of one of the host's caches: all of full attention, or all of the sliding window.
Status Fill(const ModelLayout& layout, const control::Settings& settings, bool swa,
            std::uint32_t n_tokens, std::uint32_t n_ubatch, CacheSize& size) {
  const std::uint32_t wanted = swa ? std::min(n_tokens, layout.n_swa + n_ubatch) : n_tokens;
  const std::uint32_t n_cells = (wanted + kPad - 1) / kPad * kPad;
  store::Cache cache(control::StoreOptions(settings), 1, n_cells);
  SerialExecutor executor;
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<half_t> rows;
  std::vector<std::uint64_t> cells;
  bool any = false;
  std::uint64_t weights = 0;  // what queries leave: one for each channel of K
  for (const LayerLayout& l : layout.layers) {
    if (l.swa != swa || l.n_head_kv == 0 || !l.why_plain.empty()) continue;
    any = true;
    Status s = cache.AddLayer(l.layer, static_cast<std::uint32_t>(l.elements_k()),
                              static_cast<std::uint32_t>(l.elements_v()),
                              settings.TypeOfLayer(l.layer), settings.TypesOfHeads(l.layer));
    if (s.ok()) s = cache.SetHeads(l.layer, l.n_head_kv);
    if (!s.ok()) return s;
    const auto heads = settings.TypesOfHeads(l.layer);
    if (settings.TypeOfLayer(l.layer).k.weighted ||
        std::any_of(heads.begin(), heads.end(), [](const auto& h) { return h.k.weighted; }))
      weights += l.elements_k();
    rows.resize(n_ubatch * std::max(l.elements_k(), l.elements_v()));
    for (half_t& h : rows) h = FloatToHalf(normal(rng));
    for (std::uint32_t pos = 0; pos < n_tokens; pos += n_ubatch) {
      cells.clear();
      for (std::uint32_t p = pos; p < std::min(n_tokens, pos + n_ubatch); ++p)
        cells.push_back(p % n_cells);
      for (Side side : {Side::kK, Side::kV}) {
        const std::uint64_t n = side == Side::kK ? l.elements_k() : l.elements_v();
        if (n == 0) continue;
        if (s = cache.Write(l.layer, side, cells, rows.data(), n); !s.ok()) return s;
      }
      if (s = cache.Maintain(l.layer, executor); !s.ok()) return s;
    }
  }
  if (!any) return Status::Ok();
  const store::CacheBytes b = cache.bytes();
  double bytes = static_cast<double>(b.allocator_slack + b.shared_index + weights * sizeof(float));
  for (const store::LayerBytes& l : b.layers) {
    for (int side = 0; side < 2; ++side) {
      size.logical_bytes += static_cast<double>(l.logical[side]);
      bytes += static_cast<double>(l.sum.coded[side] + l.sum.scales[side] + l.sum.open[side]);
    }
    bytes += static_cast<double>(l.sum.slack + l.sum.index);
  }
  size.stored_bytes += bytes;
  size.resident_bytes += bytes + static_cast<double>(b.scratch);
  return Status::Ok();
}

}  // namespace

Result<CacheSize> StoredSize(const ModelLayout& layout, const control::Settings& settings,
                             std::uint32_t n_tokens, std::uint32_t n_ubatch) {
  CacheSize size;
  for (const bool swa : {false, true}) {
    if (Status s = Fill(layout, settings, swa, n_tokens, n_ubatch, size); !s.ok()) return s;
  }
  return size;
}

}  // namespace kvtamp::tool
