// What a long run has finished, kept in a file while it runs so that the next one goes on from
// there (--resume): JSON Lines, the first line the settings of the run, each further one a finished
// item. A file of a run with other settings is refused; a last line cut short is dropped.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <string_view>

#include "base/status.h"
#include "tools/kvtamp/json.h"

namespace kvtamp::tool {

// By which a long text is known (FNV-1a).
std::uint64_t Fingerprint(std::string_view text);

class RunLog {
 public:
  RunLog() = default;  // keeps nothing
  // Makes the file if there is none. `settings`: an object, compared member by member.
  static Result<RunLog> Open(const std::string& path, const Json& settings);

  std::size_t size() const { return found_.size(); }
  // What was finished before; null: not yet. `pass`: "base", "tested", …
  const Json* Find(const std::string& pass, const std::string& item) const;
  // Writes a line at once.
  Status Add(const std::string& pass, const std::string& item, const Json& body);

 private:
  Status Read(const std::string& text, const Json& settings);

  std::string path_;
  std::ofstream out_;
  std::map<std::pair<std::string, std::string>, Json> found_;
};

}  // namespace kvtamp::tool
