#include "control/settings.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <optional>

#include "control/toml_file.h"
#include "cpu/cpu.h"

extern char** environ;

namespace kvtamp::control {
namespace {

constexpr Option kOptions[] = {
    {"cache.type", "", "", Kind::kString, "TYPE", "auto",
     "format of K and V: a short name of `kvtamp formats` or a full descriptor"},
    {"cache.type_k", "-ctk", "", Kind::kString, "TYPE", "auto",
     "format of K alone (auto = what cache.type says)"},
    {"cache.type_v", "-ctv", "", Kind::kString, "TYPE", "auto",
     "format of V alone (auto = what cache.type says)"},
    {"cache.n_sink", "", "", Kind::kInteger, "N", "4",
     "first tokens of a sequence kept in f16 for ever, 0 to 64"},
    {"cache.residual_length", "", "", Kind::kInteger, "N", "64",
     "newest tokens not coded finally yet, 0 to 65536; a true window, not a buffer that is flushed "
     "whole"},
    {"cache.residual_type", "", "", Kind::kString, "TYPE", "f16",
     "format of the full pages of that window: f16, or int8 for a tenth of a bit less"},
    {"cache.page_size", "", "", Kind::kInteger, "N", "64", "tokens of one page: 16, 32, 64 or 128"},
    {"cache.top_pages", "", "", Kind::kInteger, "N", "0",
     "coded pages of each KV head that decoding reads, those that can matter most (0 = all)"},
    {"cache.profile", "", "", Kind::kString, "FILE", "",
     "share out the bits over KV heads by what they are worth: a file of `kvtamp sensitivity`"},
    {"cache.skip_layers", "", "", Kind::kIntegers, "LIST", "",
     "layers that use cache.skip_type instead, e.g. 0,3,28-29"},
    {"cache.skip_type", "", "", Kind::kString, "TYPE", "int8",
     "format of the layers in cache.skip_layers"},
    {"evict.policy", "", "", Kind::kString, "POLICY", "none",
     "which entries (K and V of a token in one KV head) go: none, or a policy of docs/policies.md"},
    {"evict.keep_ratio", "", "", Kind::kNumber, "X", "1.0",
     "share of a sequence's entries that stay, above 0 and up to 1"},
    {"evict.target_size", "", "", Kind::kInteger, "N", "0",
     "entries of each KV head that stay, on average (0 = by evict.keep_ratio)"},
    {"evict.interval", "", "", Kind::kInteger, "N", "32",
     "tokens between one pruning and the next, 1 to 65536"},
    {"evict.window_size", "", "", Kind::kInteger, "N", "64",
     "newest tokens of a micro-batch whose attention gives the scores, 1 to 4096"},
    {"evict.kernel_size", "", "", Kind::kInteger, "N", "5",
     "neighbours that scores of snapkv and r_kv are smoothed over, odd"},
    {"evict.n_recent", "", "", Kind::kInteger, "N", "128",
     "newest tokens of a sequence that keep all their entries, 0 to 65536"},
    {"evict.budget", "", "", Kind::kString, "BUDGET", "uniform",
     "how entries are shared out: uniform, pyramidkv, adakv or pyramidkv+adakv"},
    {"evict.alpha_safeguard", "", "", Kind::kNumber, "X", "0.2",
     "adakv: share of its equal part that each head is sure of, 0 to 1"},
    {"evict.then", "", "", Kind::kString, "WHAT", "demote",
     "what becomes of an entry that goes: demote (fewer bits first, by page) or drop"},
    {"log.level", "", "KVTAMP_LOG", Kind::kString, "LEVEL", "info",
     "what is said in the host's log: error, warn, info or debug"},
    {"cpu", "", "", Kind::kString, "ISA", "auto",
     "instruction set of the kernels (auto = the best this processor has)"},
    {"stats", "", "", Kind::kString, "FILE", "",
     "write the summary of the cache to FILE as JSON at exit"},
    {"debug.accept_ops", "", "", Kind::kInteger, "0|1", "0",
     "for tests only: 1 takes SET_ROWS, FLASH_ATTN_EXT and ROPE on any tensors"},
};

constexpr const char* kOtherVariables[] = {
    "KVTAMP_CONFIG",     // the TOML file
    "KVTAMP_PLUGIN",     // the command and the Python package: which libggml-kvtamp.so
    "KVTAMP_LIB",        // the same for the Python package alone
    "KVTAMP_LLAMA_DIR",  // the build: the user's own llama.cpp
    "KVTAMP_LLAMA_LIB_DIR",
    "KVTAMP_SKIP_DEPS",  // the build: install no packages
};

std::string Quoted(std::string_view text) { return fmt::format("\"{}\"", text); }

// Restricted Damerau-Levenshtein distance, case ignored, '-' and '.' the same as '_'.
std::size_t Distance(std::string_view a, std::string_view b) {
  const auto fold = [](char c) {
    return c == '-' || c == '.' ? '_'
                                : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  };
  const std::size_t n = b.size() + 1;
  std::vector<std::size_t> before(n), last(n), row(n);
  for (std::size_t j = 0; j < n; ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j < n; ++j) {
      const bool same = fold(a[i - 1]) == fold(b[j - 1]);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && fold(a[i - 1]) == fold(b[j - 2]) && fold(a[i - 2]) == fold(b[j - 1])) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    std::swap(before, last);
    std::swap(last, row);
  }
  return last[n - 1];
}

Result<std::uint32_t> ParseInteger(std::string_view text, std::uint32_t low, std::uint32_t high) {
  std::uint32_t n = 0;
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (text.empty() || ec != std::errc() || end != text.data() + text.size() || n < low ||
      n > high) {
    return Status::Invalid("must be a whole number from " + std::to_string(low) + " to " +
                           std::to_string(high));
  }
  return n;
}

// "0,3,28-29"
Result<std::vector<std::uint32_t>> ParseLayers(std::string_view text) {
  constexpr std::uint32_t kMaxLayer = 4095;
  std::vector<std::uint32_t> layers;
  const Status bad = Status::Invalid("must be a list of layer numbers such as 0,3,28-29");
  if (text.empty()) return layers;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    std::string_view item = text.substr(at, comma - at);
    while (!item.empty() && item.front() == ' ') item.remove_prefix(1);
    while (!item.empty() && item.back() == ' ') item.remove_suffix(1);
    const std::size_t dash = item.find('-');
    const auto first = ParseInteger(item.substr(0, dash), 0, kMaxLayer);
    const auto last = dash == item.npos ? first : ParseInteger(item.substr(dash + 1), 0, kMaxLayer);
    if (!first.ok() || !last.ok() || last.value() < first.value()) return bad;
    for (std::uint32_t il = first.value(); il <= last.value(); ++il) layers.push_back(il);
    at = comma + 1;
  }
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  return layers;
}

