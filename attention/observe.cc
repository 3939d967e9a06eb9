#include "attention/observe.h"

#include <algorithm>
#include <atomic>

#include "attention/kernels.h"
#include "attention/unit.h"

namespace kvtamp::attention {

Status Observe(const Layer& layer, const Job& job, const Params& params, std::uint32_t first_tok,
               std::uint32_t n_tok, float* mass, std::size_t stride, Workspace& workspace,
               Executor& executor) {
  if (Status status = Check(layer, {&job, 1}, params); !status.ok()) return status;
  if (first_tok > job.n_tok || n_tok > job.n_tok - first_tok || stride < job.n_kv)
    return Status::Invalid("attention: observed tokens or cells beyond those of the job");
  const std::uint32_t gqa = params.n_head / layer.n_head_kv;
  const std::uint32_t rows = n_tok * gqa, block_rows = std::min(rows, kMaxDecodeRows);
  if (rows == 0 || job.pages.empty()) return Status::Ok();

  std::size_t slots = 0;
  for (const Page& page : job.pages) slots += RoundUp(page.rows, 16);
  const std::size_t score_bytes = (block_rows * slots * sizeof(float) + 63) / 64 * 64;
  const std::size_t per_thread = score_bytes + (DecodeScratch(layer, block_rows) + 63) / 64 * 64;
  const auto n_threads = static_cast<std::size_t>(std::max(1, executor.n_threads()));
  std::uint8_t* scratch = workspace.Get(n_threads * per_thread);
  if (scratch == nullptr) return Status::OutOfMemory("attention: no scratch memory");

  std::atomic<std::uint32_t> next{0};
  executor.ForEachWorker([&](int worker) {
    std::uint8_t* own = scratch + static_cast<std::size_t>(worker) * per_thread;
    for (std::uint32_t head; (head = next.fetch_add(1)) < layer.n_head_kv;) {
      for (std::uint32_t row = 0; row < rows; row += block_rows) {
        const Unit unit{&layer,
                        &job,
                        &params,
                        head,
                        first_tok * gqa + row,
                        std::min(block_rows, rows - row),
                        0,
                        static_cast<std::uint32_t>(job.pages.size())};
        RunObserve(unit, own + score_bytes, reinterpret_cast<float*>(own), slots,
                   mass + head * stride);
      }
    }
  });
  return Status::Ok();
}

}  // namespace kvtamp::attention
