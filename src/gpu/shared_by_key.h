#pragma once
// Objects that are made from a key and shared: by all who ask for the same one while somebody holds it.
#include <map>
#include <memory>
#include <mutex>

namespace imbrex::gpu {

// Thread-safe.
template <class Key, class T>
class SharedByKey {
 public:
  // make() is called without a lock, since it may take a second. Two threads may both make one: the first to be done is given to both.
  template <class Make>
  std::shared_ptr<T> get(const Key& key, const Make& make) {
    {
      const std::lock_guard lock(mutex_);
      const auto it = by_key_.find(key);
      if (it != by_key_.end())
        if (auto there = it->second.lock()) return there;
    }
    std::shared_ptr<T> made = make();
    const std::lock_guard lock(mutex_);
    std::erase_if(by_key_, [](const auto& entry) { return entry.second.expired(); });
    auto& slot = by_key_[key];
    if (auto other = slot.lock()) return other;
    slot = made;
    return made;
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::weak_ptr<T>> by_key_;
};

}  // namespace imbrex::gpu
