// A llama_batch and the memory it points to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "fuzz/model.h"
#include "fuzz/random.h"
#include "llama.h"

namespace kvtamp::fuzz {

class Batch {
 public:
  struct Part {
    std::vector<llama_seq_id> seqs;
    llama_pos p0 = 0;
    std::int32_t n = 0;
  };
  // Random tokens for each part, one after the other or in turns. Logits: 0 of each part's last token,
  // 1 of all, 2 of some.
  Batch(const std::vector<Part>& parts, std::int32_t seed, bool interleaved, std::int32_t outputs) {
    std::int32_t n = 0, longest = 0;
    for (const Part& p : parts) {
      n += p.n;
      longest = std::max(longest, p.n);
    }
    batch_ = llama_batch_init(n, 0, 4);
    Random r(static_cast<std::uint64_t>(seed));
    const auto add = [&](const Part& p, std::int32_t i) {
      const std::int32_t at = batch_.n_tokens++;
      batch_.token[at] = r.Int(0, kVocab - 1);
      batch_.pos[at] = p.p0 + i;
      batch_.n_seq_id[at] = static_cast<std::int32_t>(p.seqs.size());
      std::copy(p.seqs.begin(), p.seqs.end(), batch_.seq_id[at]);
      const bool last = i == p.n - 1;
      batch_.logits[at] = outputs == 1 || last || (outputs == 2 && r.Chance(0.4));
    };
    if (interleaved) {
      for (std::int32_t i = 0; i < longest; ++i)
        for (const Part& p : parts)
          if (i < p.n) add(p, i);
    } else {
      for (const Part& p : parts)
        for (std::int32_t i = 0; i < p.n; ++i) add(p, i);
    }
  }
  ~Batch() { llama_batch_free(batch_); }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  const llama_batch& get() const { return batch_; }
  llama_batch& get() { return batch_; }

 private:
  llama_batch batch_{};
};

}  // namespace kvtamp::fuzz
