// Into programs of the host that load no backends by themselves (LD_PRELOAD): registers them before
// its main, with that of GGML_BACKEND_PATH as everywhere else. Not by ggml_backend_load() of that
// one alone: a registry that is not empty keeps the host from loading its CPU backend, where that
// is a module.
#include "ggml-backend.h"

struct common_log;
[[gnu::weak]] common_log* common_log_main();
[[gnu::weak]] void common_log_flush(common_log*);

namespace {

[[gnu::constructor]] void Load() { ggml_backend_load_all(); }

// The host leaves at exit() whatever its thread for the log has not written yet.
[[gnu::destructor]] void Flush() {
  if (common_log_main != nullptr && common_log_flush != nullptr)
    common_log_flush(common_log_main());
}

}  // namespace
