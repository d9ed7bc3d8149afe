#pragma once
// One scheduler step, as every backend sees it (vLLM: CommonAttentionMetadata; SGLang: ForwardBatch; FlashInfer: indptr arrays).
#include <cstdint>
#include <optional>
#include <span>

#include "imbrex/expression.h"
#include "imbrex/tensor.h"

namespace imbrex {

struct AttentionSpec;

constexpr int kMostPosition = (1 << 29) - 1;  // of Batch::positions: sums of two are an int
constexpr int kMostTreeTokens = 64;           // query tokens of a request that is a tree (Mask::tree): a bit each

// Any mix of prefill, chunked prefill, decode and verify. Requests with no query tokens and padded requests (seq_len 0, no
// tokens) are allowed anywhere and cost nothing. Tokens from query_start_loc.back() on are padding: their outputs are not written.
struct Batch {
  std::span<const int32_t> query_start_loc;  // [num_reqs + 1], host; starts at 0, monotone (qo_indptr, cu_seqlens_q)
  std::span<const int32_t> seq_lens;         // [num_reqs], host; keys of each request, this step's tokens included

  // Where the keys are: exactly one of the three.
  TensorView block_table;  // dense: i32 [num_reqs, max_blocks]; entries past the request's last block are not read
  TensorView kv_indptr;    // CSR: i32 [num_reqs + 1], with kv_indices i32 [>= kv_indptr.back()]
  TensorView kv_indices;
  TensorView kv_last_page_len;  // CSR, optional: i32 [num_reqs]; checked against seq_lens where given
  TensorView kv_start_loc;      // ragged (block_size 0): i32 [num_reqs + 1]; request r's keys are rows [r], [r+1) of k and v

  TensorView slot_mapping;  // i64 [num_tokens]: block * block_size + offset where the token's k, v go; -1: do not write
  TensorView custom_mask;   // u8 [sum of q_len * seq_len], rows in order; only with Mask::custom, as packed_mask

  // [>= num_tokens], on the host: position of each query among its request's keys, 0 to kMostPosition, in any order; only with
  // Mask::positions. Mask and position bias go by it. Rows of the custom mask are those of queries in their order all the same.
  std::span<const int32_t> positions;

  // Those that AttentionSpec::mask_mod reads, by name, on the host, until the next update(); others may be among them.
  std::span<const NamedTensor> mask_tensors;

  // For layers that keep a state of each request (short_conv.h): [num_reqs] each, on the host.
  std::span<const int32_t> state_slots;  // the slot of the request's state; not read for a request without tokens
  // The slot that says that a request with tokens is padding, which any number of requests may have (vLLM: PAD_SLOT_ID -1, or NULL_BLOCK_ID
  // 0): no state of it is read or written, its tokens' outputs are zeros, and nothing else in its lists is looked at. None: no request is
  std::optional<int32_t> pad_slot;
  std::span<const int32_t> num_drafts;  // how many of the step's last tokens the next step may take back; empty: none
  // The last draft of the request's step before that was kept, counted from 1: in a chain that is how many were. 0, or empty: none
  std::span<const int32_t> accepted_drafts;
  // The slot that a request's state is read from, where it is not state_slots, which alone is written: a state that is kept for others,
  // say. No other request of the step may write it; any number may read it. Not read for a request without earlier tokens. Empty: its own
  std::span<const int32_t> source_slots;
  // [num_tokens], on the host; only for layers with tree_drafts or Mask::tree: the token that a draft follows, counted from 0 among the
  // request's tokens of the step (SGLang: retrieve_parent_token). It is a draft in front of this one, or the last token that is no draft:
  // -1 where all are. Not read for tokens that are no drafts: each follows the one in front of it. Empty: so do drafts. Under Mask::tree
  // all tokens are drafts where num_drafts is empty, and a draft may follow any token in front of it, or none: -1. A request of more than
  // kMostTreeTokens tokens, a prompt say, has to be a chain
  std::span<const int32_t> draft_parents;

  // The custom mask with a bit in place of a byte, the lowest of a byte first (FlashInfer: packed_custom_mask), u8: each request's rows, in
  // order and without a gap, begin with a byte of their own, behind those of the request in front or at the byte that mask_indptr has.
  TensorView packed_mask;
  std::span<const int32_t> mask_indptr;  // [num_reqs + 1], on the host: where a request's bytes begin, and end at most. Empty: they follow

  int num_reqs() const { return int(seq_lens.size()); }
  int num_tokens() const { return query_start_loc.empty() ? 0 : query_start_loc.back(); }
  int query_len(int r) const { return query_start_loc[r + 1] - query_start_loc[r]; }
  int context_len(int r) const { return seq_lens[r] - query_len(r); }  // position of the first query
  int max_query_len() const;
  int max_seq_len() const;
};

// A step whose lengths an engine's own kernels have left on the device, say after sampling and speculative acceptance: for
// Plan::update_on_device(). All arrays are in the memory of the plan's device.
struct DeviceBatch {
  TensorView query_start_loc;  // i32 [num_reqs + 1], contiguous
  TensorView seq_lens;         // i32 [num_reqs], contiguous. An absent request has no query tokens
  // These are as in Batch. The custom mask may be longer than the requests' rows.
  TensorView block_table, kv_indptr, kv_indices, kv_start_loc, slot_mapping, custom_mask;
  TensorView positions;  // i32 [>= max_num_tokens], contiguous, as in Batch. One that is out of range counts as the nearest that is not
  TensorView state_slots, num_drafts, accepted_drafts;  // i32 [num_reqs], contiguous; the last two may be empty, as in Batch
  TensorView source_slots, draft_parents;  // i32 [num_reqs] and [>= max_num_tokens], contiguous; both may be empty, as in Batch
  std::optional<int32_t> pad_slot;         // as in Batch
  TensorView packed_mask;  // u8, in place of custom_mask: each request's bytes follow those of the one in front. It may be longer, too
  int max_num_tokens = 0;  // a bound of query_start_loc.back(), known to the host; 0: PlanLimits::max_num_tokens. The tensors of
                           // write_kv() and run(), and slot_mapping, have this many tokens

  int64_t num_reqs() const { return seq_lens.size(0); }
};

// Upper bounds of every later Plan::update: scratch is sized once, from these.
struct PlanLimits {
  int max_num_reqs = 256;     // 2^24 at most
  int max_num_tokens = 8192;  // query tokens of a step; 2^30 at most
  int max_seq_len = 131072;
  int max_query_len = 0;  // query tokens of one request; 0: no limit of its own. 1 makes a plan for decode, which needs less on a GPU
  // The least number of query tokens of a request that has any; 0: no such limit. Equal to max_query_len, it makes a plan for verify, whose
  // graphs hold no launch for decode.
  int min_query_len = 0;
  // Requests may begin with the same blocks, say those of a common prompt. A GPU's plan then has kernels of decode whose items several
  // requests may share (docs/cuda.md), which read such keys once; for batches without them they take a few percent longer where steps are
  // short. Plans for CPUs look for such requests in any case. No bit of a result depends on it; with PlanOptions::balanced, where results
  // depend on the batch anyway, neighbours share far more, and latents too.
  bool shared_prompts = false;

  void validate() const;  // Error limits.* for a limit that is out of range; backends call it when a plan is made
};

// Throws Error batch.* for the first broken rule. num_blocks bounds block ids and slots; < 0 when there are no blocks.
// Costs O(tokens + blocks in use); backends call it in Plan::update unless PlanOptions::validate is false.
void validate(const Batch&, const AttentionSpec&, const PlanLimits&, int64_t num_blocks);

}  // namespace imbrex
