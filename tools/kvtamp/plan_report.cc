#include "tools/kvtamp/plan_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "control/stats.h"
#include "tools/kvtamp/words.h"

namespace kvtamp::tool {
namespace {

std::uint64_t Whole(double bytes) { return static_cast<std::uint64_t>(std::llround(bytes)); }

constexpr std::uint32_t kFurther = 4096;  // tokens over which growth is taken

double Ratio(double a, double b) { return b > 0 ? a / b : 0; }

Json LayersJson(const ModelLayout& layout) {
  Json layers = Json::array();
  for (const LayerLayout& l : layout.layers) {
    layers.push_back({{"layer", l.layer},
                      {"n_head_kv", l.n_head_kv},
                      {"head_size_k", l.head_size_k},
                      {"head_size_v", l.head_size_v},
                      {"swa", l.swa},
                      {"why_not_stored", l.why_plain},
                      {"logical_bytes_per_token", 2 * (l.elements_k() + l.elements_v())}});
  }
  return layers;
}

Json TypeJson(const Plan& plan, const PlanType& type) {
  const PlanAnswer& a = plan.answer;
  const StoredBytes bytes = type.curve.At(a.n_ctx);
  const double needed = type.Needed(a.n_ctx, a.n_users);
  Json j = {{"cache_type", type.name},
            {"format_k", codec::FormatName(type.settings.type.k)},
            {"format_v", codec::FormatName(type.settings.type.v)},
            {"kv_bpw", 16 * Ratio(bytes.stored(), bytes.logical)},
            {"kv_bytes_per_token", bytes.stored() / static_cast<double>(a.n_ctx)},
            {"stored_bytes", Whole(bytes.stored() * static_cast<double>(a.n_users))},
            {"needed_bytes", Whole(needed)}};
  if (!plan.question.budget) return j;
  const auto budget = static_cast<double>(*plan.question.budget);
  const std::uint64_t longest = type.LongestContext(a.n_users, budget);
  j["fits"] = needed <= budget;
  // Where the budget does not bind, there is no longest.
  j["n_ctx_max"] = longest >= kMaxContext ? Json(nullptr) : Json(longest);
  j["n_users_max"] = type.MostUsers(a.n_ctx, budget);
  return j;
}

}  // namespace

Json PlanJson(const Plan& plan) {
  const ModelLayout& m = *plan.layout;
  const PlanAnswer& a = plan.answer;
  Json j = {{"model_filename", m.path},
            {"model_name", m.name},
            {"architecture", m.architecture},
            {"n_ctx_train", m.n_ctx_train},
            {"n_layer", m.n_layer},
            {"n_swa", m.n_swa},
            {"swa_known", m.swa_known},
            {"mla", m.mla},
            {"n_recurrent", m.n_recurrent},
            {"n_shared", m.n_shared},
            {"has_cache", !plan.types.empty()},
            {"state_bytes_per_user", m.state_bytes}};
  j["layers"] = plan.types.empty() ? Json::array() : LayersJson(m);
  j["notes"] = plan.notes;
  if (plan.types.empty()) return j;

  const PlanType& type = plan.types[a.type];
  const auto n = static_cast<double>(a.n_ctx), users = static_cast<double>(a.n_users);
  const StoredBytes bytes = type.curve.At(a.n_ctx);
  const double further = type.curve.At(a.n_ctx + kFurther).stored() - bytes.stored();
  const double plain = type.curve.Plain(a.n_ctx);

  j["solved"] = SolvedName(a.solved);
  j["fits"] = a.fits;
  j["budget_bytes"] = plan.question.budget ? Json(*plan.question.budget) : Json(nullptr);
  j["n_ctx"] = a.n_ctx;
  j["n_users"] = a.n_users;
  j["kv_unified"] = plan.sharing.unified;
  j["n_ubatch"] = plan.sharing.n_ubatch;
  j["cache_type"] = type.name;
  j["format_k"] = codec::FormatName(type.settings.type.k);
  j["format_v"] = codec::FormatName(type.settings.type.v);
  j["page_size"] = type.settings.page_size;
  j["n_sink"] = type.settings.n_sink;
  j["residual_length"] = type.settings.residual_length;
  j["needed_bytes"] = Whole(a.needed);
  j["logical_bytes"] = Whole(bytes.logical * users);
  j["stored_bytes"] = Whole(bytes.stored() * users);
  j["stored_peak_bytes"] = Whole(type.curve.Peak(a.n_ctx) * users);
  j["in_flight_bytes"] = Whole(type.curve.InFlight());
  j["uncompressed_bytes"] = Whole(plain * users);
  j["state_bytes"] = m.state_bytes * a.n_users;
  j["compression_factor"] = Ratio(bytes.logical, bytes.stored());
  j["kv_bpw"] = 16 * Ratio(bytes.stored(), bytes.logical);
  // Of a token, where all of a context is filled.
  j["kv_bytes_per_token"] = bytes.stored() / n;
  j["kv_bytes_per_further_token"] = further / kFurther;
  j["bytes_per_token"] = {
      {"logical", bytes.logical / n}, {"codes", bytes.codes / n},   {"scales", bytes.scales / n},
      {"sinks", bytes.sinks / n},     {"window", bytes.window / n}, {"open", bytes.filling / n},
      {"index", bytes.index / n},     {"slack", bytes.slack / n},   {"uncompressed", plain / n}};
  j["types"] = Json::array();
  for (const PlanType& t : plan.types) j["types"].push_back(TypeJson(plan, t));
  j["levers"] = Json::array();
  for (const Lever& lever : plan.levers) {
    j["levers"].push_back({{"lever", lever.name},
                           {"alone_bytes", Whole(lever.alone * users)},
                           {"alone_factor", Ratio(plan.whole, lever.alone)},
                           {"in_turn_bytes", Whole(lever.in_turn * users)},
                           {"in_turn_factor", Ratio(plan.whole, lever.in_turn)}});
  }
  j["levers_from_bytes"] = Whole(plan.whole * users);
  j["why"] = a.why;
  j["command"] = plan.command;
  return j;
}

namespace {

std::string BytesOf(const Json& j) { return control::BytesText(j.get<std::uint64_t>()); }

std::string Count(const Json& j) { return Thousands(j.get<std::uint64_t>()); }

// "30 layers with K/V: 3 KV heads, K 64, V 64", layers of one shape together.
std::string ShapesText(const Json& j) {
  std::vector<std::pair<std::string, std::uint64_t>> shapes;
  for (const Json& l : j.at("layers")) {
    const auto v = l.at("head_size_v").get<unsigned>();
    std::string text = fmt::format(
        "{} KV head{}, K {}{}{}", l.at("n_head_kv").get<unsigned>(),
        l.at("n_head_kv") == 1 ? "" : "s", l.at("head_size_k").get<unsigned>(),
        v == 0 ? " (latent, V is part of K)" : fmt::format(", V {}", v),
        l.at("swa").get<bool>() ? fmt::format(", window of {}", Count(j.at("n_swa"))) : "");
    if (const auto why = l.at("why_not_stored").get<std::string>(); !why.empty())
      text += ", not compressed (" + why + ")";
    auto it = std::find_if(shapes.begin(), shapes.end(), [&](auto& s) { return s.first == text; });
    if (it == shapes.end()) it = shapes.insert(shapes.end(), {text, 0});
    it->second++;
  }
  std::string out;
  for (const auto& [text, n] : shapes)
    out += fmt::format("{}{} layer{}: {}", out.empty() ? "" : "; ", n, n == 1 ? "" : "s", text);
  return out;
}

std::string TokenTable(const Json& j) {
  struct Line {
    const char* key;
    std::string name;
  };
  const Line lines[] = {
      {"codes", fmt::format("K and V as {}", j.at("cache_type").get<std::string>())},
      {"scales", "scales, minima, widths"},
      {"sinks", fmt::format("first {} tokens, f16", j.at("n_sink").get<unsigned>())},
      {"window", fmt::format("recent window, {} tokens", j.at("residual_length").get<unsigned>())},
      {"open", "open page, f16"},
      {"index", "index"},
      {"slack", "slack"}};
  const Json& t = j.at("bytes_per_token");
  const auto stored = j.at("kv_bytes_per_token").get<double>();
  std::string out = "| a token's bytes | B | |\n| --- | ---: | ---: |\n";
  out += fmt::format("| in f16 | {:.0f} | |\n", t.at("logical").get<double>());
  for (const Line& line : lines) {
    const auto bytes = t.at(line.key).get<double>();
    out +=
        fmt::format("| {} | {:.1f} | {:.1f} % |\n", line.name, bytes, 100 * Ratio(bytes, stored));
  }
  out += fmt::format("| together | {:.1f} | {:.2f} bits, 1/{:.2f} |\n", stored,
                     j.at("kv_bpw").get<double>(), j.at("compression_factor").get<double>());
  if (t.at("uncompressed") > 0.0)
    out += fmt::format("| not compressed | {:.1f} | |\n", t.at("uncompressed").get<double>());
  return out;
}

std::string TypeTable(const Json& j) {
  const bool budget = !j.at("budget_bytes").is_null();
  std::string out = "| cache | bits | stored | needs |";
  if (budget) out += fmt::format(" fits | longest context | users of {} |", Count(j.at("n_ctx")));
  out += "\n| --- | ---: | ---: | ---: |";
  if (budget) out += " --- | ---: | ---: |";
  out += "\n";
  for (const Json& t : j.at("types")) {
    const auto name = t.at("cache_type").get<std::string>();
    out += fmt::format(
        "| {} | {:.2f} | {} | {} |", name == j.at("cache_type") ? "**" + name + "**" : name,
        t.at("kv_bpw").get<double>(), BytesOf(t.at("stored_bytes")), BytesOf(t.at("needed_bytes")));
    if (budget) {
      const Json& most = t.at("n_users_max");
      out += fmt::format(" {} | {} | {}{} |", t.at("fits").get<bool>() ? "yes" : "no",
                         t.at("n_ctx_max").is_null() ? "any" : Count(t.at("n_ctx_max")),
                         Count(most), most == kMaxUsers ? " or more" : "");
    }
    out += "\n";
  }
  return out;
}

std::string LeverTable(const Json& j) {
  if (j.at("levers").empty()) return "";
  std::string out = fmt::format(
      "| lever, from {} in f16 with all layers whole | alone | in turn |\n"
      "| --- | ---: | ---: |\n",
      BytesOf(j.at("levers_from_bytes")));
  double product = 1, together = 1;
  for (const Json& l : j.at("levers")) {
    const auto alone = l.at("alone_factor").get<double>();
    together = l.at("in_turn_factor").get<double>();
    product *= alone;
    out +=
        fmt::format("| {} | {}, 1/{:.2f} | {}, 1/{:.2f} |\n", l.at("lever").get<std::string>(),
                    BytesOf(l.at("alone_bytes")), alone, BytesOf(l.at("in_turn_bytes")), together);
  }
  if (j.at("levers").size() > 1)
    out += fmt::format(
        "\nTogether 1/{:.2f}. The factors do not multiply (that would be 1/{:.2f}): each works on "
        "its own part of the sum.\n",
        together, product);
  return out;
}

}  // namespace

std::string PlanText(const Json& j) {
  std::string out = fmt::format("{} ({})", j.at("model_name").get<std::string>(),
                                j.at("architecture").get<std::string>());
  if (const auto n = j.at("n_ctx_train").get<std::uint64_t>(); n > 0)
    out += fmt::format(", trained for {} tokens", Thousands(n));
  out += "\n";
  const auto notes = [&] {
    for (const Json& note : j.at("notes")) out += "- " + note.get<std::string>() + "\n";
  };
  if (!j.at("has_cache").get<bool>()) {
    notes();
    return out;
  }
  out += ShapesText(j) + "\n\n";
  out += fmt::format("{} tokens", Count(j.at("n_ctx")));
  if (j.at("n_users") != 1) out += fmt::format(" for each of {} users", Count(j.at("n_users")));
  out += fmt::format(
      " in {} (K {}, V {}):\n{} stored, {} in f16; at the worst moment {} must be there",
      j.at("cache_type").get<std::string>(), j.at("format_k").get<std::string>(),
      j.at("format_v").get<std::string>(), BytesOf(j.at("stored_bytes")),
      BytesOf(j.at("logical_bytes")), BytesOf(j.at("needed_bytes")));
  if (!j.at("budget_bytes").is_null()) out += fmt::format(" of {}", BytesOf(j.at("budget_bytes")));
  out += ".\n\n" + TokenTable(j) + "\n" + TypeTable(j) + "\n" + LeverTable(j);
  if (const auto why = j.at("why").get<std::string>(); !why.empty()) out += "\n" + why + "\n";
  if (!j.at("notes").empty()) out += "\n";
  notes();
  if (!j.at("command").empty()) {
    out += "\nTo run:\n  ";
    std::string line;
    for (const Json& word : j.at("command"))
      line += (line.empty() ? "" : " ") + ShellQuoted(word.get<std::string>());
    out += line + "\n";
  }
  return out;
}

}  // namespace kvtamp::tool
