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
constexpr std::size_t kSmallPerSlab = 32;  // small blocks share slabs: less rounding, less bookkeeping
constexpr std::size_t kSlabShare = 128;    // a slab of big ones is at most this part of its class
constexpr std::size_t kEmptyShare = 512;   // empty slabs are kept up to this part of everything

std::size_t RoundUp(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

// Bytes of a slab of n blocks or up to twice as many, whichever fill pages of the system best.
std::size_t SlabBytes(std::size_t block, std::size_t n) {
  std::size_t best = n;
  const auto tail = [block](std::size_t m) { return RoundUp(m * block, kOsPage) - m * block; };
  for (std::size_t m = n; m < 2 * n; ++m) {
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
  std::uint32_t n_touched = 0;      // blocks from here on were never used: not resident
  std::uint32_t n_used = 0;

  bool full() const { return n_used == n_blocks; }
  std::size_t resident(std::uint32_t touched) const;
};

struct Allocator::Class {
  std::size_t block_bytes = 0;
  std::vector<Slab*> with_room;  // slabs that have a free block, last is used first
  std::size_t resident = 0;
};

std::size_t Allocator::Slab::resident(std::uint32_t touched) const {
  return RoundUp(touched * owner->block_bytes, kOsPage);
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
  Slab* raw = slab.get();
  slabs_[reinterpret_cast<std::uintptr_t>(p)] = std::move(slab);
  c.with_room.push_back(raw);
  return raw;
}

void Allocator::Unmap(Slab* slab) {
  const std::size_t resident = slab->resident(slab->n_touched);
  std::erase(slab->owner->with_room, slab);
  std::erase(empty_slabs_, slab);
  slab->owner->resident -= resident;
  resident_ -= resident;
  empty_ -= resident;
  munmap(slab->base, slab->bytes);
  slabs_.erase(reinterpret_cast<std::uintptr_t>(slab->base));
}

std::uint8_t* Allocator::Allocate(std::size_t bytes) {
  const std::size_t block = RoundUp(std::max<std::size_t>(bytes, 1), kAlign);
  Class& c = ClassOf(block);
  Slab* slab = c.with_room.empty() ? NewSlab(c) : c.with_room.back();
  if (slab == nullptr) return nullptr;
  if (slab->n_used == 0 && slab->n_touched > 0) {
    empty_ -= slab->resident(slab->n_touched);
    std::erase(empty_slabs_, slab);
  }
  std::uint32_t i;
  if (!slab->free.empty()) {
    i = slab->free.back();
    slab->free.pop_back();
  } else {
    i = slab->n_touched++;
    const std::size_t more = slab->resident(i + 1) - slab->resident(i);
    c.resident += more;
    resident_ += more;
    peak_ = std::max(peak_, resident_);
  }
  slab->n_used++;
  if (slab->full()) std::erase(c.with_room, slab);
  used_ += block;
  return slab->base + i * block;
}

void Allocator::Free(std::uint8_t* p, std::size_t bytes) {
  if (p == nullptr) return;
  const std::size_t block = RoundUp(std::max<std::size_t>(bytes, 1), kAlign);
  auto it = std::prev(slabs_.upper_bound(reinterpret_cast<std::uintptr_t>(p)));
  Slab* slab = it->second.get();
  Class& c = *slab->owner;
  if (slab->full()) c.with_room.push_back(slab);
  slab->free.push_back(static_cast<std::uint32_t>(static_cast<std::size_t>(p - slab->base) / block));
  slab->n_used--;
  used_ -= block;
  if (slab->n_used > 0) return;
  empty_ += slab->resident(slab->n_touched);
  empty_slabs_.push_back(slab);
  while (empty_ > resident_ / kEmptyShare) Unmap(empty_slabs_.front());
}

void Allocator::Clear() {
  for (auto& [base, slab] : slabs_) munmap(slab->base, slab->bytes);
  slabs_.clear();
  classes_.clear();
  empty_slabs_.clear();
  used_ = resident_ = empty_ = 0;
}

std::size_t Allocator::index_bytes() const {
  std::size_t n = 0;
  for (auto& [base, slab] : slabs_) n += sizeof(Slab) + 64 + slab->free.capacity() * 4;
  for (auto& [size, c] : classes_) n += sizeof(Class) + 64 + c->with_room.capacity() * sizeof(Slab*);
  return n;
}

}  // namespace kvtamp::page
