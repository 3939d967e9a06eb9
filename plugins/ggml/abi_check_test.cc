#include "plugins/ggml/abi_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

namespace kvtamp::ggml_plugin {
namespace {

using abi::Facts;
using abi::Layout;
using abi::Object;
using abi::Slot;

Facts Real() { return abi::Observe(abi::OwnLayout()); }

std::uint8_t& At(Layout& layout, const Slot& slot) {
  return layout[static_cast<std::size_t>(slot.object)][slot.word];
}

Slot Find(Object object, const std::string& name) {
  for (const Slot& slot : abi::Slots()) {
    if (slot.object == object && slot.name == name) return slot;
  }
  ADD_FAILURE() << "no slot " << name;
  return {};
}

Status CheckSwapped(const Slot& a, const Slot& b) {
  Layout layout = abi::OwnLayout();
  std::swap(At(layout, a), At(layout, b));
  return abi::CheckAgainst(abi::Observe(layout));
}

// Facts as they are, but for one: what a host would show that differs there.
Status CheckAltered(const std::string& what, const std::string& found) {
  Facts facts = Real();
  const auto it = std::find_if(facts.list.begin(), facts.list.end(),
                               [&](const abi::Fact& fact) { return fact.what == what; });
  if (it == facts.list.end()) {
    ADD_FAILURE() << "no fact " << what;
    return {};
  }
  it->found = found;
  return abi::CheckAgainst(facts);
}

TEST(AbiCheck, AcceptsTheGgmlItWasBuiltFor) {
  std::string note = "left over";
  const Status status = CheckHostAbi(note);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(note, abi::NoteOn(ggml_version()));
  EXPECT_EQ(HostGgmlVersion().rfind(ggml_version(), 0), 0U) << HostGgmlVersion();
  EXPECT_EQ(BuiltAgainst(), std::string("ggml ") + ggml_version() + ", backend API " +
                                std::to_string(GGML_BACKEND_API_VERSION));
}

TEST(AbiCheck, WarnsOfVersionsNeverTested) {
  EXPECT_EQ(abi::NoteOn("0.25.3"), "");
  EXPECT_EQ(abi::NoteOn("0.26.0"), "");
  EXPECT_EQ(
      abi::NoteOn("0.99.0"),
      "ggml 0.99.0 was never tested with this plug-in (tested: 0.25.3, 0.26.0), but its layout "
      "fits");
}

// The first column of the first table in docs/hosts.md.
TEST(AbiCheck, TestedVersionsAreThoseOfTheDocs) {
  std::ifstream in(KVTAMP_SOURCE_DIR "/docs/hosts.md");
  std::vector<std::string> documented;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("| ", 0) != 0) {
      if (!documented.empty()) break;
      continue;
    }
    const std::string cell = line.substr(2, line.find(" |") - 2);
    if (!cell.empty() && cell.find_first_not_of("0123456789.") == cell.npos) {
      documented.push_back(cell);
    }
  }
  const auto known = abi::TestedVersions();
  EXPECT_EQ(documented, std::vector<std::string>(known.begin(), known.end()));
}

int g_logged = 0;

TEST(AbiCheck, IsQuietQuickAndLeavesNothingBehind) {
  ggml_log_set([](ggml_log_level, const char*, void*) { ++g_logged; }, nullptr);
  const std::size_t devices = ggml_backend_dev_count();
  g_logged = 0;  // the first look at the registry may log
  ::testing::internal::CaptureStderr();
  auto best = std::chrono::steady_clock::duration::max();
  for (int i = 0; i < 20; ++i) {
    const auto start = std::chrono::steady_clock::now();
    std::string note;
    EXPECT_TRUE(CheckHostAbi(note).ok());
    best = std::min(best, std::chrono::steady_clock::now() - start);
  }
  EXPECT_LT(best, std::chrono::milliseconds(5));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(g_logged, 0);
  EXPECT_EQ(ggml_backend_dev_count(), devices);
  ggml_log_set(nullptr, nullptr);
}

TEST(AbiCheck, KnowsEveryMemberOfEveryStructureOnce) {
  std::set<std::pair<Object, std::size_t>> places;
  for (const Slot& slot : abi::Slots()) {
    EXPECT_TRUE(places.insert({slot.object, slot.word}).second) << slot.name;
  }
  // All but a registry's version and a buffer's data members, which are checked in other ways.
  EXPECT_EQ(places.size() * sizeof(void*),
            sizeof(ggml_backend_buffer_type) + sizeof(ggml_backend_buffer_i) +
                sizeof(ggml_backend_device) + sizeof(ggml_backend_reg) - sizeof(void*) +
                sizeof(ggml_backend));
}

