// kvtamp plan: what a model's cache takes and what fits, from the metadata of its file alone.
#include <fmt/format.h>

#include <algorithm>

#include "control/byte_size.h"
#include "tools/kvtamp/cli.h"
#include "tools/kvtamp/plan_report.h"
#include "tools/kvtamp/plugin.h"

namespace kvtamp::tool {
namespace {

constexpr const char* kPlanFooter = R"(
Of --ctx, --users and --budget give two, and the third is found; with a budget and a context, also the
best type of the cache that fits, unless --cache chooses one.

Examples:
  kvtamp plan model.gguf --ctx 32768
  kvtamp plan model.gguf --budget 2GiB
  kvtamp plan model-00001-of-00003.gguf --ctx 8192 --users 16 --budget 25% -o json

Exit code: 0 done, 1 failed, 2 bad usage, 3 it does not fit.)";

// Whether the user named a type of the cache, by any of the three settings.
bool TypeChosen(const control::Settings& settings) {
  return std::any_of(settings.values.begin(), settings.values.end(), [](const control::Value& v) {
    const std::string_view path = v.option->path;
    return (path == "cache.type" || path == "cache.type_k" || path == "cache.type_v") &&
           v.source != control::Source::kDefault && v.text != "auto";
  });
}

control::Overrides OfType(const std::string& type, const std::string& type_k = "auto",
                          const std::string& type_v = "auto") {
  return {{"cache.type", type, ""}, {"cache.type_k", type_k, ""}, {"cache.type_v", type_v, ""}};
}

class Planner {
 public:
  Planner(const SettingFlags& flags, const control::Settings& settings, const ModelLayout& layout,
          const PlanQuestion& question, const Sharing& sharing)
      : flags_(flags), settings_(settings) {
    plan_.layout = &layout;
    plan_.question = question;
    plan_.sharing = sharing;
  }

  Result<Plan> Run() {
    const ModelLayout& layout = *plan_.layout;
    if (layout.causal && !layout.layers.empty()) {
      if (Status s = AddTypes(); !s.ok()) return s;
      plan_.answer = Solve(plan_.question, layout, plan_.types, usual_, ladder_);
      if (Status s = AddLevers(); !s.ok()) return s;
      if (plan_.answer.fits) AddCommand();
    }
    AddNotes();
    return plan_;
  }

 private:
  const PlanType& type() const { return plan_.types[plan_.answer.type]; }

  // That of the user first, then f16 to compare with, then the ladder.
  Status AddTypes() {
    const std::string own = codec::PairName(settings_.type);
    const auto add = [&](const std::string& name, const control::Settings& settings) -> Status {
      Result<PlanType> made = MakePlanType(name, settings, *plan_.layout, plan_.sharing);
      if (!made.ok()) return made.status();
      plan_.types.push_back(std::move(made.value()));
      return Status::Ok();
    };
    std::vector<std::string> names = {"f16"};
    for (const char* name : QualityLadder()) names.emplace_back(name);
    if (std::find(names.begin(), names.end(), own) == names.end()) {
      if (Status s = add(own, settings_); !s.ok()) return s;
    }
    for (const std::string& name : names) {
      const Result<control::Settings> settings =
          name == own ? Result<control::Settings>(settings_) : flags_.Load(OfType(name));
      if (!settings.ok()) return settings.status();
      if (name != "f16") ladder_.push_back(plan_.types.size());
      if (Status s = add(name, settings.value()); !s.ok()) return s;
    }
    const auto it = std::find_if(plan_.types.begin(), plan_.types.end(),
                                 [&](const PlanType& t) { return t.name == own; });
    usual_ = static_cast<std::size_t>(it - plan_.types.begin());
    return Status::Ok();
  }

  // A user's bytes, those not compressed too.
  static double BytesOf(const SizeCurve& curve, std::uint64_t n_ctx) {
    return curve.At(n_ctx).stored() + curve.Plain(n_ctx);
  }

