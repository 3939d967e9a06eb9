#include "page/allocator.h"

#include <sys/mman.h>

#include <algorithm>

namespace kvtamp::page {
namespace {

constexpr std::size_t kAlign = 64;
constexpr std::size_t kOsPage = 4096;
constexpr std::size_t kMinSlab = 16 * 1024;
constexpr std::size_t kMaxSlab = 2 * 1024 * 1024;
constexpr std::size_t kSlabShare = 128;   // a new slab is at most this part of its class
constexpr std::size_t kEmptyShare = 512;  // empty slabs are kept up to this part of everything

std::size_t RoundUp(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

// Bytes of a slab of about `wanted`: as many blocks as fill whole pages of the system nearly to the end.
std::size_t SlabBytes(std::size_t block, std::size_t wanted) {
  const std::size_t first = std::max<std::size_t>(1, wanted / block);
  std::size_t best = first;
  double best_waste = 1.0;
  for (std::size_t n = first; n <= 4 * first; ++n) {
    const std::size_t bytes = RoundUp(n * block, kOsPage);
    const double waste = static_cast<double>(bytes % block) / static_cast<double>(bytes);
    if (waste < best_waste) {
      best = n;
      best_waste = waste;
    }
    if (waste < 0.005) break;
  }
  return RoundUp(best * block, kOsPage);
}

}  // namespace

struct Allocator::Slab {
  std::uint8_t* base = nullptr;
  std::size_t bytes = 0;
  Class* owner = nullptr;
  std::vector<std::uint32_t> free;  // block numbers
  std::uint32_t n_blocks = 0;
};

struct Allocator::Class {
  std::size_t block_bytes = 0;
  std::vector<Slab*> with_room;  // slabs that have a free block, last is used first
  std::size_t mapped = 0;
};

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
  const std::size_t wanted = std::clamp(c.mapped / kSlabShare, kMinSlab, kMaxSlab);
  const std::size_t bytes = SlabBytes(c.block_bytes, wanted);
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  auto slab = std::make_unique<Slab>();
  slab->base = static_cast<std::uint8_t*>(p);
  slab->bytes = bytes;
  slab->owner = &c;
  slab->n_blocks = static_cast<std::uint32_t>(bytes / c.block_bytes);
  slab->free.reserve(slab->n_blocks);
  for (std::uint32_t i = slab->n_blocks; i > 0; --i) slab->free.push_back(i - 1);
  mapped_ += bytes;
  c.mapped += bytes;
  empty_ += bytes;
  empty_slabs_.push_back(slab.get());
  peak_ = std::max(peak_, mapped_);
  Slab* raw = slab.get();
  slabs_[reinterpret_cast<std::uintptr_t>(p)] = std::move(slab);
  c.with_room.push_back(raw);
  return raw;
}

void Allocator::Unmap(Slab* slab) {
  std::erase(slab->owner->with_room, slab);
  slab->owner->mapped -= slab->bytes;
  munmap(slab->base, slab->bytes);
  mapped_ -= slab->bytes;
  empty_ -= slab->bytes;
  std::erase(empty_slabs_, slab);
  slabs_.erase(reinterpret_cast<std::uintptr_t>(slab->base));
}

std::uint8_t* Allocator::Allocate(std::size_t bytes) {
  const std::size_t block = RoundUp(std::max<std::size_t>(bytes, 1), kAlign);
  Class& c = ClassOf(block);
  Slab* slab = c.with_room.empty() ? NewSlab(c) : c.with_room.back();
  if (slab == nullptr) return nullptr;
  if (slab->free.size() == slab->n_blocks) {
    empty_ -= slab->bytes;
    std::erase(empty_slabs_, slab);
  }
  const std::uint32_t i = slab->free.back();
  slab->free.pop_back();
  if (slab->free.empty()) std::erase(c.with_room, slab);
  used_ += block;
  return slab->base + i * block;
}

void Allocator::Free(std::uint8_t* p, std::size_t bytes) {
  if (p == nullptr) return;
  const std::size_t block = RoundUp(std::max<std::size_t>(bytes, 1), kAlign);
  auto it = std::prev(slabs_.upper_bound(reinterpret_cast<std::uintptr_t>(p)));
  Slab* slab = it->second.get();
  Class& c = *slab->owner;
  if (slab->free.empty()) c.with_room.push_back(slab);
  slab->free.push_back(static_cast<std::uint32_t>(static_cast<std::size_t>(p - slab->base) / block));
  used_ -= block;
  if (slab->free.size() < slab->n_blocks) return;
  empty_ += slab->bytes;
  empty_slabs_.push_back(slab);
  while (empty_ > mapped_ / kEmptyShare) Unmap(empty_slabs_.front());
}

void Allocator::Clear() {
  for (auto& [base, slab] : slabs_) munmap(slab->base, slab->bytes);
  slabs_.clear();
  classes_.clear();
  empty_slabs_.clear();
  used_ = mapped_ = empty_ = 0;
}

std::size_t Allocator::index_bytes() const {
  std::size_t n = 0;
  for (auto& [base, slab] : slabs_) n += sizeof(Slab) + 64 + slab->free.capacity() * 4;
  for (auto& [size, c] : classes_) n += sizeof(Class) + 64 + c->with_room.capacity() * sizeof(Slab*);
  return n;
}

}  // namespace kvtamp::page
