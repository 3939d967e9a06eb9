#include "bench/coded_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/observe.h"

namespace kvtamp::bench {

using codec::Coding;
using codec::Side;

namespace {

// Widths of a page's channels as those of real keys are: spread around the mean. They add up to
// the budget exactly, or the page would have another size.
void FillWidths(const codec::PageShape& shape, std::uint8_t* nibbles) {
  std::vector<std::uint32_t> widths(shape.dim);
  const std::uint32_t bits = shape.budget / shape.dim, narrow = bits < 2 ? 0 : bits - 2;
  std::uint32_t left = shape.budget;
  const auto take = [&](std::uint32_t& width, std::uint32_t wanted) {
    wanted = std::min({wanted, left, 8 - width});
    width += wanted;
    left -= wanted;
  };
  for (std::uint32_t c = 0; c < shape.dim; ++c)
    take(widths[c], c % 4 == 0 ? bits + (bits - narrow) : c % 4 == 1 ? narrow : bits);
  for (std::uint32_t c = 0; left > 0; c = (c + 1) % shape.dim) take(widths[c], 1);
  std::fill_n(nibbles, shape.dim / 2, std::uint8_t{0});
  for (std::uint32_t c = 0; c < shape.dim; ++c)
    nibbles[c / 2] |= static_cast<std::uint8_t>(widths[c] << (c % 2 * 4));
}

}  // namespace

const codec::SideLayout* CodedFormat::layout(Side side) const {
  const codec::SideLayout& layout = layouts[static_cast<std::size_t>(side)];
  return layout.heads.empty() ? nullptr : &layout;
}

std::size_t CodedFormat::side_bytes(const Shape& shape, Side side) const {
  const codec::SideLayout* coded = layout(side);
  return coded != nullptr ? coded->bytes : std::size_t{kPageSize} * shape.n_embd() * sizeof(half_t);
}

std::size_t CodedFormat::page_bytes(const Shape& shape) const {
  return side_bytes(shape, Side::kK) + side_bytes(shape, Side::kV);
}

std::size_t CodedFormat::layer_bytes(const Shape& shape) const {
  return page_bytes(shape) * (shape.length / kPageSize);
}

Result<CodedFormat> MakeCodedFormat(const Shape& shape, const codec::Pair& pair) {
  CodedFormat made;
  for (const Side side : {Side::kK, Side::kV}) {
    const codec::Format& asked = side == Side::kK ? pair.k : pair.v;
    const auto resolved = codec::Resolve(asked, side, shape.dim);
    if (!resolved.ok()) return resolved.status();
    (side == Side::kK ? made.pair.k : made.pair.v) = resolved.value();
    const auto coding = codec::CodingOf(resolved.value(), side);
    if (!coding.ok()) return coding.status();
    if (coding.value() == Coding::kF16) continue;
    if (coding.value() == Coding::kRows)
      return Status::Unsupported(codec::FormatName(asked) + " has no kernels of its own");
    for (std::uint32_t h = 0; h < shape.n_head_kv; ++h)
      made.layouts[static_cast<std::size_t>(side)].Add(
          coding.value(), codec::ShapeOf(resolved.value(), side, shape.dim, kPageSize));
  }
  return made;
}

void FillCoded(const codec::SideLayout::Head& head, Side side, std::mt19937_64& rng,
               std::uint8_t* head_bytes) {
  std::uint32_t i = 0;
  for (; i + 8 <= head.bytes; i += 8) {
    const std::uint64_t x = rng();
    std::memcpy(head_bytes + i, &x, 8);
  }
  for (; i < head.bytes; ++i) head_bytes[i] = static_cast<std::uint8_t>(rng());
  // Values around 1, and minima that put the middle of the codes on zero.
  const bool is_k = side == Side::kK;
  const std::size_t n_scales = is_k ? head.shape.dim : head.scales;
  std::fill_n(head_bytes, n_scales, static_cast<std::uint8_t>(is_k ? 112 : 120));
  std::fill(head_bytes + n_scales, head_bytes + head.scales, std::uint8_t{0});
  if (head.coding == Coding::kKPlanes) FillWidths(head.shape, head_bytes + 2 * head.shape.dim);
}

CodedAttention::CodedAttention(const Shape& shape, CodedFormat format, std::uint32_t n_observed,
                               Executor& executor)
    : shape_(shape),
      format_(std::move(format)),
      n_observed_(std::min(n_observed, shape.n_tok)),
      executor_(executor),
      query_(shape) {
  layer_.n_head_kv = shape.n_head_kv;
  layer_.dim_k = layer_.dim_v = shape.dim;
  layer_.page_size = kPageSize;
  layer_.v_group = format_.pair.v.coded() ? format_.pair.v.group : shape.dim;
  layer_.v_hadamard = format_.pair.v.hadamard;
  if (format_.pair.k.mean) {
    mean_.assign(shape.n_embd(), 0.5f);
    layer_.k_mean = mean_.data();
  }
  params_.n_head = shape.n_head;
  params_.scale = 1.0f / std::sqrt(static_cast<float>(shape.dim));
  out_.resize(query_.q.size());
  if (n_observed_ > 0) mass_.resize(std::size_t{shape.n_head_kv} * shape.length);
}

Result<std::unique_ptr<CodedAttention>> CodedAttention::Make(const Shape& shape,
                                                             const CodedFormat& format,
                                                             std::uint32_t n_layers,
                                                             std::uint32_t n_observed,
                                                             Executor& executor) {
  std::unique_ptr<CodedAttention> made(new CodedAttention(shape, format, n_observed, executor));
  for (std::uint32_t i = 0; i < n_layers; ++i)
    if (Status s = made->AddLayer(); !s.ok()) return s;
  return made;
}

const std::uint8_t* CodedAttention::MakeSide(Side side, RowSource& rows) {
  const std::size_t bytes = format_.side_bytes(shape_, side);
  std::uint8_t* block = memory_.Allocate(bytes);
  if (block == nullptr) return nullptr;
  if (const codec::SideLayout* layout = format_.layout(side); layout != nullptr) {
    for (const auto& head : layout->heads) FillCoded(head, side, rng_, block + head.offset);
  } else {
    rows.Fill({reinterpret_cast<half_t*>(block), bytes / sizeof(half_t)});
  }
  return block;
}

Status CodedAttention::AddLayer() {
  const std::uint32_t index = n_layers();
  std::vector<attention::Page>& pages = pages_.emplace_back(shape_.length / kPageSize);
  RowSource k_rows(SeedOf(index, false)), v_rows(SeedOf(index, true));
  for (std::size_t i = 0; i < pages.size(); ++i) {
    attention::Page& page = pages[i];
    page.rows = kPageSize;
    page.first_cell = static_cast<std::uint32_t>(i * kPageSize);
    page.k_layout = format_.layout(Side::kK);
    page.v_layout = format_.layout(Side::kV);
    page.k = MakeSide(Side::kK, k_rows);
    page.v = MakeSide(Side::kV, v_rows);
    if (page.k == nullptr || page.v == nullptr) return page::NoMemory(format_.page_bytes(shape_));
  }
  return Status::Ok();
}

Status CodedAttention::Step() {
  attention::Job job;
  job.q = query_.q.data();
  job.out = out_.data();
  job.q_head_stride = job.out_head_stride = shape_.dim;
  job.q_tok_stride = job.out_tok_stride = std::size_t{shape_.n_head} * shape_.dim;
  job.mask = query_.mask.data();
  job.mask_tok_stride = job.n_kv = shape_.length;
  job.n_tok = shape_.n_tok;
  for (const auto& pages : pages_) {
    job.pages = pages;
    if (Status s = Attend(layer_, {&job, 1}, params_, workspace_, executor_); !s.ok()) return s;
    if (n_observed_ == 0) continue;
    if (Status s = Observe(layer_, job, params_, shape_.n_tok - n_observed_, n_observed_,
                           mass_.data(), shape_.length, workspace_, executor_);
        !s.ok())
      return s;
  }
  return Status::Ok();
}

}  // namespace kvtamp::bench
