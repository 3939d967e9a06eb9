#include "plugins/ggml/buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <numeric>
#include <string_view>

#include "control/store_options.h"
#include "plugins/ggml/plugin.h"
#include "plugins/ggml/report.h"

namespace kvtamp::ggml_plugin {

using codec::Side;

namespace {

const std::uint8_t* Bytes(const void* p) { return static_cast<const std::uint8_t*>(p); }

// "cache_k_l12" -> 12; false for anything else, including the host's views of it.
bool ParseKvName(std::string_view name, Side& side, std::uint32_t& layer) {
  if (name.starts_with("cache_k_l")) {
    side = Side::kK;
  } else if (name.starts_with("cache_v_l")) {
    side = Side::kV;
  } else {
    return false;
  }
  name.remove_prefix(9);
  auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  return error == std::errc() && end == name.data() + name.size();
}

// What state a tensor is, by the host's name of it; null for all that lives for one graph only.
const char* KindOfState(std::string_view name) {
  for (const char* start : {"cache_r_l", "cache_s_l", "cache_ple_r_l"})
    if (name.starts_with(start)) return "recurrent state";
  if (name.starts_with("cache_idx_")) return "indexer keys";
  if (name.starts_with("dsv4_") && name.find("_state_") != name.npos) return "compressor state";
  return nullptr;
}

}  // namespace

// --- life ---------------------------------------------------------------------------------------

Buffer* Buffer::From(ggml_backend_buffer_t buffer) { return static_cast<Buffer*>(buffer->context); }

Buffer::~Buffer() {
  RememberBeforeEnd();
  Forget(this);
  cache_.reset();
  if (base_ != nullptr) munmap(base_, size_);
}

bool Buffer::Commit(const void* p, std::size_t size) {
  if (all_committed_ || size == 0) return true;
  const std::size_t os_page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t offset = static_cast<std::size_t>(Bytes(p) - base_);
  const std::size_t first = offset / os_page * os_page;
  const std::size_t last = std::min(size_, (offset + size + os_page - 1) / os_page * os_page);
  if (mprotect(base_ + first, last - first, PROT_READ | PROT_WRITE) != 0) {
    Log(LogLevel::kError,
        "no memory for " + control::BytesText(last - first) + " of plain tensors");
    return false;
  }
  if (first == 0 && last >= size_) all_committed_ = true;
  return true;
}

// --- what is in it ------------------------------------------------------------------------------

void Buffer::RegisterKv(const ggml_tensor* t, std::uint32_t layer, Side side) {
  auto kv = std::make_unique<KvTensor>();
  kv->name = t->name;
  kv->base = static_cast<std::uint8_t*>(t->data);
  kv->bytes = ggml_nbytes(t);
  kv->layer = layer;
  kv->side = side;
  kv->n_embd = static_cast<std::uint32_t>(t->ne[0]);
  kv->n_cells = static_cast<std::uint32_t>(t->ne[1]);
  kv->n_streams = static_cast<std::uint32_t>(t->ne[2] * t->ne[3]);
  KvLayer& l = layers_[layer];
  kv->pair = &l;
  auto& slot = side == Side::kK ? l.k : l.v;
  last_layer_ = std::max<int>(last_layer_, static_cast<int>(layer));
  if (layer == 0) has_first_layer_ = true;
  n_cells_ = kv->n_cells;
  if (slot != nullptr) std::erase_if(by_address_, [&](const At& a) { return a.kv == slot.get(); });
  slot = std::move(kv);
  auto at = std::lower_bound(by_address_.begin(), by_address_.end(), slot->base,
                             [](const At& a, const std::uint8_t* b) { return a.base < b; });
  by_address_.insert(at, {slot->base, slot.get()});
  const KvTensor& me = *slot;
  if (l.plain) {  // the other side could not be stored
    if (Commit(me.base, me.bytes)) plain_bytes_ += me.bytes;
  } else if (t->type != GGML_TYPE_F16) {
    MakePlain(me, std::string("the host's cache type is ") + ggml_type_name(t->type) +
                      "; leave -ctk and -ctv at f16 and set kvtamp's own type");
  } else if (l.k && l.v && (l.k->n_cells != l.v->n_cells || l.k->n_streams != l.v->n_streams)) {
    MakePlain(me, "K and V differ in cells");
  }
}

void Buffer::InitTensor(ggml_tensor* t) {
  if (t->view_src != nullptr || t->data == nullptr) return;
  std::uint32_t layer = 0;
  Side side = Side::kK;
  if (ParseKvName(t->name, side, layer) && t->ne[3] == 1 && ggml_is_contiguous(t)) {
    RegisterKv(t, layer, side);
    return;
  }
  if (const char* kind = KindOfState(t->name)) {
    auto& [n, bytes] = other_state_[kind];
    n++;
    bytes += ggml_nbytes(t);
  }
  if (!HasKv() && !all_committed_) {
    Commit(base_, size_);
  } else {
    Commit(t->data, ggml_nbytes(t));
  }
}

const KvTensor* Buffer::Find(const void* address) const {
  auto it = std::upper_bound(by_address_.begin(), by_address_.end(), Bytes(address),
                             [](const std::uint8_t* a, const At& b) { return a < b.base; });
  if (it == by_address_.begin()) return nullptr;
  const KvTensor* t = (--it)->kv;
  return Bytes(address) < t->base + t->bytes ? t : nullptr;
}

bool Buffer::EnsureStored(const KvTensor& t) {
  KvLayer& l = layer(t);
  if (l.plain) return false;
  if (l.in_store) return true;
  if (l.k == nullptr) {
    MakePlain(t, "V without K");
    return false;
  }
  const auto settings = CurrentSettings();
  if (cache_ == nullptr) {
    store::Options options = control::StoreOptions(*settings);
    if (!options.prune.policy.empty() && IsOfSlidingWindows(*this)) {
      Log(LogLevel::kInfo, "cache of " + std::to_string(t.n_cells) +
                               " cells: of sliding windows, so no entries go (evict.policy)");
      options.prune = {};
    }
    auto fresh = std::make_unique<store::Cache>(options, t.n_streams, t.n_cells);
    std::lock_guard lock(snapshot_mutex_);
    cache_ = std::move(fresh);
  }
  if (t.n_cells != cache_->n_cells() || t.n_streams != cache_->n_streams()) {
    MakePlain(t, "layers of one buffer differ in cells");
    return false;
  }
  Status s = cache_->AddLayer(t.layer, l.k->n_embd, l.v ? l.v->n_embd : 0,
                              settings->TypeOfLayer(t.layer), settings->TypesOfHeads(t.layer));
  if (!s.ok()) {
    MakePlain(t, s.message());
    return false;
  }
  l.in_store = true;
  return true;
}

bool Buffer::SetHeads(const KvTensor& t, std::uint32_t n_head_kv, std::uint32_t v_in_k) {
  KvLayer& l = layer(t);
  const bool known = l.n_head_kv == n_head_kv && (v_in_k == 0 || l.v_in_k == v_in_k);
  if (l.in_store && known) return true;
  if (!EnsureStored(t)) return false;
  Status s = cache_->SetHeads(t.layer, n_head_kv);
  if (s.ok() && v_in_k != 0) s = cache_->SetValuesInKeys(t.layer, v_in_k);
  if (!s.ok()) MakePlain(t, s.message());
  l.attended = s.ok();
  l.n_head_kv = n_head_kv;
  l.v_in_k = v_in_k;
  return s.ok();
}

void Buffer::MakePlain(const KvTensor& t, const std::string& reason) {
  KvLayer& l = layer(t);
  if (l.plain) return;
  // The store names the layer in front; all layers of one reason are told of once.
  const std::string name = "layer " + std::to_string(t.layer), prefix = name + ": ";
  const std::string why = reason.starts_with(prefix) ? reason.substr(prefix.size()) : reason;
  l.why_plain = why;
  NoteFallback(name, why);
  for (KvTensor* side : {l.k.get(), l.v.get()}) {
    if (side == nullptr || !Commit(side->base, side->bytes)) continue;
    plain_bytes_ += side->bytes;
    if (!l.in_store) continue;
    std::vector<half_t> row(side->n_embd);
    for (std::uint64_t c = 0; c < std::uint64_t{side->n_cells} * side->n_streams; ++c)
      if (cache_->Read(t.layer, side->side, c, row.data()))
        std::memcpy(side->base + c * side->row_bytes(), row.data(), side->row_bytes());
  }
  l.plain = true;
  if (l.in_store) cache_->RemoveLayer(t.layer);
  l.in_store = false;
}

void Buffer::MakeAllPlain(const std::string& why) {
  for (auto& [id, l] : layers_) MakePlain(l.k ? *l.k : *l.v, why);
}

// Rows of cells from n_kv on go when attention shows a smaller n_kv than before.
void Buffer::NoteAttended(std::uint32_t stream, std::uint32_t n_kv) {
  if (n_kv_.size() <= stream) n_kv_.resize(stream + 1);
  if (n_kv < n_kv_[stream]) RememberBeforeLoss();
  n_kv_[stream] = n_kv;
}

void Buffer::Announce() {
  if (announced_) return;
  announced_ = true;
  if (HasKv()) AnnounceLayers();
  for (const auto& [kind, state] : other_state_)
    Log(LogLevel::kInfo, kind + " (" + std::to_string(state.first) + " tensors, " +
                             control::BytesText(state.second) + "): as the host keeps it");
}

void Buffer::AnnounceLayers() {
  const auto settings = CurrentSettings();
  std::map<std::string, std::vector<std::uint32_t>> fates;
  bool all_attended = true;
  for (const auto& [id, l] : layers_) {
    std::string fate = "stored as " + codec::PairName(settings->TypeOfLayer(id));
    if (l.plain) {
      fate = "uncompressed, " + l.why_plain;
    } else if (!l.attended) {
      fate = "uncompressed, read by the host's own code (no flash attention here, or an indexer)";
      all_attended = false;
    }
    fates[fate].push_back(id);
  }
  const KvLayer& first = layers_.begin()->second;
  const KvTensor& t = first.k ? *first.k : *first.v;
  std::string line = std::to_string(t.n_cells) + " cells";
  if (t.n_streams > 1) line += " x " + std::to_string(t.n_streams) + " streams";
  for (const auto& [fate, ids] : fates)
    line.append(ids.size() == 1 ? "; layer " : "; layers ")
        .append(control::RangesText(ids))
        .append(" ")
        .append(fate);
  Log(all_attended ? LogLevel::kInfo : LogLevel::kWarn, "KV cache of " + line);
}

// --- byte ranges --------------------------------------------------------------------------------

template <class F>
void Buffer::ForRows(const KvTensor& t, const void* address, std::size_t size, F&& fn) {
  std::size_t offset = static_cast<std::size_t>(Bytes(address) - t.base);
  const std::size_t row = t.row_bytes();
  for (std::size_t done = 0; done < size;) {
    const std::size_t in_row = offset % row;
    const std::size_t n = std::min(row - in_row, size - done);
    fn(offset / row, in_row, done, n);
    done += n;
    offset += n;
  }
}

void Buffer::Patch(const KvTensor& t, const void* address, const std::uint8_t* data,
                   std::uint8_t value, std::size_t size) {
  if (!EnsureStored(t)) {
    if (data != nullptr) {
      std::memcpy(const_cast<void*>(address), data, size);
    } else {
      std::memset(const_cast<void*>(address), value, size);
    }
    return;
  }
  std::vector<half_t> row(t.n_embd);
  Status failed;
  ForRows(
      t, address, size, [&](std::uint64_t cell, std::size_t in_row, std::size_t at, std::size_t n) {
        if (!failed.ok()) return;
        if (n != t.row_bytes()) cache_->Read(t.layer, t.side, cell, row.data());
        auto* bytes = reinterpret_cast<std::uint8_t*>(row.data());
        if (data != nullptr) {
          std::memcpy(bytes + in_row, data + at, n);
        } else {
          std::memset(bytes + in_row, value, n);
        }
        // A row that was never written reads as zeros already.
        const bool zero = std::all_of(row.begin(), row.end(), [](half_t h) { return h == 0; });
        failed = zero ? cache_->WriteZero(t.layer, t.side, cell)
                      : cache_->Write(t.layer, t.side, std::span(&cell, 1), row.data(), t.n_embd);
      });
  layer(t).wrote = true;
  if (!failed.ok()) Log(LogLevel::kError, failed.message() + ": rows of " + t.name + " were lost");
}

// A restored sequence comes from its first token on, all keys before all values, in as many pieces
// as its cells lie in. The query that shows the sinks of others, one that sees few cells, never
// comes for it.
void Buffer::BeginRestored(const KvTensor& t, const void* address, std::size_t size) {
  KvLayer& l = layer(t);
  const auto before = l.from;
  l.from = t.side == Side::kK ? KvLayer::From::kKeysOfState : KvLayer::From::kValuesOfState;
  const std::size_t offset = static_cast<std::size_t>(Bytes(address) - t.base);
  if (t.side != Side::kK || offset % t.row_bytes() != 0) return;
  // Without values nothing parts one sequence's pieces from those of the next but their size.
  const bool next = l.v == nullptr && size >= t.row_bytes() * CurrentSettings()->page_size;
  if (before == KvLayer::From::kKeysOfState && !next) return;
  if (!EnsureStored(t)) return;
  const std::uint64_t stream = offset / t.row_bytes() / t.n_cells;
  cache_->BeginRestored(t.layer, static_cast<std::uint32_t>(stream));
}

void Buffer::Set(const void* address, const void* data, std::size_t size) {
  const KvTensor* t = Find(address);
  if (IsStored(t)) {
    BeginRestored(*t, address, size);
    Patch(*t, address, Bytes(data), 0, size);
    // Nobody attends these rows now, so a large state need not lie here in f16 until someone does.
    SerialExecutor executor;
    Status s = layer(*t).in_store && size >= t->row_bytes() * CurrentSettings()->page_size
                   ? cache_->Maintain(t->layer, executor)
                   : Status::Ok();
    if (!s.ok())
      Log(LogLevel::kWarn, s.message() + ": a restored state stays uncompressed for now");
  } else if (Commit(address, size)) {
    std::memcpy(const_cast<void*>(address), data, size);
  }
}

void Buffer::Fill(const void* address, std::uint8_t value, std::size_t size) {
  const KvTensor* t = Find(address);
  if (IsStored(t)) {
    Patch(*t, address, nullptr, value, size);
  } else if (Commit(address, size)) {
    std::memset(const_cast<void*>(address), value, size);
  }
}

void Buffer::Get(const void* address, void* data, std::size_t size) {
  const KvTensor* t = Find(address);
  if (!IsStored(t)) {
    if (Commit(address, size)) std::memcpy(data, address, size);
    return;
  }
  if (!layer(*t).in_store) {
    std::memset(data, 0, size);
    return;
  }
  std::vector<half_t> row(t->n_embd);
  auto* out = static_cast<std::uint8_t*>(data);
  ForRows(*t, address, size,
          [&](std::uint64_t cell, std::size_t in_row, std::size_t at, std::size_t n) {
            cache_->Read(t->layer, t->side, cell, row.data());
            if (!told_of_evicted_ && t->side == Side::kK) TellOfEvicted(*t, row);
            std::memcpy(out + at, Bytes(row.data()) + in_row, n);
          });
}

// Once, and not silently: what is gone cannot be said to a host that does not know us.
void Buffer::TellOfEvicted(const KvTensor& t, std::span<const half_t> key) {
  const std::uint32_t n_head_kv = layer(t).n_head_kv;
  const std::size_t dim = n_head_kv == 0 ? key.size() : key.size() / n_head_kv;
  for (std::size_t at = 0; at + dim <= key.size() && !told_of_evicted_; at += dim)
    told_of_evicted_ = store::IsEvicted(key.subspan(at, dim));
  if (told_of_evicted_)
    Log(LogLevel::kWarn,
        "a state is saved of which evict.policy has let entries go: here they stay gone when it is "
        "restored, a host without kvtamp would attend to zeros in their place");
}

// Whole stream to whole stream of the same tensor stays coded; everything else goes through the
// host's read and write.
bool Buffer::Copy(const ggml_tensor* src, ggml_tensor* dst) {
  if (!IsOurs(BufferOf(src)) || From(BufferOf(src)) != this) return false;
  const KvTensor* from = Find(src->data);
  const KvTensor* to = Find(dst->data);
  if (from == nullptr || from != to || !IsStored(to) || !layer(*to).in_store) return false;
  const std::size_t stream_bytes = to->row_bytes() * to->n_cells;
  const std::size_t a = static_cast<std::size_t>(Bytes(src->data) - from->base);
  const std::size_t b = static_cast<std::size_t>(Bytes(dst->data) - to->base);
  if (ggml_nbytes(src) != stream_bytes || ggml_nbytes(dst) != stream_bytes) return false;
  if (a % stream_bytes != 0 || b % stream_bytes != 0) return false;
  Status s = cache_->CopySide(to->layer, to->side, static_cast<std::uint32_t>(a / stream_bytes),
                              static_cast<std::uint32_t>(b / stream_bytes));
  if (!s.ok()) Log(LogLevel::kError, s.message() + ": a sequence could not be copied");
  return s.ok();
}

void Buffer::Clear(std::uint8_t value) {
  if (cache_ != nullptr) {
    RememberBeforeLoss();
    cache_->Clear();
  }
  // Plain memory reads as zeros again; the address space of K and V has none to lose.
  madvise(base_, size_, MADV_DONTNEED);
  if (value == 0) return;
  std::uint8_t* at = base_;
  auto fill_to = [&](std::uint8_t* end) {
    if (end > at && Commit(at, static_cast<std::size_t>(end - at)))
      std::memset(at, value, static_cast<std::size_t>(end - at));
  };
  for (const auto& [base, t] : by_address_) {
    if (!IsStored(t)) continue;
    fill_to(t->base);
    Patch(*t, t->base, nullptr, value, t->bytes);
    at = t->base + t->bytes;
  }
  fill_to(base_ + size_);
}

void Buffer::AddTo(control::Snapshot& out) {
  out.uncompressed_bytes += plain_bytes_;
  store::Cache* cache = nullptr;
  {
    std::lock_guard lock(snapshot_mutex_);
    cache = cache_.get();
  }
  if (cache == nullptr) return;
  const store::CacheBytes b = cache->bytes();
  control::CacheStats cs;
  cs.name = "kv";
  cs.cells_used = b.cells_used;
  cs.cells_capacity = cache->n_cells();
  cs.n_streams = cache->n_streams();
  std::uint64_t own[2] = {}, slack = b.allocator_slack, index = b.shared_index;
  for (const store::LayerBytes& l : b.layers) {
    control::LayerStats ls;
    ls.layer = l.layer;
    ls.n_head_kv = l.n_head_kv;
    ls.head_size_k = l.head_size_k;
    ls.head_size_v = l.head_size_v;
    ls.format_k = codec::FormatName(l.format.k);
    ls.format_v = codec::FormatName(l.format.v);
    ls.logical_bytes = l.logical[0] + l.logical[1];
    cs.logical_bytes += ls.logical_bytes;
    out.logical_bytes_k += l.logical[0];
    out.logical_bytes_v += l.logical[1];
    for (int s = 0; s < 2; ++s) {
      out.resident.coded += l.sum.coded[s];
      out.resident.scales += l.sum.scales[s];
      out.resident.open += l.sum.open[s];
      const std::uint64_t side = l.sum.coded[s] + l.sum.scales[s] + l.sum.open[s];
      own[s] += side;
      ls.stored_bytes += side;
    }
    ls.stored_bytes += l.sum.slack + l.sum.index;
    slack += l.sum.slack;
    index += l.sum.index;
    out.pages.open += l.sum.n_open;
    out.pages.settled += l.sum.n_settled;
    out.pages.sealed += l.sum.n_sealed;
    out.pages.demoted += l.sum.n_demoted;
    for (const store::LayerBytes::Entries& e : l.heads) {
      ls.heads.push_back({e.kept, e.evicted, e.demoted});
      out.entries_kept += e.kept;
      out.entries_evicted += e.evicted;
      out.entries_demoted += e.demoted;
    }
    out.rows_dead = std::max(out.rows_dead, l.sum.dead_rows);
    cs.layers.push_back(std::move(ls));
  }
  out.resident.slack += slack;
  out.resident.index += index;
  out.resident.scratch += b.scratch;
  cs.stored_bytes = own[0] + own[1] + slack + index;
  cs.resident_bytes = cs.stored_bytes + b.scratch;
  // What no side owns is shared by both in proportion.
  const std::uint64_t both = own[0] + own[1];
  const std::uint64_t k_share = both == 0 ? 0 : (slack + index) * own[0] / both;
  out.stored_bytes_k += own[0] + k_share;
  out.stored_bytes_v += own[1] + (slack + index) - k_share;
  out.resident_peak_bytes += b.peak_pages + index + b.scratch;
  out.rows_written_total = std::max(out.rows_written_total, b.rows_written);
  out.values_clamped_total += b.values_clamped;
  out.pages_seen_total += b.pages_read.seen;
  out.pages_read_total += b.pages_read.read;
  const std::uint64_t cells = std::uint64_t{cs.cells_capacity} * cs.n_streams;
  if (cells >= out.cells_capacity) {
    out.cells_capacity = cells;
    out.cells_used = b.cells_used;
  }
  out.caches.push_back(std::move(cs));
}

// --- ggml_backend_buffer_i ----------------------------------------------------------------------

namespace {

constexpr std::size_t kOsPage = 4096;

Buffer* Of(ggml_backend_buffer_t b) { return Buffer::From(b); }

const ggml_backend_buffer_i kInterface = {
    /* .free_buffer   = */ [](ggml_backend_buffer_t b) { delete Of(b); },
    /* .get_base      = */ [](ggml_backend_buffer_t b) { return Of(b)->base(); },
    /* .init_tensor   = */
    [](ggml_backend_buffer_t b, ggml_tensor* t) {
      Of(b)->InitTensor(t);
      return GGML_STATUS_SUCCESS;
    },
    /* .memset_tensor = */
    [](ggml_backend_buffer_t b, ggml_tensor* t, std::uint8_t value, std::size_t offset,
       std::size_t size) { Of(b)->Fill(Bytes(t->data) + offset, value, size); },
    /* .set_tensor    = */
    [](ggml_backend_buffer_t b, ggml_tensor* t, const void* data, std::size_t offset,
       std::size_t size) { Of(b)->Set(Bytes(t->data) + offset, data, size); },
    /* .get_tensor    = */
    [](ggml_backend_buffer_t b, const ggml_tensor* t, void* data, std::size_t offset,
       std::size_t size) { Of(b)->Get(Bytes(t->data) + offset, data, size); },
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */
    [](ggml_backend_buffer_t b, const ggml_tensor* src, ggml_tensor* dst) {
      return Of(b)->Copy(src, dst);
    },
    /* .clear         = */ [](ggml_backend_buffer_t b, std::uint8_t value) { Of(b)->Clear(value); },
    /* .reset         = */ nullptr,
};

}  // namespace

ggml_backend_buffer_t Buffer::Alloc(ggml_backend_buffer_type_t buft, std::size_t size) {
  const std::size_t bytes = std::max(kOsPage, (size + kOsPage - 1) / kOsPage * kOsPage);
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    Log(LogLevel::kError, "no address space for " + control::BytesText(size));
    return nullptr;
  }
  auto* buffer = new Buffer(bytes);
  buffer->base_ = static_cast<std::uint8_t*>(p);
  Remember(buffer);
  return ggml_backend_buffer_init(buft, kInterface, buffer, size);
}

}  // namespace kvtamp::ggml_plugin
