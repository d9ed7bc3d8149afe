#pragma once
// The parameters of CUDA kernels: plain structs, no standard header, strides in bytes. Filled by the host files, read by kernels/*.
#include "attention/cut_item.h"
#include "attention/ds_mla.h"
#include "expression/operations.h"
#include "imbrex/work.h"

namespace imbrex::cuda {

enum ElementType : int { kF32, kF16, kBf16, kE4m3, kE5m2 };  // the first five of DType, in its order

struct KvSide {  // keys or values of one layer
  char* data;
  long block_stride, token_stride, head_stride, dim_stride;  // bytes; ragged: no blocks
  const float* scales;                                       // dequantisation, on the device, [1] or [num_kv_heads]; null: `scale`
  int scale_stride;                                          // elements; 0: one for all heads
  float scale;
};

struct NewRows {  // k or v of this step: [token, head, dim]
  const char* data;
  long token_stride, head_stride, dim_stride;  // bytes
};

constexpr int kWriteKvThreads = 128;

struct WriteKvParams {
  KvSide k, v;
  NewRows new_k, new_v;
  const long* slots;  // [num_tokens], on the device; negative: not written
  long slot_stride;   // elements
  int num_tokens, num_kv_heads;
  const int* num_tokens_now;  // on the device, null: all of num_tokens. What a captured launch obeys, up to num_tokens
};

constexpr int kCopyBlocksThreads = 256, kCopyBlocksAtOnce = 256;

// The memory of a block of keys (or of values): sizes[0] * sizes[1] * sizes[2] contiguous parts.
struct BlockPieces {
  char* data;
  long block_stride, piece_bytes, strides[3];  // bytes; strides innermost first
  unsigned sizes[3];
};

struct CopyBlocksParams {
  BlockPieces k, v;
  struct {
    int from, to;
  } copies[kCopyBlocksAtOnce];  // one for each blockIdx.x; within the launch, so that no copy of the list has to live on
};

constexpr int kMergeResultsThreads = 128, kMergeResultRows = 8, kMostMergeParts = 48;

struct MergePart {  // or the result
  char* out;
  float* lse;
  long token_stride, head_stride, dim_stride;  // bytes
  long lse_token_stride, lse_head_stride;      // elements
  int type;                                    // kF32, kF16 or kBf16
};

struct MergeResultsParams {
  MergePart parts[kMostMergeParts], result;
  int num_parts, num_tokens, num_heads, dim;
};

constexpr int kGatherThreads = 256;

struct GatherParams {
  const char* from;
  const int* offsets;  // [num_rows], elements
  char* to;            // [num_rows, row_length]
  int num_rows, row_length;
};

constexpr int kFlattenThreads = 256, kFlatRows = 64;  // rows: of a thread block, all of one request and kv head

// Makes keys and values of requests flat: row by row, one request after the other (cuda/attention/flat_kv.h). There is a task for each of
// `requests`, each kv head, and keys or values.
struct FlattenKvParams {
  KvSide k, v;
  const int* block_ids;     // as in AttentionParams, with the next two
  const long* block_start;  //
  const int* seq_lens;      //
  const int* requests;      // [num_blocks]: whose kFlatRows rows these are
  const long* flat_start;   // [num_reqs]: row of the request's key 0, which may not be there itself
  const int* first_keys;    // [num_reqs]: the first that a query sees; nothing in front of it is read
  char *to_k, *to_v;        // [rows, kv heads of the launch, dim]
  int first_kv_head, num_heads, num_blocks;
  const int* num_blocks_now;  // on the device, instead of num_blocks: what a captured launch obeys; or null
  bool lists_are_there;       // as in AttentionParams; block_ids may be the caller's
};

constexpr int kPlanTableThreads = 256;

struct ExpandBiasParams {
  const float* bias;                // [relative_buckets, num_q_heads]
  long bucket_stride, head_stride;  // elements
  const int* buckets;               // [width]: bucket of each distance
  float* bias_by_distance;          // [num_q_heads, width]
  int width;
};

// One plan's batch, in device memory at addresses that never change, so that a captured graph replays any batch within the limits.
struct PlanCounts {
  int num_work, num_merges, num_tokens, num_reqs;
  int heads_together = 1;  // prefill: kv heads whose tasks are interleaved, the longest of all of them first; from heads_in_l2()
};

// The amounts of work of prefill in a graph, which holds a launch over the cache and one over flat keys: a step has work for one of them.
struct FlatCounts {
  PlanCounts over_cache, over_flat;
  int num_blocks;  // FlattenKvParams
};

// For plan_batch.cu: the rules for requests whose lengths are on the device. A request that breaks a rule is left out; when starts
// decrease, all are.
enum BatchRule : int {
  kStartsRise,
  kTokensFit,
  kQueryFits,
  kKeysFit,
  kQueriesAreKeys,
  kBlocksSuffice,
  kMaskSuffices,
  kParentsFit,
  kNumBatchRules
};

struct RegimeLists {
  CutRules rules;
  WorkItem* work;  // null: no request within the limits is of this regime
  MergeItem* merges;
  PlanCounts* counts;
  long l2_keys;  // keys_in_l2()
};

constexpr int kMostPlanThreads = 1024, kPlanRegimes = 4;

struct PlanBatchParams {
  const int *lengths_from, *starts_from;  // the caller's seq_lens [num_reqs] and query_start_loc [num_reqs + 1]
  const int* kv_starts;                   // kv_indptr or kv_start_loc [num_reqs + 1]; null: a dense table
  const int* positions_from;              // the caller's [max_tokens]; null: not given
  // Of trees of drafts the caller's [max_tokens] and [num_reqs]; null: each token follows the one in front of it; all tokens are drafts.
  const int *parents_from, *num_drafts_from;
  long kv_stride, kv_entries;  // dense: elements between rows, columns; otherwise 0, entries that kv_starts may point at
  long entry_keys, mask_size;  // keys of a block, or 1; bytes of the custom mask or, where it is packed, bits
  int num_reqs, max_tokens, min_query_len, max_query_len, max_seq_len;  // as PlanLimits has the last three
  int num_kv_heads;
  int most_position;  // one that is beyond it, or negative, counts as the nearest that is not
  bool queries_are_keys, mask_is_packed;
  // The plan's arrays, as in AttentionParams; custom_start, positions and those of trees may be null.
  int *query_start, *seq_lens;  // seq_lens: -1 for a request that is left out
  long *block_start, *custom_start;
  int* positions;
  unsigned long* tree_seen;
  int* tree_first;
  RegimeLists regimes[kPlanRegimes];
  FlatCounts* flat;  // or null; keys are not made flat then
  // Between the steps of the kernel, and what the host may ask for.
  int* item_start;  // [num_reqs]: used when these are many
  CutItem* items;   // of one regime: one for each query token at most
  int* broken;      // [kNumBatchRules]: the last request that broke the rule, plus 1; grows until the host clears it
};

constexpr int kMostTreeTokens = 64;  // imbrex::kMostTreeTokens: a longer request is a chain, and has no words

constexpr int kPackMaskThreads = 256;

constexpr int kMergeThreads = 256;
// Threads that share out the splits of eight dims at most, and rows that a thread block has then.
constexpr int most_merge_lanes(int head_dim_v) { return 4 * (head_dim_v / 8) <= kMergeThreads ? 4 : 1; }
constexpr int least_merge_rows(int head_dim_v) { return kMergeThreads / (head_dim_v / 8 * most_merge_lanes(head_dim_v)); }

// Runs in prefill: floats of a node of the tree of pieces, of a warpgroup of a thread block, and how many nodes it has.
constexpr int kRunLevels = 2, kMostInPrefillRun = 16;
constexpr int kVerifyLevels = 2;  // and likewise in verify, or one more
constexpr int kLatentLevels = 3;  // and in attention_sm90_latent.cu: as many as runs of kMostInRun pieces have
constexpr long run_node_floats(int head_dim_v) { return ((head_dim_v + 63) / 64 * 32 + 4) * 128; }

// Dims of a product in attention_sm90_fp8.cu for rows of so many: the widths that wgmma and the transposition of values have.
constexpr int sm90_fp8_dims(int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : head_dim <= 128 ? 128 : head_dim <= 192 ? 192 : 256;
}
// Bytes of a row in a chunk of them: the width of the swizzle.
constexpr int sm90_fp8_chunk(int head_dim) { return sm90_fp8_dims(head_dim) % 128 == 0 ? 128 : 64; }

// attention_sm90_latent.cu: tiles whose weights are in shared memory, and chunks of an item's queries that are in registers, of so many.
constexpr int kLatentWeightSlots = 3;
constexpr int latent_kept_chunks(int chunks) { return chunks * 2 / 3; }
// Words of a node of the tree of pieces, as far as a warp of 16 rows and so many dims has it: 20 bits of each number, and what the sums are
// relative to, with their totals.
constexpr int short_node_words(int dims) { return (dims / 16 + dims / 64 + 1) * 4 * 32; }
// Bytes of a stage of the ring: of a tile of keys, or, if these are more, of a node of the tree of pieces, as far as two warps have it.
constexpr int latent_stage_bytes(int tile_bytes, int head_dim_v) {
  constexpr int kUnit = 1024;  // of the widest swizzle
  const int node_bytes = short_node_words(head_dim_v / 2) * 4 * 2, bytes = tile_bytes > node_bytes ? tile_bytes : node_bytes;
  return (bytes + kUnit - 1) / kUnit * kUnit;
}

// attention_sm90_latent_pair.cu and attention_sm90_latent_spread.cu: levels of the tree of pieces whose nodes are in memory. Dims of the
// output that a thread block of the latter has.
constexpr int kLatentPairLevels = 2, kLatentSpreadDims = 128;

// attention_sm90_latent_decode.cu: levels of the tree of pieces whose nodes are in memory, and floats of a node, for so many rows.
constexpr int kLatentDecodeLevels = 2;
constexpr int latent_decode_node_floats(int head_dim_v, int rows) { return (head_dim_v + 128) * rows; }

// A query token of an item that several requests share, and which of the list's merges joins its partial results.
struct SharedToken {
  int token, merge;
};
constexpr int kMostSharedTokens = 32;  // of an item

constexpr int kMostScoreTensors = 4;  // that a score_mod reads

struct MergeList {  // of a regime
  const MergeItem* items;
  const PlanCounts* counts;  // null: there is no such list
  int shares;                // tasks that the rows of an item and kv head are: best of least_merge_rows() each
  bool are_short;            // sums so far are shortened when others join them: short_sums.cuh
};

// For attention_*.cu and merge.cu. A pointer is on the device.
struct AttentionParams {
  const char* q;
  char* out;
  float* lse;                                                             // or null
  long q_token_stride, q_head_stride, out_token_stride, out_head_stride;  // bytes
  long lse_token_stride, lse_head_stride;                                 // elements
  KvSide k, v;                                                            // latent_rope: `v` is k_rope and its scales
  const int* query_start;                                                 // [num_reqs + 1]
  const int* seq_lens;                                                    // [num_reqs]
  const int* block_ids;              // block b of request r is block_ids[block_start[r] + b]; null when ragged
  const long* block_start;           // [num_reqs]; ragged: the request's first row
  const unsigned char* custom_mask;  // or null
  const long* custom_start;          // [num_reqs]: the number of the request's first byte or, where the mask is packed, bit
  // The custom masks as pack_mask.cu packs them for prefill with wgmma, and the number of words for a token and, of each kind, for an item:
  // attention_sm90_mask.cuh.
  unsigned *mask_bits, *seen_tiles;
  int mask_words, seen_tile_words;
  const int* positions;  // [num_tokens]: of each token among its request's keys; null: the batch neither gives them nor has trees
  const WorkItem* work;
  const MergeItem* merges;
  const PlanCounts* counts;
  MergeList merge_lists[kPlanRegimes];  // for merge.cu, which merges the partial results of all regimes
  int* next_task;                       // zero before a launch and after it: the last block resets it
  int* arrivals;  // likewise, [merges, num_kv_heads, tiles of rows of a token]: pieces of an item that have left their partial results
  int num_kv_heads;
  int first_kv_head, kv_heads_now;       // of a launch for some heads only: prefill over flat keys, of which `k` and `v` have no more
  float scale, soft_cap;                 // soft_cap 0: off
  int window_left, window_right, chunk;  // as in Mask
  const float *head_scales, *alibi_slopes, *sinks;  // [num_q_heads] or null
  const float* bias_by_distance;  // [num_q_heads, 2 * bias_reach + 1], natural log units; distance j - p is clamped to +-bias_reach
  int bias_reach;
  int chunk_before;       // tokens in front of its own chunk that a query sees too
  float* partial_out;     // [partial rows, num_q_heads, head_dim_v], not normalised
  float* partial_state;   // [partial rows, num_q_heads, 2]: reference of the exponentials (log2 units), sum
  float* run_sums;        // [thread blocks, warpgroups, kRunLevels, run_node_floats()]: prefill, between the pieces of a run
  const float* q_scales;  // of fp8 queries, on the device, [1] or [num_kv_heads]; null: `scale` has it
  int q_scale_stride;     // elements; 0: one for all heads
  // The lists (work, counts, merges, query_start, seq_lens, block_start) were on the device before the kernel in front began: they may be
  // read in front of griddep_wait().
  bool lists_are_there;
  bool mask_is_packed;      // custom_mask has a bit for each query and key, the lowest of a byte first
  bool may_be_idle;         // the lists are there, and the launch may have no work
  bool keys_are_there;      // the lists and the keys of earlier steps are there: tiles of these may be loaded in front of griddep_wait()
  bool beside, next_waits;  // begin_launch() in attention_item.cuh
  int least_masked_q;       // query tokens of a request that pack_mask.cu packs the mask for
  // Of a list in which several requests share items, for kernels with kShares. An item with partial results and without a merge is such a
  // one: its q_begin and q_end count in shared_tokens, those of one merge beside each other. A merge whose first_partial is ~n begins its
  // parts in the rows merge_parts[n], merge_parts[n + 1] and so on.
  const SharedToken* shared_tokens;
  const int* shared_positions;  // [kMostSharedTokens], behind every key: those of such an item's tokens, where positions are given
  const int* merge_parts;
  // [num_tokens], of trees of drafts: bit k is set where a token sees the key of its request's token k; the first key that windows and
  // chunks leave it.
  const unsigned long* tree_seen;
  const int* tree_first;
  // Of the user's expressions, in the order in which each first reads them. Those of mask_mod are the step's, so that a captured launch
  // finds the next step's sizes; their array is on the device.
  ExpressionTensorData score_tensors[kMostScoreTensors];
  const ExpressionTensorData* mask_tensors;
  // Of a list with a mask_mod: the item with piece ~n has details n, and computes the keys in its stretches.
  const ItemDetails* item_details;
  const KeyStretch* stretches;
};

}  // namespace imbrex::cuda
