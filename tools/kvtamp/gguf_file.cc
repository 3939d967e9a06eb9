#include "tools/kvtamp/gguf_file.h"

#include <llama.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

namespace kvtamp::tool {
namespace {

constexpr auto kMost = std::numeric_limits<std::uint32_t>::max();

template <class T>
std::uint32_t Fitted(const void* data, std::size_t i) {
  T x;
  std::memcpy(&x, static_cast<const char*>(data) + i * sizeof(T), sizeof(T));
  if constexpr (std::numeric_limits<T>::is_signed) {
    if (x < 0) return 0;
  }
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(static_cast<std::uint64_t>(x), kMost));
}

std::optional<std::uint32_t> NumberAt(gguf_type type, const void* data, std::size_t i) {
  switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_BOOL:
      return Fitted<std::uint8_t>(data, i);
    case GGUF_TYPE_INT8:
      return Fitted<std::int8_t>(data, i);
    case GGUF_TYPE_UINT16:
      return Fitted<std::uint16_t>(data, i);
    case GGUF_TYPE_INT16:
      return Fitted<std::int16_t>(data, i);
    case GGUF_TYPE_UINT32:
      return Fitted<std::uint32_t>(data, i);
    case GGUF_TYPE_INT32:
      return Fitted<std::int32_t>(data, i);
    case GGUF_TYPE_UINT64:
      return Fitted<std::uint64_t>(data, i);
    case GGUF_TYPE_INT64:
      return Fitted<std::int64_t>(data, i);
    default:
      return std::nullopt;
  }
}

std::string PartPath(const std::string& prefix, int part, int n_parts) {
  std::string path(prefix.size() + 64, '\0');
  const int n = llama_split_path(path.data(), path.size(), prefix.c_str(), part, n_parts);
  path.resize(static_cast<std::size_t>(std::max(0, n)));
  return path;
}

}  // namespace

Result<GgufFile::Context> GgufFile::Read(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    return Status::Invalid(path + " is a folder: name the .gguf file in it");
  std::ifstream in(path, std::ios::binary);
  if (!in) return Status::Invalid("cannot read " + path + ": " + std::strerror(errno));
  char magic[4] = {};
  in.read(magic, sizeof(magic));
  if (std::memcmp(magic, "GGUF", 4) != 0) return Status::Invalid(path + " is not a GGUF file");
  Context gguf(gguf_init_from_file(path.c_str(), {/*.no_alloc =*/true, /*.ctx =*/nullptr}),
               &gguf_free);
  if (gguf == nullptr)
    return Status::Invalid(path +
                           " is not a GGUF file this ggml can read: it is damaged, cut short or "
                           "newer; download it again");
  return gguf;
}

void GgufFile::AddTensors(const gguf_context* part, const std::string& path) {
  std::uint64_t end = 0;
  for (std::int64_t i = 0; i < gguf_get_n_tensors(part); ++i) {
    rows_[gguf_get_tensor_name(part, i)] =
        static_cast<std::uint32_t>(std::min<std::int64_t>(gguf_get_tensor_ne(part, i)[1], kMost));
    end = std::max<std::uint64_t>(end,
                                  gguf_get_tensor_offset(part, i) + gguf_get_tensor_size(part, i));
  }
  std::error_code error;
  const std::uint64_t size = std::filesystem::file_size(path, error);
  if (!error && end > 0 && size < gguf_get_data_offset(part) + end) cut_short_.push_back(path);
}

Result<GgufFile> GgufFile::Open(const std::string& path) {
  Result<Context> given = Read(path);
  if (!given.ok()) return given.status();
  GgufFile file(std::move(given.value()), path);
  const int n_parts = static_cast<int>(file.Number("split.count"));
  if (n_parts <= 1) {
    file.AddTensors(file.gguf_.get(), path);
    return file;
  }
  const int part = static_cast<int>(file.Number("split.no"));
  std::string prefix(path.size() + 1, '\0');
  const int n = llama_split_prefix(prefix.data(), prefix.size(), path.c_str(), part, n_parts);
  if (n <= 0)
    return Status::Invalid(path + " is part " + std::to_string(part + 1) + " of " +
                           std::to_string(n_parts) +
                           " and not named so: give it its name back (NAME-00001-of-00002.gguf)");
  prefix.resize(static_cast<std::size_t>(n));
  file.path_ = PartPath(prefix, 0, n_parts);
  for (int i = 0; i < n_parts; ++i) {
    const std::string name = PartPath(prefix, i, n_parts);
    Result<Context> read = Read(name);
    if (!read.ok())
      return Status::Invalid(read.status().message() + " (part " + std::to_string(i + 1) + " of " +
                             std::to_string(n_parts) + ": all must lie beside each other)");
    file.AddTensors(read.value().get(), name);
    if (i == 0) file.gguf_ = std::move(read.value());
  }
  return file;
}

std::optional<std::string> GgufFile::String(const std::string& key) const {
  const std::int64_t id = gguf_find_key(gguf_.get(), key.c_str());
  if (id < 0 || gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_STRING) return std::nullopt;
  return gguf_get_val_str(gguf_.get(), id);
}

std::vector<std::uint32_t> GgufFile::Numbers(const std::string& key) const {
  const gguf_context* gguf = gguf_.get();
  const std::int64_t id = gguf_find_key(gguf, key.c_str());
  if (id < 0) return {};
  const gguf_type type = gguf_get_kv_type(gguf, id);
  const bool array = type == GGUF_TYPE_ARRAY;
  const gguf_type inner = array ? gguf_get_arr_type(gguf, id) : type;
  if (inner == GGUF_TYPE_STRING || inner == GGUF_TYPE_ARRAY) return {};
  const void* data = array ? gguf_get_arr_data(gguf, id) : gguf_get_val_data(gguf, id);
  std::vector<std::uint32_t> numbers;
  for (std::size_t i = 0; i < (array ? gguf_get_arr_n(gguf, id) : 1); ++i) {
    const auto n = NumberAt(inner, data, i);
    if (!n) return {};
    numbers.push_back(*n);
  }
  return numbers;
}

std::uint32_t GgufFile::Number(const std::string& key, std::uint32_t fallback) const {
  const auto numbers = Numbers(key);
  return numbers.empty() ? fallback : numbers.front();
}

bool GgufFile::IsArray(const std::string& key) const {
  const std::int64_t id = gguf_find_key(gguf_.get(), key.c_str());
  return id >= 0 && gguf_get_kv_type(gguf_.get(), id) == GGUF_TYPE_ARRAY;
}

std::uint32_t GgufFile::Rows(const std::string& tensor) const {
  const auto it = rows_.find(tensor);
  return it == rows_.end() ? 0 : it->second;
}

bool GgufFile::HasTensorStarting(const std::string& prefix) const {
  const auto it = rows_.lower_bound(prefix);
  return it != rows_.end() && it->first.starts_with(prefix);
}

}  // namespace kvtamp::tool
