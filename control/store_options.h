// What the settings say of a store.
#pragma once

#include "control/settings.h"
#include "store/cache.h"

namespace kvtamp::control {

inline store::Options StoreOptions(const Settings& s) {
  return {.page_size = s.page_size,
          .n_sink = s.n_sink,
          .residual_length = s.residual_length,
          .int8_window = s.int8_window,
          .top_pages = s.top_pages,
          .prune = s.prune};
}

}  // namespace kvtamp::control
