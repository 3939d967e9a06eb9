#include "codec/format.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <vector>

#include "codec/codec.h"

namespace kvtamp::codec {
namespace {

// ------------------------------------------------------------------------------ what there is

// V's group is left to Resolve, so that heads of any size take them: 64 where it divides.
constexpr ShortName kShortNames[] = {
    {"k8v8", "int8_pc", "int8_pt_sym+had", "no loss that can be seen"},
    {"k4v4", "int4_pc+qw", "lm4_pt+had", "the default"},
    {"k3.5v3", "int3.5_pc+qw", "tcq3_pt+had", "in between"},
    {"k3v3", "int3_pc+qw", "tcq3_pt+had", "in between"},
    {"k2.5v2.5", "int2.5_pc+qw", "tcq2.5_pt+had", "in between"},
    {"k2v2", "int2_pc+qw", "tcq2_pt+had", "in between"},
    {"k8v4", "int8_pc", "lm4_pt+had", "when K is the sensitive side"},
    {"k4v8", "int4_pc+qw", "int8_pt_sym+had", "when V is"},
    {"f16", "f16", "f16", "as it arrives"},
    {"auto", "int4_pc+qw", "lm4_pt+had", "the same as k4v4"},
    {"int8", "int8_pc", "int8_pt_sym+had", "the same as k8v8"},
};

constexpr std::array<std::string_view, 7> kNamesK = {
    "f16", "int8_pc", "int8_pc+mean", "int4_pc", "int4_pc+mean", "int3_pc", "int3.5_pc+qw"};
constexpr std::array<std::string_view, 7> kNamesV = {
    "f16",    "int8_pt_sym", "int8_pt_sym+had", "lm4_pt+had",
    "lm4_pt", "tcq3_pt+had", "tcq2.5_pt+had"};

constexpr std::array<std::string_view, 8> kHostTypes = {"f32",  "bf16", "q8_0", "q5_1",
                                                        "q5_0", "q4_1", "q4_0", "iq4_nl"};

std::span<const std::string_view> NamesOf(Side side) {
  return side == Side::kK ? std::span<const std::string_view>(kNamesK) : kNamesV;
}

const char* SideName(Side side) { return side == Side::kK ? "K" : "V"; }

std::string Quoted(std::string_view text) { return '"' + std::string(text) + '"'; }

template <class Names>
std::string Joined(const Names& names) {
  std::string all;
  for (std::string_view name : names) all += (all.empty() ? "" : ", ") + std::string(name);
  return all;
}

std::string ThereAre(Side side) {
  std::string all = std::string("for ") + SideName(side) + " there are " + Joined(NamesOf(side));
  return all + (side == Side::kK ? ", with 1 to 8 bits" : ", tcq with 1 to 5 bits") +
         "; and, slower, the rest of the grammar of docs/formats.md";
}

std::vector<std::string_view> PairNames() {
  std::vector<std::string_view> names;
  for (const ShortName& s : kShortNames) names.emplace_back(s.name);
  return names;
}

// ------------------------------------------------------------------------------------- words

std::size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replace = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replace, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

template <class Names>
std::string Nearest(std::string_view text, const Names& names) {
  std::string_view best;
  std::size_t least = std::string_view::npos;
  for (std::string_view name : names) {
    const std::size_t distance = EditDistance(text, name);
    if (distance < least) {
      least = distance;
      best = name;
    }
  }
  return std::string(best);
}

bool IsHostType(std::string_view text) {
  return std::find(kHostTypes.begin(), kHostTypes.end(), text) != kHostTypes.end();
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// Eats a descriptor from the left.
class Words {
 public:
  explicit Words(std::string_view text) : rest_(text) {}
  bool done() const { return rest_.empty(); }
  bool Eat(std::string_view word) {
    if (rest_.substr(0, word.size()) != word) return false;
    rest_.remove_prefix(word.size());
    return true;
  }
  bool EatNumber(std::uint32_t min, std::uint32_t max, std::uint32_t& n) {
    if (done() || !IsDigit(rest_[0]) || rest_[0] == '0') return false;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), n);
    if (error != std::errc() || n < min || n > max) return false;
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    return true;
  }
  // A number with up to two decimals, no zero in front nor at its end: in hundredths.
  bool EatCenti(std::uint32_t& centi) {
    if (!EatNumber(1, 999, centi)) return false;
    centi *= 100;
    if (!Eat(".")) return true;
    for (std::uint32_t unit : {10u, 1u}) {
      if (done() || !IsDigit(rest_[0])) return unit == 1;
      const auto digit = static_cast<std::uint32_t>(rest_[0] - '0');
      rest_.remove_prefix(1);
      centi += unit * digit;
      if (digit == 0 && (unit == 1 || done() || !IsDigit(rest_[0]))) return false;
    }
    return true;
  }
  // "+word", once.
  bool EatModifier(std::string_view word, bool& seen) {
    if (seen || !Eat(word)) return false;
    seen = true;
    return true;
  }

