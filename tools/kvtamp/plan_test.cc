#include "tools/kvtamp/plan.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "control/store_options.h"
#include "store/cache.h"
#include "tools/kvtamp/plan_report.h"

namespace kvtamp::tool {
namespace {

constexpr double kMiB = 1024.0 * 1024;

control::Settings Of(const std::string& type) {
  const auto settings = control::LoadSettings({{"cache.type", type, ""}}, {});
  EXPECT_TRUE(settings.ok()) << settings.status().message();
  return settings.value();
}

// Every third layer slides, if any do.
ModelLayout Model(std::uint32_t n_layer, std::uint32_t n_swa = 0) {
  ModelLayout layout;
  layout.n_swa = n_swa;
  layout.n_ctx_train = 8192;
  for (std::uint32_t l = 0; l < n_layer; ++l)
    layout.layers.push_back({l, 3, 64, 64, n_swa > 0 && l % 3 == 0, ""});
  return layout;
}

SizeCurve Curve(const ModelLayout& layout, const std::string& type, const Sharing& sharing = {}) {
  const auto curve = SizeCurve::Make(layout, Of(type), sharing);
  EXPECT_TRUE(curve.ok()) << curve.status().message();
  return curve.value();
}

double Stored(const ModelLayout& layout, const std::string& type, std::uint32_t n) {
  const auto size = StoredSize(layout, Of(type), n, 512);
  EXPECT_TRUE(size.ok()) << size.status().message();
  return size.value().stored_bytes;
}

// --- the curve ----------------------------------------------------------------------------------

TEST(SizeCurve, IsWhatAStoreTakesThatIsFilled) {
  const ModelLayout layout = Model(30);
  for (const char* type : {"f16", "k8v8", "k4v4", "k2v2"}) {
    const SizeCurve curve = Curve(layout, type);
    for (const std::uint32_t n : {256u, 1024u, 4096u, 16384u}) {
      EXPECT_NEAR(curve.At(n).stored() / Stored(layout, type, n), 1, 0.005) << type << " " << n;
      EXPECT_EQ(curve.At(n).logical, 30.0 * 3 * 64 * 2 * 2 * n);
      EXPECT_GE(curve.Peak(n), curve.At(n).stored());
    }
  }
}

// Beyond what is filled a page goes on as the one before.
TEST(SizeCurve, GoesOnBeyondWhatIsFilled) {
  const ModelLayout layout = Model(8);
  for (const char* type : {"k4v4", "k2v2"}) {
    const SizeCurve curve = Curve(layout, type);
    for (const std::uint32_t n : {16640u, 65536u, 131072u})
      EXPECT_NEAR(curve.At(n).stored() / Stored(layout, type, n), 1, 0.005) << type << " " << n;
  }
}

TEST(SizeCurve, ASlidingWindowStopsGrowing) {
  ModelLayout layout = Model(4, 1024);
  for (LayerLayout& l : layout.layers) l.swa = true;
  const SizeCurve curve = Curve(layout, "k4v4");
  const double at = curve.At(32768).stored();
  EXPECT_EQ(at, curve.At(1 << 20).stored());
  for (const std::uint32_t n : {1024u, 2560u, 8192u, 16384u})
    EXPECT_NEAR(curve.At(n).stored() / Stored(layout, "k4v4", n), 1, 0.005) << n;
  for (const std::uint32_t n : {18944u, 40960u})
    EXPECT_NEAR(at / Stored(layout, "k4v4", n), 1, 0.1) << n;
  // Between, as pages fill and are coded, less.
  for (std::uint32_t n = 8192; n < 8192 + 64; n += 9) {
    EXPECT_LE(Stored(layout, "k4v4", n), 1.001 * curve.Peak(32768)) << n;
    EXPECT_GE(Stored(layout, "k4v4", n), 0.85 * at) << n;
  }
  // n_swa + n_ubatch cells, whatever the context.
  EXPECT_NEAR(curve.At(32768).logical, 4 * 1536.0 * 768, 4 * 128.0 * 768);
  EXPECT_LT(curve.Peak(32768), 1.2 * at);

  // One too long to go round in.
  layout.n_swa = 200000;
  const SizeCurve wide = Curve(layout, "k4v4");
  EXPECT_GT(wide.At(150016).stored(), 1.4 * wide.At(100096).stored());
  EXPECT_EQ(wide.At(1 << 20).stored(), wide.At(1 << 21).stored());
}

TEST(SizeCurve, ItsPartsAreToldApart) {
  const StoredBytes bytes = Curve(Model(2), "k4v4").At(2048);
  const double row = 2 * 3 * 64 * 2 * 2;  // a token of both layers in f16
  EXPECT_EQ(bytes.sinks, 4 * row);
  EXPECT_EQ(bytes.window, 64 * row);
  EXPECT_EQ(bytes.filling, 0);
  EXPECT_GT(bytes.scales, 0);
  EXPECT_NEAR(bytes.codes / row / (2048 - 68), 4.0 / 16, 0.003);
  // Nothing but rows.
  const StoredBytes f16 = Curve(Model(2), "f16").At(2048);
  EXPECT_EQ(f16.scales, 0);
  EXPECT_EQ(f16.codes + f16.sinks + f16.window + f16.filling, f16.logical);
}

// Users beside each other in one cache take what each takes alone.
TEST(SizeCurve, IsOfEachUser) {
  const ModelLayout layout = Model(6);
  const control::Settings settings = Of("k4v4");
  constexpr std::uint32_t kUsers = 4, kTokens = 2048;
  store::Cache cache(control::StoreOptions(settings), kUsers, kTokens);
  SerialExecutor executor;
  const std::vector<half_t> rows(std::size_t{512} * 192);
  for (const LayerLayout& l : layout.layers) {
    ASSERT_TRUE(cache.AddLayer(l.layer, 192, 192, settings.type).ok());
    ASSERT_TRUE(cache.SetHeads(l.layer, 3).ok());
  }
  for (std::uint64_t first = 0; first < kTokens; first += 512) {
    for (std::uint64_t user = 0; user < kUsers; ++user) {
      std::vector<std::uint64_t> cells(512);
      for (std::uint64_t i = 0; i < 512; ++i) cells[i] = user * kTokens + first + i;
      for (const LayerLayout& l : layout.layers) {
        for (const codec::Side side : {codec::Side::kK, codec::Side::kV})
          ASSERT_TRUE(cache.Write(l.layer, side, cells, rows.data(), 192).ok());
        ASSERT_TRUE(cache.Maintain(l.layer, executor).ok());
      }
    }
  }
  const store::CacheBytes b = cache.bytes();
  double stored = static_cast<double>(b.allocator_slack + b.shared_index);
  for (const store::LayerBytes& l : b.layers)
    stored +=
        static_cast<double>(l.sum.coded[0] + l.sum.coded[1] + l.sum.scales[0] + l.sum.scales[1] +
                            l.sum.open[0] + l.sum.open[1] + l.sum.slack + l.sum.index);
  EXPECT_NEAR(kUsers * Curve(layout, "k4v4").At(kTokens).stored() / stored, 1, 0.01);
}

TEST(SizeCurve, WhatTheHostKeepsIsCountedApart) {
  ModelLayout layout = Model(4, 512);
  layout.layers[1].why_plain = "the host attends it";                // whole
  layout.layers[3].why_plain = "the host attends it";                // slides
  layout.layers[2].head_size_k = layout.layers[2].head_size_v = 20;  // no format takes it
  const SizeCurve curve = Curve(layout, "k4v4");
  const double row = 3 * 64 * 2 * 2, odd = 3 * 20 * 2 * 2;
  EXPECT_EQ(curve.Plain(8192), 8192 * (row + odd) + 1024 * row);
  EXPECT_EQ(curve.At(8192).logical, Curve(Model(1, 512), "k4v4").At(8192).logical);
}

TEST(SwaCells, AreThoseOfTheHost) {
  EXPECT_EQ(SwaCells(512, {1, false, 512}, 8192), 1024u);
  EXPECT_EQ(SwaCells(512, {1, false, 512}, 300), 512u);
  EXPECT_EQ(SwaCells(512, {1, false, 64}, 8192), 768u);
  EXPECT_EQ(SwaCells(512, {4, false, 512}, 8192), 1024u);
  EXPECT_EQ(SwaCells(512, {4, true, 512}, 8192), (4 * 512 + 512) / 4u);
}

// --- what fits ----------------------------------------------------------------------------------

class SolveTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    layout_ = Model(30);
    types_.clear();
    ladder_.clear();
    for (const char* name : QualityLadder()) {
      auto type = MakePlanType(name, Of(name), layout_, {});
      ASSERT_TRUE(type.ok()) << type.status().message();
      if (type.value().name == "k4v4") usual_ = types_.size();
      ladder_.push_back(types_.size());
      types_.push_back(std::move(type.value()));
    }
  }
  static PlanAnswer Ask(const PlanQuestion& q) {
    return Solve(q, layout_, types_, usual_, ladder_);
  }
  static const PlanType& Type(const PlanAnswer& a) { return types_[a.type]; }
  static std::uint64_t MiB(double n) { return static_cast<std::uint64_t>(n * kMiB); }

