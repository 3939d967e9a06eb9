// kvtamp's attention over pages of one format: no sinks, no recent window, all pages sealed, so
// that a line shows the format's kernels and nothing else.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "bench/attention.h"
#include "bench/shape.h"
#include "codec/codec.h"
#include "codec/format.h"
#include "page/allocator.h"

namespace kvtamp::bench {

// A pair of formats for heads of a shape.
struct CodedFormat {
  codec::Pair pair;                          // resolved
  std::array<codec::SideLayout, 2> layouts;  // by codec::Side; without heads: f16

  const codec::SideLayout* layout(codec::Side side) const;  // null: f16
  // What attention reads of one page, both sides, all heads: codes, scales, minima and widths.
  std::size_t page_bytes(const Shape& shape) const;
  std::size_t layer_bytes(const Shape& shape) const;
  std::size_t side_bytes(const Shape& shape, codec::Side side) const;  // of a page
};
Result<CodedFormat> MakeCodedFormat(const Shape& shape, const codec::Pair& pair);

// Any codes, with scales and widths as those of real pages: speed does not depend on what the
// codes are. `head_bytes` is the block of one head.
void FillCoded(const codec::SideLayout::Head& head, codec::Side side, std::mt19937_64& rng,
               std::uint8_t* head_bytes);

class CodedAttention final : public Attention {
 public:
  // `executor` lives longer. What could not be made comes out in the status. The last `n_observed`
  // tokens are observed as well (attention/observe.h).
  static Result<std::unique_ptr<CodedAttention>> Make(const Shape& shape, const CodedFormat& format,
                                                      std::uint32_t n_layers,
                                                      std::uint32_t n_observed, Executor& executor);

  Status Step() override;
  std::uint32_t n_layers() const override { return static_cast<std::uint32_t>(pages_.size()); }
  std::span<const float> out() const override { return out_; }

 private:
  CodedAttention(const Shape& shape, CodedFormat format, std::uint32_t n_observed,
                 Executor& executor);
  Status AddLayer();
  const std::uint8_t* MakeSide(codec::Side side, RowSource& rows);

  const Shape shape_;
  const CodedFormat format_;
  const std::uint32_t n_observed_;
  Executor& executor_;
  attention::Layer layer_;
  attention::Params params_;
  attention::Workspace workspace_;
  Query query_;
  std::vector<float> mean_, out_, mass_;
  page::Allocator memory_;                           // as the store's pages lie
  std::vector<std::vector<attention::Page>> pages_;  // [n_layers]
  std::mt19937_64 rng_{1};
};

}  // namespace kvtamp::bench
