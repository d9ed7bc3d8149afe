#pragma once
// The parameters of CPU kernels: plain structs, no standard header, strides in bytes. Filled by cpu/plan.cpp, read by kernels/*.
#include "attention/ds_mla.h"
#include "imbrex/work.h"

namespace imbrex::cpu {

enum ElementType : int { kF32, kF16, kBf16, kE4m3, kE5m2 };  // the first five of DType, in its order

constexpr int kBlockKeys = 128;   // keys a kernel works on at a time; blocks begin at multiples of it, counted from a request's first key
constexpr int kSplitKeys = 4096;  // what Kernels::split_keys is for most shapes
constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;
constexpr float kEmptyMax = -1e30f;  // running maximum (in log2 units) of a row that has seen no key

struct KvSide {  // keys or values of one layer
  const char* data;
  long block_stride, token_stride, head_stride, dim_stride;  // bytes; packed: block and head only; 0 of what there is one of, or none
  const float* scales;                                       // dequantisation, null: 1
  int scale_stride;                                          // 0: one for all heads, 1: one for each
  int type;                                                  // ElementType
  int dim;                                                   // elements of a row
  long row_bytes;                                            // that a row takes in memory, where its elements are neighbours
};

// How the rows of a cache come together that has each in two places: the first elements, which are the value too, where `k` says, and those
// behind them where `v` says. Kernels make a row of them as `type` and `dim` of `k` and `v` describe it: row_parts.inl.
struct RowParts {
  int first, second;                 // elements; 0: rows lie in one place
  int first_type, second_type;       // ElementType
  long first_stride, second_stride;  // bytes from one element to the next
  int group;                         // of the first elements, so many share a scale, an f32; 0: they have none
  long scales_at;                    // bytes from a row's begin to its scales
  // What the other elements' scale is times that of the first ones, for each kv head: queries are multiplied by it there; null: 1.
  const float* second_factors;
  bool twice;  // rows have the other elements twice, for queries of bf16 that are a sum of two numbers there
};

// The last keys of a request whose queries are a tree of drafts, from the beginning of a block on.
struct TreeTail {
  int begin;           // the first of them; below 0: the request is a chain, and has none
  int width;           // of whole blocks
  long shown;          // where the bytes of its queries begin, `width` of each, in AttentionParams::tree_shown; zero hides a key
  long key_positions;  // and the positions of the keys, in tree_positions
};

// What a query sees of a stretch of keys under a mask_mod: some of those from `begin` to `end`.
struct MaskRow {
  int begin, end;
  long bytes;  // where its bytes begin in mask_bytes, one for each key of the stretch's blocks; -1: it sees all from `begin` to `end`
};

// Logits of a query for a score_mod: those of keys from `begin` to `end`, in groups of 16 that are `pitch` floats apart, and times `scale`.
struct ScorePlace {
  int request, head, position;  // of the query among the request's keys
  int q_len, kv_len;            // of the request
  int begin, end;
  long pitch;
  float scale;
};

struct AttentionParams {
  const char* q;
  char* out;
  float* lse;                                                             // or null
  long q_token_stride, q_head_stride, out_token_stride, out_head_stride;  // bytes
  long lse_token_stride, lse_head_stride;                                 // elements
  int q_type, out_type;
  KvSide k, v;
  RowParts row_parts;
  bool packed;          // not strided, but tiles as the AMX unit reads them (amx_packed)
  bool values_in_keys;  // values are the first elements of their keys
  int block_size;       // 0: ragged
  int split_keys;       // the running sums are folded at multiples of this, whether or not the item is split there

  const int* positions;              // [num_tokens] of queries; null: bottom right
  const int* query_start;            // [num_reqs + 1]
  const int* seq_lens;               // [num_reqs]
  const int* block_ids;              // block b of request r is block_ids[block_start[r] + b]; null when ragged
  const long* block_start;           // [num_reqs]; ragged: the request's first row
  const unsigned char* custom_mask;  // or null
  const long* custom_start;          // [num_reqs]: where the request's bytes begin
  const TreeTail* tree_tails;        // [num_reqs]; null: no queries are trees
  const unsigned char* tree_shown;
  const int* tree_positions;
  // Of a mask_mod: where the rows of each of `stretches` begin in mask_rows; -1: it is seen by all. They are of the queries of the item; of
  // each of mask_heads q heads one behind the other, 1 where heads are alike. Null: there is none.
  const long* stretch_rows;
  const MaskRow* mask_rows;
  const unsigned char* mask_bytes;
  int mask_heads;

