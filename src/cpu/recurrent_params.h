#pragma once
// The parameters of a CPU kernel of recurrent layers: plain structs, strides in bytes. Filled by cpu/recurrent.cpp.
#include "cpu/params.h"

namespace imbrex::cpu {

constexpr int kRecurrentDim = 256;    // RecurrentSpec::head_dim_k at most
constexpr int kRecurrentValues = 32;  // dimensions of values that a call works on at most
constexpr int kNarrowNumbers = 4096;  // numbers of states of heads of values of one dimension, and as many heads as have these
constexpr int kRecurrentChunk = 64;   // tokens
constexpr int kLeastChunked = 16;     // tokens that make a chunk

enum RecurrentGateKind : int { kFixedGate, kLogGate, kSoftplusGate, kSigmoidGate };  // RecurrentGate, in its order
enum OutputGateKind : int { kNoOutputGate, kSiluOutputs, kSigmoidOutputs };          // OutputGate, in its order
enum OutputNormKind : int { kNoNorm, kNormBeforeGate, kNormAfterGate };              // OutputNorm, in its order

struct RecurrentParams {
  const char *q, *k, *v, *gate, *beta;    // gate and beta null: there is none
  const float *rates, *gate_bias, *skip;  // null: none
  char *state, *out;
  long q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, out_token_stride, out_head_stride;
  long gate_token_stride, gate_head_stride, beta_token_stride;
  long rates_stride, bias_stride;  // floats, of a head
  long state_slot_stride, state_row_stride, state_head_stride;
  int type, gate_type, beta_type, state_type;  // ElementType
  int dim_k, dim_v, group;                     // group: value heads of a key head
  int gate_kind;                               // RecurrentGateKind
  float gate_min, gate_max;                    // gate_max of a softplus: infinite where there is no limit
  float scale, beta_scale;
  bool channel_gate, channel_rates, k_first, delta, sigmoid_beta, scaled_values, qk_norm;
  const char *z, *norm_weight;  // null: none
  long z_token_stride, z_head_stride, weight_stride;
  int weight_type;         // ElementType
  int out_gate, out_norm;  // OutputGateKind, OutputNormKind
  int norm_heads;          // value heads of a group of the norm
  float norm_eps;
  bool finish;  // tasks have whole heads, whose outputs they gate and norm themselves
};

// The tokens of a request, as in StateRequest.
struct RecurrentItem {
  int begin, end;
  int slot, source, first_row, drafts;
  bool fresh, tree;        // tree: the layer's drafts may be one
  const int* parent_rows;  // of the batch's tokens, as in StateStep; null: drafts begin from those in front of them
};

// Whether an item's state is computed where it lies, since each number is needed once: of one token, of floats with keys innermost, in
// whole vectors, without rows for drafts and another slot to read.
static inline bool is_in_place(bool k_first, int state_type, int dim_k, const RecurrentItem& item) {
  constexpr int kWidest = 16;  // numbers of a vector
  return item.end - item.begin == 1 && !k_first && state_type == kF32 && dim_k % kWidest == 0 && item.drafts == 0 && item.first_row == 0 &&
         item.source == item.slot;
}

// How many of an item's tokens come in chunks, where the layer's do: whole ones, and a rest that is long enough. A rest of any length where
// the state has fewer bits than a float, which would be rounded in front of it.
static inline int chunked_tokens(int state_type, const RecurrentItem& item) {
  const int tokens = item.end - item.begin, rest = tokens % kRecurrentChunk;
  if (item.drafts > 0 || tokens < kLeastChunked) return 0;
  return rest < kLeastChunked && state_type == kF32 ? tokens - rest : tokens;
}

// Heads with values of one dimension that a call works on at most: a multiple of any vector's lanes.
static inline int narrow_heads(int dim_k) {
  constexpr int kWidest = 16;
  return kNarrowNumbers / dim_k / kWidest * kWidest;
}

struct RecurrentKernels {
  const char* isa;
  // An item, for a value head and dimensions [v_begin, v_end) of its values, at most kRecurrentValues of them where the state is not
  // computed where it lies.
  void (*run)(const RecurrentParams&, const RecurrentItem&, int head, int v_begin, int v_end);
  // Items one after another, for value heads [head_begin, head_end) with values of one dimension, at most narrow_heads() of them; without
  // the delta rule and gates of channels. What decays are made of is computed once for all items.
  void (*run_narrow)(const RecurrentParams&, const RecurrentItem*, int num_items, int head_begin, int head_end);
  // An item that has chunks, for value heads [head_begin, head_end) of one key head and dimensions [v_begin, v_end) of their values.
  // Scratch begins at 64 bytes.
  void (*run_chunks)(const RecurrentParams&, const RecurrentItem&, int head_begin, int head_end, int v_begin, int v_end, char* scratch);
  long (*scratch_bytes)(int dim_k, int values, int heads);
  // The gate and the norm of outputs of tokens [token_begin, token_end), which lie where they belong, for value heads [head_begin,
  // head_end): whole groups of the norm.
  void (*finish)(const RecurrentParams&, int token_begin, int token_end, int head_begin, int head_end);
  bool rounded;  // factors of products in chunks are rounded to bf16, which keys, queries and values have to be
};

}  // namespace imbrex::cpu
