#include "control/profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "control/toml_file.h"

namespace kvtamp::control {
namespace {

using codec::Format;
using codec::Side;

// Nothing is worth less: below lies the noise of any measurement.
constexpr double kLeastSensitivity = 2e-4;
constexpr int kStep = 25, kLeastBits = 100, kMostBitsK = 800, kMostBitsV = 500;  // hundredths

// Squared error against that at one bit.
double ErrorK(int centibits) { return std::exp2(-2 * (centibits - 100) / 100.0); }
double ErrorV(int centibits) {  // docs/formats.md, kVTrellis; between the whole bits log-linear
  constexpr double kAt[] = {0.303, 0.0786, 0.0217, 0.0065, 0.0025};
  const int whole = std::min(centibits / 100, 4);
  const double part = (centibits - whole * 100) / 100.0;
  return std::pow(kAt[whole - 1], 1 - part) * std::pow(kAt[whole], part) / kAt[0];
}

Status BadFile(const std::string& path, const std::string& what) {
  return Status::Invalid(path + ": " + what + " (a profile is what `kvtamp sensitivity` writes)");
}

// A list, if it is there; take(item) -> Status.
template <class F>
Status ReadList(const toml::table& table, const char* key, F&& take) {
  const toml::node* node = table.get(key);
  if (node == nullptr) return Status::Ok();
  const toml::array* array = node->as_array();
  if (array == nullptr) return Status::Invalid(std::string(key) + " is not a list");
  for (const toml::node& item : *array)
    if (Status s = take(item); !s.ok()) return s;
  return Status::Ok();
}

Status ReadNumbers(const toml::table& table, const char* key, std::vector<double>& out) {
  return ReadList(table, key, [&](const toml::node& item) {
    const auto x = item.value<double>();
    if (!x || !std::isfinite(*x)) return Status::Invalid(std::string(key) + " holds no number");
    out.push_back(*x);
    return Status::Ok();
  });
}

Status ReadFormats(const toml::table& table, const char* key, Side side, std::vector<Format>& out) {
  return ReadList(table, key, [&](const toml::node& item) {
    const auto text = item.value<std::string>();
    if (!text) return Status::Invalid(std::string(key) + " holds no name of a format");
    const auto format = codec::ParseFormat(*text, side);
    if (format.ok()) out.push_back(format.value());
    return format.status();
  });
}

Status ReadLayer(const toml::table& table, ProfileLayer& layer) {
  for (const auto& [key, value] : table) {
    constexpr const char* kKeys[] = {"index", "head_size_k", "head_size_v", "k",
                                     "v",     "type_k",      "type_v",      "window"};
    if (std::find(std::begin(kKeys), std::end(kKeys), key.str()) == std::end(kKeys))
      return Status::Invalid("unknown key layer." + std::string(key.str()));
  }
  const auto whole = [&](const char* key, std::uint32_t& out) {
    const auto x = table[key].value<std::int64_t>();
    if (!x || *x < 0 || *x > 65535) return false;
    out = static_cast<std::uint32_t>(*x);
    return true;
  };
  if (!whole("index", layer.index) || !whole("head_size_k", layer.head_size_k) ||
      !whole("head_size_v", layer.head_size_v))
    return Status::Invalid("a layer without index, head_size_k or head_size_v");
  if (table.contains("window")) {
    const auto x = table["window"].value<std::int64_t>();
    if (!x || *x < 1 || *x > UINT32_MAX) return Status::Invalid("window is no number of tokens");
    layer.window = static_cast<std::uint32_t>(*x);
  }
  for (const Status& s : {ReadNumbers(table, "k", layer.k), ReadNumbers(table, "v", layer.v),
                          ReadFormats(table, "type_k", Side::kK, layer.type_k),
                          ReadFormats(table, "type_v", Side::kV, layer.type_v)}) {
    if (!s.ok()) return s;
  }
  const std::size_t n = layer.n_heads();
  for (std::size_t m : {layer.k.size(), layer.v.size(), layer.type_k.size(), layer.type_v.size()}) {
    if (m != 0 && m != n)
      return Status::Invalid(
          fmt::format("layer {} has lists of {} and of {} heads", layer.index, n, m));
  }
  return Status::Ok();
}

// One side of one head that bits are shared out to.
struct Claim {
  std::uint32_t layer;
  std::size_t head;
  Side side;
  double sensitivity, size;  // of the head: elements, of those tokens that it keeps
  int centibits = kLeastBits;