// One side's own key. A short name counts when it names no side by itself ("int8", "f16"); "k8v4"
// does and belongs into cache.type.
Result<codec::Format> ParseSide(std::string_view text, codec::Side side) {
  Result<codec::Format> format = codec::ParseFormat(text, side);
  if (format.ok()) return format;
  const Result<codec::Pair> pair = codec::ParsePair(text);
  if (!pair.ok()) return format;
  const bool names_sides =
      text.size() > 1 && text[0] == 'k' && std::isdigit(static_cast<unsigned char>(text[1])) != 0;
  if (names_sides) {
    return Status::Invalid(Quoted(text) + " sets both sides: give it to cache.type");
  }
  return side == codec::Side::kK ? pair.value().k : pair.value().v;
}

const char* const kLevelNames[] = {"debug", "info", "warn", "error"};

// What was given for one option, before it is understood.
struct Given {
  std::string text;
  Source source;
  std::string where;
};

class Loader {
 public:
  Loader() : given_(std::size(kOptions)) {}

  Status AddFile(const std::string& path) {
    const Result<toml::table> table = ReadToml(path, "the configuration file");
    return table.ok() ? AddTable(table.value(), "", path) : table.status();
  }

  Status AddEnvironment(const Environment& env) {
    for (const auto& [name, text] : env) {
      if (!name.starts_with("KVTAMP_") || text.empty()) continue;
      if (std::find(std::begin(kOtherVariables), std::end(kOtherVariables), name) !=
          std::end(kOtherVariables)) {
        continue;
      }
      std::size_t i = 0;
      while (i < std::size(kOptions) && EnvName(kOptions[i].path) != name &&
             name != kOptions[i].short_env) {
        ++i;
      }
      if (i == std::size(kOptions)) {
        std::vector<std::string> names(std::begin(kOtherVariables), std::end(kOtherVariables));
        for (const Option& option : kOptions) {
          names.push_back(EnvName(option.path));
          if (*option.short_env != 0) names.emplace_back(option.short_env);
        }
        return Status::Invalid("unknown variable " + name + Suggestion(name, names));
      }
      if (given_[i] && given_[i]->source == Source::kEnv && given_[i]->text != text) {
        return Status::Invalid(given_[i]->where + " and " + name + " set " + kOptions[i].path +
                               " to different values");
      }
      given_[i] = Given{text, Source::kEnv, name};
    }
    return Status::Ok();
  }

