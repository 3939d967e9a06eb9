// The store: one Cache for each KV buffer of the host, its layers, their streams. The only owner of
// mutable state. Calls come one after the other, but for bytes(): a snapshot may be taken from any
// thread while the host computes.
//
// Decoding a token takes no lock, allocates nothing and calls the system for nothing, but where a
// page begins, grows, ends or is coded (steady_test).
//
// A cell is named by (stream, cell); rows are whole rows of all KV heads, f16. Head sizes need not
// be known before the first row: until SetHeads() rows stay f16.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/executor.h"
#include "base/gate.h"
#include "base/status.h"
#include "codec/format.h"
#include "page/allocator.h"
#include "store/prune.h"
#include "store/stream.h"

namespace kvtamp::store {

struct Options {
  std::uint32_t page_size = 64;
  std::uint32_t n_sink = 4;
  std::uint32_t residual_length = 64;
  bool int8_window = false;     // full pages of the recent window are int8, else f16
  std::uint32_t top_pages = 0;  // attention::Params
  // For counting bytes alone: halves may be null and are not looked at, pages are sealed without
  // being encoded, all reads as zeros. Bytes come out as ever, next to none of them resident.
  bool hollow = false;
  PruneOptions prune = {};  // must have passed CheckPruneOptions
};

// One layer's share of a snapshot.
struct LayerBytes {
  std::uint32_t layer = 0;
  std::uint32_t n_head_kv = 0, head_size_k = 0, head_size_v = 0;
  codec::Pair format;
  std::uint64_t logical[2] = {};  // f16 bytes of the live rows, by codec::Side
  StreamBytes sum;                // over its streams
  // By KV head, of the live rows: entries that are attended, and those that are gone. Empty where
  // none may go and none has.
  struct Entries {
    std::uint64_t kept = 0, evicted = 0;
    std::uint64_t demoted = 0;  // of those kept: with fewer bits than their format says
  };
  std::vector<Entries> heads;
};

struct CacheBytes {
  std::vector<LayerBytes> layers;
  std::uint64_t allocator_slack = 0;  // mapped, in no block
  std::uint64_t shared_index = 0;     // allocator's and cache's own bookkeeping
  std::uint64_t scratch = 0;
  std::uint64_t peak_pages = 0;      // highest the page memory ever was
  std::uint64_t rows_written = 0;    // once per cell, not per layer
  std::uint64_t values_clamped = 0;  // changed on the way in because f16 cannot hold them
  std::uint64_t cells_used = 0;      // live rows of the fullest layer
  attention::PagesRead pages_read;   // all layers and calls; only with Options::top_pages
};

class Cache {
 public:
  Cache(const Options& options, std::uint32_t n_streams, std::uint32_t n_cells);
  ~Cache();

  std::uint32_t n_streams() const { return n_streams_; }
  std::uint32_t n_cells() const { return n_cells_; }
  std::uint32_t n_sink() const { return options_.n_sink; }

  // `format` as the user asked; resolved in SetHeads. n_embd_v may be 0.
  // `heads`: by KV head, of the same modifiers as `format`, which may differ in bits; empty: all as
  // `format`.
  Status AddLayer(std::uint32_t layer, std::uint32_t n_embd_k, std::uint32_t n_embd_v,
                  const codec::Pair& format, std::vector<codec::Pair> heads = {});
  // The layer's KV heads; the same again is fine, another number an error once rows are coded.
  Status SetHeads(std::uint32_t layer, std::uint32_t n_head_kv);

  // n rows' halves: row i goes to (stream of, cell of) cells[i] = stream * n_cells + cell. All rows
  // are one batch; `sight` says what their tokens see, if that is known.
  Status Write(std::uint32_t layer, codec::Side side, std::span<const std::uint64_t> cells,
               const float* rows, std::size_t stride, const Sight* sight = nullptr);
  Status Write(std::uint32_t layer, codec::Side side, std::span<const std::uint64_t> cells,
               const half_t* rows, std::size_t stride, const Sight* sight = nullptr);
  // Zeros over a row that exists (Stream::WriteZero); one that does not reads as zeros already.
  Status WriteZero(std::uint32_t layer, codec::Side side, std::uint64_t cell);
  // The caller has proof that no sequence has cells of this stream from `n_kv` on.
  void DropFrom(std::uint32_t layer, std::uint32_t stream, std::uint32_t n_kv);

  // False (and zeros) where nothing was written.
  bool Read(std::uint32_t layer, codec::Side side, std::uint64_t cell, half_t* row);

