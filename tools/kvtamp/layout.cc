#include "tools/kvtamp/layout.h"

#include <ggml.h>
#include <gguf.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>

namespace kvtamp::tool {
namespace {

class File {
 public:
  explicit File(gguf_context* gguf) : gguf_(gguf, &gguf_free) {}

  std::optional<std::string> String(const std::string& key) const {
    const std::int64_t id = gguf_find_key(gguf_.get(), key.c_str());
    if (id < 0 || gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_STRING) return std::nullopt;
    return gguf_get_val_str(gguf_.get(), id);
  }

  // A number, or one for each layer; the last is used beyond the end. Empty when there is none.
  std::vector<std::uint32_t> Numbers(const std::string& key) const {
    const std::int64_t id = gguf_find_key(gguf_.get(), key.c_str());
    if (id < 0) return {};
    const gguf_type type = gguf_get_kv_type(gguf_.get(), id);
    if (type != GGUF_TYPE_ARRAY) {
      const auto n = Read(type, gguf_get_val_data_or_null(id), 0);
      return n ? std::vector<std::uint32_t>{*n} : std::vector<std::uint32_t>{};
    }
    const gguf_type inner = gguf_get_arr_type(gguf_.get(), id);
    if (inner == GGUF_TYPE_STRING) return {};
    std::vector<std::uint32_t> numbers;
    for (std::size_t i = 0; i < gguf_get_arr_n(gguf_.get(), id); ++i) {
      const auto n = Read(inner, gguf_get_arr_data(gguf_.get(), id), i);
      if (!n) return {};
      numbers.push_back(*n);
    }
    return numbers;
  }

  std::uint32_t Number(const std::string& key, std::uint32_t fallback = 0) const {
    const auto numbers = Numbers(key);
    return numbers.empty() ? fallback : numbers.front();
  }

  bool IsArray(const std::string& key) const {
    const std::int64_t id = gguf_find_key(gguf_.get(), key.c_str());
    return id >= 0 && gguf_get_kv_type(gguf_.get(), id) == GGUF_TYPE_ARRAY;
  }

  // Rows of a weight matrix, 0 when there is none of that name.
  std::uint32_t Rows(const std::string& tensor) const {
    const std::int64_t id = gguf_find_tensor(gguf_.get(), tensor.c_str());
    return id < 0 ? 0 : static_cast<std::uint32_t>(gguf_get_tensor_ne(gguf_.get(), id)[1]);
  }

  bool HasTensorStarting(const std::string& prefix) const {
    for (std::int64_t i = 0; i < gguf_get_n_tensors(gguf_.get()); ++i) {
      if (std::strncmp(gguf_get_tensor_name(gguf_.get(), i), prefix.c_str(), prefix.size()) == 0)
        return true;
    }
    return false;
  }

 private:
  const void* gguf_get_val_data_or_null(std::int64_t id) const {
    return gguf_get_kv_type(gguf_.get(), id) == GGUF_TYPE_STRING
               ? nullptr
               : gguf_get_val_data(gguf_.get(), id);
  }

  static std::optional<std::uint32_t> Read(gguf_type type, const void* data, std::size_t i) {
    if (data == nullptr) return std::nullopt;
    switch (type) {
      case GGUF_TYPE_UINT8:
        return static_cast<const std::uint8_t*>(data)[i];
      case GGUF_TYPE_BOOL:
        return static_cast<const std::int8_t*>(data)[i] != 0 ? 1 : 0;
      case GGUF_TYPE_UINT16:
        return static_cast<const std::uint16_t*>(data)[i];
      case GGUF_TYPE_UINT32:
        return static_cast<const std::uint32_t*>(data)[i];
      case GGUF_TYPE_INT32:
        return static_cast<std::uint32_t>(std::max(0, static_cast<const std::int32_t*>(data)[i]));
      case GGUF_TYPE_UINT64:
        return static_cast<std::uint32_t>(static_cast<const std::uint64_t*>(data)[i]);
      default:
        return std::nullopt;
    }
  }

