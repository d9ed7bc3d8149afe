#pragma once
// The user's expressions in a kernel: score_mod() makes a logit another one, mask_mod() says whether a query sees a key. Their text follows
// the kernel's constants (expression_functions() in cuda/attention/expressions.h), and is there if kScoreMod and kMaskMod say so.
#include "attention_item.cuh"
#include "expression/operations.h"

namespace imbrex::cuda {

float score_mod(const ExpressionInputs&);
bool mask_mod(const ExpressionInputs&);

// What an expression is given of a row, and then of one of its keys. A row behind the last one has any values.
DEVICE ExpressionInputs expression_inputs(const AttentionParams& p, const Item& item, int row, const ExpressionTensorData* tensors) {
  return {.score = 0.f,
          .batch = item.request,
          .head = item.head_of(row),
          .q = item.position_of(row),
          .kv = 0,
          .q_len = p.query_start[item.request + 1] - p.query_start[item.request],
          .kv_len = item.seq_len,
          .tensors = tensors};
}
DEVICE ExpressionInputs of_key(ExpressionInputs in, int key, float score = 0.f) {
  in.kv = key, in.score = score;
  return in;
}

}  // namespace imbrex::cuda
