#include "page/allocator.h"

#include <sys/mman.h>

#include <algorithm>

namespace kvtamp::page {
namespace {

constexpr std::size_t kAlign = 64;
constexpr std::size_t kOsPage = 4096;
constexpr std::size_t kMinSlab = 16 * 1024;
constexpr std::size_t kMaxSlab = 2 * 1024 * 1024;
constexpr std::size_t kSmallBlock = 16 * 1024;
constexpr std::size_t kSmallPerSlab =
    32;  // small blocks share slabs: less rounding, less bookkeeping
constexpr std::size_t kSlabShare = 128;   // a slab of big ones is at most this part of its class
constexpr std::size_t kEmptyShare = 512;  // empty slabs are kept up to this part of everything
constexpr std::size_t kFreedShare = 32;   // and freed blocks up to this
constexpr std::size_t kMinFreed = 64 * 1024;

std::size_t RoundUp(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

// Bytes of a slab of n blocks or up to twice as many, of big ones up to 16, whichever fill pages of
// the system best. (A coded page may be a little more than some pages; f16 ones mostly are whole.)
std::size_t SlabBytes(std::size_t block, std::size_t n) {
  std::size_t best = n;
  const auto tail = [block](std::size_t m) { return RoundUp(m * block, kOsPage) - m * block; };
  for (std::size_t m = n; m < std::max<std::size_t>(2 * n, 16); ++m) {
    if (tail(m) * best < tail(best) * m) best = m;
  }
  return RoundUp(best * block, kOsPage);
}

}  // namespace

struct Allocator::Slab {
  std::uint8_t* base = nullptr;
  std::size_t bytes = 0;
  Class* owner = nullptr;
  std::vector<std::uint32_t> free;  // numbers of blocks that were used before
  std::uint32_t n_blocks = 0;
  std::uint32_t n_touched = 0;  // blocks from here on were never used
  std::uint32_t n_used = 0;
  std::vector<bool> pages;   // of the system: which are resident
  std::size_t resident = 0;  // bytes of those
  std::size_t freed = 0;     // of those, about: in freed blocks

