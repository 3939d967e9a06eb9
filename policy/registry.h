// Every policy by name: what it needs, what its scores mean, and one made from its name.
//
//   POLICY = NAME ["+value_norm"]
//
// NAME is a row of Policies() or its alias, as the papers and kvpress call them; "+value_norm"
// multiplies a score that is made of attention by |v|₁ (scores/value_norm.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "policy/stats.h"

namespace kvtamp::policy {

// Settings of all policies; each takes what it knows. Names are kvpress's.
struct Options {
  std::uint32_t n_sink = 4;  // streaming_llm, expected_attention
  // snapkv, r_kv: tokens of the observation window, that of attention_window; at least 1. R-KV's
  // code has 8, and 7 for the kernel.
  std::uint32_t window_size = 64;
  std::uint32_t kernel_size = 5;           // snapkv, r_kv: neighbours smoothed over, odd
  std::uint32_t n_future_positions = 512;  // expected_attention: at least 1
  float epsilon = 0;                       // expected_attention: 0 or more
  bool use_vnorm = true;                   // expected_attention: times |v|₂, as published
  float mix_lambda = 0.1f;                 // r_kv: weight of importance, 0 to 1
  float similarity = 0.5f;                 // r_kv: cosine from which keys look alike, -1 to 1
  std::uint32_t n_retain = 1;              // r_kv: newest look-alikes spared
  std::uint64_t seed = 0;                  // random
};

struct PolicyInfo {
  const char* name;
  const char* alias;  // another name for it, or ""
  const char* paper;  // arXiv number, or ""
  const char* help;   // what an entry is worth
  Needs needs;
  // Scores are shares of attention, 0 or more: they add up over tokens, are alike from head to
  // head, and may be weighted. Other scores only give an order within a head.
  bool attention;
  // Policy::Score without its checks.
  void (*score)(const Layer& layer, const Options& options,
                std::span<const std::span<float>> scores);
};
std::span<const PolicyInfo> Policies();

class Policy {
 public:
  std::string name() const;  // MakePolicy of it gives the same policy
  const PolicyInfo& info() const { return *info_; }
  Needs needs() const;

  // scores[h]: [layer.heads[h].n], one for each entry; higher is kept. An entry with
  // something that is not finite scores kWorst and counts for no other. Invalid when a head lacks
  // what the policy needs (the message says what), or a score has another size. Costs n * dim for
  // each head that holds n entries, but for r_kv (scores/r_kv.h). Safe from any thread.
  Status Score(const Layer& layer, std::span<const std::span<float>> scores) const;

 private:
  friend Result<Policy> MakePolicy(std::string_view name, const Options& options);
  Policy(const PolicyInfo* info, bool weighted, const Options& options)
      : info_(info), weighted_(weighted), options_(options) {}

  const PolicyInfo* info_;
  bool weighted_;  // +value_norm
  Options options_;
};

// Invalid for an unknown name (the message lists all) or a setting out of its range.
Result<Policy> MakePolicy(std::string_view name, const Options& options = {});

}  // namespace kvtamp::policy
