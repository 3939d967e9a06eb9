#include "fuzz/pair.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "fuzz/batch.h"
#include "fuzz/model.h"

namespace kvtamp::fuzz {

namespace {

constexpr std::uint32_t kBatch = 512;
// Beyond this, positions only go down again.
constexpr llama_pos kHighPosition = 3000;

void Set(const char* name, const std::string& value) {
  if (value.empty()) {
    unsetenv(name);
  } else {
    setenv(name, value.c_str(), 1);
  }
}

llama_context* NewContext(const Setup& s, llama_model* model, ggml_type type) {
  llama_context_params p = llama_context_default_params();
  p.n_ctx = s.n_ctx;
  p.n_batch = kBatch;
  p.n_ubatch = s.n_ubatch;
  p.n_seq_max = s.n_seq;
  p.n_threads = p.n_threads_batch = static_cast<int>(s.threads);
  p.flash_attn_type = s.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  p.kv_unified = s.unified != 0;
  p.swa_full = s.swa_full != 0;
  p.type_k = p.type_v = type;
  p.no_perf = true;
  return llama_init_from_model(model, p);
}

std::string Number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", x);
  return text;
}

}  // namespace

void Totals::Add(const Totals& other) {
  for (std::size_t k = 0; k < kKinds; ++k) done[k] += other.done[k];
  skipped += other.skipped;
  tokens += other.tokens;
  refused += other.refused;
  error.Add(other.error);
}

std::uint64_t Totals::ops() const {
  std::uint64_t n = 0;
  for (std::uint64_t d : done) n += d;
  return n;
}

Pair::Pair(const Setup& setup, ggml_backend_dev_t device, std::string& why)
    : setup_(setup), bounds_(*BoundsOf(setup.type)), device_(device) {
  for (const char* name : {"KVTAMP_CACHE_TYPE_K", "KVTAMP_CACHE_TYPE_V", "KVTAMP_CACHE_SKIP_TYPE"})
    Set(name, "");
  Set("KVTAMP_CACHE_TYPE", setup.type);
  Set("KVTAMP_CACHE_PAGE_SIZE", std::to_string(setup.page_size));
  Set("KVTAMP_CACHE_N_SINK", std::to_string(setup.n_sink));
  Set("KVTAMP_CACHE_RESIDUAL_LENGTH", std::to_string(setup.residual));
  Set("KVTAMP_CACHE_SKIP_LAYERS", setup.skip_layers);
  Set("KVTAMP_CPU", setup.isa);
  host_model_.reset(NewModel(setup, nullptr));
  our_model_.reset(NewModel(setup, device));
  if (!host_model_ || !our_model_) {
    why = "no model";
    return;
  }
  for (Contexts* c : {&now_, &other_}) {
    if (c == &other_ && setup.contexts < 2) break;
    c->host.reset(
        NewContext(setup, host_model_.get(), setup.host_f32 ? GGML_TYPE_F32 : GGML_TYPE_F16));
    c->ours.reset(NewContext(setup, our_model_.get(), GGML_TYPE_F16));
    if (!c->host || !c->ours) why = "no context";
  }
}

std::string Pair::Finish(const Totals& totals) const {
  auto stats = reinterpret_cast<const char* (*)()>(ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(device_), "kvtamp_stats_json"));
  // A cache that fell back to plain memory is the host's own code: nothing was compared.
  const bool plain =
      stats == nullptr || std::strstr(stats(), "\"uncompressed_bytes\": 0,") == nullptr;
  if (plain && setup_.flash) return "the cache fell back to plain memory";
  // Latent keys are rows also where flash attention is off, and the host reads them from the store.
  const Architecture& arch = *FindArchitecture(setup_.arch);
  if (!plain && !setup_.flash && arch.attends && !arch.latent)
    return "without flash attention the cache is not plain memory";
  const double mean = totals.error.mean();
  const double bound =
      bounds_.mean + bounds_.per_shift * static_cast<double>(now_.shifts + other_.shifts);
  if (totals.error.rows > 0 && !(mean <= bound))
    return "mean error of the case " + Number(mean) + " is above " + Number(bound);
  return "";
}

