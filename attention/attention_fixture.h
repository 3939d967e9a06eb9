// A random layer with its streams, pages of any mixture of codings, and masks; owns all memory.
// Shared by the tests and the benchmark.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "attention/attention.h"
#include "codec/codec.h"
#include "codec/layout.h"

namespace kvtamp::attention {

class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(int n) : n_(n) {}
  int n_threads() const override { return n_; }
  void Run(void (*fn)(void*, int), void* arg) override {
    std::vector<std::thread> threads;
    for (int i = 1; i < n_; ++i) threads.emplace_back(fn, arg, i);
    fn(arg, 0);
    for (std::thread& t : threads) t.join();
  }

 private:
  int n_;
};

enum class Cells : std::uint8_t { kRun, kScattered };
enum class MaskKind : std::uint8_t { kNone, kCausal, kHoles, kPerHead, kAlibi, kAllShut, kWindow };

struct Shape {
  std::uint32_t n_head_kv = 2, gqa = 4, dim_k = 64, dim_v = 64, page_size = 64;
  std::uint32_t n_jobs = 1, n_tok = 1, n_pages = 5;
  std::uint32_t v_group = 0;  // 0: 64, or the head
  std::vector<codec::Coding> k{codec::Coding::kKInt4}, v{codec::Coding::kVLm4};  // drawn per page
  // Of kKPlanes and kVTrellis; the heads differ by half a bit.
  std::uint32_t centibits = 300;
  bool v_hadamard = true, mean = true;
  Cells cells = Cells::kRun;
  MaskKind mask = MaskKind::kCausal;
  bool dead_rows = false;      // with NaN in f16 rows that are dead or that the mask shuts for all
  bool null_sides = false;     // some pages without K or V
  bool partial_pages = false;  // the last page of a job is not full
  bool single_heads = false;   // pages of one head alone, of all but one, or that only one attends
  bool v_in_k = false;
  std::uint32_t turn_pairs = 0;  // pages turned by one of three amounts, or not at all
  bool turn_neox = false;
  float scale = 0;  // 0: 1 / sqrt(dim_k)
  float softcap = 0;
  bool sinks = false;
  float q_size = 1;
};

class World {
 public:
  World(const Shape& shape, std::uint32_t seed) : shape_(shape), rng_(seed) {
    layer.n_head_kv = shape.n_head_kv;
    layer.dim_k = shape.dim_k;
    layer.dim_v = shape.dim_v;
    layer.page_size = shape.page_size;
    layer.v_group = shape.v_group != 0 ? shape.v_group : shape.dim_v % 64 == 0 ? 64 : shape.dim_v;
    layer.v_hadamard = shape.v_hadamard;
    layer.v_in_k = shape.v_in_k;
    if (shape.mean) {
      mean_ = Floats(shape.n_head_kv * shape.dim_k, 1.0f);
      layer.k_mean = mean_.data();
    }
    if (shape.turn_pairs != 0) {
      layer.turn.pairs = std::min(shape.turn_pairs, shape.dim_k / 2);
      layer.turn.first = shape.dim_k - 2 * layer.turn.pairs;
      layer.turn.neox = shape.turn_neox;
      for (int i = 0; i < 3; ++i) {
        std::vector<float>& turn = floats_.emplace_back();
        for (std::uint32_t p = 0; p < layer.turn.pairs; ++p) {
          const float angle = 3 * Normal();
          turn.push_back(std::cos(angle));
          turn.push_back(std::sin(angle));
        }
        turns_.push_back(turn.data());
      }
    }
    params.n_head = shape.n_head_kv * shape.gqa;
    params.scale =
        shape.scale != 0 ? shape.scale : 1.0f / std::sqrt(static_cast<float>(shape.dim_k));
    params.softcap = shape.softcap;
    if (shape.mask == MaskKind::kAlibi) params.max_bias = 8.0f;
    if (shape.sinks) {
      sinks_ = Floats(params.n_head, 2.0f);
      params.sinks = sinks_.data();
    }
    for (std::uint32_t j = 0; j < shape.n_jobs; ++j)
      AddJob(shape.n_tok + (j % 2), shape.n_pages + j);
    for (std::size_t j = 0; j < jobs_.size(); ++j)
      jobs_[j].pages = {pages_[j].data(), pages_[j].size()};
  }

