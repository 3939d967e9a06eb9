// The definition of the result, in double precision and one row at a time: what Attend must come
// close to. Slow; for tests and for the curious.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/attention.h"

namespace kvtamp::attention {

void AttendReference(const Layer& layer, std::span<const Job> jobs, const Params& params);

// What Observe (attention/observe.h) adds, of the same shape.
void ObserveReference(const Layer& layer, const Job& job, const Params& params,
                      std::uint32_t first_tok, std::uint32_t n_tok, double* mass,
                      std::size_t stride);

}  // namespace kvtamp::attention
