#include "plugins/ggml/counts.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <ucontext.h>

#include <atomic>
#include <cstddef>

namespace {

std::atomic<bool> g_counting = false;
std::atomic<int> g_allocations = 0, g_locks = 0;

void NoteAllocation() {
  if (g_counting.load(std::memory_order_relaxed)) g_allocations++;
}

// Notes a lock and calls the C library's own function, which `next` keeps.
template <class... Args>
int Lock(std::atomic<void*>& next, const char* name, Args... args) {
  if (g_counting.load(std::memory_order_relaxed)) g_locks++;
  void* f = next.load(std::memory_order_relaxed);
  if (f == nullptr) next = f = dlsym(RTLD_NEXT, name);
  return reinterpret_cast<int (*)(Args...)>(f)(args...);
}

}  // namespace

// Seen by every library, those loaded later too.
#pragma GCC visibility push(default)
extern "C" {

void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void __libc_free(void*);

void* malloc(std::size_t n) {
  NoteAllocation();
  return __libc_malloc(n);
}
void* calloc(std::size_t n, std::size_t size) {
  NoteAllocation();
  return __libc_calloc(n, size);
}
void* realloc(void* p, std::size_t n) {
  NoteAllocation();
  return __libc_realloc(p, n);
}
void* memalign(std::size_t alignment, std::size_t n) {
  NoteAllocation();
  return __libc_memalign(alignment, n);
}
void* aligned_alloc(std::size_t alignment, std::size_t n) { return memalign(alignment, n); }
int posix_memalign(void** out, std::size_t alignment, std::size_t n) {
  *out = memalign(alignment, n);
  return *out == nullptr ? ENOMEM : 0;
}
void free(void* p) {
  if (p != nullptr) NoteAllocation();
  __libc_free(p);
}

int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  static std::atomic<void*> next;
  return Lock(next, "pthread_mutex_lock", mutex);
}
int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  static std::atomic<void*> next;
  return Lock(next, "pthread_mutex_trylock", mutex);
}
int pthread_rwlock_rdlock(pthread_rwlock_t* lock) noexcept {
  static std::atomic<void*> next;
  return Lock(next, "pthread_rwlock_rdlock", lock);
}
int pthread_rwlock_wrlock(pthread_rwlock_t* lock) noexcept {
  static std::atomic<void*> next;
  return Lock(next, "pthread_rwlock_wrlock", lock);
}
int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  static std::atomic<void*> next;
  return Lock(next, "pthread_cond_wait", condition, mutex);
}

}  // extern "C"
#pragma GCC visibility pop

namespace kvtamp::ggml_plugin::test {
namespace {

#if defined(__x86_64__) && defined(__linux__)

#ifndef PR_SET_SYSCALL_USER_DISPATCH
#define PR_SET_SYSCALL_USER_DISPATCH 59
#endif

// What the kernel looks at before each system call of the thread: 1 has it raise SIGSYS instead.
volatile char g_caught = 0;
volatile long g_system_call = -1;

// The first call is noted and made again; those after it pass.
void OnSystemCall(int, siginfo_t* info, void* context) {
  g_caught = 0;
  g_system_call = info->si_syscall;
  constexpr int kInstructionBytes = 2;
  static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] -= kInstructionBytes;
}

bool Dispatch(bool on) {
  struct sigaction action = {};
  action.sa_sigaction = OnSystemCall;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGSYS, &action, nullptr) == 0 &&
         prctl(PR_SET_SYSCALL_USER_DISPATCH, on ? 1 : 0, 0, 0, on ? &g_caught : nullptr) == 0;
}
void CatchSystemCalls() { g_caught = 1; }
long CaughtSystemCall() {
  g_caught = 0;
  const long n = g_system_call;
  g_system_call = -1;
  return n;
}

#else

bool Dispatch(bool) { return false; }
void CatchSystemCalls() {}
long CaughtSystemCall() { return -1; }

#endif

}  // namespace

bool SystemCallsAreSeen() { return Dispatch(true) && Dispatch(false); }

void StartCounting() {
  g_allocations = g_locks = 0;
  const bool seen = Dispatch(true);
  g_counting = true;
  if (seen) CatchSystemCalls();
}

Counts StopCounting() {
  Counts counts;
  counts.system_call = CaughtSystemCall();
  g_counting = false;
  Dispatch(false);
  counts.allocations = g_allocations;
  counts.locks = g_locks;
  return counts;
}

}  // namespace kvtamp::ggml_plugin::test
