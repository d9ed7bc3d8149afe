#pragma once
// The user's expressions in a kernel: score_mod() makes a logit another one, mask_mod() says whether a query sees a key. Their text follows
// the kernel's constants (expression_functions() in cuda/attention/expressions.h), and is there if kScoreMod and kMaskMod say so. Where
// kScoreAffine does, affine_score() says what score_mod() does to all keys of a row.
#include "attention_item.cuh"
#include "expression/operations.h"
#include "expression/short_operations.h"
#include "fragment.cuh"

namespace imbrex::cuda {

float score_mod(const ExpressionInputs&);
bool mask_mod(const ExpressionInputs&);
operations::AffineScore affine_score(const ExpressionInputs&);

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
DEVICE ExpressionInputs of_key(ExpressionInputs in, int key) {
  in.kv = key;
  return in;
}
// Of key `first` + `key`, whose logit is `score` times `scale`. `key` is a constant of an unrolled loop.
DEVICE ExpressionInputs of_logit(ExpressionInputs in, int first, int key, float score, float scale) {
  in.score = score, in.scale = scale;
  in.kv = first + key, in.first_kv = first, in.key = float(key);
  return in;
}

// Which keys of a tile rows see, as bits: of column 8 j + c of a thread's (fragment.cuh), bit 2 j + c of a row's word. sees(h, column) says
// it of row h. A loop, in which few elements of tensors are loaded at a time: unrolled, it takes more registers than there are.
template <int keys, int rows, class Sees>
DEVICE void set_seen_bits(u32 (&words)[rows], const Sees& sees) {
  static_assert(keys <= 128);
#pragma unroll
  for (u32& word : words) word = 0;
#pragma unroll 1
  for (int bit = 0; bit < keys / 4; ++bit) {
#pragma unroll
    for (int h = 0; h < rows; ++h) words[h] |= u32(sees(h, bit / 2 * 8 + bit % 2)) << bit;
  }
}
// Hides from row h the keys that its word does not have.
template <class S>
DEVICE void hide_unseen(u32 word, int h, S& s) {
  each_of_row(s, h, [=](float& x, int column) {
    if ((word >> (column / 8 * 2 + column % 8) & 1) == 0) x = -infinity();
  });
}

}  // namespace imbrex::cuda
