#include "tools/kvtamp/host_types.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "control/settings.h"

namespace kvtamp::tool {
namespace {

// What the host's programs allow.
constexpr ggml_type kHostTypes[] = {GGML_TYPE_F32,    GGML_TYPE_F16,  GGML_TYPE_BF16,
                                    GGML_TYPE_Q8_0,   GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,
                                    GGML_TYPE_IQ4_NL, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1};

}  // namespace

Result<ggml_type> HostType(const std::string& text, const std::string& where) {
  std::vector<std::string> names;
  for (const ggml_type type : kHostTypes) {
    names.emplace_back(ggml_type_name(type));
    if (names.back() == text) return type;
  }
  return Status::Invalid(fmt::format("{} {}: not a cache type of the host's, which are {}{}", where,
                                     text, fmt::join(names, ", "),
                                     control::Suggestion(text, names)));
}

}  // namespace kvtamp::tool
