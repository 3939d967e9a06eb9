// Saving and restoring, in order and out of it.
#include <algorithm>

#include "fuzz/pair.h"
#include "fuzz/random.h"

namespace kvtamp::fuzz {

std::string Pair::SetState(const Bytes& host, const Bytes& ours, llama_seq_id seq,
                           std::uint32_t flags, bool& ok) {
  std::size_t a = 0, b = 0;
  if (seq < 0) {
    a = llama_state_set_data(now_.host.get(), host.data(), host.size());
    b = llama_state_set_data(now_.ours.get(), ours.data(), ours.size());
  } else {
    a = llama_state_seq_set_data_ext(now_.host.get(), host.data(), host.size(), seq, flags);
    b = llama_state_seq_set_data_ext(now_.ours.get(), ours.data(), ours.size(), seq, flags);
  }
  ok = a != 0;
  // Sizes of an f32 host differ by nature.
  if ((a != 0) == (b != 0) && (a == b || setup_.host_f32)) return "";
  return "restore: the host took " + std::to_string(a) + " bytes, kvtamp " + std::to_string(b);
}

std::string Pair::Save(const Op& op, std::string& note) {
  if (now_.copy_due) return "skip";
  State s;
  const bool all = op.kind == Kind::kSaveAll;
  const llama_seq_id seq = all ? -1 : Seq(op.args[1]);
  if (!all && op.args[2] != 0) s.flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
  std::string difference;
  const auto get = [&](llama_context* c, Bytes& bytes) {
    bytes.resize(all ? llama_state_get_size(c) : llama_state_seq_get_size_ext(c, seq, s.flags));
    const std::size_t n =
        all ? llama_state_get_data(c, bytes.data(), bytes.size())
            : llama_state_seq_get_data_ext(c, bytes.data(), bytes.size(), seq, s.flags);
    if (n == 0 || n > bytes.size()) difference = "save: nothing, or more than was announced";
    bytes.resize(std::min(n, bytes.size()));
  };
  get(now_.host.get(), s.host);
  get(now_.ours.get(), s.ours);
  note = std::to_string(s.ours.size()) + " bytes";
  if (difference.empty() && !setup_.host_f32 && s.host.size() != s.ours.size())
    difference = "save: the host wrote " + std::to_string(s.host.size()) + " bytes, kvtamp " +
                 std::to_string(s.ours.size());
  (all ? whole_states_ : states_)[op.args[0]] = std::move(s);
  return difference;
}

std::string Pair::Restore(const Op& op, std::string& note) {
  const bool all = op.kind == Kind::kRestoreAll;
  auto& states = all ? whole_states_ : states_;
  const auto found = states.find(op.args[0]);
  if (found == states.end() || now_.copy_due) return "skip";
  const State& s = found->second;
  const llama_seq_id seq = all ? -1 : Seq(op.args[1]);
  // Whose: each its own, both the host's, both kvtamp's, each the other's. The types must be alike.
  const std::int32_t whose = setup_.host_f32 ? 0 : op.args[all ? 1 : 2];
  const Bytes& host = whose == 2 || whose == 3 ? s.ours : s.host;
  const Bytes& ours = whose == 1 || whose == 3 ? s.host : s.ours;
  bool ok = false;
  std::string difference = SetState(host, ours, seq, s.flags, ok);
  note = ok ? "taken" : "refused";
  if (!ok) SeqRm(seq, -1, -1);  // as the server does
  return difference;
}

std::string Pair::BadRestore(const Op& op, std::string& note) {
  const auto found = states_.find(op.args[0]);
  if (found == states_.end() || now_.copy_due) return "skip";
  const State& s = found->second;
  const llama_seq_id seq = Seq(op.args[1]);
  Bytes host = s.host, ours = s.ours;
  Random r(static_cast<std::uint64_t>(op.args[3]));
  switch (op.args[2]) {
    case 0:  // cut short
      // Where a cut falls between fields decides how far the host gets, and the fields of an f32
      // state lie elsewhere.
      if (setup_.host_f32) return "skip";
      for (Bytes* b : {&host, &ours})
        b->resize(b->size() * static_cast<std::size_t>(op.args[3]) / 1000);
      break;
    case 1: {  // another number of cells or streams, another mark at the start
      const std::size_t at = r.OneOf({0u, 1u, 8u, 12u, 13u});
      const auto bit = static_cast<std::uint8_t>(1 << r.Int(0, 2));
      for (Bytes* b : {&host, &ours})
        if (at < b->size()) (*b)[at] ^= bit;
      break;
    }
    default:  // nothing at all
      host.clear();
      ours.clear();
      break;
  }
  bool ok = false;
  std::string difference = SetState(host, ours, seq, s.flags, ok);
  note = ok ? "taken" : "refused";
  SeqRm(seq, -1, -1);
  return difference;
}

// Copies that stay in buffers of the device: the host allocates plain tensors of our type for them.
std::string Pair::DeviceState(const Op& op, std::string& note) {
  constexpr std::uint32_t kFlags = LLAMA_STATE_SEQ_FLAGS_ON_DEVICE;
  const llama_seq_id from = Seq(op.args[0]);
  if (op.kind == Kind::kDeviceSave) {
    if (!Holds(from) || now_.copy_due) return "skip";
    // A second save of a sequence goes to the buffer of the first when both have as many bytes. The
    // host pads each piece to 32 bytes, and aborts where the same bytes lie in more pieces now.
    const bool whole = setup_.flash != 0 && setup_.kv_heads * setup_.head_size * 2 % 32 == 0;
    if (!whole && now_.device_states.contains(from)) return "skip";
    State s;
    const auto get = [&](llama_context* c, Bytes& bytes) {
      bytes.resize(llama_state_seq_get_size_ext(c, from, kFlags));
      llama_state_seq_get_data_ext(c, bytes.data(), bytes.size(), from, kFlags);
    };
    get(now_.host.get(), s.host);
    get(now_.ours.get(), s.ours);
    now_.device_states[from] = std::move(s);
    return "";
  }
  const auto found = now_.device_states.find(from);
  if (found == now_.device_states.end() || now_.copy_due) return "skip";
  bool ok = false;
  const llama_seq_id seq = Seq(op.args[1]);
  std::string difference = SetState(found->second.host, found->second.ours, seq, kFlags, ok);
  note = ok ? "taken" : "refused";
  if (!ok) SeqRm(seq, -1, -1);
  return difference;
}

}  // namespace kvtamp::fuzz
