#include "tools/kvtamp/haystack.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvtamp::tool {
namespace {

// A passage shorter than this hides nothing.
constexpr std::size_t kLeast = 32;

void Append(Tokens& tokens, const Tokens& more) {
  tokens.insert(tokens.end(), more.begin(), more.end());
}

}  // namespace

Haystack::Haystack(Vocabulary vocabulary, const std::string& text)
    : vocabulary_(std::move(vocabulary)), text_(text), tokens_(vocabulary_.encode(text)) {}

bool Haystack::StartsSentence(const Tokens& tokens, std::size_t i) const {
  if (i == 0 || i == tokens.size()) return true;
  std::string before = vocabulary_.piece(tokens[i - 1]);
  const std::string after = vocabulary_.piece(tokens[i]);
  if (before.find('\n') != std::string::npos) return true;
  // " 3." and ".5" are one sentence, "end. Next" and "end.\n" are two.
  while (!before.empty() && before.back() == ' ') before.pop_back();
  return !before.empty() && std::string_view(".!?").find(before.back()) != std::string::npos &&
         !after.empty() && (after.front() == ' ' || after.front() == '\n');
}

std::size_t Haystack::NearestStart(const Tokens& tokens, std::size_t at, std::size_t first,
                                   std::size_t last, std::size_t reach) const {
  for (std::size_t d = 0; d <= reach; ++d) {
    if (at >= first + d && StartsSentence(tokens, at - d)) return at - d;
    if (at + d <= last && StartsSentence(tokens, at + d)) return at + d;
  }
  return at;
}

Result<Tokens> Haystack::Passage(std::size_t n, std::size_t i, std::size_t n_passages) const {
  if (tokens_.size() < n) {
    return Status::Invalid(
        fmt::format("the text has {} tokens, a prompt needs {} of it", tokens_.size(), n));
  }
  const std::size_t room = tokens_.size() - n;
  const std::size_t at = n_passages > 1 ? room * i / (n_passages - 1) : 0;
  const auto start =
      tokens_.begin() + static_cast<std::ptrdiff_t>(NearestStart(tokens_, at, 0, room, n / 4));
  return Tokens(start, start + static_cast<std::ptrdiff_t>(n));
}

Result<Tokens> Haystack::Hide(std::size_t length, std::size_t i, std::size_t n_passages,
                              const std::string& head, const std::vector<Hidden>& hidden,
                              const std::string& tail) const {
  Tokens out = vocabulary_.begin;
  Append(out, vocabulary_.encode(head));
  const Tokens end = vocabulary_.encode(tail);
  std::size_t taken = out.size() + end.size();
  std::vector<Tokens> sentences;
  for (const Hidden& h : hidden) {
    sentences.push_back(vocabulary_.encode(h.sentence));
    taken += sentences.back().size();
  }
  if (length < taken + kLeast) {
    return Status::Invalid(fmt::format(
        "a prompt of {} tokens is too short: what is hidden and the question take {}, and {} of "
        "text are the least",
        length, taken, kLeast));
  }
  const std::size_t n = length - taken;
  const Result<Tokens> passage = Passage(n, i, n_passages);
  if (!passage.ok()) return passage.status();
  std::vector<std::pair<std::size_t, std::size_t>> places;  // where, which
  for (std::size_t k = 0; k < hidden.size(); ++k) {
    const auto at =
        static_cast<std::size_t>(std::llround(hidden[k].depth / 100 * static_cast<double>(n)));
    const bool at_edge = at == 0 || at >= n;
    places.emplace_back(
        at_edge ? std::min(at, n) : NearestStart(passage.value(), at, 1, n - 1, n / 20), k);
  }
  std::stable_sort(places.begin(), places.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::size_t done = 0;
  const auto text = passage.value().begin();
  for (const auto& [at, k] : places) {
    out.insert(out.end(), text + static_cast<std::ptrdiff_t>(done),
               text + static_cast<std::ptrdiff_t>(at));
    Append(out, sentences[k]);
    done = at;
  }
  out.insert(out.end(), text + static_cast<std::ptrdiff_t>(done), passage.value().end());
  Append(out, end);
  return out;
}

}  // namespace kvtamp::tool
