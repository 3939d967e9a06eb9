#include "tools/kvtamp/run_log.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "tools/kvtamp/cli.h"

namespace kvtamp::tool {
namespace {

// Why a run with `now` must not go on with what one with `then` has done; "" if it may.
std::string Difference(const Json& then, const Json& now) {
  const auto text = [](const Json& j, const std::string& name) {
    return j.contains(name) ? Dump(j.at(name)) : std::string("none");
  };
  Json names = now;
  names.update(then);
  for (const auto& [name, value] : names.items()) {
    if (text(then, name) != text(now, name))
      return fmt::format("it has {} {}, this run {}", name, text(then, name), text(now, name));
  }
  return "";
}

}  // namespace

std::uint64_t Fingerprint(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

Result<RunLog> RunLog::Open(const std::string& path, const Json& settings) {
  RunLog log;
  if (path.empty()) return log;
  log.path_ = path;
  std::string text;
  if (std::error_code ec; std::filesystem::exists(path, ec)) {
    Result<std::string> read = ReadFile(path);
    if (!read.ok()) return read.status();
    text = std::move(read.value());
  }
  const std::size_t whole = text.rfind('\n') + 1;  // npos + 1 is 0: not one line
  if (whole > 0) {
    text.resize(whole);
    if (Status s = log.Read(text, settings); !s.ok()) return s;
  } else if (!text.empty() && !text.starts_with("{\"settings\":")) {
    return Status::Invalid("--resume " + path + " is not a file of kvtamp eval's");
  }
  std::error_code ec;
  if (!text.empty()) std::filesystem::resize_file(path, whole, ec);
  log.out_.open(path, std::ios::binary | std::ios::app);
  if (ec || !log.out_)
    return Status::Invalid("--resume: cannot write " + path + ": " + std::strerror(errno));
  if (whole == 0) log.out_ << Dump({{"settings", settings}}) << std::endl;
  return log;
}

Status RunLog::Read(const std::string& text, const Json& settings) {
  std::size_t number = 0;
  for (std::size_t start = 0; start < text.size();) {
    const std::size_t end = text.find('\n', start);
    Json line = Json::parse(std::string_view(text).substr(start, end - start), nullptr, false);
    start = end + 1;
    const bool first = number++ == 0;
    const bool known = line.is_object() && (first ? line.contains("settings")
                                                  : line.contains("pass") && line.contains("item"));
    if (!known) {
      return Status::Invalid(
          fmt::format("--resume {} is not a file of kvtamp eval's: line {}", path_, number));
    }
    if (!first) {
      const std::pair key(line["pass"].get<std::string>(), line["item"].get<std::string>());
      found_[key] = std::move(line);
      continue;
    }
    if (const std::string why = Difference(line.at("settings"), settings); !why.empty()) {
      return Status::Invalid(fmt::format(
          "--resume {} was made with other settings: {}; name another file", path_, why));
    }
  }
  return Status::Ok();
}

const Json* RunLog::Find(const std::string& pass, const std::string& item) const {
  const auto found = found_.find({pass, item});
  return found == found_.end() ? nullptr : &found->second;
}

Status RunLog::Add(const std::string& pass, const std::string& item, const Json& body) {
  if (path_.empty()) return Status::Ok();
  Json line = {{"pass", pass}, {"item", item}};
  line.update(body);
  out_ << Dump(line) << std::endl;
  if (!out_) return Status::Invalid("--resume: cannot write " + path_);
  return Status::Ok();
}

}  // namespace kvtamp::tool
