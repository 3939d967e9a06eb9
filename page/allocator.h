// Memory of all pages of a cache: slabs of equal blocks, one class per block size.
//
// Page formats have few distinct sizes, so a class per exact size (rounded to 64 bytes, for vector
// loads) wastes nothing inside a block. A slab is one anonymous mapping whose blocks are used in
// order, so that what was never used is not resident and not counted. Big blocks (f16 pages, which
// come and go) get slabs of their own as long as their class is small. A slab whose last block is
// freed goes back to the system, unless the empty ones are below 1/512 of everything; so do whole
// OS pages between used blocks once freed blocks hold more than 1/32. Every resident byte is
// counted.
//
// Not thread-safe: the cache that owns it serialises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"

namespace kvtamp::page {

// The error of a refused Allocate.
inline Status NoMemory(std::size_t bytes) {
  return Status::OutOfMemory("no memory for a page of " + std::to_string(bytes) + " bytes");
}

class Allocator {
 public:
  Allocator();
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  // At least `bytes` bytes, 64-byte aligned, contents undefined; null when the system refuses.
  std::uint8_t* Allocate(std::size_t bytes);
  // One more owner of a block that nobody will change: each frees it, the last for good.
  void Share(std::uint8_t* block) { shared_[block]++; }
  std::uint32_t owners(const std::uint8_t* block) const;
  // `bytes` as asked for in Allocate.
  void Free(std::uint8_t* block, std::size_t bytes);
  // Every block at once; outstanding pointers become invalid.
  void Clear();

  std::size_t used_bytes() const { return used_; }          // blocks handed out, rounding included
  std::size_t resident_bytes() const { return resident_; }  // touched so far, by whole OS pages
  std::size_t peak_bytes() const { return peak_; }
  std::size_t index_bytes() const;  // our own bookkeeping

 private:
  struct Slab;
  struct Class;
  Class& ClassOf(std::size_t block_bytes);
  Slab* NewSlab(Class& c);
  void Unmap(Slab* slab);
  void Touch(Slab& slab, std::uint32_t block);
  // Gives back every OS page that no used block reaches into.
  void Trim();

  std::map<std::size_t, std::unique_ptr<Class>> classes_;          // by block size
  std::map<std::uintptr_t, std::unique_ptr<Slab>> slabs_;          // by base address
  std::unordered_map<const std::uint8_t*, std::uint32_t> shared_;  // owners beyond the first
  std::size_t used_ = 0, resident_ = 0, peak_ = 0;
  std::size_t freed_ = 0;  // of resident_, about: in freed blocks of slabs still used
  std::size_t empty_ = 0;  // of resident_, in slabs without a used block:
  std::vector<Slab*> empty_slabs_;
};

}  // namespace kvtamp::page
