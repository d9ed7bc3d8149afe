#pragma once
// Whole blocks of a cache on a device from one place to another: copy on write, moving blocks together.
#include <array>
#include <memory>
#include <span>
#include <string_view>

#include "cuda/module.h"
#include "imbrex/kv_cache.h"

namespace imbrex::cuda {

KernelKey copy_blocks_key(std::string_view arch);

class CopyBlocks {
 public:
  CopyBlocks(const std::shared_ptr<const Context>&, std::string_view arch);

  // What copy_blocks() of kv_cache.h does, with the same rules and errors, in the stream's order. The list is needed only during the
  // call; a captured graph repeats these very copies. The context must be current.
  void run(const AttentionSpec&, const KvCache&, std::span<const BlockCopy>, CUstream) const;

 private:
  static constexpr std::array<int, 5> kWidths{16, 8, 4, 2, 1};  // bytes of an access, widest first
  Device device_;
  std::shared_ptr<const Module> module_;
  std::array<Kernel, kWidths.size()> kernels_;
};

}  // namespace imbrex::cuda
