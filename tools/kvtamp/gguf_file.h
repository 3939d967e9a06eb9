// The metadata and the tensor list of a GGUF file, of all parts of one that is split. No weights
// are read: the file may be larger than memory.
#pragma once

#include <gguf.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace kvtamp::tool {

class GgufFile {
 public:
  // `path`: the file, or any part of a split one. Errors say which file, and what to do.
  static Result<GgufFile> Open(const std::string& path);

  // What to pass to the host: the first part.
  const std::string& path() const { return path_; }
  // Parts whose weights end before they should; the metadata is whole.
  const std::vector<std::string>& cut_short() const { return cut_short_; }

  std::optional<std::string> String(const std::string& key) const;
  // A number, or one for each layer. Empty when there is none. What does not fit 32 bits is the
  // largest number that does; negative is 0.
  std::vector<std::uint32_t> Numbers(const std::string& key) const;
  std::uint32_t Number(const std::string& key, std::uint32_t fallback = 0) const;
  bool IsArray(const std::string& key) const;
  // Rows of a weight matrix, 0 when there is none of that name.
  std::uint32_t Rows(const std::string& tensor) const;
  bool HasTensorStarting(const std::string& prefix) const;

 private:
  using Context = std::unique_ptr<gguf_context, void (*)(gguf_context*)>;
  GgufFile(Context gguf, std::string path) : gguf_(std::move(gguf)), path_(std::move(path)) {}
  static Result<Context> Read(const std::string& path);
  void AddTensors(const gguf_context* part, const std::string& path);

  Context gguf_;  // of the first part, which has all metadata
  std::string path_;
  std::map<std::string, std::uint32_t> rows_;  // of each tensor, by name
  std::vector<std::string> cut_short_;
};

}  // namespace kvtamp::tool
