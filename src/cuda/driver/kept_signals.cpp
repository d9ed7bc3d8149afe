// KeptSignals: sigaction() of every signal before, and again after where a library has left something else.
#include "cuda/driver/kept_signals.h"

#include <dlfcn.h>
#include <signal.h>

#include <array>
#include <cstring>
#include <mutex>

namespace imbrex::cuda {
namespace {

struct KeptActions {
  std::mutex mutex;
  int users = 0;
  const void* library = nullptr;
  std::array<struct sigaction, 32> actions;  // by signal; those of real-time signals are nobody's here
};

KeptActions& kept() {
  static auto* const one = new KeptActions;  // never destroyed: kernels may be compiled while static objects go down
  return *one;
}

void* handler_of(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) ? reinterpret_cast<void*>(action.sa_sigaction) : reinterpret_cast<void*>(action.sa_handler);
}

bool same(const struct sigaction& a, const struct sigaction& b) {
  return handler_of(a) == handler_of(b) && a.sa_flags == b.sa_flags && std::memcmp(&a.sa_mask, &b.sa_mask, sizeof(a.sa_mask)) == 0;
}

const void* library_of(const void* address) {
  Dl_info info;
  return dladdr(address, &info) != 0 ? info.dli_fbase : nullptr;
}

}  // namespace

KeptSignals::KeptSignals(const void* library) {
  KeptActions& k = kept();
  const std::lock_guard lock(k.mutex);
  if (k.users++ > 0) return;
  k.library = library_of(library);
  for (int signal = 1; signal < int(k.actions.size()); ++signal) sigaction(signal, nullptr, &k.actions[size_t(signal)]);
}

KeptSignals::~KeptSignals() {
  KeptActions& k = kept();
  const std::lock_guard lock(k.mutex);
  if (--k.users > 0) return;
  for (int signal = 1; signal < int(k.actions.size()); ++signal) {
    const struct sigaction& before = k.actions[size_t(signal)];
    struct sigaction now;
    if (sigaction(signal, nullptr, &now) != 0 || same(now, before)) continue;
    // The old handler with other flags, or one of the library that stayed because two threads compiled at once.
    const void* const handler = handler_of(now);
    if (handler == handler_of(before) || (k.library != nullptr && library_of(handler) == k.library)) sigaction(signal, &before, nullptr);
  }
}

}  // namespace imbrex::cuda
