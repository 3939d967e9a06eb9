// Our buffers. A buffer is a reservation of address space; what is in it decides what it costs:
//
//   K/V tensors (cache_k_l<N>, cache_v_l<N>, f16)   never become resident: their rows live in a
//                                                   store::Cache, found by address
//   everything else (recurrent state, compute       is committed as plain memory when it is
//   initialised buffers, forced weights, checkpoints)           or first touched
//
// A K/V pair the store cannot hold (transposed V, quantised or latent caches, unknown layouts) is
// made plain too, with what it held, and is computed by ggml's own CPU code: slower and
// uncompressed, but right.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "codec/format.h"
#include "control/stats.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "store/cache.h"

namespace kvtamp::ggml_plugin {

struct KvLayer;

// One K or V tensor of the host.
struct KvTensor {
  std::string name;
  KvLayer* pair = nullptr;  // it is one of
  std::uint8_t* base = nullptr;
  std::size_t bytes = 0;
  std::uint32_t layer = 0;
  codec::Side side = codec::Side::kK;
  std::uint32_t n_embd = 0, n_cells = 0, n_streams = 0;  // [n_embd, n_cells, n_streams] f16
  std::size_t row_bytes() const { return std::size_t{n_embd} * sizeof(half_t); }
};

// One layer's pair (V may be missing).
struct KvLayer {
  std::unique_ptr<KvTensor> k, v;
  bool plain = false;  // memory as the host lays it out, no store
  bool in_store = false;
  bool wrote = false;                       // rows came in since the last Maintain
  bool attended = false;                    // by us, as far as is known
  std::uint32_t n_head_kv = 0, v_in_k = 0;  // as SetHeads was last told; 0: not yet
  // Whose rows came last: a state brings all keys, then all values.
  enum class From : std::uint8_t { kGraph, kKeysOfState, kValuesOfState } from = From::kGraph;
  std::string why_plain;
};

class Buffer {
 public:
  static ggml_backend_buffer_t Alloc(ggml_backend_buffer_type_t buft, std::size_t size);
  static Buffer* From(ggml_backend_buffer_t buffer);  // null for the host's size-0 dummies
  ~Buffer();

  void* base() const { return base_; }
  store::Cache* cache() { return cache_.get(); }

  // The K or V tensor that holds this address, or null. Valid for views as for the tensor itself.
  const KvTensor* Find(const void* address) const;
  KvLayer& layer(const KvTensor& t) { return *t.pair; }
  bool HasKv() const { return !layers_.empty(); }
  // The highest layer with K here, -1 if none. From any thread.
  int last_layer() const { return last_layer_; }
  bool has_first_layer() const { return has_first_layer_; }
  std::uint32_t n_cells() const { return n_cells_; }  // of its K and V; 0: it has none

  // The layer in the store, with its heads; false (layer made plain, one warning) when it cannot
  // be.
  bool EnsureStored(const KvTensor& t);
  // `v_in_k`: see store::Cache::SetValuesInKeys; 0 where not known or V is apart.
  bool SetHeads(const KvTensor& t, std::uint32_t n_head_kv, std::uint32_t v_in_k);
  // Moves a layer to plain memory with all it holds. Each reason is logged once.
  void MakePlain(const KvTensor& t, const std::string& reason);
  void MakeAllPlain(const std::string& why);
  // Says once which layers are coded and which stay as they are. By the first graph that is
  // computed the host has shown all its ops, when it planned its memory.
  void Announce();
  // Before rows are dropped as docs/reclaim.md allows.
  void NoteAttended(std::uint32_t stream, std::uint32_t n_kv);

  // Makes [p, p+size) usable memory (only parts outside stored K/V may be asked for).
  bool Commit(const void* p, std::size_t size);

  // ggml_backend_buffer_i, on byte ranges of any view.
  void InitTensor(ggml_tensor* t);
  void Set(const void* address, const void* data, std::size_t size);
  void Get(const void* address, void* data, std::size_t size);
  void Fill(const void* address, std::uint8_t value, std::size_t size);
  bool Copy(const ggml_tensor* src, ggml_tensor* dst);
  void Clear(std::uint8_t value);

  void AddTo(control::Snapshot& out);

 private:
  explicit Buffer(std::size_t size) : size_(size) {}
  void RegisterKv(const ggml_tensor* t, std::uint32_t layer, codec::Side side);
  void AnnounceLayers();
  // Calls fn(global cell, byte offset in row, data offset, bytes) for each row a range touches.
  template <class F>
  static void ForRows(const KvTensor& t, const void* address, std::size_t size, F&& fn);
  // Writes bytes (or `value` where data is null) over rows of a stored tensor.
  void Patch(const KvTensor& t, const void* address, const std::uint8_t* data, std::uint8_t value,
             std::size_t size);
  void TellOfEvicted(const KvTensor& t, std::span<const half_t> key);
  void BeginRestored(const KvTensor& t, const void* address, std::size_t size);
  bool IsStored(const KvTensor* t) { return t != nullptr && !layer(*t).plain; }

  std::uint8_t* base_ = nullptr;
  std::size_t size_ = 0;
  std::atomic<std::size_t> plain_bytes_{0};
  std::atomic<int> last_layer_{-1};
  std::atomic<bool> has_first_layer_ = false;
  std::atomic<std::uint32_t> n_cells_{0};
  bool all_committed_ = false;
  bool announced_ = false;
  bool told_of_evicted_ = false;
  std::vector<std::uint32_t> n_kv_;  // of each stream, when it was last written and attended
  // State of other kinds than K and V, by what it is: number of tensors, bytes.
  std::map<std::string, std::pair<int, std::size_t>> other_state_;
  std::map<std::uint32_t, KvLayer> layers_;
  struct At {
    const std::uint8_t* base;
    const KvTensor* kv;
  };
  std::vector<At> by_address_;  // ascending
  std::unique_ptr<store::Cache> cache_;
  std::mutex snapshot_mutex_;  // a snapshot may look for cache_ from any thread
};

// A snapshot of all buffers alive now.
control::Snapshot TakeSnapshot();
// The fullest snapshot seen when a cache was cleared or freed, or the present one if it is fuller.
control::Snapshot FinalSnapshot();
// Counts work given back to the host's code; the first of each reason is logged.
void NoteFallback(const std::string& op, const std::string& reason);

}  // namespace kvtamp::ggml_plugin
