// The host's own cache types, by name.
#pragma once

#include <ggml.h>

#include <string>

#include "base/status.h"

namespace kvtamp::tool {

// `where` names what the user gave, for the message.
Result<ggml_type> HostType(const std::string& text, const std::string& where);

}  // namespace kvtamp::tool