  static inline ModelLayout layout_;
  static inline std::vector<PlanType> types_;
  static inline std::vector<std::size_t> ladder_;
  static inline std::size_t usual_ = 0;
};

TEST_F(SolveTest, TheLongestContextIsTheLongest) {
  for (const double budget : {8 * kMiB, 100 * kMiB, 5000 * kMiB}) {
    for (const std::uint64_t users : {1u, 7u}) {
      for (const PlanType& type : types_) {
        const std::uint64_t n = type.LongestContext(users, budget);
        ASSERT_EQ(n % kCellsPad, 0u);
        EXPECT_TRUE(n == 0 || type.Needed(n, users) <= budget) << type.name;
        EXPECT_GT(type.Needed(n + kCellsPad, users), budget) << type.name;
      }
    }
  }
}

TEST_F(SolveTest, TheMostUsersAreTheMost) {
  for (const PlanType& type : types_) {
    const std::uint64_t n = type.MostUsers(4096, 300 * kMiB);
    EXPECT_LE(type.Needed(4096, n), 300 * kMiB) << type.name;
    EXPECT_GT(type.Needed(4096, n + 1), 300 * kMiB) << type.name;
    EXPECT_EQ(type.MostUsers(4096, 1e15), kMaxUsers);
    EXPECT_EQ(type.MostUsers(4096, 1e5), 0u);
  }
}

