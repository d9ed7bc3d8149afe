#pragma once
// Merge of partial attention results by their log-sum-exp, as a public operation (cascades, context parallelism, split KV).
#include <memory>
#include <span>

#include "imbrex/device_stream.h"
#include "imbrex/parallel.h"
#include "imbrex/tensor.h"

namespace imbrex {

struct PartialResult {
  TensorView out;  // f32, bf16 or f16 [num_tokens, num_heads, head_dim_v], normalised
  TensorView lse;  // f32 [num_tokens, num_heads], natural log; -inf for an empty part, or +inf, as FlashMLA and FlashAttention 2 have it
};

// out = sum_i exp(lse_i - lse) out_i, lse = log sum_i exp(lse_i), per token and head; parts are taken in the order given.
// Rows that are empty in every part get out 0 and lse -inf. `out` may be one of the parts. Error merge.* for shapes that differ.
void merge_partial_results(std::span<const PartialResult> parts, const TensorView& out, const TensorView& lse, const ParallelFor& = {});

// Merges results in the memory of any device, as merge_partial_results() does. Stateless after it is made; any number of threads may use
// it.
class PartialMerger {
 public:
  virtual ~PartialMerger() = default;
  // The merge is in the order of the stream. If `out` is one of the parts, `lse` may be that part's log-sum-exps. A GPU takes at most 48
  // parts (Error merge.parts.many). The views are parameters of the launch: a graph that captures it merges what these addresses hold when
  // it is replayed.
  virtual void merge(std::span<const PartialResult> parts, const TensorView& out, const TensorView& lse, Stream = nullptr) const = 0;
};
// Makes a merger, and loads a GPU's kernel. `threads` are for a CPU. Error backend.device_absent for a device that is only described.
std::unique_ptr<PartialMerger> make_partial_merger(const DeviceInfo&, const ParallelFor& threads = {});

}  // namespace imbrex
