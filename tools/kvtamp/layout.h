// The shape of a model's cache, read from a GGUF file's metadata and tensor list alone (no weights
// are read, no model is loaded; a split file is given by any of its parts). What the host decides
// only at run time (which layers slide, for models whose file does not say) is marked as not known
// rather than guessed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "control/settings.h"

namespace kvtamp::tool {

struct LayerLayout {
  std::uint32_t layer = 0;
  std::uint32_t n_head_kv = 0;  // 0: this layer has no K/V of its own
  std::uint32_t head_size_k = 0;
  std::uint32_t head_size_v = 0;  // 0: V is a view of K (MLA)
  bool swa = false;               // attends a sliding window
  std::string why_plain;          // the host attends it without us; empty: we do
  std::uint64_t elements_k() const { return std::uint64_t{n_head_kv} * head_size_k; }
  std::uint64_t elements_v() const { return std::uint64_t{n_head_kv} * head_size_v; }
};

struct ModelLayout {
  std::string path;  // what to pass to the host: the first of a split file's parts
  std::vector<std::string> cut_short;  // files that end before their weights do
  std::string name;
  std::string architecture;
  std::uint32_t n_ctx_train = 0;
  std::uint32_t n_layer = 0;
  std::uint32_t n_head = 0;  // query heads (of the first attention layer)
  std::uint32_t n_swa = 0;   // 0: no sliding window
  bool swa_known = true;     // false: some layers slide, the file does not say which
  bool mla = false;
  std::uint32_t n_recurrent = 0;    // layers with recurrent state
  std::uint64_t state_bytes = 0;    // of that, for each sequence
  std::uint32_t n_shared = 0;       // layers that read another layer's K/V
  bool causal = true;               // false: an encoder, or the like: it keeps no cache
  std::vector<LayerLayout> layers;  // those with K/V of their own
};

Result<ModelLayout> ReadLayout(const std::string& gguf);
// An error, too, for a model without a K/V cache.
Result<ModelLayout> ReadCacheLayout(const std::string& gguf);

// Whether the formats asked for fit the model's heads: an error when a group of elements that the
// user chose does not divide one. (Heads of a size that no format takes are not the user's mistake:
// the plug-in keeps such layers uncompressed.)
Status CheckFormats(const ModelLayout& model, const control::Settings& settings);

}  // namespace kvtamp::tool
