#include "control/profile.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>

namespace kvtamp::control {
namespace {

codec::Pair Type(const char* name) { return codec::ParsePair(name).value(); }

class File {
 public:
  explicit File(const std::string& text)
      : path_(testing::TempDir() + "profile" + std::to_string(::getpid()) + ".toml") {
    std::ofstream(path_) << text;
  }
  ~File() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

Profile Example() {
  Profile p;
  p.model = "a model";
  for (std::uint32_t i = 0; i < 4; ++i)
    p.layers.push_back({i, 64, 64, {1e-3, 1e-3}, {1e-3, 1e-3}, {}, {}});
  return p;
}

double MeanBits(const HeadTypes& types) {
  double sum = 0, n = 0;
  for (const auto& [layer, heads] : types) {
    for (const codec::Pair& pair : heads) {
      sum += pair.k.centibits + pair.v.centibits;
      n += 2;
    }
  }
  return sum / n / 100;
}

TEST(Profile, WhatIsWrittenIsRead) {
  Profile p = Example();
  p.layers[1].type_k = {Type("k3v3").k, Type("k8v8").k};
  p.layers[3].window = 512;
  const File file("");
  ASSERT_TRUE(WriteProfile(file.path(), p).ok());
  const auto read = ReadProfile(file.path());
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(ProfileText(read.value()), ProfileText(p));
  EXPECT_EQ(read.value().layers[1].type_k, p.layers[1].type_k);
  EXPECT_EQ(read.value().model, "a model");
}

TEST(Profile, MistakesAreSaid) {
  const auto said = [](const std::string& text) {
    const File file(text);
    const auto read = ReadProfile(file.path());
    EXPECT_FALSE(read.ok()) << text;
    return read.status().message();
  };
  const std::string layer =
      "version = 1\n[[layer]]\nindex = 0\nhead_size_k = 64\nhead_size_v = 64\n";
  EXPECT_NE(said("").find("version 1"), std::string::npos);
  EXPECT_NE(said("version = 2\n").find("version 1"), std::string::npos);
  EXPECT_NE(said("version = 1\n").find("no layers"), std::string::npos);
  EXPECT_NE(said("version = 1\n[[layer]]\nindex = 0\n").find("head_size_k"), std::string::npos);
  EXPECT_NE(said(layer + "k = [1, 2]\nv = [1]\n").find("2 and of 1 heads"), std::string::npos);
  EXPECT_NE(said(layer + "k = [nan]\n").find("no number"), std::string::npos);
  EXPECT_NE(said(layer + "typ_k = []\n").find("typ_k"), std::string::npos);
  EXPECT_NE(said(layer + "type_k = [\"int3_pq\"]\n").find("int3_pq"), std::string::npos);
  EXPECT_NE(said("version = ").find(":1"), std::string::npos);
  EXPECT_FALSE(ReadProfile("/nonexistent/profile.toml").ok());
  EXPECT_FALSE(WriteProfile("/nonexistent/profile.toml", Example()).ok());
}

TEST(ShareBits, TheMeanIsThatOfTheType) {
  Profile p = Example();
  p.layers[2].k[1] = 0.5;
  p.layers[0].v[0] = 1e-5;
  for (const char* type : {"k4v4", "k3.5v3", "k2.25v2", "k1.5v1.5"}) {
    const HeadTypes types = ShareBits(p, Type(type));
    ASSERT_EQ(types.size(), 4u);
    const codec::Pair t = Type(type);
    const double mean = (t.k.centibits + t.v.centibits) / 200.0;
    EXPECT_LE(MeanBits(types), mean + 1e-9) << type;
    EXPECT_GE(MeanBits(types), mean - 0.25 / 16) << type;
    EXPECT_GT(types.at(2)[1].k.centibits, types.at(1)[1].k.centibits) << type;
    for (const auto& [layer, heads] : types) {
      for (const codec::Pair& pair : heads) {
        EXPECT_TRUE(codec::CodingOf(pair.k, codec::Side::kK).ok());
        EXPECT_TRUE(codec::CodingOf(pair.v, codec::Side::kV).ok());
        EXPECT_TRUE(!pair.k.mean && pair.k.weighted && pair.v.hadamard);
      }
    }
  }
}

// A layer that keeps a sixteenth of the tokens pays a sixteenth for a bit.
TEST(ShareBits, BitsAreCheapWhereAWindowKeepsFewTokens) {
  Profile p = Example();
  for (std::size_t i : {1u, 2u, 3u}) p.layers[i].window = kTokensShared / 16;
  for (const char* type : {"k4v4", "k2.25v2"}) {
    const HeadTypes types = ShareBits(p, Type(type));
    const codec::Pair t = Type(type);
    double sum = 0, n = 0;
    for (const auto& [layer, heads] : types) {
      const double kept = layer == 0 ? 1 : 1.0 / 16;
      for (const codec::Pair& pair : heads) {
        sum += kept * (pair.k.centibits + pair.v.centibits);
        n += 2 * kept;
      }
    }
    EXPECT_LE(sum / n, (t.k.centibits + t.v.centibits) / 2.0 + 1e-9) << type;
    EXPECT_GE(sum / n, (t.k.centibits + t.v.centibits) / 2.0 - 25) << type;
    // A sixteenth of the price: two bits more, where there are so many.
    EXPECT_GE(types.at(1)[0].k.centibits, std::min(800, types.at(0)[0].k.centibits + 150)) << type;
  }
}

TEST(ShareBits, FourTimesTheSensitivityIsOneBit) {
  Profile p = Example();
  p.layers[0].k = {4e-2, 4e-2};
  p.layers[1].k = {1e-2, 1e-2};
  const HeadTypes types = ShareBits(p, Type("k3v3"));
  EXPECT_NEAR(types.at(0)[0].k.centibits - types.at(1)[0].k.centibits, 100, 25);
}

TEST(ShareBits, GivenFormatsHoldAndF16Stays) {
  Profile p = Example();
  p.layers[0].type_k = {Type("k8v8").k, Type("k2v2").k};
  HeadTypes types = ShareBits(p, Type("k3v3"));
  EXPECT_EQ(types.at(0)[0].k, Type("k8v8").k);
  EXPECT_EQ(types.at(0)[1].k, Type("k2v2").k);
  types = ShareBits(p, Type("f16"));
  EXPECT_EQ(types.at(1)[0], Type("f16"));
}

}  // namespace
}  // namespace kvtamp::control
