// A case: a model's shape, the settings of its two contexts, and a list of operations. It is made
// from a seed, can be written down one operation a line, and read back.
//
// Operations name nothing absolutely: a sequence is a number that is taken modulo the sequences
// there are, a range of positions is in thousandths of what the sequence holds, a decode goes on
// where its sequence ends. So any sub-list of a case is a case too, which is what makes shrinking
// possible.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvtamp::fuzz {

struct Setup {
  std::string type = "f16";    // KVTAMP_CACHE_TYPE
  std::string arch = "llama";  // a name of model.h
  std::string isa = "auto";    // KVTAMP_CPU
  std::string skip_layers;     // KVTAMP_CACHE_SKIP_LAYERS
  std::uint32_t page_size = 64, n_sink = 4, residual = 64;
  std::uint32_t layers = 1, heads = 2, kv_heads = 1, head_size = 32;
  std::uint32_t window = 0;  // of the sliding layers, where the architecture has them
  // Rotary angles scaled per channel, for long contexts: 1 keys too, as is usual, 2 not.
  std::uint32_t yarn = 0;
  std::uint32_t model_seed = 0;
  std::uint32_t n_ctx = 256, n_seq = 1, n_ubatch = 512, threads = 1;
  std::uint32_t unified = 0, swa_full = 0;
  std::uint32_t flash = 1;     // flash attention; without it V is transposed and nothing is coded
  std::uint32_t contexts = 1;  // of the same model and device; 2 take turns
  // The host's own cache is f32: it loses nothing in a shift, but its states are of another type.
  std::uint32_t host_f32 = 0;
};

enum class Kind : std::uint8_t {
  kDecode,
  kDecodeShared,
  kDraft,
  kSeqRm,
  kSeqCp,
  kSeqKeep,
  kSeqAdd,
  kContextShift,
  kSeqDiv,
  kClear,
  kSave,
  kRestore,
  kSaveAll,
  kRestoreAll,
  kBadRestore,
  kDeviceSave,
  kDeviceRestore,
  kBadDecode,
  kSwitch,
};
inline constexpr std::size_t kKinds = static_cast<std::size_t>(Kind::kSwitch) + 1;

struct KindInfo {
  const char* name;
  const char* args;    // what each number means
  std::size_t n_args;  // at least
  int weight;          // how often it is drawn, out of their sum
};
const KindInfo& InfoOf(Kind kind);

struct Op {
  Kind kind = Kind::kDecode;
  std::vector<std::int32_t> args;
};

struct Case {
  Setup setup;
  std::vector<Op> ops;
};

// `type` of f16, k8v8, k4v4.
Case MakeCase(std::uint64_t seed, const std::string& type, int n_ops);

std::string ToText(const Setup& setup);  // one line
std::string ToText(const Op& op);        // one line
std::string ToText(const Case& c);
// Empty lines and what follows a # are ignored. On failure `why` says which line is wrong.
std::optional<Case> ParseCase(std::string_view text, std::string& why);

}  // namespace kvtamp::fuzz
