// The definition of the result, in double precision and one row at a time: what Attend must come
// close to. Slow; for tests and for the curious.
#pragma once

#include <span>

#include "attention/attention.h"

namespace kvtamp::attention {

void AttendReference(const Layer& layer, std::span<const Job> jobs, const Params& params);

}  // namespace kvtamp::attention
