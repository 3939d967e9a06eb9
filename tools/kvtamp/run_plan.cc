#include "tools/kvtamp/run_plan.h"

#include <algorithm>
#include <span>
#include <string_view>

#include "tools/kvtamp/words.h"

namespace kvtamp::tool {
namespace {

// One thing a host must be told. `flags` are its spellings, `off` those that mean "no" by
// themselves.
struct Wish {
  const char* env;
  const char* value;
  std::span<const std::string_view> flags;
  std::span<const std::string_view> off;
};

constexpr std::string_view kDevice[] = {"-dev", "--device"};
constexpr std::string_view kLayers[] = {"-ngl", "--gpu-layers", "--n-gpu-layers"};
constexpr std::string_view kFlash[] = {"-fa", "--flash-attn"};
constexpr std::string_view kProjector[] = {"--mmproj-offload"};
constexpr std::string_view kNoProjector[] = {"--no-mmproj-offload"};
constexpr std::string_view kCacheRam[] = {"-cram", "--cache-ram"};
constexpr std::string_view kOffload[] = {"-kvo", "--kv-offload"};
constexpr std::string_view kNoOffload[] = {"-nkvo", "--no-kv-offload"};
constexpr std::string_view kRpc[] = {"--rpc"};
constexpr std::string_view kModel[] = {"-m", "--model"};
constexpr std::string_view kTypeK[] = {"-ctk", "--cache-type-k"};
constexpr std::string_view kTypeV[] = {"-ctv", "--cache-type-v"};

// 999 is every layer of any model, in the words of every version of the host. Given explicitly it
// also keeps --fit, which counts uncompressed bytes, from moving layers (and their cache) away from
// us.
constexpr Wish kWishes[] = {
    {"LLAMA_ARG_DEVICE", "KVTAMP", kDevice, {}},
    {"LLAMA_ARG_N_GPU_LAYERS", "999", kLayers, {}},
    {"LLAMA_ARG_FLASH_ATTN", "on", kFlash, {}},
    // The projector of a multimodal model would be put into our memory whole.
    {"LLAMA_ARG_MMPROJ_OFFLOAD", "0", kProjector, kNoProjector},
    // llama-server keeps idle prompts uncompressed in RAM otherwise, 8 GiB of them.
    {"LLAMA_ARG_CACHE_RAM", "0", kCacheRam, {}},
};

bool In(std::string_view word, std::span<const std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

bool IsOff(const std::string& value) {
  const std::string v = Lower(value);
  return v == "off" || v == "0" || v == "disabled" || v == "false" || v == "no";
}

bool IsNumber(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == text.npos;
}

// "--flash_attn" is "--flash-attn" to the host.
std::string Canonical(const std::string& arg) {
  std::string name = arg;
  if (name.starts_with("--")) std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

class Words {
 public:
  Words(const std::vector<std::string>& program, const GetEnv& getenv)
      : args_(program), getenv_(getenv) {}

  bool HasFlag(std::span<const std::string_view> flags) const { return At(flags) > 0; }

  // The flag's value, else the variable's; "" when neither is there.
  std::string Value(std::span<const std::string_view> flags, const std::string& env) const {
    const std::size_t at = At(flags);
    if (at > 0) return at + 1 < args_.size() ? args_[at + 1] : "";
    return getenv_(env).value_or("");
  }

 private:
  // Index of the last of these flags, 0 for none.
  std::size_t At(std::span<const std::string_view> flags) const {
    for (std::size_t i = args_.size(); i-- > 1;) {
      if (In(Canonical(args_[i]), flags)) return i;
    }
    return 0;
  }

  const std::vector<std::string>& args_;
  const GetEnv& getenv_;
};

// The devices of a list that are not ours.
std::string Others(const std::string& devices) {
  std::string others;
  for (const std::string& name : Split(devices, ",/"))
    if (!name.empty() && Lower(name) != "kvtamp") others += (others.empty() ? "" : ", ") + name;
  return others;
}

bool NamesUs(const std::string& devices) {
  const std::vector<std::string> names = Split(Lower(devices), ",/");
  return std::find(names.begin(), names.end(), "kvtamp") != names.end();
}

}  // namespace

Result<RunPlan> PlanRun(const std::string& plugin, const std::vector<std::string>& program,
                        const GetEnv& getenv) {
  RunPlan plan;
  const Words words(program, getenv);
  const std::string path = program.empty() ? "" : program.front();
  const std::string name = path.substr(path.find_last_of('/') + 1);

  if (name.ends_with("rpc-server")) {
    return Status::Invalid(
        name +
        " computes whole models for others, and KVTAMP holds a cache only: start it "
        "without kvtamp, and run the client with it");
  }
  const std::string loaded = getenv("GGML_BACKEND_PATH").value_or("");
  if (loaded.empty()) {
    plan.set.emplace_back("GGML_BACKEND_PATH", plugin);
  } else if (loaded.find("ggml-kvtamp") == loaded.npos) {
    return Status::Invalid("GGML_BACKEND_PATH is set to " + loaded +
                           " and can name one library only: unset it to run with kvtamp");
  }

  plan.model = words.Value(kModel, "LLAMA_ARG_MODEL");

  const bool bench = name == "llama-bench";
  for (const Wish& wish : kWishes) {
    if (bench) break;  // it reads no LLAMA_ARG_ variable; flags are appended below
    if (words.HasFlag(wish.flags) || words.HasFlag(wish.off)) continue;
    if (getenv(wish.env)) continue;
    // The host's other spelling: LLAMA_ARG_NO_MMPROJ_OFFLOAD.
    std::string no = "LLAMA_ARG_NO_";
    no += std::string_view(wish.env).substr(std::string_view("LLAMA_ARG_").size());
    if (!wish.off.empty() && getenv(no)) continue;
    plan.set.emplace_back(wish.env, wish.value);
  }
  if (bench) {
    const auto append = [&](std::span<const std::string_view> flags, const char* flag,
                            const char* value) {
      if (words.HasFlag(flags)) return;
      plan.append.emplace_back(flag);
      plan.append.emplace_back(value);
    };
    append(kDevice, "-dev", "KVTAMP");
    append(kLayers, "-ngl", "999");
    append(kFlash, "-fa", "1");
  }

  const std::string idle = ": the cache will stay the host's own, uncompressed";
  const std::string devices = words.Value(kDevice, "LLAMA_ARG_DEVICE");
  if (!devices.empty() && !NamesUs(devices)) {
    plan.warnings.push_back("device " + devices + " was asked for and not KVTAMP" + idle);
  } else if (const std::string others = Others(devices); !others.empty()) {
    plan.warnings.push_back("layers on " + others + " keep the host's own cache, uncompressed");
  } else if (devices.empty() && !bench && !words.Value(kRpc, "LLAMA_ARG_RPC").empty()) {
    plan.warnings.push_back(
        "--rpc: its devices stay idle, since KVTAMP alone is asked for: say -dev KVTAMP,RPC0 to "
        "share the "
        "layers (those on RPC0 keep the host's own cache, uncompressed)");
  }
  const std::string layers = words.Value(kLayers, "LLAMA_ARG_N_GPU_LAYERS");
  if (layers == "0") {
    plan.warnings.push_back("-ngl 0 keeps every layer from device KVTAMP" + idle);
  } else if (IsNumber(layers) && layers.size() < 3 && layers != "99") {  // 99 is habit for "all"
    plan.warnings.push_back("-ngl " + layers + ": no more than the last " + layers +
                            " layers use the compressed cache");
  }
  const bool keeps_kv = bench ? words.HasFlag(kNoOffload) && !IsOff(words.Value(kNoOffload, ""))
                              : words.HasFlag(kNoOffload);
  const std::string offload = getenv("LLAMA_ARG_KV_OFFLOAD").value_or("");
  if (keeps_kv || (!words.HasFlag(kOffload) &&
                   (getenv("LLAMA_ARG_NO_KV_OFFLOAD") || (!offload.empty() && IsOff(offload))))) {
    plan.warnings.push_back("-nkvo keeps the cache from device KVTAMP" + idle);
  }
  if (IsOff(words.Value(kFlash, bench ? "" : "LLAMA_ARG_FLASH_ATTN"))) {
    plan.warnings.push_back(
        "-fa off: without flash attention the cache goes uncompressed, and slowly");
  }
  for (const auto& [flags, env, flag] :
       {std::tuple(std::span<const std::string_view>(kTypeK), "LLAMA_ARG_CACHE_TYPE_K", "-ctk"),
        std::tuple(std::span<const std::string_view>(kTypeV), "LLAMA_ARG_CACHE_TYPE_V", "-ctv")}) {
    const std::string type = Lower(words.Value(flags, bench ? "" : env));
    if (!type.empty() && type != "f16" && type != "f32" && type != "bf16") {
      plan.warnings.push_back(
          std::string(flag) + " " + type +
          " is the host's own quantisation and keeps kvtamp's off: leave it at f16 and say "
          "`kvtamp run --cache TYPE`");
    }
  }
  return plan;
}

}  // namespace kvtamp::tool
