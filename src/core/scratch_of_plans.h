#pragma once
// The workspace of devices whose plans keep their scratch: it holds nothing. And scratch that the plans of a composite plan share.
#include <cstddef>
#include <cstdint>
#include <memory>

#include "imbrex/workspace.h"

namespace imbrex {

std::shared_ptr<Workspace> scratch_of_plans(const Device&);

// Memory of the host for plans of which one computes after the other: as large as the plan needs that needs most. They are made, updated
// and run by one thread at a time.
class SharedScratch final : public Workspace {
 public:
  Device device() const override { return {}; }
  int64_t bytes() const override { return bytes_; }
  void reserve(int64_t bytes) {
    if (bytes <= bytes_) return;
    memory_ = std::make_unique_for_overwrite<char[]>(size_t(bytes));
    bytes_ = bytes;
  }
  char* data() const { return memory_.get(); }

 private:
  std::unique_ptr<char[]> memory_;  // not touched before it is needed
  int64_t bytes_ = 0;
};

}  // namespace imbrex