std::string Pair::CheckPositions() const {
  if (!removal_.empty()) return removal_;
  for (std::uint32_t s = 0; s < setup_.n_seq; ++s) {
    const auto seq = static_cast<llama_seq_id>(s);
    if (llama_memory_seq_pos_min(host_memory(), seq) !=
            llama_memory_seq_pos_min(our_memory(), seq) ||
        llama_memory_seq_pos_max(host_memory(), seq) != llama_memory_seq_pos_max(our_memory(), seq))
      return "sequence " + std::to_string(s) + " holds other positions";
  }
  return "";
}

Pair::Range Pair::Resolve(llama_seq_id seq, std::int32_t from, std::int32_t to) const {
  const llama_pos first = std::max(0, llama_memory_seq_pos_min(host_memory(), seq));
  const llama_pos n = End(seq) - first;
  const llama_pos p0 = from <= 0 ? -1 : first + n * from / 1000;
  const llama_pos p1 = to > 1000 ? -1 : first + n * to / 1000;
  return {p0, p1};
}

std::string Pair::Text(const Range& r) {
  std::string text = std::to_string(r.p0);
  return text.append(" to ").append(std::to_string(r.p1));
}

void Pair::SeqRm(llama_seq_id seq, llama_pos p0, llama_pos p1) {
  const bool host = llama_memory_seq_rm(host_memory(), seq, p0, p1);
  const bool ours = llama_memory_seq_rm(our_memory(), seq, p0, p1);
  if (host != ours)
    removal_ = host ? "kvtamp refuses to take tokens away" : "only kvtamp takes tokens away";
}

// --- decoding -----------------------------------------------------------------------------------

std::string Pair::DecodeBatch(const llama_batch& batch, Totals& totals, int& rc) {
  rc = llama_decode(now_.host.get(), batch);
  const int ours = llama_decode(now_.ours.get(), batch);
  if (rc != ours)
    return "decode: the host answers " + std::to_string(rc) + ", kvtamp " + std::to_string(ours);
  if (rc >= 0 && now_.shift_due) {
    now_.shift_due = false;
    now_.shifts += setup_.host_f32 ? 0 : 1;
  }
  if (rc >= 0) now_.copy_due = false;  // below nought the batch was refused unseen
  if (rc != 0) {
    totals.refused++;
    return "";
  }
  totals.tokens += static_cast<std::uint64_t>(batch.n_tokens);
  const double bound = bounds_.row + bounds_.per_shift * static_cast<double>(now_.shifts);
  for (std::int32_t i = 0; i < batch.n_tokens; ++i) {
    if (!batch.logits[i]) continue;
    const float* a = llama_get_logits_ith(now_.host.get(), i);
    const float* b = llama_get_logits_ith(now_.ours.get(), i);
    const std::string what = "logits of token " + std::to_string(i) + " (sequence " +
                             std::to_string(batch.seq_id[i][0]) + ", position " +
                             std::to_string(batch.pos[i]) + "): ";
    if (a == nullptr || b == nullptr) return what + "missing";
    const bool finite = std::all_of(b, b + kVocab, [](float f) { return std::isfinite(f); });
    if (!finite) return what + "not finite";
    const double error = RowError(a, b, kVocab);
    if (!(error <= bound)) return what + "error " + Number(error) + " is above " + Number(bound);
    totals.error.Add(error);
  }
  return "";
}

std::string Pair::Decode(const Op& op, Totals& totals, std::string& note) {
  const bool interleaved = op.args[1] != 0;
  std::vector<Batch::Part> parts;
  std::int32_t left = Most();
  for (std::size_t i = 4; i + 1 < op.args.size(); i += 2) {
    const llama_seq_id seq = Seq(op.args[i]);
    const bool known = std::any_of(parts.begin(), parts.end(),
                                   [&](const Batch::Part& p) { return p.seqs[0] == seq; });
    const std::int32_t n = std::min(op.args[i + 1], left);
    if (known || n < 1) continue;
    left -= n;
    parts.push_back({{seq}, End(seq), n});
  }
  if (parts.empty()) return "";
  const Batch batch(parts, op.args[0], interleaved, op.args[2]);
  int rc = 0;
  std::string difference = DecodeBatch(batch.get(), totals, rc);
  note = "answer " + std::to_string(rc) + ", from position " + std::to_string(parts[0].p0);
  if (rc == 1 && difference.empty()) MakeRoom(op.args[3], parts[0].seqs[0]);
  return difference;
}

