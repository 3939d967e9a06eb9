// One model twice: its cache with the host, and its cache with kvtamp. The same calls go to both,
// and whatever either answers must agree.
//
// Which calls are legal depends on what the sequences hold. The host keeps that in tables of its
// own that no backend can influence, so the host's context is asked, and both get the same call.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fuzz/case.h"
#include "fuzz/compare.h"
#include "ggml-backend.h"
#include "llama-cpp.h"
#include "llama.h"

namespace kvtamp::fuzz {

struct Totals {
  std::array<std::uint64_t, kKinds> done{};
  std::uint64_t skipped = 0;  // not legal as things stood
  std::uint64_t tokens = 0, refused = 0;
  ErrorStats error;

  void Add(const Totals& other);
  std::uint64_t ops() const;
};

class Pair {
 public:
  // Settings go through the environment, which the device reads when the context is made. `why` is
  // set if anything failed.
  Pair(const Setup& setup, ggml_backend_dev_t device, std::string& why);

  // Empty, or what differs. `note` says what the operation came to.
  std::string Apply(const Op& op, Totals& totals, std::string& note);
  // Once all operations are done.
  std::string Finish(const Totals& totals) const;

 private:
  using Bytes = std::vector<std::uint8_t>;
  struct State {
    Bytes host, ours;
    std::uint32_t flags = 0;
  };
  // [p0, p1) of positions.
  struct Range {
    llama_pos p0, p1;
  };
  static std::string Text(const Range& range);

  // A context with the host's cache, and one with ours.
  struct Contexts {
    llama_context_ptr host, ours;
    std::map<llama_seq_id, State> device_states;
    bool shift_due = false;
    // The host copies between streams when it next decodes. Rows restored before that are
    // overwritten by the copy, or taken for those to be copied, and rows saved before it are not
    // those of the sequence: the host's fault, and what is attended in the end are cells that
    // nobody wrote. So nothing is saved or restored while a copy is due.
    bool copy_due = false;
    std::uint64_t shifts = 0;  // that the host's cache has made since it was last emptied
  };

  llama_memory_t host_memory() const { return llama_get_memory(now_.host.get()); }
  llama_memory_t our_memory() const { return llama_get_memory(now_.ours.get()); }
  // Where YaRN scales keys, the host's shift does so once more, also to those of cells that do not
  // move: a fault of the host, which kvtamp does not share.
  bool CanShift() const { return setup_.yarn != 1 && llama_memory_can_shift(host_memory()); }
  llama_seq_id Seq(std::int32_t n) const { return n % static_cast<std::int32_t>(setup_.n_seq); }
  llama_pos End(llama_seq_id seq) const { return llama_memory_seq_pos_max(host_memory(), seq) + 1; }
  // Tokens of a batch; the host asserts it.
  std::int32_t Most() const { return static_cast<std::int32_t>(llama_n_batch(now_.host.get())); }
  bool Holds(llama_seq_id seq) const { return End(seq) > 0; }
  Range Resolve(llama_seq_id seq, std::int32_t from, std::int32_t to) const;
  template <class F>
  void Both(F&& fn) {
    fn(now_.host.get());
    fn(now_.ours.get());
  }
  void SeqRm(llama_seq_id seq, llama_pos p0, llama_pos p1);

  // Decodes on both. `rc` is what both answered.
  std::string DecodeBatch(const llama_batch& batch, Totals& totals, int& rc);
  std::string Decode(const Op& op, Totals& totals, std::string& note);
  std::string DecodeShared(const Op& op, Totals& totals, std::string& note);
  std::string Draft(const Op& op, Totals& totals, std::string& note);
  std::string BadDecode(const Op& op, Totals& totals, std::string& note);
  void MakeRoom(std::int32_t how, llama_seq_id seq);
  std::string Memory(const Op& op, std::string& note);
  std::string ContextShift(llama_seq_id seq, std::int32_t keep, std::int32_t discard);
  std::string SeqCp(const Op& op, std::string& note);
  std::string Save(const Op& op, std::string& note);
  std::string Restore(const Op& op, std::string& note);
  std::string BadRestore(const Op& op, std::string& note);
  std::string DeviceState(const Op& op, std::string& note);
  // Gives `host` and `ours` back to both, for one sequence or (-1) all. Whether it worked is `ok`.
  std::string SetState(const Bytes& host, const Bytes& ours, llama_seq_id seq, std::uint32_t flags,
                       bool& ok);
  std::string CheckPositions() const;

  const Setup setup_;
  const Bounds bounds_;
  ggml_backend_dev_t device_;
  llama_model_ptr host_model_, our_model_;
  Contexts now_, other_;  // other_ only where there are two
  std::map<int, State> states_, whole_states_;
  std::string removal_;  // what differed in taking tokens away
};

}  // namespace kvtamp::fuzz