  int num_q_heads, num_kv_heads, group;
  int heads_together;     // kv heads of an item that `attention` runs, 1 to Kernels::most_heads
  float scale, soft_cap;  // soft_cap 0: off
  bool causal;
  int window_left, window_right, chunk;             // as in Mask
  int chunk_before;                                 // tokens in front of its own chunk that a query sees too
  const float *head_scales, *alibi_slopes, *sinks;  // [num_q_heads] or null
  bool alibi_sqrt;
  const float* bias_by_distance;  // [num_q_heads, 2 * bias_reach + 1], natural log units; distance j - p is clamped to +-bias_reach
  int bias_reach;
  // Puts what a score_mod makes of logits, in natural units once they are scaled, in their place. Null: there is none.
  void (*modify_scores)(const void* score_mod, const ScorePlace&, float* scores);
  const void* score_mod;

  // ListDetails of the schedule; null where it has none.
  const int *tokens, *request_of, *parts;
  const ItemDetails* details;
  const KeyStretch* stretches;

  float* partial_out;    // [partial rows, num_q_heads, v.dim], not normalised
  float* partial_state;  // [partial rows, num_q_heads, 2]: running maximum (log2 units), sum
};

struct WriteKvParams {
  KvSide k, v;                                                                                    // the cache; data is written
  const char *src_k, *src_v;                                                                      // src_v null: keys alone
  long k_token_stride, k_head_stride, k_dim_stride, v_token_stride, v_head_stride, v_dim_stride;  // bytes
  int src_type;
  const long long* slots;
  long slot_stride;  // elements
  int block_size, num_kv_heads;
  bool packed;
  bool ds_mla;  // records of fp8_ds_mla, at k
};

// The task that a worker will probably run after an item, so that its first keys can be prefetched. item null: nothing is known.
struct NextTask {
  const WorkItem* item;
  int kv_head;
};

// The kernels of one instruction set. `attention` runs one work item for heads_together kv heads, from `kv_head` on. It returns false when
// a row's output is not finite although its weights are: then a value is not finite, and rows that do not see it may have multiplied it by
// zero, which makes NaN.
struct Kernels {
  const char* isa;
  int row_tile;    // rows (query token, q head) an item should have at most
  int most_heads;  // that it can run together, of items of most_rows_together rows at most
  int most_rows_together;
  int widened;                                                  // ElementType that rows of records are made of
  int (*split_keys)(const AttentionParams&);                    // AttentionParams::split_keys, of the shape
  long (*scratch_bytes)(const AttentionParams&, int max_rows);  // of one worker
  void (*enter)();  // before the first item a worker runs, and after the last: tile configuration
  void (*leave)();
  bool (*attention)(const AttentionParams&, const WorkItem&, int kv_head, NextTask, char* scratch);
  void (*merge)(const AttentionParams&, const MergeItem&, int head_begin, int head_end);
  void (*write_kv)(const WriteKvParams&, int token_begin, int token_end);
};

static inline const ItemDetails* details_of(const AttentionParams& a, const WorkItem& item) {
  return item.piece < 0 ? a.details + ~item.piece : nullptr;
}

// The row of the partial buffers with part `part` of a merge's token number `t`.
static inline long partial_row(const AttentionParams& a, const MergeItem& merge, int part, int t) {
  const int first = a.parts ? a.parts[merge.first_partial + part] : merge.first_partial + part * (merge.q_end - merge.q_begin);
  return long(first) + t;
}

// Of query token `t` of request `r` among the request's keys.
static inline int position_of(const AttentionParams& a, int r, int t) {
  return a.positions ? a.positions[t] : a.seq_lens[r] - a.query_start[r + 1] + t;
}

// Keys [lo, hi) that the query at position p sees, custom mask aside.
struct Visible {
  int lo, hi;
};
static inline Visible visible_keys(const AttentionParams& a, int p, int seq_len) {
  long lo = 0, hi = seq_len;
  if (a.causal && hi > p + 1L) hi = p + 1L;
  if (a.window_right >= 0 && hi > p + 1L + a.window_right) hi = p + 1L + a.window_right;
  if (a.window_left >= 0 && lo < long(p) - a.window_left) lo = long(p) - a.window_left;
  if (a.chunk > 0) {
    const long chunk_begin = p < 0 ? -1 : long(p) / a.chunk * a.chunk;
    if (chunk_begin < 0) return {0, 0};
    if (lo < chunk_begin - a.chunk_before) lo = chunk_begin - a.chunk_before;
    if (hi > chunk_begin + a.chunk) hi = chunk_begin + a.chunk;
  }
  if (lo >= hi) return {0, 0};
  return {int(lo), int(hi)};
}

// The address of key (or value) row j of a request.
static inline const char* kv_row(const AttentionParams& a, const KvSide& side, int request, int kv_head, int j) {
  const char* base = side.data + kv_head * side.head_stride;
  if (a.block_size == 0) return base + (a.block_start[request] + j) * side.token_stride;
  const int block = a.block_ids[a.block_start[request] + j / a.block_size];
  return base + block * side.block_stride + (j % a.block_size) * side.token_stride;
}

}  // namespace imbrex::cpu