// What programs do when there is no room.
void Pair::MakeRoom(std::int32_t how, llama_seq_id seq) {
  llama_seq_id longest = 0;
  for (llama_seq_id s = 0; s < static_cast<llama_seq_id>(setup_.n_seq); ++s)
    if (End(s) > End(longest)) longest = s;
  switch (how) {
    case 0:
      SeqRm(seq, -1, -1);
      break;
    case 1:
      ContextShift(longest, 4, 500);
      break;
    case 2:
      SeqRm(longest, -1, -1);
      break;
    case 3:
      Both([](llama_context* c) { llama_memory_clear(llama_get_memory(c), false); });
      break;
    default:
      break;
  }
}

// Tokens that belong to two sequences at once.
std::string Pair::DecodeShared(const Op& op, Totals& totals, std::string& note) {
  const llama_seq_id a = Seq(op.args[2]), b = Seq(op.args[3]);
  // A recurrent state belongs to one sequence.
  if (a == b || FindArchitecture(setup_.arch)->recurrent) return "skip";
  const auto first = [&](llama_seq_id s) { return llama_memory_seq_pos_min(host_memory(), s); };
  if (first(a) != first(b) || End(a) != End(b)) {
    SeqRm(a, -1, -1);
    SeqRm(b, -1, -1);
  }
  const Batch batch({{{a, b}, End(a), std::min(op.args[1], Most())}}, op.args[0], false, 0);
  int rc = 0;
  std::string difference = DecodeBatch(batch.get(), totals, rc);
  note = "answer " + std::to_string(rc);
  return difference;
}

// Speculative decoding: some of the drafted tokens are taken back.
std::string Pair::Draft(const Op& op, Totals& totals, std::string& note) {
  const llama_seq_id seq = Seq(op.args[1]);
  const llama_pos p0 = End(seq);
  const Batch batch({{{seq}, p0, std::clamp(op.args[2], 1, Most())}}, op.args[0], false, 1);
  int rc = 0;
  std::string difference = DecodeBatch(batch.get(), totals, rc);
  note = "answer " + std::to_string(rc) + ", from position " + std::to_string(p0);
  if (rc == 0) {
    SeqRm(seq, p0 + op.args[3], -1);
  } else if (rc == 1) {
    MakeRoom(1, seq);
  }
  return difference;
}

// Calls that must be refused, and change nothing.
std::string Pair::BadDecode(const Op& op, Totals& totals, std::string& note) {
  const llama_seq_id seq = Seq(op.args[1]);
  Batch batch({{{seq}, End(seq), 2}}, 7, false, 1);
  switch (op.args[0]) {
    case 0:
      if (!Holds(seq)) return "skip";  // a sequence may begin anywhere
      batch.get().pos[0] += 3;
      batch.get().pos[1] += 3;
      break;
    case 1:
      batch.get().token[1] = kVocab + 5;
      break;
    case 2:
      batch.get().seq_id[1][0] = 400;  // more than any context has
      break;
    default:
      batch.get().pos[1] += 2;  // a hole inside the batch
      break;
  }
  int rc = 0;
  std::string difference = DecodeBatch(batch.get(), totals, rc);
  note = "answer " + std::to_string(rc);
  if (difference.empty() && rc >= 0) return "a decode that is wrong was not refused";
  return difference;
}

// --- sequences ----------------------------------------------------------------------------------

std::string Pair::ContextShift(llama_seq_id seq, std::int32_t keep, std::int32_t discard) {
  const llama_pos first = std::max(0, llama_memory_seq_pos_min(host_memory(), seq));
  const llama_pos p0 = first + keep;
  const llama_pos n = (End(seq) - p0) * discard / 1000;
  if (n <= 0 || !CanShift()) return "skip";
  SeqRm(seq, p0, p0 + n);
  Both([&](llama_context* c) { llama_memory_seq_add(llama_get_memory(c), seq, p0 + n, -1, -n); });
  now_.shift_due = true;
  return "";
}