TEST_F(SolveTest, OfContextAndUsersTheBudget) {
  const PlanAnswer a = Ask({.n_ctx = 4096, .n_users = 3});
  EXPECT_EQ(a.solved, Solved::kBudget);
  EXPECT_EQ(Type(a).name, "k4v4");
  EXPECT_EQ(a.needed, Type(a).Needed(4096, 3));
  const PlanAnswer none = Ask({});
  EXPECT_EQ(none.n_ctx, 8192u);
  EXPECT_EQ(none.n_users, 1u);
}

TEST_F(SolveTest, OfBudgetAndUsersTheContext) {
  const PlanAnswer a = Ask({.n_users = 4, .budget = MiB(80)});
  EXPECT_EQ(a.solved, Solved::kContext);
  EXPECT_EQ(Type(a).name, "k4v4");
  EXPECT_EQ(a.n_ctx, Type(a).LongestContext(4, 80 * kMiB));
  EXPECT_LE(a.needed, 80 * kMiB);
  // All the model was trained for: then as good as it gets.
  const PlanAnswer much = Ask({.budget = MiB(1000)});
  EXPECT_EQ(much.n_ctx, 8192u);
  EXPECT_EQ(Type(much).name, "k8v8");
  const PlanAnswer some = Ask({.budget = MiB(52)});
  EXPECT_EQ(some.n_ctx, 8192u);
  EXPECT_EQ(Type(some).name, "k4v4");
  // Not so much that any of it fits in the default.
  const double least = types_[usual_].Needed(kCellsPad, 4);
  const PlanAnswer little = Ask({.n_users = 4, .budget = static_cast<std::uint64_t>(least) - 1000});
  EXPECT_TRUE(little.fits);
  EXPECT_GT(little.type, usual_);
}

