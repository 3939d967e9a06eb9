// kvtamp formats: the short names, what they stand for, and their true size.
#include <fmt/format.h>

#include "codec/format.h"
#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/json.h"

namespace kvtamp::tool {
namespace {

constexpr std::uint32_t kDims[] = {64, 128};

Result<double> Bits(const codec::Format& format, codec::Side side, std::uint32_t dim,
                    std::uint32_t page_size) {
  const Result<codec::Format> resolved = codec::Resolve(format, side, dim);
  if (!resolved.ok()) return resolved.status();
  return codec::BitsPerElement(resolved.value(), side, dim, page_size);
}

}  // namespace

int FormatsMain(const Args& args) {
  CLI::App app("The formats of the cache and their true size, scales and minima counted",
               "kvtamp formats");
  app.footer(R"(
Examples:
  kvtamp formats
  kvtamp formats --cache-page-size 128
  kvtamp formats -o json)");
  std::string output = "md";
  AddOutput(app, output, {"md", "json"});
  SettingFlags flags;
  flags.AddTo(app, "cache.page_size");
  if (const auto code = Parse(app, args)) return *code;
  const Result<control::Settings> settings = flags.Load();
  if (!settings.ok()) return Fail("formats", settings.status(), kBadUsage);
  const std::uint32_t page_size = settings.value().page_size;

  Json rows = Json::array();
  for (const codec::ShortName& name : codec::ShortNames()) {
    const auto pair = codec::ParsePair(name.name);
    if (!pair.ok()) return Fail("formats", pair.status(), kFailed);
    Json row = {{"name", name.name},
                {"format_k", codec::FormatName(pair.value().k)},
                {"format_v", codec::FormatName(pair.value().v)},
                {"page_size", page_size}};
    for (const std::uint32_t dim : kDims) {
      const auto k = Bits(pair.value().k, codec::Side::kK, dim, page_size);
      const auto v = Bits(pair.value().v, codec::Side::kV, dim, page_size);
      if (!k.ok() || !v.ok()) {
        return Fail("formats", k.ok() ? v.status() : k.status());
      }
      row["bits"][std::to_string(dim)] = {
          {"k", k.value()}, {"v", v.value()}, {"kv", (k.value() + v.value()) / 2}};
    }
    row["note"] = name.note;
    rows.push_back(std::move(row));
  }
  if (output == "json") {
    fmt::print("{}\n", Dump(rows, 2));
    return kDone;
  }
  fmt::print(
      "Bits per element of a full coded page of {} tokens, by head size. A cache also holds f16 "
      "rows:\nsinks, the recent window and the page being filled (`kvtamp doctor -m MODEL` counts "
      "them).\n\n",
      page_size);
  fmt::print("| {:6} | {:16} | {:16} | K @64 | V @64 | K+V @64 | K+V @128 | note |\n", "name", "K",
             "V");
  fmt::print(
      "| ------ | ---------------- | ---------------- | ----: | ----: | ------: | -------: | ---- "
      "|\n");
  for (const auto& row : rows) {
    const auto& at64 = row["bits"]["64"];
    fmt::print("| {:6} | {:16} | {:16} | {:5.2f} | {:5.2f} | {:7.2f} | {:8.2f} | {} |\n",
               row["name"].get<std::string>(), row["format_k"].get<std::string>(),
               row["format_v"].get<std::string>(), at64["k"].get<double>(), at64["v"].get<double>(),
               at64["kv"].get<double>(), row["bits"]["128"]["kv"].get<double>(),
               row["note"].get<std::string>());
  }
  return kDone;
}

}  // namespace kvtamp::tool