std::string Pair::SeqCp(const Op& op, std::string& note) {
  const llama_seq_id from = Seq(op.args[0]), to = Seq(op.args[1]);
  if (from == to) return "skip";
  Range range = Resolve(from, op.args[2], op.args[3]);
  // Between streams the host copies whole caches only, and asserts that it is asked to.
  if (!setup_.unified) range = {-1, -1};
  // In one stream the cells become shared; two cells at one position are no use to anyone.
  if (setup_.unified) SeqRm(to, -1, -1);
  Both([&](llama_context* c) {
    llama_memory_seq_cp(llama_get_memory(c), from, to, range.p0, range.p1);
  });
  now_.copy_due = now_.copy_due || !setup_.unified;
  note = Text(range);
  return "";
}

std::string Pair::Memory(const Op& op, std::string& note) {
  const auto& args = op.args;
  const auto say = [&](const Range& r) { note = Text(r); };
  switch (op.kind) {
    case Kind::kSeqRm: {
      const llama_seq_id seq = args[0] < 0 ? -1 : Seq(args[0]);
      const Range range = Resolve(seq < 0 ? 0 : seq, args[1], args[2]);
      say(range);
      SeqRm(seq, range.p0, range.p1);
      return "";
    }
    case Kind::kSeqKeep:
      Both([&](llama_context* c) { llama_memory_seq_keep(llama_get_memory(c), Seq(args[0])); });
      return "";
    case Kind::kSeqAdd: {
      const llama_seq_id seq = Seq(args[0]);
      if (!Holds(seq) || !CanShift()) return "skip";
      const Range range = Resolve(seq, args[1], args[2]);
      const llama_pos delta = End(seq) > kHighPosition ? -std::abs(args[3]) : args[3];
      say(range);
      Both([&](llama_context* c) {
        llama_memory_seq_add(llama_get_memory(c), seq, range.p0, range.p1, delta);
      });
      now_.shift_due = true;
      return "";
    }
    case Kind::kSeqDiv: {
      const llama_seq_id seq = Seq(args[0]);
      if (!Holds(seq) || args[3] < 1 || !CanShift()) return "skip";
      const Range range = Resolve(seq, args[1], args[2]);
      say(range);
      Both([&](llama_context* c) {
        llama_memory_seq_div(llama_get_memory(c), seq, range.p0, range.p1, args[3]);
      });
      now_.shift_due = true;
      return "";
    }
    case Kind::kClear:
      Both([&](llama_context* c) { llama_memory_clear(llama_get_memory(c), args[0] != 0); });
      now_.shifts = args[0] != 0 ? 0 : now_.shifts;
      return "";
    default:
      return "skip";
  }
}

std::string Pair::Apply(const Op& op, Totals& totals, std::string& note) {
  std::string difference;
  switch (op.kind) {
    case Kind::kDecode:
      difference = Decode(op, totals, note);
      break;
    case Kind::kDecodeShared:
      difference = DecodeShared(op, totals, note);
      break;
    case Kind::kDraft:
      difference = Draft(op, totals, note);
      break;
    case Kind::kBadDecode:
      difference = BadDecode(op, totals, note);
      break;
    case Kind::kSeqCp:
      difference = SeqCp(op, note);
      break;
    case Kind::kContextShift:
      difference = ContextShift(Seq(op.args[0]), op.args[1], op.args[2]);
      break;
    case Kind::kSave:
    case Kind::kSaveAll:
      difference = Save(op, note);
      break;
    case Kind::kRestore:
    case Kind::kRestoreAll:
      difference = Restore(op, note);
      break;
    case Kind::kBadRestore:
      difference = BadRestore(op, note);
      break;
    case Kind::kDeviceSave:
    case Kind::kDeviceRestore:
      difference = DeviceState(op, note);
      break;
    case Kind::kSwitch:
      if (setup_.contexts < 2) {
        difference = "skip";
      } else {
        std::swap(now_, other_);
      }
      break;
    default:
      difference = Memory(op, note);
      break;
  }
  if (difference == "skip") {
    totals.skipped++;
    note = "skipped";
    return "";
  }
  totals.done[static_cast<std::size_t>(op.kind)]++;
  return difference.empty() ? CheckPositions() : difference;
}

}  // namespace kvtamp::fuzz
