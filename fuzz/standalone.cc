// A main for the libFuzzer targets where there is no libFuzzer: runs the files that are named, or
// random inputs.
//   TARGET [--runs N] [--seed N] [FILE...]
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/random.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  long runs = 1000;
  auto seed = static_cast<std::uint64_t>(std::time(nullptr));
  bool any_file = false;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--runs" && i + 1 < argc) {
      runs = std::atol(argv[++i]);
    } else if (word == "--seed" && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else {
      any_file = true;
      std::ifstream in(word, std::ios::binary);
      if (!in) {
        std::fprintf(stderr, "cannot read %s\n", word.c_str());
        return 2;
      }
      const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
      LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
    }
  }
  if (any_file) return 0;
  std::printf("--seed %" PRIu64 " --runs %ld\n", seed, runs);
  std::fflush(stdout);
  for (long n = 0; n < runs; ++n) {
    kvtamp::fuzz::Random r(seed + static_cast<std::uint64_t>(n));
    std::vector<std::uint8_t> input(static_cast<std::size_t>(r.Int(0, 600)));
    for (std::uint8_t& b : input) b = static_cast<std::uint8_t>(r.Next());
    // What an abort leaves behind: the input, to be given back as a file.
    std::ofstream("fuzz-input.bin", std::ios::binary)
        .write(reinterpret_cast<const char*>(input.data()),
               static_cast<std::streamsize>(input.size()));
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::remove("fuzz-input.bin");
  return 0;
}
