// Tiny models with random weights, made in memory through the host's public API.
#pragma once

#include <span>
#include <string_view>

#include "fuzz/case.h"
#include "ggml-backend.h"
#include "llama.h"

namespace kvtamp::fuzz {

inline constexpr int kVocab = 64;

// What is special about an architecture, as far as its cache is concerned.
struct Architecture {
  const char* name;
  bool sliding;     // some layers see a window only and have a cache of their own
  bool grouped;     // fewer KV heads than heads
  bool wide_heads;  // heads need not divide the embedding
  bool latent;      // V is the first part of K
  bool recurrent;   // also keeps a state per sequence, that cannot go back
  bool attends;     // has K and V at all
};
std::span<const Architecture> Architectures();
const Architecture* FindArchitecture(std::string_view name);

// The model with its layers on `device`, or on none. The weights depend on the setup alone. Null if
// the host refuses.
llama_model* NewModel(const Setup& setup, ggml_backend_dev_t device);

}  // namespace kvtamp::fuzz
