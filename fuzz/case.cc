#include "fuzz/case.h"

#include <algorithm>
#include <sstream>

#include "cpu/cpu.h"
#include "fuzz/model.h"
#include "fuzz/random.h"

namespace kvtamp::fuzz {

namespace {

constexpr KindInfo kInfos[kKinds] = {
    {"decode", "tokens_seed interleaved outputs when_full (seq n)...", 6, 330},
    {"decode_shared", "tokens_seed n seq other", 4, 15},
    {"draft", "tokens_seed seq drafted accepted", 4, 60},
    {"seq_rm", "seq|-1 from to", 3, 90},
    {"seq_cp", "from to first last", 4, 70},
    {"seq_keep", "seq", 1, 8},
    {"seq_add", "seq from to delta", 4, 35},
    {"context_shift", "seq keep discard", 3, 50},
    {"seq_div", "seq from to by", 4, 10},
    {"clear", "data", 1, 8},
    {"save", "slot seq partial", 3, 50},
    {"restore", "slot seq whose", 3, 60},
    {"save_all", "slot", 1, 8},
    {"restore_all", "slot whose", 2, 8},
    {"bad_restore", "slot seq how where", 4, 20},
    {"device_save", "seq", 1, 15},
    {"device_restore", "from seq", 2, 20},
    {"bad_decode", "how seq", 2, 15},
    {"switch", "", 0, 25},
};

template <class S, class F>
void ForEachField(S& s, F&& f) {
  f("type", s.type);
  f("arch", s.arch);
  f("isa", s.isa);
  f("skip_layers", s.skip_layers);
  f("page_size", s.page_size);
  f("n_sink", s.n_sink);
  f("residual", s.residual);
  f("layers", s.layers);
  f("heads", s.heads);
  f("kv_heads", s.kv_heads);
  f("head_size", s.head_size);
  f("window", s.window);
  f("yarn", s.yarn);
  f("model_seed", s.model_seed);
  f("n_ctx", s.n_ctx);
  f("n_seq", s.n_seq);
  f("n_ubatch", s.n_ubatch);
  f("threads", s.threads);
  f("unified", s.unified);
  f("swa_full", s.swa_full);
  f("host_f32", s.host_f32);
  f("flash", s.flash);
  f("contexts", s.contexts);
}

// Mostly few tokens, as when generating; now and then a prompt.
int DrawLength(Random& r) {
  const double p = r.Uniform();
  if (p < 0.60) return 1;
  if (p < 0.85) return r.Int(2, 5);
  if (p < 0.975) return r.Int(6, 24);
  return r.Int(25, 150);
}

Setup DrawSetup(Random& r, const std::string& type) {
  Setup s;
  s.type = type;
  const auto archs = Architectures();
  s.arch = archs[static_cast<std::size_t>(r.Int(0, static_cast<int>(archs.size()) - 1))].name;
  const Architecture& arch = *FindArchitecture(s.arch);
  if (r.Chance(0.5)) {
    const auto isas = cpu::AvailableIsas();
    s.isa = isas[static_cast<std::size_t>(r.Int(0, static_cast<int>(isas.size()) - 1))];
    if (s.isa == "scalar" && r.Chance(0.5)) s.isa = "auto";  // slow
  }
  s.page_size = r.OneOf({16u, 16u, 32u, 64u, 128u});
  s.n_sink = r.OneOf({0u, 1u, 4u, 4u, 7u, 64u});
  s.residual = r.OneOf({0u, 0u, 1u, 16u, 40u, 64u, 200u});
  s.layers = arch.sliding ? r.OneOf({2u, 2u, 3u}) : r.OneOf({1u, 2u, 2u, 3u});
  s.head_size = arch.latent ? r.OneOf({64u, 128u, 512u}) : r.OneOf({32u, 64u, 80u, 96u, 128u});
  if (s.arch == "lfm2") s.layers = r.OneOf({2u, 3u});
  const std::uint32_t most = arch.wide_heads ? 8 : std::max(1u, 256 / s.head_size);
  do {
    s.heads = r.OneOf({1u, 2u, 4u, 8u});
  } while (s.heads > most);
  s.kv_heads = s.heads;
  if (arch.grouped) {
    while (s.kv_heads > 1 && r.Chance(0.6)) s.kv_heads /= 2;
  }
  if (arch.sliding) s.window = r.OneOf({4u, 16u, 40u, 100u, 300u});
  // Those layers are int8, which f16's bounds do not allow for.
  if (type != "f16" && s.layers > 1 && r.Chance(0.15)) s.skip_layers = std::to_string(r.Int(0, 1));
  if (!arch.sliding && r.Chance(0.3)) s.yarn = r.OneOf({1u, 2u, 2u});
  s.model_seed = static_cast<std::uint32_t>(r.Next());
  s.n_seq = r.OneOf({1u, 2u, 3u, 4u, 8u, 16u});
  s.unified = r.Chance(0.5);
  s.n_ctx = s.unified ? r.OneOf({256u, 256u, 512u, 768u}) : 256 * s.n_seq;
  s.n_ubatch = r.OneOf({5u, 16u, 32u, 64u, 512u, 512u, 512u});
  s.threads = r.Chance(0.06) ? 2 : 1;
  s.swa_full = r.Chance(0.5);
  s.host_f32 = r.Chance(0.4);
  s.flash = !r.Chance(0.08);
  s.contexts = r.Chance(0.2) ? 2 : 1;
  return s;
}

Op DrawOp(Random& r) {
  int sum = 0;
  for (const KindInfo& info : kInfos) sum += info.weight;
  int at = r.Int(0, sum - 1);
  std::size_t k = 0;
  while (at >= kInfos[k].weight) at -= kInfos[k++].weight;
  Op op{static_cast<Kind>(k), {}};
  const int token_seed = r.Int(0, 9999);
  // Low numbers more often, so that a few sequences grow long.
  const auto seq = [&] { return std::min(r.Int(0, 15), r.Int(0, 15)); };
  // Ends of a range in thousandths; often one end is open.
  const auto from = [&] { return r.Chance(0.4) ? 0 : r.Int(0, 1000); };
  const auto to = [&] { return r.Chance(0.5) ? 1001 : r.Int(0, 1001); };
  switch (op.kind) {
    case Kind::kDecode: {
      op.args = {token_seed, r.Int(0, 1), r.OneOf({0, 0, 1, 2}), r.Int(0, 4)};
      const int parts = r.Chance(0.6) ? 1 : r.Int(2, 5);
      for (int i = 0; i < parts; ++i) {
        op.args.push_back(seq());
        op.args.push_back(DrawLength(r));
      }
      break;
    }
    case Kind::kDecodeShared:
      op.args = {token_seed, DrawLength(r), seq(), seq()};
      break;
    case Kind::kDraft: {
      const int n = r.Int(1, 16);
      op.args = {token_seed, seq(), n, r.Int(0, n)};
      break;
    }
    case Kind::kSeqRm:
      op.args = {r.Chance(0.05) ? -1 : seq(), from(), to()};
      break;
    case Kind::kSeqCp:
      op.args = {seq(), seq(), from(), to()};
      break;
    case Kind::kSeqKeep:
    case Kind::kDeviceSave:
      op.args = {seq()};
      break;
    case Kind::kSeqAdd:
      op.args = {seq(), from(), to(), r.Chance(0.5) ? -r.Int(1, 100) : r.Int(1, 60)};
      break;
    case Kind::kContextShift:
      op.args = {seq(), r.Int(0, 8), r.Int(100, 700)};
      break;
    case Kind::kSeqDiv:
      op.args = {seq(), from(), to(), r.Int(2, 4)};
      break;
    case Kind::kClear:
      op.args = {r.Int(0, 1)};
      break;
    case Kind::kSave:
      op.args = {r.Int(0, 3), seq(), r.Chance(0.2)};
      break;
    case Kind::kRestore:
      op.args = {r.Int(0, 3), seq(), r.Int(0, 3)};
      break;
    case Kind::kSaveAll:
      op.args = {r.Int(0, 1)};
      break;
    case Kind::kRestoreAll:
      op.args = {r.Int(0, 1), r.Int(0, 3)};
      break;
    case Kind::kBadRestore:
      op.args = {r.Int(0, 3), seq(), r.Int(0, 2), r.Int(0, 999)};
      break;
    case Kind::kDeviceRestore:
      op.args = {seq(), seq()};
      break;
    case Kind::kBadDecode:
      op.args = {r.Int(0, 3), seq()};
      break;
    case Kind::kSwitch:
      break;
  }
  return op;
}

bool ParseNumber(const std::string& text, std::int64_t& out) {
  std::istringstream in(text);
  return in >> out && in.peek() == std::char_traits<char>::eof();
}

bool ParseSetup(std::istringstream& in, Setup& s, std::string& why) {
  std::string word;
  while (in >> word) {
    const std::size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    const std::string value = equals == word.npos ? "" : word.substr(equals + 1);
    bool known = false, good = true;
    const auto take = [&](const char* name, auto& field) {
      if (key != name) return;
      known = true;
      if constexpr (std::is_same_v<std::decay_t<decltype(field)>, std::string>) {
        field = value;
      } else {
        std::int64_t n = 0;
        good = ParseNumber(value, n) && n >= 0;
        field = static_cast<std::uint32_t>(n);
      }
    };
    ForEachField(s, take);
    if (!known || !good) {
      why = "not a setting: " + word;
      return false;
    }
  }
  if (FindArchitecture(s.arch) == nullptr) {
    why = "not an architecture: " + s.arch;
    return false;
  }
  return true;
}

}  // namespace

const KindInfo& InfoOf(Kind kind) { return kInfos[static_cast<std::size_t>(kind)]; }

Case MakeCase(std::uint64_t seed, const std::string& type, int n_ops) {
  Random r(seed);
  Case c;
  c.setup = DrawSetup(r, type);
  for (int i = 0; i < n_ops; ++i) c.ops.push_back(DrawOp(r));
  return c;
}

std::string ToText(const Setup& setup) {
  std::string text = "case";
  const auto add = [&](const char* name, const auto& field) {
    text += std::string(" ") + name + "=";
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, std::string>) {
      text += field;
    } else {
      text += std::to_string(field);
    }
  };
  ForEachField(setup, add);
  return text;
}

