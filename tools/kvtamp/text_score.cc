#include "tools/kvtamp/text_score.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <span>

#include "tools/kvtamp/words.h"

namespace kvtamp::tool {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsPoint(char c) { return c == '.' || c == ','; }

// ASCII that always stands alone; points, commas and dashes have rules of their own.
bool IsMark(char c) {
  return (c >= ' ' && c <= '&') || (c >= '(' && c <= '+') || c == '/' || (c >= ':' && c <= '@') ||
         (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
}

// Bytes of the white space (as Python has it) at the start of `text`; 0: none.
std::size_t SpaceAt(std::string_view text) {
  const char c = text.front();
  if (c == ' ' || (c >= '\t' && c <= '\r') || (c >= '\x1c' && c <= '\x1f')) return 1;
  for (const std::string_view space : {"\u0085", "\u00a0"})
    if (text.starts_with(space)) return space.size();
  for (const std::string_view space :
       {"\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004", "\u2005", "\u2006", "\u2007",
        "\u2008", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"})
    if (text.starts_with(space)) return space.size();
  return 0;
}

std::vector<std::string> SplitWords(std::string_view text) {
  std::vector<std::string> words;
  bool inside = false;
  while (!text.empty()) {
    const std::size_t space = SpaceAt(text);
    if (space == 0) {
      if (!inside) words.emplace_back();
      words.back() += text.front();
    }
    inside = space == 0;
    text.remove_prefix(std::max<std::size_t>(space, 1));
  }
  return words;
}

std::string_view WithoutEnd(std::string_view text) {
  std::size_t end = 0;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t space = SpaceAt(text.substr(i));
    i += std::max<std::size_t>(space, 1);
    if (space == 0) end = i;
  }
  return text.substr(0, end);
}

std::string Replaced(std::string text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos;
       at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
  return text;
}

// Every pair of neighbours that `matches`, none of them twice, with a space before, between and
// after as asked.
template <class F>
std::string Spaced(const std::string& text, bool before, bool after, F&& matches) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (i + 1 == text.size() || !matches(text[i], text[i + 1])) {
      out += text[i];
      continue;
    }
    if (before) out += ' ';
    out += text[i];
    out += ' ';
    out += text[++i];
    if (after) out += ' ';
  }
  return out;
}

std::map<std::vector<std::string>, double> Grams(std::span<const std::string> words,
                                                 std::size_t order) {
  std::map<std::vector<std::string>, double> grams;
  for (std::size_t i = 0; i + order <= words.size(); ++i)
    ++grams[{words.begin() + static_cast<std::ptrdiff_t>(i),
             words.begin() + static_cast<std::ptrdiff_t>(i + order)}];
  return grams;
}

std::vector<std::string> PlainWords(std::string_view text) {
  std::string kept = Lower(std::string(text));
  for (char& c : kept) {
    if (!IsDigit(c) && (c < 'a' || c > 'z')) c = ' ';
  }
  return SplitWords(kept);
}

}  // namespace

std::vector<std::string> Words13a(std::string_view text) {
  std::string line(WithoutEnd(text));
  for (const auto& [from, to] :
       {std::pair("<skipped>", ""), std::pair("-\n", ""), std::pair("\n", " "),
        std::pair("&quot;", "\""), std::pair("&amp;", "&"), std::pair("&lt;", "<"),
        std::pair("&gt;", ">")})
    line = Replaced(std::move(line), from, to);
  std::string marked = " ";
  for (const char c : line) {
    if (IsMark(c))
      (marked += ' ') += c, marked += ' ';
    else
      marked += c;
  }
  marked += ' ';
  marked = Spaced(marked, false, true, [](char a, char b) { return !IsDigit(a) && IsPoint(b); });
  marked = Spaced(marked, true, false, [](char a, char b) { return IsPoint(a) && !IsDigit(b); });
  marked = Spaced(marked, false, true, [](char a, char b) { return IsDigit(a) && b == '-'; });
  return SplitWords(marked);
}

BleuCounts& BleuCounts::Add(const BleuCounts& other, double sign) {
  for (std::size_t i = 0; i < kOrder; ++i) {
    matched[i] += sign * other.matched[i];
    total[i] += sign * other.total[i];
  }
  length += sign * other.length;
  length_reference += sign * other.length_reference;
  return *this;
}

BleuCounts CountBleu(std::string_view text, std::string_view reference) {
  const std::vector<std::string> words = Words13a(text), wanted = Words13a(reference);
  BleuCounts counts;
  counts.length = static_cast<double>(words.size());
  counts.length_reference = static_cast<double>(wanted.size());
  for (std::size_t order = 1; order <= BleuCounts::kOrder; ++order) {
    const auto there = Grams(wanted, order);
    for (const auto& [gram, n] : Grams(words, order)) {
      counts.total[order - 1] += n;
      if (const auto found = there.find(gram); found != there.end())
        counts.matched[order - 1] += std::min(n, found->second);
    }
  }
  return counts;
}

double Bleu(const BleuCounts& counts) {
  if (std::ranges::all_of(counts.matched, [](double n) { return n == 0; })) return 0;
  double log_sum = 0, smooth = 1;
  for (std::size_t i = 0; i < BleuCounts::kOrder; ++i) {
    if (counts.total[i] == 0) return 0;
    if (counts.matched[i] == 0) smooth *= 2;
    const double matched = counts.matched[i] == 0 ? 1 / smooth : counts.matched[i];
    log_sum += std::log(100 * matched / counts.total[i]);
  }
  const double brevity = counts.length < counts.length_reference
                             ? std::exp(1 - counts.length_reference / counts.length)
                             : 1;
  return brevity * std::exp(log_sum / BleuCounts::kOrder);
}

double RougeL(std::string_view text, std::string_view reference) {
  const std::vector<std::string> words = PlainWords(text), wanted = PlainWords(reference);
  if (words.empty() || wanted.empty()) return 0;
  // Longest common subsequence, one row of the table at a time.
  std::vector<std::size_t> row(words.size() + 1);
  for (const std::string& word : wanted) {
    std::size_t diagonal = 0;
    for (std::size_t i = 1; i <= words.size(); ++i) {
      const std::size_t above = row[i];
      row[i] = words[i - 1] == word ? diagonal + 1 : std::max(above, row[i - 1]);
      diagonal = above;
    }
  }
  const auto common = static_cast<double>(row.back());
  return 2 * common / static_cast<double>(words.size() + wanted.size());
}

}  // namespace kvtamp::tool