TEST_F(SolveTest, OfBudgetAndContextTheBestTypeAndUsers) {
  const PlanAnswer a = Ask({.n_ctx = 8192, .budget = MiB(110)});
  EXPECT_EQ(a.solved, Solved::kUsers);
  EXPECT_EQ(Type(a).name, "k8v8");
  EXPECT_EQ(a.n_users, 1u);
  const PlanAnswer tight = Ask({.n_ctx = 8192, .n_users = 2, .budget = MiB(90)});
  EXPECT_EQ(tight.solved, Solved::kType);
  EXPECT_EQ(Type(tight).name, "k3.5v3");
  EXPECT_GT(types_[tight.type - 1].Needed(8192, 2), 90 * kMiB);
  EXPECT_LE(tight.needed, 90 * kMiB);
}

TEST_F(SolveTest, WhatDoesNotFitIsSaidAndWhatWould) {
  const PlanAnswer a = Ask({.n_ctx = 8192, .n_users = 4, .budget = MiB(50)});
  EXPECT_FALSE(a.fits);
  EXPECT_EQ(Type(a).name, "k2v2");
  for (const char* part : {"8,192 tokens for 4 users do not fit in 50.0 MiB", "even k2v2",
                           "What would fit", "or one user"})
    EXPECT_NE(a.why.find(part), std::string::npos) << a.why;
  // Not a cell, not a user.
  const PlanAnswer hopeless = Ask({.n_ctx = 8192, .budget = 1000});
  EXPECT_FALSE(hopeless.fits);
  EXPECT_EQ(hopeless.why.find("would fit"), std::string::npos) << hopeless.why;
  EXPECT_FALSE(Ask({.budget = 1000}).fits);
}

TEST_F(SolveTest, ATypeThatWasChosenStays) {
  const PlanAnswer fits = Ask({.n_ctx = 8192, .budget = MiB(1000), .type_chosen = true});
  EXPECT_EQ(Type(fits).name, "k4v4");
  EXPECT_EQ(fits.solved, Solved::kUsers);
  EXPECT_GT(fits.n_users, 15u);
  const PlanAnswer small =
      Ask({.n_ctx = 8192, .n_users = 1, .budget = MiB(30), .type_chosen = true});
  EXPECT_FALSE(small.fits);
  EXPECT_EQ(Type(small).name, "k4v4");
  EXPECT_NE(small.why.find("smaller type"), std::string::npos) << small.why;
}

TEST_F(SolveTest, RecurrentStateIsOfEachUserAndNotOfTheContext) {
  PlanType type = types_[usual_];
  const double without = type.Needed(4096, 3);
  type.state_bytes = 1000000;
  EXPECT_EQ(type.Needed(4096, 3) - without, 3e6);
  EXPECT_EQ(type.Needed(8192, 3) - types_[usual_].Needed(8192, 3), 3e6);
}

TEST(QualityLadder, IsOfDocumentedTypesEachSmallerThanTwoBefore) {
  std::vector<double> bytes;
  for (const char* name : QualityLadder()) {
    EXPECT_TRUE(std::any_of(codec::ShortNames().begin(), codec::ShortNames().end(),
                            [&](const auto& s) { return std::string(s.name) == name; }))
        << name;
    bytes.push_back(Curve(Model(8), name).At(8192).stored());
  }
  for (std::size_t i = 2; i < bytes.size(); ++i) EXPECT_LT(bytes[i], bytes[i - 2]) << i;
}

TEST(Thousands, AreParted) {
  EXPECT_EQ(Thousands(0), "0");
  EXPECT_EQ(Thousands(999), "999");
  EXPECT_EQ(Thousands(1000), "1,000");
  EXPECT_EQ(Thousands(1234567), "1,234,567");
}

}  // namespace
}  // namespace kvtamp::tool
