// cell -> page number, for one layer and stream. Buckets of 64 cells: one number when the whole
// bucket lies in one page (the usual case: 4 bytes for 64 cells), else a table. Grows with the
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
    const std::uint32_t n = buckets_[b];
    return IsTable(n) ? tables_[n - kTable][cell % kBucket] : n;
  }
  // Find may name a page for a cell that was never set when its neighbours were; the page's own
  // cells decide.
  void Set(std::uint32_t cell, std::uint32_t page);
  void Clear() {
    buckets_.clear();
    tables_.clear();
    free_.clear();
  }
  std::size_t bytes() const {
    return (buckets_.capacity() + free_.capacity()) * sizeof(std::uint32_t) +
           tables_.capacity() * sizeof(tables_[0]) +
           (tables_.size() - free_.size()) * kBucket * sizeof(std::uint32_t);
  }

 private:
  static constexpr std::uint32_t kBucket = 64;
  static constexpr std::uint32_t kTable = 0x80000000u;  // from here on: numbers of tables
  static bool IsTable(std::uint32_t n) { return n >= kTable && n != kNone; }

  std::vector<std::uint32_t> buckets_;  // a page, a table or kNone
  std::vector<std::unique_ptr<std::uint32_t[]>> tables_;
  std::vector<std::uint32_t> free_;  // tables that are none now
};

}  // namespace kvtamp::page