TEST(AbiCheck, SeesAnyTwoMembersExchanged) {
  const std::vector<Slot> slots = abi::Slots();
  int pairs = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    for (std::size_t j = i + 1; j < slots.size(); ++j) {
      if (slots[i].object != slots[j].object) continue;
      if (!slots[i].reachable && !slots[j].reachable) continue;
      const Status status = CheckSwapped(slots[i], slots[j]);
      EXPECT_EQ(status.code(), Code::kUnsupported) << slots[i].name << " and " << slots[j].name;
      ++pairs;
    }
  }
  EXPECT_GT(pairs, 300);
}

// The limit of the method. The plug-in leaves both null, so a host that exchanged them, alone among
// all members, would still find what it needs.
TEST(AbiCheck, CannotSeeMembersThatNoPublicFunctionReaches) {
  std::set<std::string> hidden;
  for (const Slot& slot : abi::Slots()) {
    if (!slot.reachable) hidden.insert(slot.name);
  }
  hidden.erase("alloc_buffer_n");  // members of newer versions only
  hidden.erase("get_alloc_size_n");
  EXPECT_EQ(hidden, (std::set<std::string>{"context", "graph_optimize", "graph_plan_update"}));
  EXPECT_TRUE(CheckSwapped(Find(Object::kBackend, "graph_plan_update"),
                           Find(Object::kBackend, "graph_optimize"))
                  .ok());
}

// A host whose structures have one member more, or one less, at every place. Past the last member
// that a public function reaches, only the members that follow the table can tell.
TEST(AbiCheck, SeesMembersInsertedAndRemoved) {
  for (const Slot& slot : abi::Slots()) {
    if (!slot.reachable) continue;
    const auto object = static_cast<std::size_t>(slot.object);
    Layout removed = abi::OwnLayout();
    Layout inserted = abi::OwnLayout();
    for (std::size_t w = slot.word; w + 1 < abi::kWords; ++w) {
      removed[object][w + 1] = static_cast<std::uint8_t>(w);
      inserted[object][w] = static_cast<std::uint8_t>(w + 1);
    }
    removed[object][slot.word] = abi::kWords - 1;
    EXPECT_FALSE(abi::CheckAgainst(abi::Observe(removed)).ok()) << slot.name;
    EXPECT_FALSE(abi::CheckAgainst(abi::Observe(inserted)).ok()) << slot.name;
  }
}

TEST(AbiCheck, SaysInOneLineWhatDiffersAndWhatToDo) {
  const Status status =
      CheckSwapped(Find(Object::kBuffer, "set_tensor"), Find(Object::kBuffer, "get_tensor"));
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_EQ(status.message(),
            "this process has ggml " + HostGgmlVersion() +
                ", whose layout differs from what this plug-in was built for, " + BuiltAgainst() +
                ": what ggml_backend_tensor_set reaches is get_tensor, expected set_tensor, "
                "and 1 more. Build the plug-in again, with KVTAMP_LLAMA_DIR set to the llama.cpp "
                "that is to load it");
}

TEST(AbiCheck, RefusesOtherNumbersSizesAndPlaces) {
  EXPECT_TRUE(abi::CheckAgainst(Real()).ok());
  const std::string op = "operation " + std::to_string(GGML_OP_SET_ROWS);
  EXPECT_NE(
      CheckAltered(op, "GET_ROWS_BACK").message().find(op + " is GET_ROWS_BACK, expected SET_ROWS"),
      std::string::npos);
  const std::string overhead = std::to_string(32 + sizeof(ggml_tensor));
  EXPECT_NE(CheckAltered("ggml_tensor_overhead()", "376")
                .message()
                .find("ggml_tensor_overhead() is 376, expected " + overhead),
            std::string::npos);
  EXPECT_FALSE(CheckAltered("the size of ggml_backend_dev_props", "64").ok());
  EXPECT_FALSE(CheckAltered("type " + std::to_string(GGML_TYPE_BF16), "f16").ok());
  EXPECT_FALSE(CheckAltered("ggml_tensor.view_offs", "elsewhere").ok());
  EXPECT_FALSE(CheckAltered("ggml_backend_buffer.usage", "elsewhere").ok());
  // A function that the host lacks, or that does the work without asking us.
  EXPECT_FALSE(CheckAltered("what ggml_backend_tensor_set_2d reaches", "nothing").ok());
}

}  // namespace
}  // namespace kvtamp::ggml_plugin
