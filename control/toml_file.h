// A TOML file, or where it is wrong. For the .cc files of this folder.
#pragma once

#define TOML_EXCEPTIONS 0
#include <toml++/toml.h>
#include <unistd.h>

#include <string>

#include "base/status.h"

namespace kvtamp::control {

// `what` names the file in the error, as in "the configuration file".
inline Result<toml::table> ReadToml(const std::string& path, const char* what) {
  if (::access(path.c_str(), R_OK) != 0)
    return Status::Invalid("cannot read " + std::string(what) + " " + path);
  toml::parse_result parsed = toml::parse_file(path);
  if (parsed) return std::move(parsed).table();
  const toml::parse_error& error = parsed.error();
  return Status::Invalid(path + ":" + std::to_string(error.source().begin.line) + ": " +
                         std::string(error.description()));
}

}  // namespace kvtamp::control
