// Host side of copy_blocks.cu: the shape of a block, the widest access it allows, and the list cut into launches.
#include "cuda/ops/copy_blocks.h"

#include <algorithm>

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
  const std::vector<BlockShape> shapes = stored_shapes(spec, cache);
  const CurrentContext current(*context_);
  // A launch copies two tensors, or the last one alone.
  for (size_t i = 0; i < shapes.size(); i += 2) {
    const bool two = i + 1 < shapes.size();
    copy(shapes[i], two ? &shapes[i + 1] : nullptr, copies, cu_stream(stream));
  }
}

void CopyBlocks::copy(const BlockShape& k, const BlockShape* v, std::span<const BlockCopy> copies, CUstream stream) const {
  const auto width =
      std::find_if(kWidths.begin(), kWidths.end(), [&](int bytes) { return allows(k, bytes) && (v == nullptr || allows(*v, bytes)); });
  const Kernel& kernel = kernels_[size_t(width - kWidths.begin())];
  CopyBlocksParams params{.k = pieces(k), .v = v == nullptr ? BlockPieces{} : pieces(*v), .copies = {}};
  const int64_t bytes = std::max(k.bytes(), v == nullptr ? 0 : v->bytes());
  const int64_t parts = std::clamp<int64_t>(bytes / kBytesPerThreadBlock, 1, 256);
  while (!copies.empty()) {
    const auto now = copies.first(std::min(copies.size(), size_t(kCopyBlocksAtOnce)));
    copies = copies.subspan(now.size());
    for (size_t i = 0; i < now.size(); ++i) params.copies[i] = {now[i].from, now[i].to};
    kernel.launch({.grid_x = unsigned(now.size()), .grid_y = unsigned(parts), .threads = kCopyBlocksThreads}, stream, params);
  }
}

}  // namespace imbrex::cuda
