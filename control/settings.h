// Every setting there is, in one table, and where each value came from.
//
// One rule makes the three forms of a name: `cache.type_k` in the TOML file is the flag
// `--cache-type-k` and the variable KVTAMP_CACHE_TYPE_K. A stronger source wins: flag > environment
// > file > default. An unknown key, variable or value is an error that names its nearest neighbour,
// never ignored. Nothing here prints; reading the environment happens in LoadSettings() alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/status.h"
#include "codec/format.h"
#include "control/profile.h"
#include "store/prune.h"

namespace kvtamp::control {

enum class Source : std::uint8_t { kDefault, kFile, kEnv, kFlag };
const char* SourceName(Source source);  // "default", "file", "env", "flag"

enum class Kind : std::uint8_t { kString, kInteger, kIntegers, kNumber };

// One row of the table. Pointers are to static text and never null.
struct Option {
  const char* path;        // in TOML: "cache.type_k"
  const char* short_flag;  // "-ctk", only where llama.cpp means the same by it; else ""
  const char* short_env;   // "KVTAMP_LOG", an allowed second spelling; else ""
  Kind kind;
  const char* value_name;  // for help: "TYPE"
  const char* fallback;    // the default, as text
  const char* help;
};
std::span<const Option> Options();
const Option* FindOption(std::string_view path);  // null when there is none

std::string FlagName(std::string_view path);  // "--cache-type-k"
std::string EnvName(std::string_view path);   // "KVTAMP_CACHE_TYPE_K"

// Variables called KVTAMP_… that are not settings (KVTAMP_CONFIG names the file, others steer
// tools).
std::span<const char* const> OtherVariables();

// One value in force.
struct Value {
  const Option* option = nullptr;
  std::string text;  // as given
  Source source = Source::kDefault;
  std::string where;  // "--cache-type-k", "KVTAMP_CACHE_TYPE_K", "FILE:12", ""
};

struct Settings {
  // From cache.type, .type_k, .type_v: for each side the stronger source wins; the side's own key
  // wins within one source. "auto" of a side's own key leaves it to cache.type.
  codec::Pair type;
  std::uint32_t n_sink = 0;                // 0 … 64
  std::uint32_t residual_length = 0;       // 0 … 65536 newest tokens kept: a true window
  bool int8_window = false;                // cache.residual_type: its full pages are int8, else f16
  std::uint32_t page_size = 0;             // 16, 32, 64, 128
  std::uint32_t top_pages = 0;             // coded pages that decoding reads; 0: all
  std::vector<std::uint32_t> skip_layers;  // ascending, each once
  codec::Pair skip_type;                   // what those layers use instead of `type`
  store::PruneOptions prune;               // [evict]; no policy: nothing is let go of
  LogLevel log_level = LogLevel::kInfo;
  std::string cpu;    // for cpu::ForceIsa; "auto" = the best
  std::string stats;  // file for the summary at exit; empty = none
  // 1: SET_ROWS, FLASH_ATTN_EXT and ROPE are ours whatever they work on. The host's
  // test-backend-ops asks before it allocates, and would skip them; a model would run its own ROPE
  // through us.
  std::uint32_t accept_ops = 0;

  std::string config_file;    // the file that was read; empty = none
  std::vector<Value> values;  // one for each of Options(), in its order

  std::string profile;  // file; empty = none
  HeadTypes heads;      // what it says, for `type`

  // What layer `il` uses; and by KV head, empty where all are alike.
  const codec::Pair& TypeOfLayer(std::uint32_t il) const;
  std::vector<codec::Pair> TypesOfHeads(std::uint32_t il) const;
};

// A value given on the command line; `flag` is how the user spelled it (for messages).
struct Override {
  std::string path;
  std::string text;
  std::string flag;
};
using Overrides = std::vector<Override>;
using Environment =
    std::vector<std::pair<std::string, std::string>>;  // only KVTAMP_… are looked at
Environment ProcessEnvironment();

// `file`: a TOML file; when empty, KVTAMP_CONFIG of `env` names it; when that is empty too, none.
Result<Settings> LoadSettings(const Overrides& flags, const Environment& env,
                              const std::string& file = {});
// The process's environment (and the file it names) alone: what the plug-in uses.
Result<Settings> LoadSettings();

// Of `names` the one least edits away from `word`, or "" when none is near.
std::string NearestName(std::string_view word, std::span<const std::string> names);
// "; did you mean NAME?", or "".
std::string Suggestion(std::string_view word, std::span<const std::string> names);

}  // namespace kvtamp::control
