// See slow_reads.h. Pages are closed, and a handler of the fault opens them: at once to a write, and to a read when the time is over.
#include "slow_reads.h"

#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace imbrex::test {
namespace {

constexpr size_t kPage = 4096, kMostPages = 1024;

// What the handler knows; plain memory, since it may not allocate.
std::atomic<char*> watched{nullptr};
std::atomic<size_t> watched_bytes{0};
std::atomic<int> wait_ms{0}, readers{0};
std::atomic<bool> is_open[kMostPages];
struct sigaction handler_before;

#if defined(__x86_64__) && defined(__linux__)
constexpr bool kWorks = true;
bool is_write(const ucontext_t& context) { return (context.uc_mcontext.gregs[REG_ERR] & 2) != 0; }
#else
constexpr bool kWorks = false;
bool is_write(const ucontext_t&) { return true; }
#endif

void on_fault(int, siginfo_t* info, void* context) {
  char* const first = watched.load();
  const size_t offset = size_t(static_cast<char*>(info->si_addr) - first);
  if (first == nullptr || offset >= watched_bytes.load()) {
    sigaction(SIGSEGV, &handler_before, nullptr);  // the access is made again, and is somebody else's affair
    return;
  }
  const size_t page = offset / kPage;
  if (!is_write(*static_cast<const ucontext_t*>(context)) && !is_open[page].load()) {
    readers.fetch_add(1);
    for (int i = 0; i < wait_ms.load() && !is_open[page].load(); ++i) {
      const timespec millisecond{0, 1'000'000};
      nanosleep(&millisecond, nullptr);
    }
  }
  mprotect(first + page * kPage, kPage, PROT_READ | PROT_WRITE);
  is_open[page].store(true);
}

}  // namespace

SlowReads::SlowReads(size_t bytes, std::chrono::milliseconds wait) : bytes_((bytes + kPage - 1) / kPage * kPage) {
  if (bytes_ > kPage * kMostPages || watched.load() != nullptr) throw std::logic_error("too much memory, or a second one");
  void* const memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(memory);
  wait_ms = int(wait.count());
  watched_bytes = bytes_;
  watched = data_;
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &handler_before);
}

SlowReads::~SlowReads() {
  sigaction(SIGSEGV, &handler_before, nullptr);
  watched = nullptr;
  munmap(data_, bytes_);
}

void SlowReads::arm() {
  readers = 0;
  if (!kWorks) return;
  for (std::atomic<bool>& page : is_open) page = false;
  mprotect(data_, bytes_, PROT_NONE);
}

void SlowReads::disarm() { mprotect(data_, bytes_, PROT_READ | PROT_WRITE); }

int SlowReads::waited() { return readers.load(); }
bool SlowReads::works() { return kWorks; }

}  // namespace imbrex::test