  Status AddLevers() {
    const ModelLayout& layout = *plan_.layout;
    const std::uint64_t n = plan_.answer.n_ctx;
    ModelLayout whole = layout;
    double windowed = 0;
    for (LayerLayout& l : whole.layers) {
      const double f16 = 2.0 * static_cast<double>(l.elements_k() + l.elements_v());
      plan_.whole += f16 * static_cast<double>(n);
      windowed += f16 * static_cast<double>(
                            l.swa ? std::min(n, SwaCells(layout.n_swa, plan_.sharing, n)) : n);
      l.swa = false;
    }
    if (windowed < plan_.whole) {
      plan_.levers.push_back({"the model's sliding windows", windowed, windowed});
    }
    const std::string k = codec::FormatName(type().settings.type.k);
    const std::string v = codec::FormatName(type().settings.type.v);
    const bool coded_k = type().settings.type.k.coded(), coded_v = type().settings.type.v.coded();
    const bool int8 = type().settings.int8_window;
    const auto with = [&](const ModelLayout& model, const std::string& type_k,
                          const std::string& type_v) -> Result<double> {
      control::Overrides overrides = OfType("f16", type_k, type_v);
      overrides.push_back({"cache.residual_type", "f16", ""});
      const Result<control::Settings> settings = flags_.Load(overrides);
      if (!settings.ok()) return settings.status();
      const Result<SizeCurve> curve = SizeCurve::Make(model, settings.value(), plan_.sharing);
      if (!curve.ok()) return curve.status();
      return BytesOf(curve.value(), n);
    };
    const double all = BytesOf(type().curve, n);
    if (coded_k) {
      const Result<double> alone = with(whole, k, "f16");
      const Result<double> in_turn = with(layout, k, "f16");
      if (!alone.ok() || !in_turn.ok()) return alone.ok() ? in_turn.status() : alone.status();
      plan_.levers.push_back({"K as " + k, alone.value(), in_turn.value()});
    }
    if (coded_v) {
      const Result<double> alone = with(whole, "f16", v);
      const Result<double> in_turn = int8 ? with(layout, k, v) : Result<double>(all);
      if (!alone.ok() || !in_turn.ok()) return alone.ok() ? in_turn.status() : alone.status();
      plan_.levers.push_back({"V as " + v, alone.value(), in_turn.value()});
    }
    // By itself it has no page to work on: it is of those that are to be coded.
    if (int8 && (coded_k || coded_v))
      plan_.levers.push_back({"recent window as int8", plan_.whole, all});
    return Status::Ok();
  }

  void AddCommand() {
    const ModelLayout& layout = *plan_.layout;
    const PlanAnswer& a = plan_.answer;
    const bool held = std::any_of(layout.layers.begin(), layout.layers.end(), [&](const auto& l) {
      return l.why_plain.empty() && WhyNotStored(l, type().settings).empty();
    });
    if (!held) {
      plan_.notes.emplace_back(
          "No layer can be compressed: the host keeps and attends the cache itself.");
      return;
    }
    std::vector<std::string>& words = plan_.command;
    words = {"kvtamp", "run", "--cache", type().name};
    for (const control::Override& flag : flags_.overrides()) {
      if (flag.path.starts_with("cache.type")) continue;
      words.push_back(control::FlagName(flag.path));
      words.push_back(flag.text);
    }
    if (!flags_.config_file().empty())
      words.insert(words.end(), {"--config-file", flags_.config_file()});
    words.insert(words.end(),
                 {"--", "llama-server", "-m", layout.path, "-c",
                  std::to_string(a.n_ctx * a.n_users), "-np", std::to_string(a.n_users)});
    if (plan_.sharing.unified) words.emplace_back("-kvu");
    if (plan_.sharing.n_ubatch != Sharing().n_ubatch)
      words.insert(words.end(), {"-ub", std::to_string(plan_.sharing.n_ubatch)});
  }

  void AddNotes() {
    const ModelLayout& m = *plan_.layout;
    std::vector<std::string>& notes = plan_.notes;
    if (plan_.types.empty()) {
      notes.push_back(m.causal ? "No layer has attention: there is no K/V cache to compress."
                               : "An encoder, or the like: it keeps no K/V cache.");
    } else {
      const std::uint64_t asked = plan_.question.n_ctx_asked;
      if (asked != 0 && asked != plan_.answer.n_ctx)
        notes.push_back(fmt::format("The host makes {} cells of {} tokens.",
                                    Thousands(plan_.answer.n_ctx), Thousands(asked)));
      if (m.n_ctx_train > 0 &&
          plan_.answer.n_ctx > (m.n_ctx_train + kCellsPad - 1) / kCellsPad * kCellsPad)
        notes.push_back(fmt::format(
            "The model was trained for {} tokens: beyond them it needs its RoPE scaled.",
            Thousands(m.n_ctx_train)));
      if (!m.swa_known)
        notes.push_back(fmt::format(
            "Some layers may slide over {} tokens, the file does not say which: all are counted "
            "whole.",
            Thousands(m.n_swa)));
      if (m.n_shared > 0)
        notes.push_back(
            fmt::format("{} layers read the K/V of earlier ones and have none.", m.n_shared));
      if (std::any_of(m.layers.begin(), m.layers.end(),
                      [](const auto& l) { return l.why_plain.starts_with("sparse"); }))
        notes.emplace_back("The host's index of its sparse attention is not counted.");
      if (plan_.sharing.unified && plan_.answer.n_users > 16)
        notes.emplace_back(
            "In one pool no more than 16 users have a recent window of their own at a time.");
    }
    if (m.n_recurrent > 0)
      notes.push_back(fmt::format(
          "{} layers have recurrent state, {} for each user: the host keeps it as it is.",
          m.n_recurrent, control::BytesText(m.state_bytes)));
    for (const std::string& file : m.cut_short)
      notes.push_back(file + " ends before its weights do: it will not load, download it again.");
  }

