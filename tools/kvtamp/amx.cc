#include "tools/kvtamp/amx.h"

#include <dlfcn.h>
#include <elf.h>
#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <ggml.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <fstream>
#include <vector>

namespace kvtamp::tool {
namespace {

// Exit codes of the child.
constexpr int kRight = 0, kWrong = 1, kUntried = 2;
constexpr unsigned kSeconds = 20;

// More than one row on either side: a single one is computed without tiles.
constexpr std::int64_t kInner = 256, kOuter = 64, kRows = 32;

ggml_backend_buffer_type_t AmxType(ggml_backend_dev_t cpu) {
  const auto extra =
      reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
          ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
  if (extra == nullptr) return nullptr;
  for (ggml_backend_buffer_type_t* type = extra(cpu); type != nullptr && *type != nullptr; ++type) {
    if (std::strcmp(ggml_backend_buft_name(*type), "AMX") == 0) return *type;
  }
  return nullptr;
}

// Ones times ones: every sum is kInner.
int Multiply(ggml_backend_dev_t cpu, ggml_backend_buffer_type_t amx) {
  const ggml_backend_ptr backend(ggml_backend_dev_init(cpu, nullptr));
  const ggml_init_params params = {16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr,
                                   true};
  const ggml_context_ptr weights(ggml_init(params)), rest(ggml_init(params));
  if (backend == nullptr || weights == nullptr || rest == nullptr) return kUntried;
  const auto set_threads =
      reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
          ggml_backend_dev_backend_reg(cpu), "ggml_backend_set_n_threads"));
  if (set_threads != nullptr) set_threads(backend.get(), 1);

  ggml_tensor* w = ggml_new_tensor_2d(weights.get(), GGML_TYPE_Q8_0, kInner, kOuter);
  ggml_tensor* x = ggml_new_tensor_2d(rest.get(), GGML_TYPE_F32, kInner, kRows);
  ggml_tensor* y = ggml_mul_mat(rest.get(), w, x);
  const ggml_backend_buffer_ptr in_tiles(
      ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), amx));
  const ggml_backend_buffer_ptr plain(ggml_backend_alloc_ctx_tensors(rest.get(), backend.get()));
  if (in_tiles == nullptr || plain == nullptr || !ggml_backend_dev_supports_op(cpu, y))
    return kUntried;

  const std::vector<float> ones(static_cast<std::size_t>(kInner * kOuter), 1.0f);
  std::vector<char> coded(ggml_nbytes(w));
  ggml_quantize_chunk(GGML_TYPE_Q8_0, ones.data(), coded.data(), 0, kOuter, kInner, nullptr);
  ggml_backend_tensor_set(w, coded.data(), 0, coded.size());
  ggml_backend_tensor_set(x, ones.data(), 0, ggml_nbytes(x));
  ggml_cgraph* graph = ggml_new_graph(rest.get());
  ggml_build_forward_expand(graph, y);
  if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) return kUntried;
  std::vector<float> sums(static_cast<std::size_t>(kOuter * kRows));
  ggml_backend_tensor_get(y, sums.data(), 0, ggml_nbytes(y));
  for (const float sum : sums) {
    if (!(sum > kInner - 2.0f && sum < kInner + 2.0f)) return kWrong;  // x is rounded to 8 bits
  }
  return kRight;
}

}  // namespace

std::string CompilerOf(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  const auto read = [&in](std::uint64_t at, void* to, std::size_t n) {
    in.seekg(static_cast<std::streamoff>(at));
    return static_cast<bool>(in.read(static_cast<char*>(to), static_cast<std::streamsize>(n)));
  };
  Elf64_Ehdr header;
  if (!read(0, &header, sizeof header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_shentsize != sizeof(Elf64_Shdr))
    return "";
  std::vector<Elf64_Shdr> sections(header.e_shnum);
  if (header.e_shstrndx >= sections.size() ||
      !read(header.e_shoff, sections.data(), sections.size() * sizeof(Elf64_Shdr)))
    return "";
  for (const Elf64_Shdr& section : sections) {
    std::array<char, sizeof ".comment"> name;
    if (!read(sections[header.e_shstrndx].sh_offset + section.sh_name, name.data(), name.size()) ||
        std::memcmp(name.data(), ".comment", name.size()) != 0)
      continue;
    // Texts that end with a zero each; one will do, a file of two compilers is rare.
    std::string text(std::min<std::size_t>(section.sh_size, 200), '\0');
    if (!read(section.sh_offset, text.data(), text.size())) return "";
    const std::size_t first = text.find_first_not_of('\0');
    return first == text.npos ? "" : std::string(text.c_str() + first);
  }
  return "";
}

AmxTrial TryAmx() {
  AmxTrial trial;
  ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  ggml_backend_buffer_type_t amx = cpu == nullptr ? nullptr : AmxType(cpu);
  if (amx == nullptr) return trial;

  // Any function of that library leads to its file.
  Dl_info info;
  const void* function = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu),
                                                           "ggml_backend_dev_get_extra_bufts");
  if (dladdr(function, &info) != 0 && info.dli_fname != nullptr) {
    trial.library = info.dli_fname;
    trial.compiler = CompilerOf(trial.library);
  }

  trial.outcome = AmxTrial::Outcome::kUntried;
  const pid_t child = fork();
  if (child == 0) {
    const rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    for (const int s : {SIGILL, SIGSEGV, SIGBUS, SIGABRT}) std::signal(s, SIG_DFL);
    alarm(kSeconds);
    _exit(Multiply(cpu, amx));
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return trial;
  if (WIFSIGNALED(status)) {
    trial.signal = WTERMSIG(status);
    trial.outcome =
        trial.signal == SIGALRM ? AmxTrial::Outcome::kUntried : AmxTrial::Outcome::kDied;
  } else if (WEXITSTATUS(status) == kRight) {
    trial.outcome = AmxTrial::Outcome::kRight;
  } else if (WEXITSTATUS(status) == kWrong) {
    trial.outcome = AmxTrial::Outcome::kWrong;
  }
  return trial;
}

std::optional<AmxProblem> ProblemOf(const AmxTrial& trial) {
  if (trial.outcome != AmxTrial::Outcome::kWrong && trial.outcome != AmxTrial::Outcome::kDied)
    return std::nullopt;
  std::string text = trial.outcome == AmxTrial::Outcome::kWrong
                         ? "the host's CPU backend computes wrongly"
                         : std::string("the host's CPU backend dies") +
                               (trial.signal == SIGILL ? " (illegal instruction)" : "");
  text += " with this processor's AMX instructions";
  if (!trial.compiler.empty()) text += "; it was compiled by " + trial.compiler;
  if (!trial.library.empty()) text += ": " + trial.library;
  return AmxProblem{
      text,
      "GCC 12.2, which Debian 12 has, and others of its time get them wrong. Build llama.cpp with "
      "a "
      "newer one or with clang, or without AMX (cmake -DCMAKE_C_FLAGS=-mno-amx-int8 "
      "-DCMAKE_CXX_FLAGS=-mno-amx-int8), or with kvtamp's scripts/gcc-amx.h before every source "
      "(-include), as scripts/fetch does"};
}

}  // namespace kvtamp::tool
