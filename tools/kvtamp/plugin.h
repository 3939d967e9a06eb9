// Finding libggml-kvtamp.so and loading it into this process.
#pragma once

#include <ggml-backend.h>

#include <string>
#include <vector>

#include "base/status.h"

namespace kvtamp::tool {

inline constexpr const char* kDeviceName = "KVTAMP";

// KVTAMP_PLUGIN if set, else ../lib and . from the folder of this executable. An absolute path.
Result<std::string> FindPlugin();

// Keeps what libllama and ggml say from the screen; `verbose` lets it through.
void SilenceHost(bool verbose);
// The last lines they logged at level error or warning, oldest first, joined by "; "; then forgets
// them.
std::string TakeHostErrors();

struct Plugin {
  ggml_backend_reg_t reg = nullptr;
  ggml_backend_dev_t device = nullptr;
  const char* (*stats_json)() = nullptr;  // never null: an empty object when the plug-in has none
};
// The host's own backends, which must come before the plug-in.
void LoadHost();
// The host's too. Settings must already be in the environment. The error is the plug-in's or ggml's
// own line.
Result<Plugin> LoadPlugin(const std::string& path);

}  // namespace kvtamp::tool