 private:
  std::string_view rest_;
};

bool IsFp8(Levels levels) { return levels == Levels::kFp8E4m3 || levels == Levels::kFp8E5m2; }

bool ParseLevels(Words& words, Format& p) {
  p.levels = words.Eat("int")        ? Levels::kInt
             : words.Eat("tcq")      ? Levels::kTcq
             : words.Eat("fp8_e4m3") ? Levels::kFp8E4m3
             : words.Eat("fp8_e5m2") ? Levels::kFp8E5m2
                                     : Levels::kLm;
  return p.levels != Levels::kLm || words.Eat("lm");
}

bool ParseBits(Words& words, Format& p) {
  std::uint32_t centibits = 0;
  if (!words.EatCenti(centibits) || centibits < 100 || centibits > 800) return false;
  p.centibits = static_cast<std::uint16_t>(centibits);
  return true;
}

bool ParseModifiers(Words& words, Format& p) {
  bool outliers = false;
  std::uint32_t n = 0;
  while (!words.done()) {
    if (words.EatModifier("+had", p.hadamard) || words.EatModifier("+mean", p.mean) ||
        words.EatModifier("+qw", p.weighted) || words.EatModifier("+rw", p.by_range))
      continue;
    if (!words.EatModifier("+out", outliers) || !words.EatNumber(1, 64, n)) return false;
    p.outliers = static_cast<std::uint16_t>(n);
  }
  return true;
}

// False: not a word of the grammar.
bool ParseGrammar(std::string_view text, Format& p) {
  if (text == "f16") return true;
  Words words(text);
  if (!ParseLevels(words, p)) return false;
  const bool fp8 = IsFp8(p.levels);
  p.centibits = 800;
  if (!fp8 && !ParseBits(words, p)) return false;
  std::uint32_t group = 0;
  if (words.Eat("_g")) {
    if (!words.EatNumber(1, kMaxDim, group)) return false;
    p.group = static_cast<std::uint16_t>(group);
  }
  if (words.Eat("_pc")) {
    p.axis = Axis::kChannel;
  } else if (!words.Eat("_pt") && !fp8) {
    return false;  // what has a layout must say its axis: which one is better differs by side
  }
  p.sym = words.Eat("_sym");
  return ParseModifiers(words, p);
}

// The known names of a side; with the group that `text` gives, so that the nearest has it too.
std::vector<std::string> Candidates(std::string_view text, Side side) {
  std::vector<std::string> names(NamesOf(side).begin(), NamesOf(side).end());
  const std::size_t at = text.find("_g");
  if (side == Side::kK || at == text.npos) return names;
  std::size_t end = at + 2;
  while (end < text.size() && IsDigit(text[end])) ++end;
  if (end == at + 2) return names;
  for (std::string& name : names) {
    const std::size_t axis = name.find("_pt");
    if (axis != name.npos) name.insert(axis, text.substr(at, end - at));
  }
  return names;
}

Status UnknownFormat(std::string_view text, Side side) {
  return Status::Invalid("unknown format " + Quoted(text) + "; the nearest is " +
                         Quoted(Nearest(text, Candidates(text, side))) + "; " + ThereAre(side));
}

// Hundredths, without zeros at the end.
std::string Decimal(std::uint32_t centi) {
  std::string text = std::to_string(centi / 100);
  if (centi % 100 != 0) text.append(1, '.').append(std::to_string(centi / 10 % 10));
  if (centi % 10 != 0) text += std::to_string(centi % 10);
  return text;
}

Status NoLayout(std::string_view text, Side side) {
  return Status::Unsupported("format " + Quoted(text) + " has no layout on " + SideName(side) +
                             " yet; " + ThereAre(side));
}

Status HostType(std::string_view text, const std::string& flag) {
  return Status::Unsupported(Quoted(text) + " is a type of the host: give it to the host's own " +
                             flag);
}

// ------------------------------------------------------------------------------------- pairs

Pair PairOf(const ShortName& s) {
  return {ParseFormat(s.k, Side::kK).value(), ParseFormat(s.v, Side::kV).value()};
}

// "k=… v=…"
Result<Pair> ParseSides(std::string_view text) {
  const std::size_t space = text.find(" v=");
  if (space == text.npos) {
    return Status::Invalid(Quoted(text) + " names K alone; write \"k=… v=…\"");
  }
  const Result<Format> k = ParseFormat(text.substr(2, space - 2), Side::kK);
  if (!k.ok()) return k.status();
  const Result<Format> v = ParseFormat(text.substr(space + 3), Side::kV);
  if (!v.ok()) return v.status();
  return Pair{k.value(), v.value()};
}

// "k3v2.5" and the like: false if it is no such word.
bool ParsePairWord(std::string_view text, std::uint32_t& k, std::uint32_t& v) {
  Words words(text);
  return words.Eat("k") && words.EatCenti(k) && words.Eat("v") && words.EatCenti(v) && words.done();
}

// What a short name means at each size; where there is nothing of that size, the error.
Result<Pair> PairOfBits(std::uint32_t k, std::uint32_t v) {
  Pair pair;
  pair.k = {Levels::kInt, static_cast<std::uint16_t>(k), Axis::kChannel};
  pair.k.weighted = k != 800;
  pair.v = {v == 800   ? Levels::kInt
            : v == 400 ? Levels::kLm
                       : Levels::kTcq,
            static_cast<std::uint16_t>(v)};
  pair.v.sym = v == 800;
  pair.v.hadamard = true;
  if (const auto coding = CodingOf(pair.k, Side::kK); !coding.ok()) return coding.status();
  if (const auto coding = CodingOf(pair.v, Side::kV); !coding.ok()) return coding.status();
  return pair;
}

Status UnknownPair(std::string_view text) {
  std::vector<std::string> names;
  for (const ShortName& s : kShortNames) names.emplace_back(s.name);
  for (Side side : {Side::kK, Side::kV}) {
    for (std::string& name : Candidates(text, side)) names.push_back(std::move(name));
  }
  return Status::Invalid("unknown type " + Quoted(text) + "; the nearest is " +
                         Quoted(Nearest(text, names)) + "; there are " + Joined(PairNames()) +
                         ", and a format for each side, as in \"k=int8_pc v=lm4_pt+had\"");
}

}  // namespace

