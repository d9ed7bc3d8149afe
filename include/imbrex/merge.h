#pragma once
// Merge of partial attention results by their log-sum-exp, as a public operation (cascades, context parallelism, split KV).
#include <span>

#include "imbrex/parallel.h"
#include "imbrex/tensor.h"

namespace imbrex {

struct PartialResult {
  TensorView out;  // f32, bf16 or f16 [num_tokens, num_heads, head_dim_v], normalised
  TensorView lse;  // f32 [num_tokens, num_heads], natural log; -inf for an empty part
};

// out = sum_i exp(lse_i - lse) out_i, lse = log sum_i exp(lse_i), per token and head; parts are taken in the order given.
// Rows that are empty in every part get out 0 and lse -inf. `out` may be one of the parts. Error merge.* for shapes that differ.
void merge_partial_results(std::span<const PartialResult> parts, const TensorView& out, const TensorView& lse, const ParallelFor& = {});

}  // namespace imbrex
