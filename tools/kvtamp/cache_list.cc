#include "tools/kvtamp/cache_list.h"

#include <fmt/format.h>
#include <stdlib.h>

#include <algorithm>
#include <span>

#include "tools/kvtamp/host_types.h"
#include "tools/kvtamp/words.h"

namespace kvtamp::tool {
namespace {

// An entry of --host-types.
Result<CacheEntry> HostCache(const std::string& text) {
  CacheEntry e;
  e.name = text;
  e.cache.name = "host " + text;
  e.cache.host = true;
  const auto type = HostType(text, "--host-types");
  if (!type.ok()) return type.status();
  e.cache.type_k = e.cache.type_v = type.value();
  e.format_k = e.format_v = e.name;
  return e;
}

}  // namespace

void AddCacheLists(CLI::App& app, std::vector<std::string>& caches,
                   std::vector<std::string>& host_types) {
  const auto add = [&](const char* name, auto& list, const char* help, const char* type) {
    app.add_option(name, list, help)->delimiter(',')->type_name(type)->capture_default_str();
  };
  add("--caches", caches, "kvtamp's caches, with commas between", "CACHE");
  add("--host-types", host_types, "the host's own cache types beside them", "TYPE");
}

Result<CacheEntry> OwnCache(const std::string& text) {
  CacheEntry e;
  e.cache.name = text;
  const std::vector<std::string> parts = Split(text, "@");
  e.name = parts.front();
  control::Overrides overrides{{"cache.type", e.name, "--caches " + e.name}};
  for (const std::string& part : std::span(parts).subspan(1)) {
    const std::size_t eq = part.find('=');
    if (eq == std::string::npos)
      return Status::Invalid(
          fmt::format("--caches {}: {} is not of the form SETTING=VALUE", text, part));
    const std::string name = part.substr(0, eq);
    overrides.push_back({name.starts_with("evict.") ? name : "cache." + name, part.substr(eq + 1),
                         "--caches @" + part});
    e.settings_text += (e.settings_text.empty() ? "" : " ") + part;
  }
  for (const control::Override& o : overrides) {
    if (control::FindOption(o.path) != nullptr) continue;
    std::vector<std::string> names;
    for (const control::Option& option : control::Options()) {
      const std::string_view path = option.path;
      if (path.starts_with("cache.")) names.emplace_back(path.substr(6));
      if (path.starts_with("evict.")) names.emplace_back(path);
    }
    const std::string name = o.path.starts_with("evict.") ? o.path : o.path.substr(6);
    return Status::Invalid(
        fmt::format("--caches {}: no setting {}{}", text, name, control::Suggestion(name, names)));
  }
  auto settings = control::LoadSettings(overrides, control::ProcessEnvironment());
  if (!settings.ok()) return settings.status();
  e.settings = settings.value();
  e.format_k = codec::FormatName(e.settings.type.k);
  e.format_v = codec::FormatName(e.settings.type.v);
  // The type by its sides alone, whatever the environment says of either.
  e.cache.environment = {{"KVTAMP_CACHE_TYPE", ""},
                         {"KVTAMP_CACHE_TYPE_K", codec::FormatName(e.settings.type.k)},
                         {"KVTAMP_CACHE_TYPE_V", codec::FormatName(e.settings.type.v)}};
  for (std::size_t i = 1; i < overrides.size(); ++i)
    e.cache.environment.emplace_back(control::EnvName(overrides[i].path), overrides[i].text);
  return e;
}

Status AddCaches(const std::vector<std::string>& texts, bool host, std::vector<CacheEntry>& to) {
  for (const std::string& text : texts) {
    auto entry = host ? HostCache(text) : OwnCache(text);
    if (!entry.ok()) return entry.status();
    to.push_back(std::move(entry.value()));
  }
  return Status::Ok();
}

std::vector<TestedCache> TestedCaches(const std::vector<CacheEntry>& caches) {
  std::vector<TestedCache> tested;
  for (const CacheEntry& e : caches) tested.push_back(e.cache);
  return tested;
}

Result<ModelPair> LoadModels(const std::string& model, const std::vector<CacheEntry>& caches) {
  ::setenv("KVTAMP_LOG", "error", 0);
  return LoadPair(model,
                  std::ranges::any_of(caches, [](const CacheEntry& e) { return !e.cache.host; }));
}

Status CheckCaches(const ModelLayout& model, const std::vector<CacheEntry>& caches) {
  for (const CacheEntry& e : caches) {
    if (e.cache.host) continue;
    if (const Status fits = CheckFormats(model, e.settings); !fits.ok())
      return Status::Invalid(e.name + ": " + fits.message());
  }
  return Status::Ok();
}

}  // namespace kvtamp::tool
