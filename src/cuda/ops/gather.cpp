// Host side of gather.cu.
#include "cuda/ops/gather.h"

#include <algorithm>

#include "core/check.h"
#include "core/tensor_format.h"
#include "cuda/params.h"

namespace imbrex::cuda {
namespace {

constexpr int64_t kRowsPerBlock = kGatherThreads / 32;  // a warp copies a row
constexpr int64_t kMaxBlocks = 4096;                    // several for each multiprocessor there is; each takes rows until there are none

}  // namespace

KernelKey gather_key(std::string_view arch) { return {"gather.cu", std::string(arch), {}}; }

Gather::Gather(const std::shared_ptr<const Context>& context, std::string_view arch) : module_(Module::load(context, gather_key(arch))) {
  for (size_t i = 0; i < kernels_.size(); ++i) kernels_[i] = module_->kernel(fmt::format("gather_{}", 1 << i));
}

void Gather::run(const TensorView& from, const TensorView& offsets, const TensorView& to, CUstream stream) const {
  const int64_t size = size_of(from.dtype), rows = to.size(0);
  check(size <= 4 && rows <= INT32_MAX && to.size(1) <= INT32_MAX, "stream.gather",
        "expected elements of 4 bytes at most, and at most {} rows of as many, got {}", INT32_MAX, to);
  if (rows == 0) return;
  const GatherParams params{.from = from.as<const char>(),
                            .offsets = offsets.as<const int>(),
                            .to = to.as<char>(),
                            .num_rows = int(rows),
                            .row_length = int(to.size(1))};
  const int64_t blocks = std::min((rows + kRowsPerBlock - 1) / kRowsPerBlock, kMaxBlocks);
  kernels_[size_t(size / 2)].launch({.grid_x = unsigned(blocks), .threads = kGatherThreads}, stream, params);
}

}  // namespace imbrex::cuda