Result<Format> ParseFormat(std::string_view text, Side side) {
  if (IsHostType(text)) return HostType(text, side == Side::kK ? "-ctk" : "-ctv");
  Format format;
  if (!ParseGrammar(text, format)) return UnknownFormat(text, side);
  if (!CodingOf(format, side).ok()) return NoLayout(text, side);
  return format;
}

std::string FormatName(const Format& format) {
  if (!format.coded()) return "f16";
  std::string name;
  switch (format.levels) {
    case Levels::kFp8E4m3:
      name = "fp8_e4m3";
      break;
    case Levels::kFp8E5m2:
      name = "fp8_e5m2";
      break;
    default:
      name = format.levels == Levels::kInt ? "int" : format.levels == Levels::kLm ? "lm" : "tcq";
      name += Decimal(format.centibits);
  }
  if (format.group != 0) name += "_g" + std::to_string(format.group);
  name += format.axis == Axis::kChannel ? "_pc" : "_pt";
  if (format.sym) name += "_sym";
  if (format.hadamard) name += "+had";
  if (format.mean) name += "+mean";
  if (format.weighted) name += "+qw";
  if (format.by_range) name += "+rw";
  if (format.outliers != 0) name += "+out" + std::to_string(format.outliers);
  return name;
}

std::span<const ShortName> ShortNames() { return kShortNames; }

Result<Pair> ParsePair(std::string_view text) {
  for (const ShortName& s : kShortNames) {
    if (text == s.name) return PairOf(s);
  }
  if (text.substr(0, 2) == "k=") return ParseSides(text);
  if (IsHostType(text)) return HostType(text, "-ctk and -ctv");
  if (std::uint32_t kc, vc; ParsePairWord(text, kc, vc)) {
    if (kc >= 100 && kc <= 800 && vc >= 100 && vc <= 800) return PairOfBits(kc, vc);
    return Status::Unsupported(Quoted(text) + ": K and V take 1 to 8 bits each, as in k3.5v3");
  }
  const Result<Format> k = ParseFormat(text, Side::kK), v = ParseFormat(text, Side::kV);
  if (k.ok() && v.ok()) return Pair{k.value(), v.value()};
  if (k.ok() || v.ok()) {
    const std::string example =
        k.ok() ? "k=" + std::string(text) + " v=f16" : "k=f16 v=" + std::string(text);
    return Status::Invalid(Quoted(text) + " is a format of " + (k.ok() ? "K" : "V") +
                           " alone; name both sides, as in " + Quoted(example));
  }
  if (k.status().code() == Code::kUnsupported) {
    return Status::Unsupported("format " + Quoted(text) + " has no layout yet; " +
                               ThereAre(Side::kK) + "; " + ThereAre(Side::kV));
  }
  return UnknownPair(text);
}

