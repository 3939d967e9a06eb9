#include "page/cell_index.h"

#include <algorithm>

namespace kvtamp::page {

void CellIndex::Set(std::uint32_t cell, std::uint32_t page) {
  const std::size_t b = cell / kBucket;
  if (b >= buckets_.size()) {
    if (b >= buckets_.capacity())
      buckets_.reserve(b + b / 8 + 8);  // doubling would show in the figures
    buckets_.resize(b + 1);
  }
  Bucket& bucket = buckets_[b];
  if (bucket.table) {
    bucket.table[cell % kBucket] = page;
    // Back to one number once the bucket lies in one page again.
    if (cell % kBucket == kBucket - 1 &&
        std::all_of(bucket.table.get(), bucket.table.get() + kBucket,
                    [page](std::uint32_t p) { return p == page; })) {
      bucket.page = page;
      bucket.table.reset();
      n_tables_--;
    }
  } else if (bucket.page == kNone) {
    bucket.page = page;
  } else if (bucket.page != page) {
    bucket.table = std::make_unique<std::uint32_t[]>(kBucket);
    std::fill_n(bucket.table.get(), kBucket, bucket.page);
    bucket.table[cell % kBucket] = page;
    n_tables_++;
  }
}

}  // namespace kvtamp::page
