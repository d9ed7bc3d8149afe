// The one explicit, ordered list of backends, and the out-of-tree ones that register at run time. Used by select() and the programs.
#include <pthread.h>

#include <algorithm>
#include <mutex>

#include "attention/reference.h"
#include "core/check.h"
#include "imbrex/select.h"

namespace imbrex {

const Backend& cpu_amx();  // cpu/backend.cpp
const Backend& cpu_avx512();
const Backend& cpu_generic();
const Backend& cuda_sm90();  // cuda/backend.cpp
const Backend& cuda_sm80();

namespace {

// Built-in backends, best first.
std::vector<const Backend*> built_in_backends() {
  return {&cuda_sm90(), &cuda_sm80(), &cpu_amx(), &cpu_avx512(), &cpu_generic(), &reference_backend()};
}

struct Registered {
  std::mutex mutex;
  std::vector<std::shared_ptr<const Backend>> active;
  std::vector<std::shared_ptr<const Backend>> retired;  // kept alive: another thread may still hold a pointer from backends()
};

// Never destroyed, so that backends can be asked for while static objects go down. A fork waits for the lock, because a child would never
// see it free that another thread of its parent held.
Registered& registered() {
  static auto* const state = [] {
    const auto unlock = [] { registered().mutex.unlock(); };
    pthread_atfork([] { registered().mutex.lock(); }, unlock, unlock);
    return new Registered;
  }();
  return *state;
}

const Backend* find_in(const std::vector<const Backend*>& list, std::string_view name) {
  const auto it = std::find_if(list.begin(), list.end(), [&](const Backend* b) { return b->name() == name; });
  return it == list.end() ? nullptr : *it;
}

}  // namespace

std::vector<const Backend*> backends() {
  std::vector<const Backend*> all;
  auto& state = registered();
  {
    const std::lock_guard lock(state.mutex);
    for (const auto& backend : state.active) all.push_back(backend.get());
  }
  const auto built_in = built_in_backends();
  all.insert(all.end(), built_in.begin(), built_in.end());
  return all;
}

const Backend* find_backend(std::string_view name) { return find_in(backends(), name); }

void register_backend(std::shared_ptr<const Backend> backend) {
  check(backend != nullptr, "registry.null", "a backend to register, got a null pointer");
  check(!backend->name().empty(), "registry.name", "a backend with a name, got an empty one");
  auto& state = registered();
  const std::lock_guard lock(state.mutex);
  const bool taken = find_in(built_in_backends(), backend->name()) != nullptr ||
                     std::any_of(state.active.begin(), state.active.end(), [&](const auto& b) { return b->name() == backend->name(); });
  check(!taken, "registry.duplicate", "a backend named \"{}\" is there already", backend->name());
  state.active.push_back(std::move(backend));
}

void unregister_backend(std::string_view name) {
  auto& state = registered();
  const std::lock_guard lock(state.mutex);
  const auto it = std::find_if(state.active.begin(), state.active.end(), [&](const auto& b) { return b->name() == name; });
  check(it != state.active.end(), "registry.unknown", "no backend named \"{}\" was registered at run time", name);
  state.retired.push_back(std::move(*it));
  state.active.erase(it);
}

}  // namespace imbrex