  Status AddFlags(const Overrides& flags) {
    for (const Override& flag : flags) {
      const Option* option = FindOption(flag.path);
      if (option == nullptr) return UnknownKey(flag.path, flag.flag.empty() ? "flags" : flag.flag);
      given_[static_cast<std::size_t>(option - kOptions)] =
          Given{flag.text, Source::kFlag, flag.flag.empty() ? FlagName(flag.path) : flag.flag};
    }
    return Status::Ok();
  }

  Result<Settings> Finish(std::string config_file) {
    Settings s;
    s.config_file = std::move(config_file);
    for (std::size_t i = 0; i < std::size(kOptions); ++i) {
      const Option& option = kOptions[i];
      s.values.push_back(given_[i]
                             ? Value{&option, given_[i]->text, given_[i]->source, given_[i]->where}
                             : Value{&option, option.fallback, Source::kDefault, ""});
    }
    for (const Value& value : s.values) {
      const Status status = Take(value, s);
      if (!status.ok()) {
        const std::string origin = value.where.empty() ? "" : " (from " + value.where + ")";
        return Status(status.code(), std::string(value.option->path) + " = " + Quoted(value.text) +
                                         origin + ": " + status.message());
      }
    }
    return s;
  }

 private:
  Status UnknownKey(const std::string& path, const std::string& where) const {
    std::vector<std::string> names;
    for (const Option& option : kOptions) names.emplace_back(option.path);
    return Status::Invalid(where + ": unknown key " + path + Suggestion(path, names));
  }

  Status AddTable(const toml::table& table, const std::string& prefix, const std::string& file) {
    for (const auto& [key, node] : table) {
      const std::string path = prefix + std::string(key.str());
      const std::string where = file + ":" + std::to_string(key.source().begin.line);
      if (const toml::table* inner = node.as_table()) {
        const bool known = std::any_of(
            std::begin(kOptions), std::end(kOptions),
            [&](const Option& o) { return std::string_view(o.path).starts_with(path + "."); });
        if (!known) return UnknownKey(path, where);
        if (Status status = AddTable(*inner, path + ".", file); !status.ok()) return status;
        continue;
      }
      const Option* option = FindOption(path);
      if (option == nullptr) return UnknownKey(path, where);
      const std::optional<std::string> text = TextOf(node, option->kind);
      if (!text) {
        const char* wanted = option->kind == Kind::kString    ? "a string in quotes"
                             : option->kind == Kind::kInteger ? "a whole number"
                             : option->kind == Kind::kNumber  ? "a number"
                                                              : "a list of whole numbers";
        return Status::Invalid(where + ": " + path + " must be " + wanted);
      }
      given_[static_cast<std::size_t>(option - kOptions)] = Given{*text, Source::kFile, where};
    }
    return Status::Ok();
  }

  static std::optional<std::string> TextOf(const toml::node& node, Kind kind) {
    switch (kind) {
      case Kind::kString:
        return node.value_exact<std::string>();
      case Kind::kInteger:
        if (const auto n = node.value_exact<std::int64_t>()) return std::to_string(*n);
        return std::nullopt;
      case Kind::kNumber:
        if (const auto n = node.value_exact<std::int64_t>()) return std::to_string(*n);
        if (const auto x = node.value_exact<double>()) return fmt::format("{}", *x);
        return std::nullopt;
      case Kind::kIntegers: {
        const toml::array* array = node.as_array();
        if (array == nullptr) return std::nullopt;
        std::string text;
        for (const toml::node& item : *array) {
          const auto n = item.value_exact<std::int64_t>();
          if (!n) return std::nullopt;
          if (!text.empty()) text += ',';
          text += std::to_string(*n);
        }
        return text;
      }
    }
    return std::nullopt;
  }