std::string PairName(const Pair& pair) {
  for (const ShortName& s : kShortNames) {
    if (pair == PairOf(s)) return s.name;
  }
  const Result<Pair> by_bits = PairOfBits(pair.k.centibits, pair.v.centibits);
  if (by_bits.ok() && by_bits.value() == pair)
    return "k" + Decimal(pair.k.centibits) + "v" + Decimal(pair.v.centibits);
  return "k=" + FormatName(pair.k) + " v=" + FormatName(pair.v);
}

// What kRows can hold.
bool HasRows(const Format& format, Side side) {
  if (format.weighted || format.by_range || format.levels == Levels::kTcq ||
      (side == Side::kV && format.mean))
    return false;
  if (IsFp8(format.levels)) return !format.sym && format.centibits == 800;
  const bool whole = format.centibits % 100 == 0 && format.centibits >= 100;
  if (format.levels == Levels::kLm) return whole && format.centibits <= 600 && !format.sym;
  return format.levels == Levels::kInt && whole && format.centibits <= 800 &&
         !(format.sym && format.centibits == 100);
}

Result<Coding> CodingOf(const Format& format, Side side) {
  Format f = format;
  if (f == Format{}) return Coding::kF16;
  if (side == Side::kK) {
    f.mean = false;
    if (f == Format{Levels::kInt, 800, Axis::kChannel}) return Coding::kKInt8;
    if (f == Format{Levels::kInt, 400, Axis::kChannel}) return Coding::kKInt4;
    const bool whole = f.centibits % 100 == 0, varied = f.weighted != f.by_range;
    if (varied) f.weighted = f.by_range = false;
    if ((varied || whole) && f.centibits >= 100 && f.centibits <= 800) {
      f.centibits = 0;
      if (f == Format{Levels::kInt, 0, Axis::kChannel}) return Coding::kKPlanes;
    }
  } else {
    f.hadamard = false;
    f.group = 0;
    if (f == Format{Levels::kInt, 800, Axis::kToken, 0, true}) return Coding::kVInt8;
    if (f == Format{Levels::kLm, 400, Axis::kToken}) return Coding::kVLm4;
    if (f.levels == Levels::kTcq && f.centibits >= 100 && f.centibits <= 500) {
      f.centibits = 0;
      if (f == Format{Levels::kTcq, 0, Axis::kToken}) return Coding::kVTrellis;
    }
  }
  if (HasRows(format, side)) return Coding::kRows;
  return NoLayout(FormatName(format), side);
}

Result<Format> Resolve(Format format, Side side, std::uint32_t dim) {
  const Result<Coding> coding = CodingOf(format, side);
  if (!coding.ok()) return coding.status();
  if (dim == 0 || dim > kMaxDim) {
    return Status::Invalid("a head of " + std::to_string(dim) + " elements; 1 to " +
                           std::to_string(kMaxDim) + " are handled");
  }
  if (!format.coded() || format.axis == Axis::kChannel) return format;
  if (format.group == 0) {
    std::uint32_t group = dim % 64 == 0 ? 64 : std::min<std::uint32_t>(dim, 128);
    while (dim % group != 0) --group;
    format.group = static_cast<std::uint16_t>(group);
  } else if (dim % format.group != 0) {
    return Status::Invalid("format " + Quoted(FormatName(format)) + ": groups of " +
                           std::to_string(format.group) + " do not divide a head of " +
                           std::to_string(dim) + " elements");
  }
  return format;
}

Format WithBits(const Format& format, Side side, std::uint16_t centibits) {
  Format f;
  f.centibits = centibits;
  if (side == Side::kK) {
    f.levels = Levels::kInt;
    f.axis = Axis::kChannel;
    f.mean = format.mean;
    f.weighted = centibits != 800;
    return f;
  }
  f.levels = centibits == 800 ? Levels::kInt : centibits == 400 ? Levels::kLm : Levels::kTcq;
  f.sym = centibits == 800;
  f.hadamard = format.hadamard;
  if (format.axis == Axis::kToken) f.group = format.group;
  return f;
}

double BitsPerElement(const Format& resolved, Side side, std::uint32_t dim,
                      std::uint32_t page_size) {
  const Result<Coding> coding = CodingOf(resolved, side);
  if (!coding.ok() || dim == 0 || page_size == 0) return 0;
  PageShape shape = ShapeOf(resolved, side, dim, page_size);
  if (shape.group == 0) shape.group = dim;
  return 8.0 * static_cast<double>(EncodedBytes(coding.value(), shape).total) /
         (double{1} * page_size * dim);
}

}  // namespace kvtamp::codec
