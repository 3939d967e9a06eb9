// What holds for every policy, by its name.
#include "policy/registry.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>

#include "policy/policy_fixture.h"
#include "policy/select.h"

namespace kvtamp::policy {
namespace {

constexpr float kBad[] = {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()};
constexpr Needs kAllNeeds[] = {
    kPositions, kAttentionSum, kAttentionRows, kAttentionWindow, kAttentionLast, kAttentionMax, kK,
    kV,         kQueries};

std::vector<std::string> AllNames() {
  std::vector<std::string> names;
  for (const PolicyInfo& info : Policies()) {
    names.emplace_back(info.name);
    if (MakePolicy(std::string(info.name) + "+value_norm").ok()) {
      names.push_back(std::string(info.name) + "+value_norm");
    }
  }
  return names;
}

Policy Made(const std::string& name, const Options& options = {}) {
  return MakePolicy(name, options).value();
}

// A layer of two heads that have everything.
struct TwoHeads {
  OwnedHead own[2];
  std::vector<Head> heads;
  std::vector<float> angle = {1.0f, 0.1f};
  Layer layer;
  std::vector<float> scores[2];

  explicit TwoHeads(std::uint32_t n, std::uint32_t m) : own{FullHead(n, 1), FullHead(m, 2)} {
    layer.next_position = 1000;
    layer.window_queries = 16;
    layer.rope = {angle, false};
    Refresh();
  }
  void Refresh() {
    heads = {own[0].head, own[1].head};
    layer.heads = heads;
    for (int h : {0, 1}) scores[h].assign(heads[h].n, -77);
  }
  Status Score(const Policy& policy) {
    const std::span<float> views[] = {scores[0], scores[1]};
    return policy.Score(layer, views);
  }
};

// Makes one statistic unusable.
void Remove(Head& head, Needs need) {
  if (need == kPositions) head.positions = {};
  if (need == kAttentionSum) head.attention_sum = {};
  if (need == kAttentionRows) head.attention_rows = {};
  if (need == kAttentionWindow) head.attention_window = {};
  if (need == kAttentionLast) head.attention_last = {};
  if (need == kAttentionMax) head.attention_max = {};
  if (need == kK) head.k = {};
  if (need == kV) head.v = {};
  if (need == kQueries) head.queries = {};
}

TEST(Registry, NamesAreUniqueAndMakePolicies) {
  std::set<std::string> seen;
  for (const PolicyInfo& info : Policies()) {
    EXPECT_TRUE(seen.insert(info.name).second) << info.name;
    if (*info.alias != 0) {
      EXPECT_TRUE(seen.insert(info.alias).second) << info.alias;
      EXPECT_EQ(Made(info.alias).name(), info.name);
    }
  }
  for (const std::string& name : AllNames()) EXPECT_EQ(Made(name).name(), name);
  for (const char* name : {"h2o+value_norm", "snapkv+value_norm", "kvzip+value_norm"}) {
    EXPECT_TRUE(MakePolicy(name).ok()) << name;
  }
}

TEST(Registry, UnknownNamesAndWeightsThatMakeNoSenseAreRefused) {
  for (const char* name : {"", "none", "H2O", "h2o+", "+value_norm", "h2o+value_norm+value_norm",
                           "knorm+value_norm", "expected_attention+value_norm"}) {
    const Result<Policy> policy = MakePolicy(name);
    ASSERT_FALSE(policy.ok()) << name;
    EXPECT_EQ(policy.status().code(), Code::kInvalidArgument) << name;
  }
  const std::string message = MakePolicy("snap_kv").status().message();
  for (const PolicyInfo& info : Policies()) EXPECT_NE(message.find(info.name), message.npos);
}

TEST(Registry, SettingsOutOfRangeAreRefused) {
  const auto refused = [](auto change) {
    Options options;
    change(options);
    return !MakePolicy("h2o", options).ok();
  };
  EXPECT_FALSE(refused([](Options&) {}));
  EXPECT_TRUE(refused([](Options& o) { o.kernel_size = 4; }));
  EXPECT_TRUE(refused([](Options& o) { o.kernel_size = 0; }));
  EXPECT_TRUE(refused([](Options& o) { o.window_size = 0; }));
  EXPECT_TRUE(refused([](Options& o) { o.n_future_positions = 0; }));
  EXPECT_TRUE(refused([](Options& o) { o.epsilon = -1; }));
  EXPECT_TRUE(refused([](Options& o) { o.mix_lambda = 1.5f; }));
  EXPECT_TRUE(refused([](Options& o) { o.mix_lambda = kBad[0]; }));
  EXPECT_TRUE(refused([](Options& o) { o.similarity = -2; }));
}

TEST(Registry, EachNeedsExactlyWhatItSays) {
  for (const std::string& name : AllNames()) {
    const Policy policy = Made(name);
    for (Needs need : kAllNeeds) {
      TwoHeads all(20, 10);
      Remove(all.heads[1], need);
      const Status status = all.Score(policy);
      if ((policy.needs() & need) == 0) {
        EXPECT_TRUE(status.ok()) << name << ": " << status.message();
      } else {
        EXPECT_EQ(status.code(), Code::kInvalidArgument) << name << " without " << NeedNames(need);
        // Without K there is nothing to compare queries with either.
        EXPECT_NE(status.message().find(NeedNames(need) + " of KV head 1"), std::string::npos)
            << status.message();
      }
    }
  }
}

// Makes one statistic of entry i something else.
void Change(OwnedHead& own, Needs need, std::uint32_t i, float bad) {
  if (need == kPositions) own.positions[i]++;
  if (need == kQueries) own.mean[i] = bad;
  if (need == kAttentionSum) own.sum[i] = bad;
  if (need == kAttentionRows) own.rows[i] = bad;
  if (need == kAttentionWindow) own.window[i] = bad;
  if (need == kAttentionLast) own.last[i] = bad;
  if (need == kAttentionMax) own.max[i] = bad;
  if (need == kK) own.k[i * kDimK + 3] = bad;
  if (need == kV) own.v[i * kDimV + 2] = bad;
}

TEST(Registry, EachLooksAtExactlyWhatItNeeds) {
  Options options;
  options.window_size = 4;
  for (const std::string& name : AllNames()) {
    const Policy policy = Made(name, options);
    TwoHeads plain(20, 20);
    ASSERT_TRUE(plain.Score(policy).ok());
    for (Needs need : kAllNeeds) {
      TwoHeads all(20, 20);
      Change(all.own[1], need, 10, 0.125f);
      ASSERT_TRUE(all.Score(policy).ok());
      EXPECT_EQ(all.scores[1] != plain.scores[1], (policy.needs() & need) != 0)
          << name << " and " << NeedNames(need);
    }
  }
}

TEST(Registry, PartsOfWhatIsNeededAreMissedToo) {
  const auto refused = [](const char* name, auto change) {
    TwoHeads all(20, 10);
    change(all);
    return !all.Score(Made(name)).ok();
  };
  EXPECT_FALSE(refused("snapkv", [](TwoHeads&) {}));
  EXPECT_TRUE(refused("snapkv", [](TwoHeads& t) { t.layer.window_queries = 0; }));
  EXPECT_TRUE(refused(
      "h2o", [](TwoHeads& t) { t.heads[0].attention_sum = t.heads[0].attention_sum.first(19); }));
  EXPECT_TRUE(refused("knorm", [](TwoHeads& t) { t.heads[0].k.n = 19; }));
  EXPECT_TRUE(refused("knorm", [](TwoHeads& t) { t.heads[0].k.stride = kDimK - 1; }));
  EXPECT_TRUE(refused("expected_attention", [](TwoHeads& t) { t.heads[0].queries.variance = {}; }));
  EXPECT_TRUE(refused("expected_attention", [](TwoHeads& t) {
    t.angle.resize(kDimK / 2 + 1);
    t.layer.rope.angle = t.angle;
  }));
  EXPECT_EQ(Made("h2o+value_norm").needs(), kAttentionSum | kV);
}

TEST(Registry, ExpectedAttentionNeedsValuesOnlyForTheirNorm) {
  EXPECT_EQ(Made("expected_attention").needs(), kK | kV | kQueries);
  Options options;
  options.use_vnorm = false;
  TwoHeads all(20, 10);
  for (Head& head : all.heads) Remove(head, kV);
  EXPECT_TRUE(all.Score(Made("expected_attention", options)).ok());
  EXPECT_FALSE(all.Score(Made("expected_attention")).ok());
}

TEST(Registry, SettingsReachTheScores) {
  const auto changes = [](const char* name, auto change) {
    Options options;
    options.window_size = 4;
    TwoHeads a(30, 20), b(30, 20);
    EXPECT_TRUE(a.Score(Made(name, options)).ok());
    change(options);
    EXPECT_TRUE(b.Score(Made(name, options)).ok());
    return a.scores[0] != b.scores[0];
  };
  EXPECT_FALSE(changes("snapkv", [](Options&) {}));
  EXPECT_TRUE(changes("streaming_llm", [](Options& o) { o.n_sink = 6; }));
  EXPECT_TRUE(changes("expected_attention", [](Options& o) { o.n_sink = 6; }));
  EXPECT_TRUE(changes("expected_attention", [](Options& o) { o.n_future_positions = 3; }));
  EXPECT_TRUE(changes("expected_attention", [](Options& o) { o.epsilon = 0.5f; }));
  EXPECT_TRUE(changes("expected_attention", [](Options& o) { o.use_vnorm = false; }));
  EXPECT_TRUE(changes("snapkv", [](Options& o) { o.window_size = 9; }));
  EXPECT_TRUE(changes("snapkv", [](Options& o) { o.kernel_size = 7; }));
  EXPECT_TRUE(changes("r_kv", [](Options& o) { o.window_size = 9; }));
  EXPECT_TRUE(changes("r_kv", [](Options& o) { o.kernel_size = 1; }));
  EXPECT_TRUE(changes("r_kv", [](Options& o) { o.mix_lambda = 0.5f; }));
  EXPECT_TRUE(changes("r_kv", [](Options& o) { o.similarity = 0.9f; }));
  EXPECT_TRUE(changes("r_kv", [](Options& o) { o.n_retain = 3; }));
  EXPECT_TRUE(changes("random", [](Options& o) { o.seed = 1; }));
}

TEST(Registry, ScoresAreFiniteAndAttentionIsNotNegative) {
  for (const std::string& name : AllNames()) {
    TwoHeads all(100, 70);
    const Policy policy = Made(name);
    ASSERT_TRUE(all.Score(policy).ok()) << name;
    std::set<float> different;
    for (const auto& scores : all.scores) {
      for (float s : scores) {
        EXPECT_TRUE(std::isfinite(s)) << name;
        EXPECT_TRUE(s >= 0 || !policy.info().attention) << name;
        different.insert(s);
      }
    }
    EXPECT_GT(different.size(), 20u) << name;
  }
}

TEST(Registry, WhatIsNotFiniteIsNeverKeptOverWhatIs) {
  Options options;
  options.window_size = 4;
  const std::uint32_t n = 40;
  int cases = 0;
  for (const std::string& name : AllNames()) {
    const Policy policy = Made(name, options);
    for (Needs need : kAllNeeds) {
      if ((policy.needs() & need & ~(kPositions | kQueries)) == 0) continue;
      for (float bad : kBad) {
        for (std::uint32_t i : {0u, 20u, n - 1}) {  // a sink, the middle, the window
          TwoHeads all(n, n);
          for (OwnedHead& own : all.own) Change(own, need, i, bad);
          ASSERT_TRUE(all.Score(policy).ok()) << name;
          for (std::uint32_t j = 0; j < n; ++j) {
            EXPECT_EQ(std::isfinite(all.scores[1][j]), j != i) << name << " " << bad << " at " << j;
          }
          EXPECT_EQ(all.scores[1][i], kWorst) << name << " " << bad << " in " << NeedNames(need);
          const auto kept = SelectKept(all.scores[1], {}, n - 1);
          EXPECT_EQ(std::count(kept.begin(), kept.end(), i), 0) << name;
          ++cases;
        }
      }
    }
  }
  EXPECT_GE(cases, 9 * 15);
}

TEST(Registry, QueriesThatAreNotFiniteSayNothing) {
  for (float bad : kBad) {
    TwoHeads all(30, 20);
    all.own[0].mean[3] = bad;  // of the first query head
    ASSERT_TRUE(all.Score(Made("expected_attention")).ok());
    EXPECT_EQ(std::count(all.scores[0].begin(), all.scores[0].end(), kWorst), 26);  // but for sinks
    EXPECT_EQ(std::count(all.scores[1].begin(), all.scores[1].end(), kWorst), 0);
  }
}

TEST(Registry, HeadsWithoutEntriesAndWithOne) {
  for (const std::string& name : AllNames()) {
    TwoHeads all(0, 1);
    ASSERT_TRUE(all.Score(Made(name)).ok()) << name;
    EXPECT_TRUE(std::isfinite(all.scores[1][0])) << name;
    TwoHeads none(0, 0);
    EXPECT_TRUE(none.Score(Made(name)).ok()) << name;
  }
}

TEST(Registry, ScoresOfAnotherSizeAreRefused) {
  TwoHeads all(20, 10);
  all.scores[1].resize(9);
  EXPECT_FALSE(all.Score(Made("h2o")).ok());
  all.scores[1].resize(10);
  const std::span<float> three[] = {all.scores[0], all.scores[1], all.scores[1]};
  EXPECT_FALSE(Made("h2o").Score(all.layer, three).ok());
  EXPECT_FALSE(Made("h2o").Score(all.layer, std::span(three).first(1)).ok());
  EXPECT_TRUE(Made("h2o").Score(all.layer, std::span(three).first(2)).ok());
}

TEST(Registry, WeightedByValuesTheWindowStillStays) {
  Options options;
  options.window_size = 5;
  TwoHeads plain(30, 20), weighted(30, 20);
  for (std::size_t i = 25 * kDimV; i < plain.own[0].v.size(); ++i) weighted.own[0].v[i] = 0;
  ASSERT_TRUE(plain.Score(Made("snapkv", options)).ok());
  ASSERT_TRUE(weighted.Score(Made("snapkv+value_norm", options)).ok());
  const std::vector<float>& s = weighted.scores[0];
  EXPECT_NE(plain.scores[0][3], s[3]);
  for (int i = 25; i < 30; ++i) EXPECT_EQ(s[i], *std::max_element(s.begin(), s.end()));
}

// The rows of the first table of the docs: what stands between the bars.
std::vector<std::vector<std::string>> PolicyTable() {
  std::ifstream file(KVTAMP_SOURCE_DIR "/docs/policies.md");
  EXPECT_TRUE(file.is_open());
  std::vector<std::vector<std::string>> rows;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("| `", 0) != 0) continue;
    std::vector<std::string>& row = rows.emplace_back();
    std::istringstream cells(line.substr(1));
    for (std::string cell; std::getline(cells, cell, '|');) {
      const std::size_t first = cell.find_first_not_of(" `");
      row.push_back(
          first == cell.npos ? "" : cell.substr(first, cell.find_last_not_of(" `") - first + 1));
    }
  }
  return rows;
}

TEST(Docs, ListExactlyThePoliciesWithTheirPapersAndNeeds) {
  const auto rows = PolicyTable();
  ASSERT_EQ(rows.size(), Policies().size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const PolicyInfo& info = Policies()[i];
    const std::vector<std::string> expected = {info.name, info.alias, info.help, info.paper,
                                               NeedNames(info.needs)};
    EXPECT_EQ(rows[i], expected);
  }
}

}  // namespace
}  // namespace kvtamp::policy
