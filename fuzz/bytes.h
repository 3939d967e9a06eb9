// Reads a fuzzer's input from front to back; past its end everything is nought.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace kvtamp::fuzz {

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  bool empty() const { return at_ >= size_; }
  std::uint8_t U8() { return at_ < size_ ? data_[at_++] : 0; }
  std::uint16_t U16() {
    const auto low = U8();
    return static_cast<std::uint16_t>(low | U8() << 8);
  }
  std::uint32_t Below(std::uint32_t n) { return n <= 256 ? U8() % n : U16() % n; }
  bool Flag() { return (U8() & 1) != 0; }

 private:
  const std::uint8_t* data_;
  std::size_t size_, at_ = 0;
};

// What must hold, in builds of every kind.
inline void Require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "fuzzer: %s\n", what);
  std::abort();
}

}  // namespace kvtamp::fuzz
