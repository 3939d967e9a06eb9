#include "page/cell_index.h"

#include <algorithm>

namespace kvtamp::page {

void CellIndex::Set(std::uint32_t cell, std::uint32_t page) {
  const std::size_t b = cell / kBucket;
  if (b >= buckets_.size()) {
    if (b >= buckets_.capacity())
      buckets_.reserve(b + b / 8 + 8);  // doubling would show in the figures
    buckets_.resize(b + 1, kNone);
  }
  std::uint32_t& bucket = buckets_[b];
  if (bucket == kNone || bucket == page) {
    bucket = page;
    return;
  }
  if (!IsTable(bucket)) {
    auto table = std::make_unique<std::uint32_t[]>(kBucket);
    std::fill_n(table.get(), kBucket, bucket);
    if (free_.empty()) {
      bucket = kTable + static_cast<std::uint32_t>(tables_.size());
      tables_.reserve(tables_.size() + tables_.size() / 8 + 1);
      tables_.push_back(std::move(table));
    } else {
      bucket = kTable + free_.back();
      free_.pop_back();
      tables_[bucket - kTable] = std::move(table);
    }
  }
  std::uint32_t* table = tables_[bucket - kTable].get();
  table[cell % kBucket] = page;
  // Back to one number once the bucket lies in one page again.
  if (cell % kBucket != kBucket - 1 ||
      !std::all_of(table, table + kBucket, [page](std::uint32_t p) { return p == page; }))
    return;
  free_.push_back(bucket - kTable);
  tables_[bucket - kTable].reset();
  bucket = page;
}

}  // namespace kvtamp::page
