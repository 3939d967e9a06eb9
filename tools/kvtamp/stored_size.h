// What kvtamp's cache takes at a number of tokens, all overhead counted: measured on a store that
// is filled, not computed. Bytes do not depend on what the rows hold.
#pragma once

#include "base/status.h"
#include "control/settings.h"
#include "tools/kvtamp/cache_size.h"
#include "tools/kvtamp/layout.h"

namespace kvtamp::tool {

// One sequence of n_tokens that came in by micro-batches of n_ubatch.
Result<CacheSize> StoredSize(const ModelLayout& layout, const control::Settings& settings,
                             std::uint32_t n_tokens, std::uint32_t n_ubatch);

}  // namespace kvtamp::tool
