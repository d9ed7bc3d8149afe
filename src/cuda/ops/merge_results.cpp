// Host side of merge_results.cu.
#include "cuda/ops/merge_results.h"

#include <algorithm>

#include "attention/merge_checks.h"
#include "core/check.h"
#include "core/tensor_format.h"
#include "cuda/driver/jit.h"
#include "cuda/driver/memory.h"
#include "cuda/params.h"

namespace imbrex::cuda {
namespace {

MergePart part_of(const TensorView& out, const TensorView& lse) {
  const int64_t size = size_of(out.dtype);
  return {.out = out.as<char>(),
          .lse = lse.as<float>(),
          .token_stride = out.stride(0) * size,
          .head_stride = out.stride(1) * size,
          .dim_stride = out.stride(2) * size,
          .lse_token_stride = lse.stride(0),
          .lse_head_stride = lse.stride(1),
          .type = int(out.dtype)};
}

bool in_eights(const MergePart& part, int dim) {
  const int64_t size = size_of(DType(part.type));
  return dim % 8 == 0 && part.dim_stride == size && reinterpret_cast<uintptr_t>(part.out) % 16 == 0 && part.token_stride % 16 == 0 &&
         part.head_stride % 16 == 0;
}

}  // namespace

KernelKey merge_results_key(std::string_view arch) { return {"merge_results.cu", std::string(arch), {}}; }

MergeResults::MergeResults(const std::shared_ptr<const Context>& context, std::string_view arch)
    : device_{DeviceType::cuda, context->device()},
      context_(context),
      module_(Module::load(context, merge_results_key(arch))),
      eights_(module_->kernel("merge_results_8")),
      elements_(module_->kernel("merge_results_1")) {}

void MergeResults::merge(std::span<const PartialResult> parts, const TensorView& out, const TensorView& lse, Stream stream) const {
  check_merge(parts, out, lse, device_);
  check(parts.size() <= size_t(kMostMergeParts), "merge.parts.many", "expected at most {} parts on {}, got {}", kMostMergeParts, device_,
        parts.size());
  const int64_t rows = out.size(0) * out.size(1);
  if (rows == 0) return;
  check(out.size(0) <= INT32_MAX && out.size(1) <= INT32_MAX && out.size(2) <= INT32_MAX / kMergeResultRows &&
            rows / kMergeResultRows < INT32_MAX,
        "merge.out.size", "expected at most {} rows, got {}", int64_t(INT32_MAX) * kMergeResultRows, out);
  MergeResultsParams params{.parts = {}, .result = part_of(out, lse), .num_parts = int(parts.size()), .num_tokens = int(out.size(0))};
  params.num_heads = int(out.size(1)), params.dim = int(out.size(2));
  bool eights = in_eights(params.result, params.dim);
  for (size_t i = 0; i < parts.size(); ++i) {
    params.parts[i] = part_of(parts[i].out, parts[i].lse);
    eights = eights && in_eights(params.parts[i], params.dim);
  }
  const CurrentContext current(*context_);
  (eights ? eights_ : elements_)
      .launch({.grid_x = unsigned((rows + kMergeResultRows - 1) / kMergeResultRows), .threads = kMergeResultsThreads}, cu_stream(stream),
              params);
}

}  // namespace imbrex::cuda
