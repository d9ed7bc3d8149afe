#pragma once
// The backends of a family: built-in ones, and out-of-tree ones that register at run time.
#include <pthread.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "imbrex/family.h"

namespace imbrex {

template <class Family>
class Registry {
 public:
  using Backend = BackendOf<Family>;
  using List = std::vector<const Backend*>;

  // Defined once for each family: its backends, best first.
  static List built_in();

  static List all() {
    List list;
    Registered& state = registered();
    {
      const std::lock_guard lock(state.mutex);
      for (const auto& backend : state.active) list.push_back(backend.get());
    }
    const List inside = built_in();
    list.insert(list.end(), inside.begin(), inside.end());
    return list;
  }

  static const Backend* find(std::string_view name) { return find_in(all(), name); }

  static void add(std::shared_ptr<const Backend> backend) {
    check(backend != nullptr, "registry.null", "a backend to register, got a null pointer");
    check(!backend->name().empty(), "registry.name", "a backend with a name, got an empty one");
    Registered& state = registered();
    const std::lock_guard lock(state.mutex);
    const bool taken = find_in(built_in(), backend->name()) != nullptr ||
                       std::any_of(state.active.begin(), state.active.end(), [&](const auto& b) { return b->name() == backend->name(); });
    check(!taken, "registry.duplicate", "a backend named \"{}\" is there already", backend->name());
    state.active.push_back(std::move(backend));
  }

  static void remove(std::string_view name) {
    Registered& state = registered();
    const std::lock_guard lock(state.mutex);
    const auto it = std::find_if(state.active.begin(), state.active.end(), [&](const auto& b) { return b->name() == name; });
    check(it != state.active.end(), "registry.unknown", "no backend named \"{}\" was registered at run time", name);
    state.retired.push_back(std::move(*it));
    state.active.erase(it);
  }

 private:
  struct Registered {
    std::mutex mutex;
    std::vector<std::shared_ptr<const Backend>> active;
    std::vector<std::shared_ptr<const Backend>> retired;  // kept alive: another thread may still hold a pointer from all()
  };

  // The registry is never destroyed, so that backends can be asked for while static objects are destroyed. A fork waits for the lock: a
  // lock that another thread of the parent held would stay locked in the child.
  static Registered& registered() {
    static auto* const state = [] {
      const auto unlock = [] { registered().mutex.unlock(); };
      pthread_atfork([] { registered().mutex.lock(); }, unlock, unlock);
      return new Registered;
    }();
    return *state;
  }

  static const Backend* find_in(const List& list, std::string_view name) {
    const auto it = std::find_if(list.begin(), list.end(), [&](const Backend* b) { return b->name() == name; });
    return it == list.end() ? nullptr : *it;
  }
};

}  // namespace imbrex