  // Jobs that write into `out`, one after the other; as many floats as OutputSize().
  std::vector<Job> JobsInto(std::vector<float>& out) const {
    out.assign(OutputSize(), -1.0f);
    std::vector<Job> jobs = jobs_;
    std::size_t at = 0;
    for (Job& job : jobs) {
      job.out = out.data() + at;
      job.out_head_stride = layer.dim_v;
      job.out_tok_stride = std::size_t{params.n_head} * layer.dim_v;
      at += job.n_tok * job.out_tok_stride;
    }
    return jobs;
  }
  std::size_t OutputSize() const {
    std::size_t n = 0;
    for (const Job& job : jobs_) n += std::size_t{job.n_tok} * params.n_head * layer.dim_v;
    return n;
  }
  // K and V as they lie in memory, read once.
  std::size_t page_bytes() const { return page_bytes_; }
  const std::deque<std::vector<std::uint8_t>>& blobs() const { return blobs_; }

  Layer layer;
  Params params;

 private:
  float Normal() { return normal_(rng_); }
  bool Chance(int percent) { return static_cast<int>(rng_() % 100) < percent; }
  std::vector<float> Floats(std::size_t n, float size) {
    std::vector<float> v(n);
    for (float& x : v) x = size * Normal();
    return v;
  }