  // Understands one value. cache.type comes before .type_k and .type_v in the table, as it must.
  static Status Take(const Value& value, Settings& s) {
    const std::string_view path = value.option->path;
    const std::string& text = value.text;
    if (path == "cache.type") {
      const auto pair = codec::ParsePair(text);
      if (!pair.ok()) return pair.status();
      s.type = pair.value();
      return Status::Ok();
    }
    if (path == "cache.type_k" || path == "cache.type_v") {
      if (text == "auto") return Status::Ok();
      const codec::Side side = path.back() == 'k' ? codec::Side::kK : codec::Side::kV;
      const auto format = ParseSide(text, side);
      if (!format.ok()) return format.status();
      if (s.values[0].source > value.source)
        return Status::Ok();  // cache.type, given more strongly
      (side == codec::Side::kK ? s.type.k : s.type.v) = format.value();
      return Status::Ok();
    }
    if (path == "cache.skip_type") {
      const auto pair = codec::ParsePair(text);
      if (!pair.ok()) return pair.status();
      s.skip_type = pair.value();
      return Status::Ok();
    }
    if (path == "cache.n_sink") return TakeInteger(text, 0, 64, s.n_sink);
    if (path == "cache.residual_length") return TakeInteger(text, 0, 65536, s.residual_length);
    if (path == "cache.residual_type") {
      if (text != "int8" && text != "f16") return Status::Invalid("must be int8 or f16");
      s.int8_window = text == "int8";
      return Status::Ok();
    }
    if (path == "cache.page_size") {
      std::uint32_t n = 0;
      const Status status = TakeInteger(text, 16, 128, n);
      if (!status.ok() || (n != 16 && n != 32 && n != 64 && n != 128)) {
        return Status::Invalid("must be 16, 32, 64 or 128");
      }
      s.page_size = n;
      return Status::Ok();
    }
    if (path == "cache.top_pages") return TakeInteger(text, 0, 1u << 20, s.top_pages);
    if (path.starts_with("evict.")) return TakeEvict(path.substr(6), text, s.prune);
    if (path == "cache.profile") {
      if (text.empty()) return Status::Ok();
      const Result<Profile> profile = ReadProfile(std::string(text));
      if (!profile.ok()) return profile.status();
      s.profile = std::string(text);
      s.heads = ShareBits(profile.value(), s.type);
      return Status::Ok();
    }
    if (path == "cache.skip_layers") {
      auto layers = ParseLayers(text);
      if (!layers.ok()) return layers.status();
      s.skip_layers = std::move(layers.value());
      return Status::Ok();
    }
    if (path == "log.level") {
      for (std::size_t i = 0; i < std::size(kLevelNames); ++i) {
        if (text == kLevelNames[i]) {
          s.log_level = static_cast<LogLevel>(i);
          return Status::Ok();
        }
      }
      const std::vector<std::string> names(std::begin(kLevelNames), std::end(kLevelNames));
      return Status::Invalid("must be error, warn, info or debug" + Suggestion(text, names));
    }
    if (path == "cpu") {
      const std::vector<std::string> isas = cpu::AvailableIsas();
      if (text != "auto" && std::find(isas.begin(), isas.end(), text) == isas.end()) {
        std::string list = "auto";
        for (const std::string& isa : isas) list += ", " + isa;
        return Status::Invalid("not an instruction set of this processor: there are " + list);
      }
      s.cpu = text;
      return Status::Ok();
    }
    if (path == "stats") {
      s.stats = text;
      return Status::Ok();
    }
    if (path == "debug.accept_ops") return TakeInteger(text, 0, 1, s.accept_ops);
    return Status::Internal("an option of the table that nobody reads");
  }

  // [evict]: what it comes to is checked once the whole section is there.
  static Status TakeEvict(std::string_view key, std::string_view text, store::PruneOptions& prune) {
    policy::BudgetOptions& budget = prune.budget;
    if (key == "policy") {
      if (text == "none") return Status::Ok();
      prune.policy = std::string(text);
      store::PruneOptions alone;
      alone.policy = prune.policy;
      return store::CheckPruneOptions(alone);
    }
    if (key == "keep_ratio") return TakeNumber(text, 0, 1, true, budget.keep_ratio);
    if (key == "target_size") return TakeInteger(text, 0, 1u << 30, budget.target_size);
    if (key == "interval") return TakeInteger(text, 1, 65536, prune.interval);
    if (key == "window_size") return TakeInteger(text, 1, 4096, prune.scores.window_size);
    if (key == "kernel_size") {
      const Status status = TakeInteger(text, 1, 4095, prune.scores.kernel_size);
      if (status.ok() && prune.scores.kernel_size % 2 == 0) return Status::Invalid("must be odd");
      return status;
    }
    if (key == "n_recent") return TakeInteger(text, 0, 65536, prune.n_recent);
    if (key == "budget") return policy::ParseBudget(text, budget);
    if (key == "alpha_safeguard") return TakeNumber(text, 0, 1, false, budget.alpha_safeguard);
    if (text == "merge" || text == "spill")
      return Status::Unsupported("there is no such thing yet: demote or drop");
    if (text != "demote" && text != "drop") return Status::Invalid("must be demote or drop");
    prune.demote = text == "demote";
    return Status::Ok();
  }

