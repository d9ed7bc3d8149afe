#pragma once
// Whole blocks of a cache on a device from one place to another: copy on write, moving blocks together.
#include <array>
#include <memory>
#include <span>
#include <string_view>

#include "attention/block_shape.h"
#include "cuda/driver/module.h"
#include "imbrex/kv_cache.h"

namespace imbrex::cuda {

KernelKey copy_blocks_key(std::string_view arch);

class CopyBlocks final : public BlockCopier {
 public:
  CopyBlocks(const std::shared_ptr<const Context>&, std::string_view arch);

  // The rules and errors are those of copy_blocks() of kv_cache.h.
  void copy(const AttentionSpec&, const KvCache&, std::span<const BlockCopy>, Stream) const override;

 private:
  void copy(const BlockShape& k, const BlockShape* v, std::span<const BlockCopy>, CUstream) const;

  static constexpr std::array<int, 5> kWidths{16, 8, 4, 2, 1};  // bytes of an access, widest first
  Device device_;
  std::shared_ptr<const Context> context_;
  std::shared_ptr<const Module> module_;
  std::array<Kernel, kWidths.size()> kernels_;
};

}  // namespace imbrex::cuda