  // Rows [page_size, n_head_kv, dim], with channels of quite different size, as keys have.
  std::vector<half_t> Rows(std::uint32_t dim, const std::vector<float>* mean) {
    std::vector<half_t> rows(std::size_t{shape_.page_size} * shape_.n_head_kv * dim);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::size_t c = i % (std::size_t{shape_.n_head_kv} * dim);
      const float size = mean != nullptr ? (c % 7 == 0 ? 3.0f : 0.7f) : 1.0f;
      rows[i] =
          FloatToHalf(size * Normal() + (mean != nullptr && !mean->empty() ? (*mean)[c] : 0.0f));
    }
    return rows;
  }

  void AddJob(std::uint32_t n_tok, std::uint32_t n_pages) {
    const std::uint32_t ps = shape_.page_size, n_rows = n_pages * ps;
    // Cells past n_kv exist when rows are scattered; then some rows of theirs must be ignored.
    const std::uint32_t n_cells = shape_.cells == Cells::kScattered ? n_rows + 19 : n_rows;
    const std::uint32_t n_kv = n_rows == 0                         ? 0
                               : shape_.cells == Cells::kScattered ? n_rows + 3
                                                                   : n_rows - ps / 3;
    std::vector<std::uint32_t>& order = cells_.emplace_back(n_cells);
    std::iota(order.begin(), order.end(), 0u);
    if (shape_.cells == Cells::kScattered) std::shuffle(order.begin(), order.end(), rng_);

    Job job;
    job.n_tok = n_tok;
    job.n_kv = n_kv;
    std::vector<float>& q = floats_.emplace_back(
        Floats(std::size_t{n_tok} * params.n_head * shape_.dim_k + 5 * n_tok, shape_.q_size));
    job.q = q.data();
    job.q_head_stride = shape_.dim_k;
    job.q_tok_stride = std::size_t{params.n_head} * shape_.dim_k + 5;  // rows need not be packed
    const std::vector<half_t>* mask = AddMask(job, n_tok, n_kv);

    std::vector<Page>& pages = pages_.emplace_back();
    for (std::uint32_t i = 0; i < n_pages; ++i) {
      pages.push_back(AddPage(job, mask, order, i, i + 1 == n_pages && shape_.partial_pages));
    }
    jobs_.push_back(job);
  }

  const std::vector<half_t>* AddMask(Job& job, std::uint32_t n_tok, std::uint32_t n_kv) {
    const MaskKind kind = shape_.mask;
    if (kind == MaskKind::kNone) return nullptr;
    const std::uint32_t n_heads = kind == MaskKind::kPerHead ? params.n_head : 1;
    std::vector<half_t>& mask = halves_.emplace_back(std::size_t{n_tok} * n_kv * n_heads);
    job.mask = mask.data();
    job.mask_tok_stride = n_kv;
    job.mask_head_stride = kind == MaskKind::kPerHead ? std::size_t{n_tok} * n_kv : 0;
    for (std::uint32_t h = 0; h < n_heads; ++h) {
      for (std::uint32_t t = 0; t < n_tok; ++t) {
        half_t* row = mask.data() + (std::size_t{h} * n_tok + t) * n_kv;
        const bool shut_row = kind != MaskKind::kCausal && kind != MaskKind::kWindow && Chance(10);
        const int position = static_cast<int>(n_kv) - static_cast<int>(n_tok) + static_cast<int>(t);
        for (std::uint32_t c = 0; c < n_kv; ++c) {
          const int distance = position - static_cast<int>(c);
          bool shut = distance < 0;
          float value = 0;
          if (kind == MaskKind::kHoles || kind == MaskKind::kPerHead) shut = shut || Chance(30);
          if (kind == MaskKind::kHoles && Chance(5)) value = -1.5f;
          if (kind == MaskKind::kWindow) shut = shut || distance > 70;
          if (kind == MaskKind::kAlibi) value = -static_cast<float>(std::abs(distance));
          if (kind == MaskKind::kAllShut || shut_row) shut = true;
          row[c] = shut ? half_t{0xFC00} : FloatToHalf(value);
        }
      }
    }
    return &mask;
  }

  Page AddPage(const Job& job, const std::vector<half_t>* mask,
               const std::vector<std::uint32_t>& order, std::uint32_t index, bool partial) {
    const std::uint32_t ps = shape_.page_size;
    Page page;
    page.rows =
        static_cast<std::uint16_t>(partial ? 1 + static_cast<std::uint32_t>(rng_()) % ps : ps);
    // Bit h: head h has a block. Where one only is meant to attend, the others' are there as well.
    std::uint32_t held = ~0u;
    if (shape_.single_heads && Chance(75)) {
      const std::uint32_t head = static_cast<std::uint32_t>(rng_()) % shape_.n_head_kv;
      const bool all_but_one = Chance(30);
      if (!all_but_one) {
        page.head = static_cast<std::uint16_t>(head & 0x7FFF);
        page.alone = Chance(60);
      }
      if (page.alone) held = 1u << head;
      if (all_but_one) held = ~(1u << head);
    }
    page.first_cell = index * ps;
    if (shape_.cells == Cells::kScattered) page.cells = order.data() + std::size_t{index} * ps;
    if (!turns_.empty() && !Chance(25)) page.turn = turns_[rng_() % turns_.size()];
    page.k_layout = Layout(shape_.k[rng_() % shape_.k.size()], shape_.dim_k, 0, held);
    if (page.k_layout == nullptr && !page.alone) held = ~0u;  // nothing would say who is gone
    page.v_layout = Layout(shape_.v[rng_() % shape_.v.size()], shape_.dim_v, layer.v_group, held);

    std::vector<std::uint64_t>& live = words_.emplace_back((ps + 63) / 64);
    std::vector<bool> seen(ps);
    for (std::uint32_t r = 0; r < page.rows; ++r) {
      if (shape_.dead_rows && Chance(20)) continue;
      live[r / 64] |= std::uint64_t{1} << (r % 64);
      seen[r] = shape_.mask == MaskKind::kNone;
      const std::uint32_t cell = page.cells != nullptr ? page.cells[r] : page.first_cell + r;
      if (mask != nullptr && cell < job.n_kv) {
        for (std::size_t at = cell; at < mask->size(); at += job.n_kv)
          seen[r] = seen[r] || (*mask)[at] != 0xFC00;
      }
    }
    if (shape_.dead_rows) page.live = live.data();

    std::vector<half_t> k = Rows(shape_.dim_k, &mean_), v = Rows(shape_.dim_v, nullptr);
    if (shape_.dead_rows) {
      for (std::uint32_t r = 0; r < ps; ++r) {
        if (seen[r]) continue;
        std::fill_n(k.begin() + std::size_t{r} * layer.n_head_kv * layer.dim_k,
                    layer.n_head_kv * layer.dim_k, 0x7E01);
        std::fill_n(v.begin() + std::size_t{r} * layer.n_head_kv * layer.dim_v,
                    layer.n_head_kv * layer.dim_v, 0xFFFF);
      }
    }
    if (!shape_.null_sides || !Chance(30))
      page.k = Pack(page, page.k_layout, k, shape_.dim_k, true);
    if (!shape_.v_in_k && (!shape_.null_sides || !Chance(30)))
      page.v = Pack(page, page.v_layout, v, shape_.dim_v, false);
    return page;
  }

  const codec::SideLayout* Layout(codec::Coding coding, std::uint32_t dim, std::uint32_t group,
                                  std::uint32_t held) {
    if (coding == codec::Coding::kF16) return nullptr;
    codec::SideLayout& layout = layouts_.emplace_back();
    for (std::uint32_t h = 0; h < shape_.n_head_kv; ++h) {
      if ((held >> h & 1) == 0) {
        layout.heads.push_back({coding, {}, layout.bytes, 0, 0});
        continue;
      }
      codec::PageShape shape{shape_.page_size, dim, group};
      const std::uint32_t centibits = shape_.centibits + h % 2 * 50;
      if (coding == codec::Coding::kKPlanes) {
        shape.budget = std::min(dim * 8, (centibits * dim + 200) / 400 * 4);
        shape.weighted = true;
      }
      if (coding == codec::Coding::kRows) {
        shape.format = {codec::Levels::kInt, 5, codec::Axis::kToken, false, h % 2 == 0, 1};
        shape.group = dim;
      }
      if (coding == codec::Coding::kVTrellis)
        shape.rate8 = codec::TrellisRate8(shape_.page_size, dim, centibits);
      layout.Add(coding, shape);
    }
    return &layout;
  }

  const std::uint8_t* Pack(const Page& page, const codec::SideLayout* layout,
                           const std::vector<half_t>& rows, std::uint32_t dim, bool is_k) {
    std::vector<std::uint8_t>& blob = blobs_.emplace_back();
    if (layout == nullptr && page.alone) {
      blob.resize(rows.size() / shape_.n_head_kv * sizeof(half_t));
      for (std::uint32_t r = 0; r < shape_.page_size; ++r) {
        std::memcpy(blob.data() + std::size_t{r} * dim * sizeof(half_t),
                    rows.data() + (std::size_t{r} * shape_.n_head_kv + page.head) * dim,
                    dim * sizeof(half_t));
      }
    } else if (layout == nullptr) {
      blob.resize(rows.size() * sizeof(half_t));
      std::memcpy(blob.data(), rows.data(), blob.size());
    } else {
      // Rows that are not there get codes as well, so that using them would show.
      constexpr std::uint64_t all[] = {~std::uint64_t{0}, ~std::uint64_t{0}};
      blob.resize(layout->bytes);
      for (std::uint32_t h = 0; h < shape_.n_head_kv; ++h) {
        const codec::SideLayout::Head& to = layout->heads[h];
        if (to.bytes == 0) continue;
        const codec::EncodeInput in{rows.data() + std::size_t{h} * dim,
                                    std::size_t{shape_.n_head_kv} * dim, all};
        if (is_k) {
          codec::EncodeK(to.coding, to.shape, in,
                         layer.k_mean == nullptr ? nullptr : layer.k_mean + h * dim,
                         blob.data() + to.offset);
        } else {
          codec::EncodeV(to.coding, to.shape, in, layer.v_hadamard, blob.data() + to.offset);
        }
      }
    }
    page_bytes_ += blob.size();
    return blob.data();
  }

  Shape shape_;
  std::mt19937 rng_;
  std::normal_distribution<float> normal_;
  std::vector<float> mean_, sinks_;
  std::vector<const float*> turns_;
  std::vector<Job> jobs_;
  std::deque<std::vector<Page>> pages_;
  std::deque<std::vector<std::uint32_t>> cells_;
  std::deque<std::vector<std::uint64_t>> words_;
  std::deque<std::vector<float>> floats_;
  std::deque<std::vector<half_t>> halves_;
  std::deque<std::vector<std::uint8_t>> blobs_;
  std::deque<codec::SideLayout> layouts_;
  std::size_t page_bytes_ = 0;
};

}  // namespace kvtamp::attention