  std::unique_ptr<gguf_context, void (*)(gguf_context*)> gguf_;
};

std::uint32_t At(const std::vector<std::uint32_t>& numbers, std::uint32_t i,
                 std::uint32_t fallback) {
  if (numbers.empty()) return fallback;
  return numbers[std::min<std::size_t>(i, numbers.size() - 1)];
}

// Every how many layers one attends everything, where the host knows it by architecture and the
// file need not say; 0 = not known here.
std::uint32_t KnownPattern(const std::string& architecture) {
  if (architecture == "gemma3") return 6;
  if (architecture == "gemma2" || architecture == "gpt-oss") return 2;
  if (architecture == "cohere2") return 4;
  return 0;
}

// Why the host attends a layer by its own code, which then is not compressed; empty where it leaves
// that to us. What the plug-in says at load tells the same (tests/host/test_archs.py).
std::string WhyPlain(const File& file, const std::string& architecture, const std::string& blk) {
  if (architecture == "grok") return "the host turns flash attention off for this architecture";
  if (file.HasTensorStarting(blk + "indexer.") ||
      file.HasTensorStarting(blk + "attn_compressor_")) {
    return "sparse attention: the host itself picks the tokens and attends them";
  }
  return "";
}

}  // namespace

Result<ModelLayout> ReadLayout(const std::string& gguf) {
  {
    std::ifstream in(gguf, std::ios::binary);
    if (!in) return Status::Invalid("cannot read " + gguf + ": " + std::strerror(errno));
    char magic[4] = {};
    in.read(magic, sizeof(magic));
    if (std::memcmp(magic, "GGUF", 4) != 0) return Status::Invalid(gguf + " is not a GGUF file");
  }
  gguf_context* context =
      gguf_init_from_file(gguf.c_str(), {/*.no_alloc =*/true, /*.ctx =*/nullptr});
  if (context == nullptr) return Status::Invalid(gguf + " is not a GGUF file this ggml can read");
  const File file(context);

  ModelLayout model;
  const auto architecture = file.String("general.architecture");
  if (!architecture) return Status::Invalid(gguf + " does not name its architecture");
  model.architecture = *architecture;
  model.name = file.String("general.name").value_or(model.architecture);
  const std::string p = model.architecture + ".";
  model.n_layer = file.Number(p + "block_count");
  model.n_ctx_train = file.Number(p + "context_length");
  model.causal = file.Number(p + "attention.causal", 1) != 0;
  model.n_swa = file.Number(p + "attention.sliding_window");
  model.n_shared = file.Number(p + "attention.shared_kv_layers");

  const std::uint32_t n_embd = file.Number(p + "embedding_length");
  const auto n_head = file.Numbers(p + "attention.head_count");
  const auto n_head_kv = file.Numbers(p + "attention.head_count_kv");
  model.n_head = n_head.empty() ? 0 : *std::max_element(n_head.begin(), n_head.end());
  const std::uint32_t even = model.n_head == 0 ? 0 : n_embd / model.n_head;
  const std::uint32_t key = file.Number(p + "attention.key_length", even);
  const std::uint32_t value = file.Number(p + "attention.value_length", even);
  const std::uint32_t key_swa = file.Number(p + "attention.key_length_swa", key);
  const std::uint32_t value_swa = file.Number(p + "attention.value_length_swa", value);
  const std::uint32_t lora = file.Number(p + "attention.kv_lora_rank");
  model.mla = lora > 0 && file.Number(p + "attention.key_length_mla") > 0;
  const auto recurrent = file.Numbers(p + "attention.recurrent_layers");

  const std::string pattern_key = p + "attention.sliding_window_pattern";
  const auto pattern = file.Numbers(pattern_key);
  const std::uint32_t period = !pattern.empty() && !file.IsArray(pattern_key)
                                   ? pattern.front()
                                   : KnownPattern(model.architecture);
  if (model.n_swa > 0 && pattern.empty() && period == 0) model.swa_known = false;

  for (std::uint32_t il = 0; il < model.n_layer; ++il) {
    const std::string blk = "blk." + std::to_string(il) + ".";
    const std::uint32_t heads = At(n_head_kv, il, At(n_head, il, 0));
    const bool state = file.HasTensorStarting(blk + "ssm_") ||
                       file.HasTensorStarting(blk + "time_mix_") ||
                       file.HasTensorStarting(blk + "shortconv.");
    // Recurrent without weights of a state's own: its attention weights are of linear attention.
    const bool linear = !state && At(recurrent, il, 0) != 0;
    model.n_recurrent += state || linear;
    if (heads == 0 || linear) continue;
    // Other linear attention has weights of attention's names too, but not for the output.
    if (file.HasTensorStarting("blk.") && !file.HasTensorStarting(blk + "attn_output")) continue;
    LayerLayout layer;
    layer.layer = il;
    if (model.n_swa > 0) {
      layer.swa = file.IsArray(pattern_key) ? At(pattern, il, 0) != 0
                                            : period > 0 && il % period < period - 1;
    }
    if (model.mla) {
      layer.n_head_kv = 1;
      layer.head_size_k = lora + file.Number(p + "rope.dimension_count");
    } else {
      layer.n_head_kv = heads;
      layer.head_size_k = layer.swa ? key_swa : key;
      layer.head_size_v = layer.swa ? value_swa : value;
      // The weights know best.
      const std::uint32_t rows_k = file.Rows(blk + "attn_k.weight");
      const std::uint32_t rows_v = file.Rows(blk + "attn_v.weight");
      if (rows_k > 0 && layer.n_head_kv > 0 && rows_k % layer.n_head_kv == 0) {
        layer.head_size_k = rows_k / layer.n_head_kv;
      }
      if (rows_v > 0 && layer.n_head_kv > 0 && rows_v % layer.n_head_kv == 0) {
        layer.head_size_v = rows_v / layer.n_head_kv;
      }
    }
    layer.why_plain = WhyPlain(file, model.architecture, blk);
    const bool shared = model.n_shared > 0 && il + model.n_shared >= model.n_layer;
    if (!shared && layer.n_head_kv > 0 && layer.head_size_k > 0) model.layers.push_back(layer);
  }
  return model;
}

Result<ModelLayout> ReadCacheLayout(const std::string& gguf) {
  Result<ModelLayout> layout = ReadLayout(gguf);
  if (layout.ok() && layout.value().layers.empty())
    return Status::Invalid(gguf + " has no K/V cache");
  return layout;
}

Status CheckFormats(const ModelLayout& model, const control::Settings& settings) {
  for (const LayerLayout& layer : model.layers) {
    const codec::Pair& type = settings.TypeOfLayer(layer.layer);
    for (const codec::Side side : {codec::Side::kK, codec::Side::kV}) {
      const codec::Format& format = side == codec::Side::kK ? type.k : type.v;
      const std::uint32_t dim = side == codec::Side::kK ? layer.head_size_k : layer.head_size_v;
      if (format.group == 0 || dim == 0) continue;
      const Result<codec::Format> resolved = codec::Resolve(format, side, dim);
      if (!resolved.ok()) {
        return Status::Invalid("layer " + std::to_string(layer.layer) + " of " + model.name + ": " +
                               resolved.status().message());
      }
    }
  }
  return Status::Ok();
}

}  // namespace kvtamp::tool
