// How much attention each cell gets from a few query tokens: what H2O (arXiv:2306.14048), TOVA
// (arXiv:2401.06104) and SnapKV (arXiv:2404.14469) score keys by.
//
// The values are not touched, and one pass over the keys does for up to 24 query rows of a KV head;
// still it may cost what decoding a token does. So it is for a token now and then, or for the last
// tokens of a prompt, and not for each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention.h"

namespace kvtamp::attention {

// mass[head * stride + cell] += sum over the tokens [first_tok, first_tok + n_tok) of `job`, and
// the query heads of KV head `head`, of softmax(q·K + mask) at the cell. With sinks
// (Params::sinks) a query's shares add up to less than 1; one that sees nothing adds nothing.
// job.out and Params::top_pages are not used. mass: [n_head_kv][stride], stride >= job.n_kv.
Status Observe(const Layer& layer, const Job& job, const Params& params, std::uint32_t first_tok,
               std::uint32_t n_tok, float* mass, std::size_t stride, Workspace& workspace,
               Executor& executor);

}  // namespace kvtamp::attention