  static Status TakeNumber(std::string_view text, double low, double high, bool above,
                           double& out) {
    double x = 0;
    const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), x);
    // A NaN is in no range.
    if (text.empty() || ec != std::errc() || end != text.data() + text.size() ||
        !(above ? x > low : x >= low) || !(x <= high))
      return Status::Invalid(fmt::format("must be a number {} {} {} {}", above ? "above" : "from",
                                         low, above ? "and at most" : "to", high));
    out = x;
    return Status::Ok();
  }

  static Status TakeInteger(std::string_view text, std::uint32_t low, std::uint32_t high,
                            std::uint32_t& out) {
    const auto n = ParseInteger(text, low, high);
    if (!n.ok()) return n.status();
    out = n.value();
    return Status::Ok();
  }

  std::vector<std::optional<Given>> given_;  // [Options()]
};

}  // namespace

const char* SourceName(Source source) {
  switch (source) {
    case Source::kDefault:
      return "default";
    case Source::kFile:
      return "file";
    case Source::kEnv:
      return "env";
    case Source::kFlag:
      return "flag";
  }
  return "";
}

std::span<const Option> Options() { return kOptions; }
std::span<const char* const> OtherVariables() { return kOtherVariables; }

const Option* FindOption(std::string_view path) {
  for (const Option& option : kOptions) {
    if (path == option.path) return &option;
  }
  return nullptr;
}

std::string FlagName(std::string_view path) {
  std::string name = "--" + std::string(path);
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '.' || c == '_'; }, '-');
  return name;
}

std::string EnvName(std::string_view path) {
  std::string name = "KVTAMP_" + std::string(path);
  for (char& c : name) {
    c = c == '.' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

std::vector<codec::Pair> Settings::TypesOfHeads(std::uint32_t il) const {
  if (std::binary_search(skip_layers.begin(), skip_layers.end(), il)) return {};
  const auto it = heads.find(il);
  return it == heads.end() ? std::vector<codec::Pair>() : it->second;
}

const codec::Pair& Settings::TypeOfLayer(std::uint32_t il) const {
  return std::binary_search(skip_layers.begin(), skip_layers.end(), il) ? skip_type : type;
}

Environment ProcessEnvironment() {
  Environment env;
  for (char** p = environ; p != nullptr && *p != nullptr; ++p) {
    const std::string_view entry = *p;
    const std::size_t equals = entry.find('=');
    if (equals == entry.npos || !entry.starts_with("KVTAMP_")) continue;
    env.emplace_back(entry.substr(0, equals), entry.substr(equals + 1));
  }
  return env;
}

Result<Settings> LoadSettings(const Overrides& flags, const Environment& env,
                              const std::string& file) {
  std::string config = file;
  for (const auto& [name, text] : env) {
    if (config.empty() && name == "KVTAMP_CONFIG") config = text;
  }
  Loader loader;
  if (!config.empty()) {
    if (Status status = loader.AddFile(config); !status.ok()) return status;
  }
  if (Status status = loader.AddEnvironment(env); !status.ok()) return status;
  if (Status status = loader.AddFlags(flags); !status.ok()) return status;
  return loader.Finish(std::move(config));
}

Result<Settings> LoadSettings() { return LoadSettings({}, ProcessEnvironment()); }

std::string NearestName(std::string_view word, std::span<const std::string> names) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, word.size() / 3) + 1;
  for (const std::string& name : names) {
    std::size_t d = Distance(word, name);
    const std::size_t shorter = std::min(word.size(), name.size());
    if (shorter >= 3 && word.substr(0, shorter) == std::string_view(name).substr(0, shorter)) {
      d = std::min<std::size_t>(d, 2);  // "warning" is "warn"
    }
    if (d < best_distance) {
      best_distance = d;
      best = name;
    }
  }
  return best;
}

std::string Suggestion(std::string_view word, std::span<const std::string> names) {
  const std::string near = NearestName(word, names);
  return near.empty() ? std::string() : "; did you mean " + near + "?";
}

}  // namespace kvtamp::control