std::string ToText(const Op& op) {
  std::string text = InfoOf(op.kind).name;
  for (std::int32_t a : op.args) text.append(" ").append(std::to_string(a));
  return text;
}

std::string ToText(const Case& c) {
  std::string text = ToText(c.setup) + "\n";
  for (const Op& op : c.ops) text += ToText(op) + "\n";
  return text;
}

std::optional<Case> ParseCase(std::string_view text, std::string& why) {
  Case c;
  std::istringstream lines{std::string(text)};
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    std::istringstream in(line.substr(0, line.find('#')));
    std::string name, word;
    if (!(in >> name)) continue;
    const auto fail = [&](const std::string& what) {
      why = "line " + std::to_string(number) + ": " + what;
      return std::nullopt;
    };
    if (name == "case") {
      if (!ParseSetup(in, c.setup, why)) return fail(why);
      continue;
    }
    const auto info = std::find_if(std::begin(kInfos), std::end(kInfos),
                                   [&](const KindInfo& i) { return name == i.name; });
    if (info == std::end(kInfos)) return fail("not an operation: " + name);
    Op op{static_cast<Kind>(info - kInfos), {}};
    while (in >> word) {
      std::int64_t n = 0;
      if (!ParseNumber(word, n)) return fail("not a number: " + word);
      op.args.push_back(static_cast<std::int32_t>(n));
    }
    if (op.args.size() < info->n_args) return fail(name + " takes: " + info->args);
    c.ops.push_back(std::move(op));
  }
  return c;
}

}  // namespace kvtamp::fuzz
