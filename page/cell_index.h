// cell -> page number, for one layer and stream. Buckets of 64 cells: one number when the whole
// bucket lies in one page (the usual case: 16 bytes for 64 cells), else a table. Grows with the
// highest cell written, so a context of a million cells costs nothing until it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvtamp::page {

class CellIndex {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  std::uint32_t Find(std::uint32_t cell) const {
    const std::size_t b = cell / kBucket;
    if (b >= buckets_.size()) return kNone;
    const Bucket& bucket = buckets_[b];
    return bucket.table ? bucket.table[cell % kBucket] : bucket.page;
  }
  // Find may name a page for a cell that was never set when its neighbours were; the page's own
  // cells decide.
  void Set(std::uint32_t cell, std::uint32_t page);
  void Clear() {
    buckets_.clear();
    n_tables_ = 0;
  }
  std::size_t bytes() const {
    return buckets_.capacity() * sizeof(Bucket) + n_tables_ * kBucket * sizeof(std::uint32_t);
  }

 private:
  static constexpr std::uint32_t kBucket = 64;
  struct Bucket {
    std::uint32_t page = kNone;
    std::unique_ptr<std::uint32_t[]> table;
  };
  std::vector<Bucket> buckets_;
  std::size_t n_tables_ = 0;
};

}  // namespace kvtamp::page
