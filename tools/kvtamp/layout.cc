#include "tools/kvtamp/layout.h"

#include <algorithm>
#include <iterator>

#include "tools/kvtamp/gguf_file.h"

namespace kvtamp::tool {
namespace {

// More than any model has, and few enough that sums of bytes hold.
constexpr std::uint32_t kMaxLayers = 4096;
constexpr std::uint64_t kMaxRow = std::uint64_t{1} << 20;

std::uint32_t At(const std::vector<std::uint32_t>& numbers, std::uint32_t i,
                 std::uint32_t fallback) {
  if (numbers.empty()) return fallback;
  return numbers[std::min<std::size_t>(i, numbers.size() - 1)];
}

// What the host knows by architecture and a file need not say: every how many layers one attends
// everything (0: none does), and whether it is the first of them or the last.
struct Sliding {
  const char* architecture;
  std::uint32_t period;
  bool dense_first = false;
  std::uint32_t n_swa = 0;  // the window where the file says none
};
constexpr Sliding kSliding[] = {
    {"afmoe", 4},
    {"cohere2", 4},
    {"cohere2moe", 4, true},
    {"deepseek4", 0},
    {"exaone-moe", 4},
    {"exaone4", 4, false, 4096},
    {"gemma2", 2, false, 4096},
    {"gemma3", 6},
    {"gemma3n", 5},
    {"gpt-oss", 2},
    {"laguna", 4, true},
    {"lfm2", 0},
    {"llama4", 4, false, 8192},
    {"mellum", 4},
    {"muse-glimmer", 4},
    {"olmo2", 4},
    {"plamo3", 8},
    {"smallthinker", 4, true},
};

const Sliding* FindSliding(const std::string& architecture) {
  for (const Sliding& s : kSliding)
    if (architecture == s.architecture) return &s;
  return nullptr;
}

// Architectures for which the host makes no cache, whatever their files say.
bool HasNoCache(const std::string& architecture) {
  constexpr const char* kNone[] = {
      "bert",         "dream",          "eurobert",  "gemma-embedding", "jina-bert-v2",
      "jina-bert-v3", "llada",          "llada-moe", "modern-bert",     "neo-bert",
      "nomic-bert",   "nomic-bert-moe", "rnd1",      "wavtokenizer-dec"};
  return std::find(std::begin(kNone), std::end(kNone), architecture) != std::end(kNone);
}

// The window as the host takes it, which is not always what the file says. 0: none.
std::uint32_t WindowOf(const GgufFile& file, const std::string& architecture,
                       std::uint32_t n_layer) {
  const std::string key = architecture + ".attention.sliding_window";
  const Sliding* known = FindSliding(architecture);
  const std::uint32_t said = file.Number(key, known == nullptr ? 0 : known->n_swa);
  if (architecture == "phi3") return 0;                       // switched off in the host
  if (architecture == "exaone4" && n_layer != 64) return 0;   // of the large one alone
  if (architecture == "llama4") return said == 0 ? 0 : 8192;  // chunks of a fixed size
  if (architecture == "smallthinker") return said == 0 ? 0 : 4096;
  return said;
}

// Numbers of 32 bits that a layer's recurrent state has for each sequence, as the host computes
// them.
std::uint64_t StateElements(const GgufFile& file, const std::string& architecture,
                            std::uint64_t n_embd, std::uint64_t n_head, std::uint64_t head_size) {
  const std::string p = architecture + ".";
  const auto number = [&](const char* key, std::uint32_t fallback = 0) {
    return std::uint64_t{file.Number(p + key, fallback)};
  };
  if (const std::uint64_t wkv = number("wkv.head_size"); wkv != 0)
    return n_embd * (number("token_shift_count", 2) + wkv);
  const std::uint64_t conv = number("ssm.conv_kernel"), inner = number("ssm.inner_size"),
                      state = number("ssm.state_size");
  if (const std::uint64_t cache = number("shortconv.l_cache"); cache != 0)
    return n_embd * (cache - 1) + state * inner;
  if (const std::uint64_t kda = number("kda.head_dim"); kda != 0)
    return 3 * (conv > 0 ? conv - 1 : 3) * n_head * kda + kda * kda * n_head;
  const std::uint64_t n_conv =
      (conv > 0 ? conv - 1 : 0) * (inner + 2 * number("ssm.group_count") * state);
  return n_conv + (architecture == "minimax-01" ? head_size * head_size * n_head : state * inner);
}

// Why the host attends a layer by its own code, which then is not compressed; empty where it leaves
// that to us. What the plug-in says at load tells the same (tests/host/test_archs.py).
std::string WhyPlain(const GgufFile& file, const std::string& architecture,
                     const std::string& blk) {
  if (architecture == "grok") return "the host turns flash attention off for this architecture";
  if (file.HasTensorStarting(blk + "indexer.") ||
      file.HasTensorStarting(blk + "attn_compressor_")) {
    return "sparse attention: the host itself picks the tokens and attends them";
  }
  return "";
}

}  // namespace

Result<ModelLayout> ReadLayout(const std::string& gguf) {
  const Result<GgufFile> opened = GgufFile::Open(gguf);
  if (!opened.ok()) return opened.status();
  const GgufFile& file = opened.value();

  ModelLayout model;
  const auto architecture = file.String("general.architecture");
  if (!architecture) return Status::Invalid(gguf + " does not name its architecture");
  const auto damaged = [&](const std::string& what) {
    return Status::Invalid(gguf + " says " + what +
                           ": it is damaged, or not a language model; download it again");
  };
  model.path = file.path();
  model.cut_short = file.cut_short();
  model.architecture = *architecture;
  model.name = file.String("general.name").value_or(model.architecture);
  const std::string p = model.architecture + ".";
  model.n_layer = file.Number(p + "block_count");
  if (model.n_layer > kMaxLayers)
    return damaged("that it has " + std::to_string(model.n_layer) + " layers");
  model.n_ctx_train = file.Number(p + "context_length");
  model.causal = file.Number(p + "attention.causal", 1) != 0 && !HasNoCache(model.architecture);
  // Of the trunk: layers that only draft tokens for it have no place in its cache.
  const std::uint32_t n_nextn = file.Number(p + "nextn_predict_layers");
  std::uint32_t n_trunk = model.n_layer;
  if (n_nextn < model.n_layer && model.architecture != "hy_v4") n_trunk -= n_nextn;
  model.n_swa = WindowOf(file, model.architecture, n_trunk);
  model.n_shared = file.Number(p + "attention.shared_kv_layers");
  if (model.architecture == "gemma3n")
    model.n_shared = model.n_layer - std::min(model.n_layer, 20u);

  const std::uint32_t n_embd = file.Number(p + "embedding_length");
  const auto n_head = file.Numbers(p + "attention.head_count");
  const auto n_head_kv = file.Numbers(p + "attention.head_count_kv");
  model.n_head = n_head.empty() ? 0 : *std::max_element(n_head.begin(), n_head.end());
  const std::uint32_t even = model.n_head == 0 ? 0 : n_embd / model.n_head;
  const std::uint32_t lora = file.Number(p + "attention.kv_lora_rank");
  model.mla = lora > 0 && file.Number(p + "attention.key_length_mla") > 0;
  const std::uint32_t latent = lora + file.Number(p + "rope.dimension_count");
  const std::uint32_t key = file.Number(p + "attention.key_length", model.mla ? latent : even);
  const std::uint32_t value = file.Number(p + "attention.value_length", even);
  const std::uint32_t key_swa = file.Number(p + "attention.key_length_swa", key);
  const std::uint32_t value_swa = file.Number(p + "attention.value_length_swa", value);
  const auto recurrent = file.Numbers(p + "attention.recurrent_layers");

  const std::string pattern_key = p + "attention.sliding_window_pattern";
  const auto pattern = file.Numbers(pattern_key);
  const Sliding* known = FindSliding(model.architecture);
  const bool listed = file.IsArray(pattern_key);
  const std::uint32_t period = !pattern.empty() ? pattern.front() : known ? known->period : 0;
  const bool dense_first = known != nullptr && known->dense_first;
  model.swa_known = model.n_swa == 0 || !pattern.empty() || known != nullptr;
  const auto slides = [&](std::uint32_t il) {
    if (model.n_swa == 0 || !model.swa_known) return false;
    if (listed) return At(pattern, il, 0) != 0;
    if (period == 0) return true;
    return dense_first ? il % period != 0 : il % period < period - 1;
  };

  for (std::uint32_t il = 0; il < n_trunk; ++il) {
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
    layer.swa = slides(il);
    layer.head_size_k = layer.swa ? key_swa : key;
    if (model.mla) {
      layer.n_head_kv = 1;
    } else {
      layer.n_head_kv = heads;
      layer.head_size_v = layer.swa ? value_swa : value;
      // The weights know best.
      const std::uint32_t rows_k = file.Rows(blk + "attn_k.weight");
      const std::uint32_t rows_v = file.Rows(blk + "attn_v.weight");
      if (rows_k > 0 && rows_k % heads == 0) layer.head_size_k = rows_k / heads;
      if (rows_v > 0 && rows_v % heads == 0) layer.head_size_v = rows_v / heads;
      if (model.architecture == "deepseek4") layer.head_size_v = 0;  // a key is its value
    }
    layer.why_plain = WhyPlain(file, model.architecture, blk);
    if (std::max(layer.elements_k(), layer.elements_v()) > kMaxRow)
      return damaged("that a token's key in layer " + std::to_string(il) + " has " +
                     std::to_string(std::max(layer.elements_k(), layer.elements_v())) + " numbers");
    const bool shared = model.n_shared > 0 && std::uint64_t{il} + model.n_shared >= model.n_layer;
    if (!shared && layer.head_size_k > 0) model.layers.push_back(layer);
  }
  model.state_bytes = 4 * model.n_recurrent *
                      StateElements(file, model.architecture, n_embd, At(n_head, 0, 0), key);
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
