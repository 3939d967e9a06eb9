#include "codec/format.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace kvtamp::codec {
namespace {

bool Contains(const std::string& text, std::string_view word) {
  return text.find(word) != text.npos;
}

// Bits in hundredths, whole and not.
constexpr std::uint16_t kCentibits[] = {100, 125, 200, 250, 300, 301, 390, 400, 500, 600, 725, 800};

// What Format can hold within the grammar, at these sizes.
std::vector<Format> AllFormats() {
  std::vector<Format> all = {Format{}};
  for (Levels levels : {Levels::kInt, Levels::kLm, Levels::kTcq}) {
    for (std::uint16_t bits : kCentibits) {
      for (Axis axis : {Axis::kChannel, Axis::kToken}) {
        for (std::uint16_t group : {0, 1, 32, 64, 576}) {
          for (int flags = 0; flags < 32; ++flags) {
            all.push_back({levels, bits, axis, group, (flags & 1) != 0, (flags & 2) != 0,
                           (flags & 4) != 0, (flags & 8) != 0, (flags & 16) != 0});
          }
        }
      }
    }
  }
  return all;
}

TEST(Format, NamesParseBackOrAreRefusedForTheirLayout) {
  std::map<Side, int> with_layout;
  for (Side side : {Side::kK, Side::kV}) {
    std::set<std::string> names;
    for (const Format& format : AllFormats()) {
      const std::string name = FormatName(format);
      EXPECT_TRUE(names.insert(name).second) << name << " stands for two formats";
      const Result<Format> parsed = ParseFormat(name, side);
      if (CodingOf(format, side).ok()) {
        ++with_layout[side];
        ASSERT_TRUE(parsed.ok()) << name << ": " << parsed.status().message();
        EXPECT_EQ(parsed.value(), format) << name;
      } else {
        EXPECT_EQ(parsed.status().code(), Code::kUnsupported) << name;
      }
    }
  }
  EXPECT_GT(with_layout[Side::kK], 100);
  EXPECT_GT(with_layout[Side::kV], 100);
}

TEST(Format, Codings) {
  const auto coding = [](const char* name, Side side) {
    return CodingOf(ParseFormat(name, side).value(), side).value();
  };
  EXPECT_EQ(coding("f16", Side::kK), Coding::kF16);
  EXPECT_EQ(coding("f16", Side::kV), Coding::kF16);
  EXPECT_EQ(coding("int4_pc+mean", Side::kK), Coding::kKInt4);
  EXPECT_EQ(coding("int8_pc", Side::kK), Coding::kKInt8);
  EXPECT_EQ(coding("int8_g32_pt_sym+had", Side::kV), Coding::kVInt8);
  EXPECT_EQ(coding("lm4_pt", Side::kV), Coding::kVLm4);
  EXPECT_EQ(coding("int3_pc+mean", Side::kK), Coding::kKPlanes);
  EXPECT_EQ(coding("int4_pc+qw", Side::kK), Coding::kKPlanes);
  EXPECT_EQ(coding("int2.6_pc+mean+qw", Side::kK), Coding::kKPlanes);
  EXPECT_EQ(coding("tcq2.25_g32_pt+had", Side::kV), Coding::kVTrellis);
  for (const char* name : {"fp8_e4m3_pt", "fp8_e5m2_pc+had", "int4_g32_pt+had", "int5_pt_sym",
                           "int3_pc_sym", "lm3_pt+had", "int2_g16_pc+out2", "int8_pt"}) {
    EXPECT_EQ(coding(name, Side::kK), Coding::kRows) << name;
    EXPECT_EQ(coding(name, Side::kV), Coding::kRows) << name;
  }
  EXPECT_EQ(coding("int4_pc+mean", Side::kK), Coding::kKInt4);
  EXPECT_EQ(coding("int4_pc", Side::kV), Coding::kRows);
  EXPECT_EQ(coding("fp8_e4m3+mean", Side::kK), Coding::kRows);
}

TEST(Format, DecimalsAreWrittenInOneWay) {
  EXPECT_EQ(FormatName(ParseFormat("int3.5_pc+qw", Side::kK).value()), "int3.5_pc+qw");
  EXPECT_EQ(FormatName(ParseFormat("tcq2.05_pt", Side::kV).value()), "tcq2.05_pt");
  for (const char* text : {"int3.50_pc+qw", "int03_pc", "int3._pc+qw", "int3.555_pc+qw",
                           "int.5_pc+qw", "int3.0_pc+qw", "int0.5_pc+qw", "int8.5_pc+qw"}) {
    EXPECT_EQ(ParseFormat(text, Side::kK).status().code(), Code::kInvalidArgument) << text;
  }
}

TEST(Format, UnknownNamesGetTheNearestAndTheList) {
  const struct {
    Side side;
    const char *text, *nearest;
  } cases[] = {
      {Side::kK, "int4_pc+meen", "\"int4_pc+mean\""},
      {Side::kK, "int8", "\"int8_pc\""},
      {Side::kK, "INT4_pc", "\"int4_pc\""},
      {Side::kK, "int9_pc", "\"int8_pc\""},
      {Side::kK, "f61", "\"f16\""},
      {Side::kK, "int4_pc_pc", "\"int4_pc\""},
      {Side::kK, "", "\"f16\""},
      {Side::kK, "int4_pc+mean+mean", "\"int4_pc+mean\""},
      {Side::kV, "lm4_g32_pt+hat", "\"lm4_g32_pt+had\""},
      {Side::kV, "lm4_g0_pt+had", "nearest"},
      {Side::kV, "ln4_pt", "\"lm4_pt\""},
      {Side::kV, "int8_pt_sim", "\"int8_pt_sym\""},
      {Side::kV, "lm4_g999_pt", "nearest"},
      {Side::kV, "lm4_pt ", "\"lm4_pt\""},
  };
  for (const auto& c : cases) {
    const Status status = ParseFormat(c.text, c.side).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << c.text;
    EXPECT_TRUE(Contains(status.message(), c.nearest)) << c.text << ": " << status.message();
    EXPECT_TRUE(Contains(status.message(), c.side == Side::kK ? "int8_pc+mean" : "int8_pt_sym+had"))
        << status.message();
  }
}

TEST(Format, GrammarWithoutLayoutIsUnsupported) {
  for (const char* text : {"int3.5_pc", "tcq6_pt", "tcq3_pt+had+qw", "lm7_pt+had", "lm3_pt_sym",
                           "fp8_e4m3_pt_sym", "int1_pt_sym"}) {
    for (Side side : {Side::kK, Side::kV}) {
      const Status status = ParseFormat(text, side).status();
      EXPECT_EQ(status.code(), Code::kUnsupported) << text;
      EXPECT_TRUE(Contains(status.message(), "there are")) << status.message();
    }
    EXPECT_EQ(ParsePair(text).status().code(), Code::kUnsupported) << text;
  }
  // Only keys have a mean that softmax does not see, and only their channels queries to weigh them.
  EXPECT_EQ(ParseFormat("int4_pc+mean", Side::kV).status().code(), Code::kUnsupported);
  EXPECT_EQ(ParseFormat("int4_pc+qw", Side::kV).status().code(), Code::kUnsupported);
  EXPECT_EQ(ParseFormat("tcq3_pt+had", Side::kK).status().code(), Code::kUnsupported);
}

TEST(Format, HostTypesAreTheHosts) {
  for (const char* text : {"f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"}) {
    const Status k = ParseFormat(text, Side::kK).status(), v = ParseFormat(text, Side::kV).status();
    EXPECT_EQ(k.code(), Code::kUnsupported) << text;
    EXPECT_TRUE(Contains(k.message(), "-ctk") && !Contains(k.message(), "-ctv")) << k.message();
    EXPECT_TRUE(Contains(v.message(), "-ctv") && !Contains(v.message(), "-ctk")) << v.message();
    const Status pair = ParsePair(text).status();
    EXPECT_EQ(pair.code(), Code::kUnsupported) << text;
    EXPECT_TRUE(Contains(pair.message(), "-ctk and -ctv")) << pair.message();
  }
}

TEST(Pair, ShortNames) {
  for (const ShortName& s : ShortNames()) {
    const Result<Pair> pair = ParsePair(s.name);
    ASSERT_TRUE(pair.ok()) << s.name;
    EXPECT_EQ(FormatName(pair.value().k), s.k);
    EXPECT_EQ(FormatName(pair.value().v), s.v);
    const std::string name = PairName(pair.value());
    EXPECT_EQ(name, s.name == std::string("auto")   ? "k4v4"
                    : s.name == std::string("int8") ? "k8v8"
                                                    : s.name);
  }
  EXPECT_EQ(ParsePair("auto").value(), ParsePair("k4v4").value());
  EXPECT_EQ(ParsePair("int8").value(), ParsePair("k8v8").value());
  EXPECT_EQ(FormatName(ParsePair("k4v4").value().k), "int4_pc+qw");
  EXPECT_EQ(ParsePair("k4v8").value().v, ParsePair("k8v8").value().v);
  EXPECT_EQ(ParsePair("f16").value(), Pair{});
}

TEST(Pair, AnySizeHasAShortName) {
  const Pair pair = ParsePair("k3.75v2.5").value();
  EXPECT_EQ(FormatName(pair.k), "int3.75_pc+qw");
  EXPECT_EQ(FormatName(pair.v), "tcq2.5_pt+had");
  EXPECT_EQ(PairName(pair), "k3.75v2.5");
  EXPECT_EQ(FormatName(ParsePair("k1v1").value().v), "tcq1_pt+had");
}

TEST(Pair, BothSidesByName) {
  const Pair pair = ParsePair("k=int8_pc v=lm4_g32_pt").value();
  EXPECT_EQ(FormatName(pair.k), "int8_pc");
  EXPECT_EQ(FormatName(pair.v), "lm4_g32_pt");
  EXPECT_EQ(PairName(pair), "k=int8_pc v=lm4_g32_pt");
  EXPECT_EQ(ParsePair(PairName(pair)).value(), pair);
  EXPECT_EQ(PairName(ParsePair("k=int4_pc+qw v=lm4_pt+had").value()), "k4v4");
  EXPECT_EQ(PairName(ParsePair("k=int4_pc+mean v=lm4_pt+had").value()),
            "k=int4_pc+mean v=lm4_pt+had");
  EXPECT_EQ(ParsePair("k=int8_pc").status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(ParsePair("k=int8_pc v=int8_pc").ok());
  EXPECT_TRUE(ParsePair("fp8_e4m3_pt").ok());  // one name for both sides
}

TEST(Pair, Errors) {
  const Status one_side = ParsePair("int4_pc+mean").status();
  EXPECT_EQ(one_side.code(), Code::kInvalidArgument);
  EXPECT_TRUE(Contains(one_side.message(), "K alone")) << one_side.message();
  EXPECT_TRUE(Contains(ParsePair("tcq3_pt").status().message(), "V alone"));
  for (const char* text : {"k3v6", "k2v7.5", "k4v16", "k9v3"}) {
    EXPECT_EQ(ParsePair(text).status().code(), Code::kUnsupported) << text;
  }
  const struct {
    const char *text, *nearest;
  } cases[] = {{"k4b4", "\"k4v4\""},
               {"aut", "\"auto\""},
               {"int4", "\"int8\""},
               {"k8v8 ", "\"k8v8\""},
               {"int8_pc+mena", "\"int8_pc+mean\""},
               {"lm4_g16_pt+hda", "\"lm4_g16_pt+had\""}};
  for (const auto& c : cases) {
    const Status status = ParsePair(c.text).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << c.text;
    EXPECT_TRUE(Contains(status.message(), c.nearest)) << c.text << ": " << status.message();
  }
}

TEST(Resolve, Groups) {
  const Format v = ParseFormat("lm4_pt+had", Side::kV).value();
  const struct {
    std::uint32_t dim;
    int group;
  } cases[] = {{32, 32},   {40, 40},  {64, 64},  {72, 72},  {80, 80},   {96, 96},
               {112, 112}, {128, 64}, {136, 68}, {192, 64}, {200, 100}, {576, 64}};
  for (const auto& c : cases) {
    const Format resolved = Resolve(v, Side::kV, c.dim).value();
    EXPECT_EQ(resolved.group, c.group) << c.dim;
    EXPECT_EQ(Resolve(resolved, Side::kV, c.dim).value(), resolved);
  }
  const Format g48 = ParseFormat("lm4_g48_pt", Side::kV).value();
  EXPECT_EQ(Resolve(g48, Side::kV, 96).value(), g48);
  const Status status = Resolve(g48, Side::kV, 64).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_TRUE(Contains(status.message(), "48") && Contains(status.message(), "64"))
      << status.message();
  const Format k = ParseFormat("int4_pc", Side::kK).value();
  EXPECT_EQ(Resolve(k, Side::kK, 80).value(), k);
  EXPECT_FALSE(Resolve(k, Side::kK, 584).ok());
  EXPECT_FALSE(Resolve(k, Side::kK, 0).ok());
}

double Bits(const char* name, Side side, std::uint32_t dim, std::uint32_t page_size) {
  const Format format = Resolve(ParseFormat(name, side).value(), side, dim).value();
  return BitsPerElement(format, side, dim, page_size);
}

TEST(BitsPerElement, CountsScalesAndPadding) {
  EXPECT_EQ(Bits("f16", Side::kK, 64, 64), 16.0);
  EXPECT_EQ(Bits("int4_pc", Side::kK, 64, 64), 4.25);
  EXPECT_EQ(Bits("int4_pc", Side::kK, 80, 16), 5.0);
  EXPECT_EQ(Bits("int8_pc+mean", Side::kK, 128, 128), 8.125);
  EXPECT_EQ(Bits("lm4_pt+had", Side::kV, 128, 64), 4.125);
  EXPECT_EQ(Bits("lm4_g32_pt", Side::kV, 128, 64), 4.25);
  EXPECT_DOUBLE_EQ(Bits("lm4_pt", Side::kV, 40, 64), 4.0 * 48 / 40 + 8.0 / 40);
  EXPECT_EQ(Bits("int8_pt_sym", Side::kV, 64, 32), 8.125);
  // Scales, minima and widths are 20 bits a channel and page.
  EXPECT_EQ(Bits("int3.5_pc+qw", Side::kK, 64, 64), 3.5 + 20.0 / 64);
  EXPECT_EQ(Bits("int2.6_pc+qw", Side::kK, 64, 64), 2.625 + 20.0 / 64);  // in steps of 4 of 64
  EXPECT_EQ(Bits("tcq2.25_pt+had", Side::kV, 64, 64), 2.25 + 8.0 / 64);
  EXPECT_DOUBLE_EQ(Bits("tcq2.2_pt+had", Side::kV, 80, 64), 2.0 + 8.0 / 80);  // 5 blocks: halves
}

// The rows of the table under `heading`: what stands between the bars.
std::vector<std::vector<std::string>> TableUnder(const std::string& path,
                                                 const std::string& heading) {
  std::ifstream file(path);
  EXPECT_TRUE(file.is_open()) << path;
  std::vector<std::vector<std::string>> rows;
  std::string line;
  bool inside = false;
  while (std::getline(file, line)) {
    if (line.rfind("## ", 0) == 0) inside = line == "## " + heading;
    if (!inside || line.rfind("| `", 0) != 0) continue;
    std::vector<std::string>& row = rows.emplace_back();
    std::istringstream cells(line.substr(1));
    for (std::string cell; std::getline(cells, cell, '|');) {
      const std::size_t first = cell.find_first_not_of(" `");
      if (first == cell.npos) continue;
      row.push_back(cell.substr(first, cell.find_last_not_of(" `") - first + 1));
    }
  }
  return rows;
}

std::string TwoDecimals(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f", x);
  return text;
}

TEST(Docs, ListExactlyTheShortNamesWithTheirSizes) {
  const auto rows = TableUnder(KVTAMP_SOURCE_DIR "/docs/formats.md", "Short names");
  ASSERT_EQ(rows.size(), ShortNames().size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const ShortName& s = ShortNames()[i];
    std::vector<std::string> expected = {s.name, s.k, s.v};
    for (std::uint32_t dim : {64u, 128u}) {
      const double k = Bits(s.k, Side::kK, dim, 64), v = Bits(s.v, Side::kV, dim, 64);
      for (double bits : {k, v, (k + v) / 2}) expected.push_back(TwoDecimals(bits));
    }
    expected.emplace_back(s.note);
    EXPECT_EQ(rows[i], expected);
  }
}

// `intN_pc` in the docs stands for whole N, `intB_pc+qw` for any size.
std::vector<std::string> Expand(const std::string& name) {
  const std::size_t at = name.find_first_of("NB");
  if (at == name.npos) return {name};
  std::vector<std::string> all;
  for (std::uint16_t centibits : kCentibits) {
    if (name[at] == 'N' && centibits % 100 != 0) continue;
    Format format{Levels::kInt, centibits, Axis::kChannel};
    std::string number = FormatName(format).substr(3);
    number.resize(number.find('_'));
    all.push_back(name.substr(0, at) + number + name.substr(at + 1));
  }
  return all;
}

TEST(Docs, ListExactlyTheFormats) {
  std::map<std::string, std::string> documented, known;
  for (const auto& row : TableUnder(KVTAMP_SOURCE_DIR "/docs/formats.md", "Formats")) {
    ASSERT_GE(row.size(), 4u);
    for (const std::string& name : Expand(row[0])) {
      const Side side = row[1] == "K" ? Side::kK : Side::kV;
      const auto format = ParseFormat(name, side);
      if (!format.ok() || CodingOf(format.value(), side).value() == Coding::kRows ||
          documented.contains(row[1] + " " + name))
        continue;
      documented[row[1] + " " + name] = row[3];
    }
  }
  constexpr const char* kLayouts[] = {"f16",   "kKInt8",   "kKInt4",   "kVInt8",
                                      "kVLm4", "kKPlanes", "kVTrellis"};
  for (Side side : {Side::kK, Side::kV}) {
    for (const Format& format : AllFormats()) {
      const Result<Coding> coding = CodingOf(format, side);
      if (format.group != 0 || !format.coded() || !coding.ok() || coding.value() == Coding::kRows)
        continue;
      known[(side == Side::kK ? "K " : "V ") + FormatName(format)] =
          kLayouts[static_cast<int>(coding.value())];
    }
  }
  EXPECT_EQ(documented, known);
}

}  // namespace
}  // namespace kvtamp::codec
