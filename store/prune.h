// Which entries go: a policy's scores, a budget, and what attention gave to the entries that there
// are, put together once every so many tokens (docs/policies.md). The stream lets go of them.
//
// Runs are pruned each by itself. A row's position is its place in its run, in order of writing:
// the store knows of no other. That is the host's own position less a constant, as long as the
// sequence was written in order and shares its beginning with none.
//
// Not thread-safe; Cache serialises.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/executor.h"
#include "base/status.h"
#include "policy/budget.h"
#include "policy/registry.h"
#include "store/stream.h"

namespace kvtamp::store {

struct PruneOptions {
  std::string policy;  // of policy::MakePolicy; empty: nothing is pruned
  policy::Options scores;
  policy::BudgetOptions budget;  // of the rows of a run; target_size 0: by keep_ratio
  std::uint32_t interval = 32;   // tokens of a stream between one pruning and the next
  std::uint32_t n_recent = 128;  // newest rows of a run that keep all their entries
  bool demote = false;           // fewer bits first, by page
};

// Says why not: an unknown policy, or one that needs what nobody can know behind ggml.
Status CheckPruneOptions(const PruneOptions& options);

// What attention gave to the entries of one stream, as far as it was looked at: the last tokens of
// a micro-batch, once in an interval.
struct Observed {
  std::uint64_t rows = 0;  // written since the last pruning
  bool seen_now = false;   // attention was looked at since then
  std::uint32_t gqa = 1;   // query heads of a KV head
  std::uint32_t cells = 0;
  std::vector<float> mass;  // [n_head_kv][cells] p, by KV head
  std::vector<float> seen;  // [cells] query rows of a KV head that saw it

  void Forget(std::uint32_t cell);  // it is written anew
  std::size_t bytes() const { return (mass.capacity() + seen.capacity()) * sizeof(float); }
};

class Pruner {
 public:
  // The options must have passed CheckPruneOptions.
  explicit Pruner(const PruneOptions& options);

  bool Due(const Observed& observed) const { return observed.rows >= options_.interval; }
  // Adds what the last tokens of the job give.
  Status Observe(const attention::Layer& layer, const attention::Job& job,
                 const attention::Params& params, attention::Workspace& workspace,
                 Executor& executor, Observed& observed) const;
  // One stream of a layer, and the layer's place among those of the cache.
  struct Place {
    std::uint32_t index, n_layers;
    LayerShape& shape;
    Observed& observed;
    Stream& stream;
  };
  // Lets go of entries where that is due, and is what is done first.
  Status Prune(const Place& place) const;
  // Else appends what is to be coded anew with fewer bits.
  Status Demote(const Place& place, std::vector<Stream::SealTask>& tasks) const;

 private:
  struct Scored;
  bool Demotes(const LayerShape& shape) const;
  bool Begin(const Place& place) const;
  std::uint32_t MeanSize(const Stream::RunEntries& run) const;
  Status Score(const Place& place, const Stream::RunEntries& run, Scored& scored) const;
  Status PruneRun(const Place& place, const Stream::RunEntries& run) const;
  Status DemoteRun(const Place& place, const Stream::RunEntries& run,
                   std::vector<Stream::SealTask>& tasks) const;
  Result<std::vector<std::uint32_t>> Keep(const Place& place, std::uint32_t mean, bool ada,
                                          std::span<const policy::HeadEntries> heads) const;

  PruneOptions options_;
  policy::Policy policy_;
  bool watches_ = false;         // the policy needs attention
  std::uint32_t window_ = 0;     // observed tokens that count, the older ones fading; 0: all
  std::uint32_t n_observe_ = 0;  // tokens of a micro-batch that are observed
};

}  // namespace kvtamp::store