  const SettingFlags& flags_;
  const control::Settings& settings_;
  Plan plan_;
  std::size_t usual_ = 0;
  std::vector<std::size_t> ladder_;
};

}  // namespace

int PlanMain(const Args& args) {
  CLI::App app("What a model's cache takes, what fits a budget, and the command line to run it",
               "kvtamp plan");
  app.footer(kPlanFooter);
  std::string model, budget, output = "md";
  std::uint64_t n_ctx = 0, n_users = 0;
  Sharing sharing;
  app.add_option("-m,--model,MODEL", model,
                 "GGUF file, any part of a split one; no weights are read")
      ->type_name("FILE")
      ->required();
  const auto* ctx =
      AddNumber(app, "-c,--ctx", n_ctx, "tokens of each user's context", 1, kMaxContext)
          ->default_str("");
  const auto* users =
      AddNumber(app, "--users", n_users, "sequences that are kept at once", 1, kMaxUsers)
          ->default_str("");
  const auto* given_budget =
      app.add_option("--budget", budget,
                     "memory for the cache: 4GiB, 512MiB, or 50% of the machine's")
          ->type_name("SIZE");
  app.add_flag("--kv-unified", sharing.unified,
               "the users share one pool of cells, as with llama-server -kvu");
  AddMicroBatch(app, sharing.n_ubatch);
  AddOutput(app, output, {"md", "json"});
  SettingFlags flags;
  flags.AddTo(app, "cache.");
  if (const auto code = Parse(app, args)) return *code;

  const Result<control::Settings> settings = flags.Load();
  if (!settings.ok()) return Fail("plan", settings.status(), kBadUsage);
  PlanQuestion question;
  question.type_chosen = TypeChosen(settings.value());
  if (ctx->count() > 0) {
    question.n_ctx_asked = n_ctx;
    question.n_ctx = (n_ctx + kCellsPad - 1) / kCellsPad * kCellsPad;
  }
  if (users->count() > 0) question.n_users = n_users;
  if (given_budget->count() > 0) {
    const auto bytes = control::ParseBytes(budget, control::MemoryOfSystem());
    if (!bytes.ok()) return Fail("plan", "--budget: " + bytes.status().message(), kBadUsage);
    question.budget = bytes.value();
  }

  SilenceHost(false);
  const Result<ModelLayout> layout = ReadLayout(model);
  if (!layout.ok()) return Fail("plan", layout.status());
  if (const Status fits = CheckFormats(layout.value(), settings.value()); !fits.ok())
    return Fail("plan", fits, kBadUsage);
  if (!question.n_ctx && !question.budget && layout.value().n_ctx_train == 0)
    return Fail("plan", model + " does not say for how long a context it was trained: give --ctx",
                kBadUsage);
  // How many users share one pool's sliding windows may be what is to be found: then as if few did.
  sharing.n_users = static_cast<std::uint32_t>(
      question.n_users.value_or(sharing.unified && question.budget && question.n_ctx ? 2 : 1));

  const Result<Plan> plan =
      Planner(flags, settings.value(), layout.value(), question, sharing).Run();
  if (!plan.ok()) return Fail("plan", plan.status());
  const Json j = PlanJson(plan.value());
  if (output == "json") {
    fmt::print("{}\n", Dump(j, 2));
  } else {
    fmt::print("{}", PlanText(j));
  }
  return plan.value().answer.fits ? kDone : kLimitPassed;
}

}  // namespace kvtamp::tool
