// What each KV head of a model is worth: measured once (`kvtamp sensitivity`), used to share out
// the bits a type gives on average.
//
// A head's sensitivity is the KL divergence of the model's predictions that coding it alone, at one
// bit, costs. It differs a thousandfold between heads, and neither the first nor the last layers
// are the sensitive ones. The loss of coding all is taken for the sum over heads of sensitivity
// times how much smaller the squared error is at that head's bits than at one bit; the next quarter
// of a bit always goes where it takes most off that sum. (KVTuner, arXiv:2502.04420, searches pairs
// of widths for layers.)
//
// The file (TOML):
//   version = 1
//   model = "name"
//   [[layer]]
//   index = 0
//   head_size_k = 64
//   head_size_v = 64
//   k = [0.0012, 0.0002]      # one for each KV head
//   v = [0.0003, 0.0004]
//   window = 512              # tokens that it attends at most; left out: all
// and, instead of or beside those two, formats that hold whatever the type says:
//   type_k = ["int3_pc+qw", "int8_pc"]
//   type_v = ["tcq3_pt+had", "int8_pt_sym+had"]
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "codec/format.h"

namespace kvtamp::control {

struct ProfileLayer {
  std::uint32_t index = 0, head_size_k = 0, head_size_v = 0;
  std::vector<double> k, v;                   // sensitivities, by KV head
  std::vector<codec::Format> type_k, type_v;  // given formats, by KV head
  std::uint32_t window = 0;                   // tokens attended at most: a sliding window; 0: all
  std::size_t n_heads() const {
    return std::max({k.size(), v.size(), type_k.size(), type_v.size()});
  }
};

struct Profile {
  std::string model;
  std::vector<ProfileLayer> layers;
};

Result<Profile> ReadProfile(const std::string& path);
std::string ProfileText(const Profile& profile);
// Replaces the file whole or not at all.
Status WriteProfile(const std::string& path, const Profile& profile);

// Formats by layer and KV head that take as many bits as `type` on average over K and V together,
// of a context of kTokensShared tokens: what layers with a window keep of it is little, and bits
// are cheap there. Formats that cannot be divided (f16, int8) stay as they are.
inline constexpr std::uint32_t kTokensShared = 8192;
using HeadTypes = std::map<std::uint32_t, std::vector<codec::Pair>>;
HeadTypes ShareBits(const Profile& profile, const codec::Pair& type);

}  // namespace kvtamp::control