  double error(int at) const { return side == Side::kK ? ErrorK(at) : ErrorV(at); }
  int most() const { return side == Side::kK ? kMostBitsK : kMostBitsV; }
  double gain() const {  // per bit of memory
    if (centibits + kStep > most()) return -1;
    return sensitivity * (error(centibits) - error(centibits + kStep)) / size;
  }
};

bool Shares(const Format& format, Side side) {
  return side == Side::kK
             ? format.weighted
             : format.levels == codec::Levels::kTcq || format.levels == codec::Levels::kLm;
}

Format OfBits(Format format, Side side, int centibits) {
  format.centibits = static_cast<std::uint16_t>(centibits);
  if (side == Side::kV) {
    format.levels = centibits == 400 ? codec::Levels::kLm : codec::Levels::kTcq;
  }
  return format;
}

}  // namespace

Result<Profile> ReadProfile(const std::string& path) {
  const Result<toml::table> parsed = ReadToml(path, "the profile");
  if (!parsed.ok()) return parsed.status();
  const toml::table& table = parsed.value();
  if (table["version"].value<std::int64_t>() != 1) return BadFile(path, "not of version 1");
  Profile profile;
  profile.model = table["model"].value_or(std::string());
  const toml::array* layers = table["layer"].as_array();
  if (layers == nullptr || layers->empty()) return BadFile(path, "no layers");
  for (const toml::node& node : *layers) {
    if (node.as_table() == nullptr) return BadFile(path, "a layer that is no table");
    ProfileLayer layer;
    if (const Status s = ReadLayer(*node.as_table(), layer); !s.ok())
      return BadFile(path, s.message());
    profile.layers.push_back(std::move(layer));
  }
  return profile;
}

std::string ProfileText(const Profile& profile) {
  std::string text = "version = 1\nmodel = " + fmt::format("\"{}\"\n", [&] {
                       std::string name = profile.model;
                       std::erase_if(name, [](char c) { return c == '"' || c == '\\' || c < ' '; });
                       return name;
                     }());
  for (const ProfileLayer& layer : profile.layers) {
    text += fmt::format("\n[[layer]]\nindex = {}\nhead_size_k = {}\nhead_size_v = {}\n",
                        layer.index, layer.head_size_k, layer.head_size_v);
    if (layer.window != 0) text += fmt::format("window = {}\n", layer.window);
    for (const auto& [key, list] : {std::pair("k", &layer.k), std::pair("v", &layer.v)}) {
      if (list->empty()) continue;
      std::string items;
      for (double x : *list) items += fmt::format("{}{:.3e}", items.empty() ? "" : ", ", x);
      text += fmt::format("{} = [{}]\n", key, items);
    }
    for (const auto& [key, list] :
         {std::pair("type_k", &layer.type_k), std::pair("type_v", &layer.type_v)}) {
      if (list->empty()) continue;
      std::string items;
      for (const Format& f : *list)
        items += fmt::format("{}\"{}\"", items.empty() ? "" : ", ", codec::FormatName(f));
      text += fmt::format("{} = [{}]\n", key, items);
    }
  }
  return text;
}

Status WriteProfile(const std::string& path, const Profile& profile) {
  const std::string fresh = path + ".new";
  {
    std::ofstream file(fresh, std::ios::trunc);
    file << ProfileText(profile);
    file.flush();
    if (!file) {
      std::remove(fresh.c_str());
      return Status::Invalid("cannot write " + fresh);
    }
  }
  if (std::rename(fresh.c_str(), path.c_str()) != 0) {
    std::remove(fresh.c_str());
    return Status::Invalid("cannot replace " + path);
  }
  return Status::Ok();
}

HeadTypes ShareBits(const Profile& profile, const codec::Pair& type) {
  HeadTypes types;
  std::vector<Claim> claims;
  double budget = 0;  // hundredths of bits of a token
  for (const ProfileLayer& layer : profile.layers) {
    const std::size_t n = layer.n_heads();
    const double kept =
        layer.window == 0 ? 1 : std::min(1.0, static_cast<double>(layer.window) / kTokensShared);
    std::vector<codec::Pair>& heads = types[layer.index];
    heads.assign(n, type);
    for (std::size_t h = 0; h < n; ++h) {
      if (h < layer.type_k.size()) {
        heads[h].k = layer.type_k[h];
      } else if (h < layer.k.size() && Shares(type.k, Side::kK)) {
        const double size = layer.head_size_k * kept;
        claims.push_back({layer.index, h, Side::kK, layer.k[h], size});
        budget += size * (type.k.centibits - kLeastBits);
      }
      if (h < layer.type_v.size()) {
        heads[h].v = layer.type_v[h];
      } else if (h < layer.v.size() && Shares(type.v, Side::kV) && layer.head_size_v != 0) {
        const double size = layer.head_size_v * kept;
        claims.push_back({layer.index, h, Side::kV, layer.v[h], size});
        budget += size * (type.v.centibits - kLeastBits);
      }
    }
  }
  for (Claim& c : claims) c.sensitivity = std::max(c.sensitivity, kLeastSensitivity);
  while (!claims.empty()) {
    Claim* best = nullptr;
    double most = 0;
    for (Claim& c : claims) {
      const double gain = c.gain();
      if (gain <= most || c.size * kStep > budget) continue;
      best = &c;
      most = gain;
    }
    if (best == nullptr) break;
    best->centibits += kStep;
    budget -= best->size * kStep;
  }
  for (const Claim& c : claims) {
    codec::Pair& pair = types[c.layer][c.head];
    Format& format = c.side == Side::kK ? pair.k : pair.v;
    format = OfBits(format, c.side, c.centibits);
  }
  return types;
}

}  // namespace kvtamp::control