  // The entries of these cells in one KV head are attended no more; how many there were. Their
  // bytes go with Maintain. Sinks stay.
  std::size_t Evict(std::uint32_t layer, std::uint32_t stream, std::uint32_t head,
                    std::span<const std::uint32_t> cells);

  // Marks cells of one stream that must stay f16 (a sequence's first tokens).
  void MarkSinks(std::uint32_t layer, std::uint32_t stream, std::span<const std::uint32_t> cells);

  // For layers without V: the first `dim` channels of each head's key are its value (latent
  // attention).
  Status SetValuesInKeys(std::uint32_t layer, std::uint32_t dim);

  // The rows that are written to this stream from now on come from a saved state and are one
  // sequence's, from its first token on, which is coded in pages of its own; and where all was
  // cleared for it, as a host does before it loads a whole state, with the mean key from before. So
  // the pages come out the same again.
  void BeginRestored(std::uint32_t layer, std::uint32_t stream);

  // One job per stream; `pages` of each is set here, whatever it says.
  struct StreamJob {
    std::uint32_t stream = 0;
    attention::Job job;
  };
  Status Attend(std::uint32_t layer, std::span<const StreamJob> jobs,
                const attention::Params& params, Executor& executor);

  // Seals what is due, and compacts where rows died; call when the writers of the last rows have
  // attended.
  Status Maintain(std::uint32_t layer, Executor& executor);

  // Context shift without loss (RoFormer, arXiv:2104.09864: turning a key by a number of positions
  // and dotting it with q is dotting the stored key with q turned back). Cell c of the layer, all
  // streams in a row, has moved by delta[c] positions; coded keys are not touched. `angles` fills
  // [pairs] (cos, sin) for a number of positions. Unsupported if the layer's keys turn in another
  // way than before.
  using Angles = std::function<Status(std::int32_t shift, std::span<float> cos_sin)>;
  Status ShiftK(std::uint32_t layer, std::span<const std::int32_t> delta, const TurnShape& turn,
                const Angles& angles);

  // Rewrites K rows of a stream: for every live row of `cells` (ascending, within the stream) the
  // matching row of `rows` [cells.size()][n_embd_k] replaces it; sealed pages are coded again.
  Status ReplaceK(std::uint32_t layer, std::uint32_t stream, std::span<const std::uint32_t> cells,
                  const half_t* rows);

  // Replaces one side of stream `to` by that of `from`. K then V of the same pair copies the pages
  // as they are; a lone side goes through its rows.
  Status CopySide(std::uint32_t layer, codec::Side side, std::uint32_t from, std::uint32_t to);

  void Clear();
  void RemoveLayer(std::uint32_t layer);

  CacheBytes bytes();  // from any thread

 private:
  struct Layer {
    LayerShape shape;
    codec::Pair format;
    std::vector<codec::Pair> heads;
    std::vector<std::unique_ptr<Stream>> streams;
    bool copy_pending = false;  // a K copy that waits for its V
    std::uint32_t copy_from = 0, copy_to = 0;
    std::uint64_t rows_written = 0;
    std::uint64_t rows_clamped = 0;
    bool restored = false;           // since Clear
    std::uint64_t q_count = 0;       // queries that LayerShape::k_weight is the mean over
    std::vector<Observed> observed;  // by stream; empty where nothing is pruned
  };
  Layer* Get(std::uint32_t layer);
  Status SetLayouts(Layer& layer) const;
  void NoteQueries(Layer& layer, const attention::Job& job, std::uint32_t n_head);
  void NoteWritten(Layer& layer, std::span<const std::uint64_t> cells);
  Pruner::Place PlaceOf(std::uint32_t layer, std::size_t stream);
  Status FlushCopy(Layer& layer);
  Status CopyRows(Layer& layer, codec::Side side, std::uint32_t from, std::uint32_t to);
  Stream& StreamOf(Layer& layer, std::uint64_t cell) { return *layer.streams[cell / n_cells_]; }

  const Options options_;
  const std::uint32_t n_streams_, n_cells_;
  Gate gate_;
  page::Allocator allocator_;
  std::vector<std::unique_ptr<Layer>> layers_;  // by number; null: none
  attention::Workspace workspace_;
  std::vector<attention::Page> views_;  // of the layer being attended
  std::deque<page::RowMask> view_masks_;
  std::vector<std::size_t> view_ends_;  // in views_, by job
  std::vector<attention::Job> jobs_;
  std::uint64_t clamped_ = 0;
  attention::PagesRead pages_read_;
  std::optional<Pruner> pruner_;
};

}  // namespace kvtamp::store
