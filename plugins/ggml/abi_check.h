// Is the ggml in this process laid out as the one the plug-in was compiled for?
//
// The plug-in fills ggml's structures by value and the host reads them by offset, yet ggml does not
// raise the version of that interface when members are inserted: a plug-in built for another ggml
// loads and then crashes. So the layout is measured. Objects whose every member is a recorder are
// handed to ggml's public functions, and each must reach the recorder that is expected.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kvtamp::ggml_plugin {

// Ok, or one line that says what was found, what was expected and what to do. `note` receives a
// warning when the layout fits but this version of ggml was never tested; else it is emptied.
// Takes less than a millisecond, leaves nothing behind, logs nothing and throws nothing.
Status CheckHostAbi(std::string& note);

std::string BuiltAgainst();     // "ggml 0.25.3, backend API 2"
std::string HostGgmlVersion();  // "0.25.3", with the commit if ggml knows it

// The parts, apart so that tests can play a host that differs.
namespace abi {

enum class Object : std::uint8_t { kBufferType, kBuffer, kDevice, kRegistry, kBackend };
inline constexpr std::size_t kObjects = 5;
// More than any of the structures has: a host with longer ones must find recorders there too.
inline constexpr std::size_t kWords = 40;

// layout[object][word] is the recorder put into that word. Ours is the identity; exchanging two
// entries plays a host that has the two members exchanged.
using Layout = std::array<std::array<std::uint8_t, kWords>, kObjects>;
Layout OwnLayout();

// One member of one structure.
struct Slot {
  Object object;
  std::size_t word;
  const char* name;
  bool reachable;  // by a public function without side effects; else its place is not checked
};
std::vector<Slot> Slots();

// "`what` is `found`", where `expected` was compiled in.
struct Fact {
  std::string what;
  std::string expected;
  std::string found;
};
struct Facts {
  std::string version;
  std::vector<Fact> list;
};

// Goes from what is harmless to ask to what relies on it, and stops after a group with a
// difference.
Facts Observe(const Layout& layout);
Status CheckAgainst(const Facts& facts);
std::vector<std::string_view> TestedVersions();  // docs/hosts.md has the same list
// The warning of CheckHostAbi, for ggml_version() as given.
std::string NoteOn(const std::string& version);

}  // namespace abi
}  // namespace kvtamp::ggml_plugin
