// Host side of copy_blocks.cu: the shape of a block, the widest access it allows, and the list cut into launches.
#include "cuda/ops/copy_blocks.h"

#include <algorithm>

#include "attention/block_shape.h"
#include "core/check.h"
#include "core/tensor_format.h"
#include "cuda/driver/memory.h"
#include "cuda/params.h"

namespace imbrex::cuda {
namespace {

constexpr int64_t kMaxBlockBytes = int64_t(1) << 31;  // a kernel counts the accesses of a block with 32 bits
constexpr int64_t kBytesPerThreadBlock = 16 << 10;

bool allows(const BlockShape& shape, int64_t width) {
  bool fits =
      reinterpret_cast<uintptr_t>(shape.base) % uintptr_t(width) == 0 && shape.block_stride % width == 0 && shape.piece % width == 0;
  for (const int64_t stride : shape.strides) fits = fits && stride % width == 0;
  return fits;
}

BlockPieces pieces(const BlockShape& shape) {
  check(shape.bytes() < kMaxBlockBytes, "kv_cache.copy.size", "expected blocks of less than {} bytes, got {}", kMaxBlockBytes,
        shape.bytes());
  BlockPieces p{.data = shape.base, .block_stride = shape.block_stride, .piece_bytes = shape.piece};
  for (size_t i = 0; i < 3; ++i) {
    p.sizes[i] = unsigned(shape.sizes[i]);
    p.strides[i] = shape.strides[i];
  }
  return p;
}

}  // namespace

KernelKey copy_blocks_key(std::string_view arch) { return {"copy_blocks.cu", std::string(arch), {}}; }

CopyBlocks::CopyBlocks(const std::shared_ptr<const Context>& context, std::string_view arch)
    : device_{DeviceType::cuda, context->device()}, context_(context), module_(Module::load(context, copy_blocks_key(arch))) {
  for (size_t i = 0; i < kWidths.size(); ++i) kernels_[i] = module_->kernel(fmt::format("copy_blocks_{}", kWidths[i]));
}

void CopyBlocks::copy(const AttentionSpec& spec, const KvCache& cache, std::span<const BlockCopy> copies, Stream stream) const {
  check(spec.block_size > 0, "kv_cache.copy.ragged", "a spec without blocks (block_size 0) has none to copy");
  cache.validate(spec);
  check(cache.k.device == device_, "kv_cache.copy.device", "expected a cache on {}, got {}", device_, cache.k);
  check_copies(copies, cache.num_blocks(spec));
  const BlockShape k = block_shape(cache.k), v = block_shape(cache.v);
  const auto width = std::find_if(kWidths.begin(), kWidths.end(), [&](int bytes) { return allows(k, bytes) && allows(v, bytes); });
  const Kernel& kernel = kernels_[size_t(width - kWidths.begin())];
  CopyBlocksParams params{.k = pieces(k), .v = pieces(v), .copies = {}};
  const int64_t parts = std::clamp<int64_t>(std::max(k.bytes(), v.bytes()) / kBytesPerThreadBlock, 1, 256);
  const CurrentContext current(*context_);
  while (!copies.empty()) {
    const auto now = copies.first(std::min(copies.size(), size_t(kCopyBlocksAtOnce)));
    copies = copies.subspan(now.size());
    for (size_t i = 0; i < now.size(); ++i) params.copies[i] = {now[i].from, now[i].to};
    kernel.launch({.grid_x = unsigned(now.size()), .grid_y = unsigned(parts), .threads = kCopyBlocksThreads}, cu_stream(stream), params);
  }
}

}  // namespace imbrex::cuda
