// What the parts of the plug-in share: the settings in force and the device's objects.
#pragma once

#include <memory>

#include "control/settings.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"

namespace kvtamp::ggml_plugin {

inline constexpr const char* kDeviceName = "KVTAMP";

// Settings as last read; never null after registration.
std::shared_ptr<const control::Settings> CurrentSettings();
// Reads the environment again (each new context does); keeps the old ones and logs when it is
// wrong.
void ReloadSettings();

ggml_backend_buffer_type_t BufferType();
// The buffer a tensor's data lies in: its view source's, else its own. Null for unallocated
// tensors.
inline ggml_backend_buffer_t BufferOf(const ggml_tensor* t) {
  return t->view_src != nullptr ? t->view_src->buffer : t->buffer;
}
inline bool IsOurs(ggml_backend_buffer_t buffer) {
  return buffer != nullptr && buffer->buft == BufferType();
}

}  // namespace kvtamp::ggml_plugin