  bool full() const { return n_used == n_blocks; }
  std::uint32_t first_page(std::uint32_t block) const;
  std::uint32_t end_page(std::uint32_t block) const;
};

struct Allocator::Class {
  std::size_t block_bytes = 0;
  std::vector<Slab*> with_room;  // slabs that have a free block, last is used first
  std::size_t resident = 0;
};

std::uint32_t Allocator::Slab::first_page(std::uint32_t block) const {
  return static_cast<std::uint32_t>(block * owner->block_bytes / kOsPage);
}
std::uint32_t Allocator::Slab::end_page(std::uint32_t block) const {
  return static_cast<std::uint32_t>(((block + 1) * owner->block_bytes + kOsPage - 1) / kOsPage);
}

Allocator::Allocator() = default;
Allocator::~Allocator() { Clear(); }

Allocator::Class& Allocator::ClassOf(std::size_t block_bytes) {
  auto& c = classes_[block_bytes];
  if (!c) {
    c = std::make_unique<Class>();
    c->block_bytes = block_bytes;
  }
  return *c;
}

Allocator::Slab* Allocator::NewSlab(Class& c) {
  std::size_t n = std::clamp(c.resident / kSlabShare, kMinSlab, kMaxSlab) / c.block_bytes;
  n = std::max(n, c.block_bytes <= kSmallBlock ? kSmallPerSlab : 1);
  const std::size_t bytes = SlabBytes(c.block_bytes, n);
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  auto slab = std::make_unique<Slab>();
  slab->base = static_cast<std::uint8_t*>(p);
  slab->bytes = bytes;
  slab->owner = &c;
  slab->n_blocks = static_cast<std::uint32_t>(bytes / c.block_bytes);
  slab->pages.resize(bytes / kOsPage);
  Slab* raw = slab.get();
  slabs_[reinterpret_cast<std::uintptr_t>(p)] = std::move(slab);
  c.with_room.push_back(raw);
  return raw;
}

void Allocator::Unmap(Slab* slab) {
  std::erase(slab->owner->with_room, slab);
  std::erase(empty_slabs_, slab);
  slab->owner->resident -= slab->resident;
  resident_ -= slab->resident;
  empty_ -= slab->resident;
  munmap(slab->base, slab->bytes);
  slabs_.erase(reinterpret_cast<std::uintptr_t>(slab->base));
}

void Allocator::Touch(Slab& slab, std::uint32_t block) {
  for (std::uint32_t p = slab.first_page(block); p < slab.end_page(block); ++p) {
    if (slab.pages[p]) continue;
    slab.pages[p] = true;
    slab.resident += kOsPage;
    slab.owner->resident += kOsPage;
    resident_ += kOsPage;
  }
  peak_ = std::max(peak_, resident_);
}

void Allocator::Trim() {
  for (auto& [base, slab] : slabs_) {
    if (slab->freed == 0 || slab->n_used == 0) continue;
    std::vector<bool> used_block(slab->n_touched, true), used_page(slab->pages.size());
    for (std::uint32_t i : slab->free) used_block[i] = false;
    for (std::uint32_t i = 0; i < slab->n_touched; ++i)
      for (std::uint32_t p = slab->first_page(i); used_block[i] && p < slab->end_page(i); ++p)
        used_page[p] = true;
    for (std::size_t p = 0; p < slab->pages.size();) {
      std::size_t end = p;
      while (end < slab->pages.size() && slab->pages[end] && !used_page[end]) ++end;
      const std::size_t bytes = (end - p) * kOsPage;
      if (bytes != 0 && madvise(slab->base + p * kOsPage, bytes, MADV_DONTNEED) == 0) {
        std::fill(slab->pages.begin() + static_cast<std::ptrdiff_t>(p),
                  slab->pages.begin() + static_cast<std::ptrdiff_t>(end), false);
        slab->resident -= bytes;
        slab->owner->resident -= bytes;
        resident_ -= bytes;
      }
      p = end + 1;
    }
    slab->freed = 0;
  }
  freed_ = 0;
}

std::uint8_t* Allocator::Allocate(std::size_t bytes) {
  const std::size_t block = RoundUp(std::max<std::size_t>(bytes, 1), kAlign);
  Class& c = ClassOf(block);
  Slab* slab = c.with_room.empty() ? NewSlab(c) : c.with_room.back();
  if (slab == nullptr) return nullptr;
  if (slab->n_used == 0 && slab->n_touched > 0) {
    empty_ -= slab->resident;
    std::erase(empty_slabs_, slab);
  }
  std::uint32_t i;
  if (!slab->free.empty()) {
    i = slab->free.back();
    slab->free.pop_back();
    const std::size_t again = std::min(block, slab->freed);
    slab->freed -= again;
    freed_ -= again;
  } else {
    i = slab->n_touched++;
  }
  Touch(*slab, i);
  slab->n_used++;
  if (slab->full()) std::erase(c.with_room, slab);
  used_ += block;
  return slab->base + i * block;
}

std::uint32_t Allocator::owners(const std::uint8_t* p) const {
  auto it = shared_.find(p);
  return it == shared_.end() ? 1 : it->second + 1;
}

void Allocator::Free(std::uint8_t* p, std::size_t bytes) {
  if (p == nullptr) return;
  if (!shared_.empty()) {
    if (auto it = shared_.find(p); it != shared_.end()) {
      if (--it->second == 0) shared_.erase(it);
      return;
    }
  }
  const std::size_t block = RoundUp(std::max<std::size_t>(bytes, 1), kAlign);
  auto it = std::prev(slabs_.upper_bound(reinterpret_cast<std::uintptr_t>(p)));
  Slab* slab = it->second.get();
  Class& c = *slab->owner;
  if (slab->full()) c.with_room.push_back(slab);
  slab->free.push_back(
      static_cast<std::uint32_t>(static_cast<std::size_t>(p - slab->base) / block));
  slab->n_used--;
  used_ -= block;
  if (slab->n_used > 0) {
    slab->freed += block;
    freed_ += block;
    if (freed_ > std::max(kMinFreed, resident_ / kFreedShare)) Trim();
    return;
  }
  freed_ -= slab->freed;
  slab->freed = 0;
  empty_ += slab->resident;
  empty_slabs_.push_back(slab);
  while (empty_ > resident_ / kEmptyShare) Unmap(empty_slabs_.front());
}

void Allocator::Clear() {
  for (auto& [base, slab] : slabs_) munmap(slab->base, slab->bytes);
  slabs_.clear();
  classes_.clear();
  empty_slabs_.clear();
  shared_.clear();
  used_ = resident_ = empty_ = freed_ = 0;
}

std::size_t Allocator::index_bytes() const {
  std::size_t n = 0;
  for (auto& [base, slab] : slabs_)
    n += sizeof(Slab) + 64 + slab->free.capacity() * 4 + slab->pages.capacity() / 8;
  for (auto& [size, c] : classes_)
    n += sizeof(Class) + 64 + c->with_room.capacity() * sizeof(Slab*);
  n += shared_.size() * (sizeof(*shared_.begin()) + 2 * sizeof(void*));
  return n;
}

}  // namespace kvtamp::page
