#pragma once
// A work item as the attention kernels see it: its rows, the keys they see, and what happens to their logits. No word about tiles of
// registers: that is the kernels' own.
//
// Row r of an item is query token r / kGroup and, of the q heads that share its kv head, number r % kGroup. A result depends on its own
// query and keys alone: keys are taken in tiles that begin at multiples of kTileKeys, in rising order, and a key that is hidden from a row
// changes no bit of that row's sums.
#include "async.cuh"
#include "attention_output.cuh"
#include "cuda/params.h"
#include "key_place.cuh"
#include "ptx.cuh"
#include "soft_cap.cuh"

namespace imbrex::cuda {

constexpr int kFar = 1 << 29;                                 // beyond any sequence, and its sum with a position is still an int
constexpr bool kPrefill = kTileRows >= 64 && kKeyWarps == 1;  // warps share out rows and nothing else
// Of a task, which begins with a token where an item of latents has several tasks of several tokens.
constexpr int kTaskRows =
    kValuesInKeys && (kItemRows > kTileRows) && (kGroup < kTileRows) ? (kTileRows / kGroup) * kGroup : kTileRows * kCluster;
constexpr int kMostRows = kGroup > kItemRows ? kGroup : kItemRows;   // of a work item and kv head: a token at least
constexpr int kRowBlocks = (kMostRows + kTaskRows - 1) / kTaskRows;  // and tasks
static_assert(!kShares || (kRowBlocks == 1 && kMostRows / kGroup <= kMostSharedTokens && !kTree && !kWholeItems));

struct KeyRange {
  int lo, hi;  // keys [lo, hi); empty when lo >= hi
};

// Whether a custom mask, a byte or a bit each, shows what has such a number in it: a query and a key.
DEVICE bool custom_shows(const AttentionParams& p, long number) {
  const u32 byte = p.custom_mask[p.mask_is_packed ? number >> 3 : number];
  return (p.mask_is_packed ? byte >> (number & 7) & 1u : byte) != 0;
}

// Keys that the query at `position` sees, the length of its request and custom masks aside. Both ends rise with the position.
DEVICE KeyRange visible_keys(const AttentionParams& p, int position) {
  KeyRange keys{-kFar, kFar};
  if constexpr (kCausal) keys.hi = position + 1;
  if constexpr (kWindow) {
    if (p.window_right >= 0) keys.hi = min(keys.hi, position + 1 + min(p.window_right, kFar));
    if (p.window_left >= 0) keys.lo = position - min(p.window_left, kFar);
    if (p.chunk > 0) {
      const int chunk = min(p.chunk, kFar), below = position >= 0 ? 0 : chunk - 1;  // rounds down
      const int begin = (position - below) / chunk * chunk;
      keys.lo = max(keys.lo, begin - min(p.chunk_before, kFar));
      keys.hi = min(keys.hi, begin + chunk);
    }
  }
  return keys;
}

// The position of a query token among the keys of its request, as an item has it: a number, or where the batch gives the number. Either way
// the positions of the tokens behind it follow.
template <bool given>
struct PositionOf {
  using Type = int;
  DEVICE static int token(const AttentionParams&, int, int usual) { return usual; }
  DEVICE static int behind(const AttentionParams&, int last_key) { return last_key; }
  DEVICE static int number(int position) { return position; }
};
template <>
struct PositionOf<true> {
  using Type = const int*;
  DEVICE static const int* token(const AttentionParams& p, int token, int) { return p.positions + token; }
  DEVICE static const int* behind(const AttentionParams& p, int) { return p.shared_positions; }
  DEVICE static int number(const int* position) { return __ldg(position); }
};
constexpr bool kGivenPositions = kPositions || kTree;
using Position = PositionOf<kGivenPositions>;

// What an item of queries that are a tree of drafts has besides. Their own keys are the request's last, and which of them a query sees is
// in its word of AttentionParams::tree_seen; its other keys are those of a causal mask and of its position.
template <bool>
struct TreePart {
  static constexpr int first_own = 0, first_bit = kFar, all_first = -kFar;
  DEVICE void set_tree(int, int, int) {}
  DEVICE void set_all_first(int) {}
};
template <>
struct TreePart<true> {
  int first_own;  // the key of the item's first query token
  int first_bit;  // the key of bit 0; kFar where there are no words
  int all_first;  // the first key that windows and chunks leave all of the item's rows
  // `context`: keys in front of the request's queries; `index`: of the item's first query among these.
  DEVICE void set_tree(int context, int index, int q_len) {
    first_own = context + index, first_bit = q_len <= kMostTreeTokens ? context : kFar;
  }
  DEVICE void set_all_first(int key) { all_first = key; }
};

// The task of a thread block, or of a cluster: up to kTaskRows rows of a work item for one kv head. It is the same in every thread.
struct Item : TreePart<kTree> {
  int kv_head;
  int row_begin, num_rows;  // of the item's rows; none where these do not fill all tasks
  int q_begin;              // query token of the item's row 0, within the batch
  Position::Type position;  // of that token among its request's keys
  int query_index;          // of that token among its request's queries
  int request, seq_len;
  int lo, hi;                 // keys that any of the rows sees, within the item's range: nothing else of the cache is read
  int partial, merge, piece;  // as in WorkItem
  long first_block;           // of the request's blocks in block_ids; ragged: its first key's row

  // Whether its rows are of several requests; then q_begin counts in shared_tokens, and so does what token_of() returns.
  DEVICE bool is_shared() const { return kShares && partial >= 0 && merge < 0; }
  DEVICE int token_of(int row) const { return q_begin + (row_begin + row) / kGroup; }
  DEVICE int head_of(int row) const { return kv_head * kGroup + (row_begin + row) % kGroup; }
  // Where positions are given, a row behind the last one has the position of that.
  DEVICE int position_of(int row) const {
    const int there = kGivenPositions ? min(row, num_rows - 1) : row;
    return Position::number(position + (row_begin + there) / kGroup);
  }
  // Of a tree: the key of a row's own token, the first key that windows and chunks leave it, and the word that says which tokens it sees.
  DEVICE int own_key(int row) const { return first_own + (row_begin + min(row, num_rows - 1)) / kGroup; }
  DEVICE int first_seen(const AttentionParams& p, int row) const {
    return kWindow ? __ldg(p.tree_first + token_of(min(row, num_rows - 1))) : -kFar;
  }
  DEVICE u64 word_of(const AttentionParams& p, int row) const {
    return first_bit == kFar ? 0 : u64(__ldg(p.tree_seen + token_of(min(row, num_rows - 1))));
  }
};

// The query token of a row, within the batch.
DEVICE int query_token(const AttentionParams& p, const Item& item, int row) {
  return item.is_shared() ? p.shared_tokens[item.token_of(row)].token : item.token_of(row);
}

enum class Outer { least, greatest };
// The least, or the greatest, number of rows `first` to `last`; found by a warp together.
template <Outer outer, class Number>
DEVICE int outer_of_rows(int first, int last, const Number& number_of) {
  const auto further = [](int a, int b) { return outer == Outer::least ? min(a, b) : max(a, b); };
  int number = number_of(first);
  for (int row = first + lane_id(); row <= last; row += 32) number = further(number, number_of(row));
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) number = further(number, shuffle(number, lane_id() ^ distance));
  return number;
}
// Of the positions of their queries.
template <Outer outer>
DEVICE int outer_position(const Item& item, int first, int last) {
  if constexpr (!kGivenPositions) return item.position_of(outer == Outer::least ? first : last);
  return outer_of_rows<outer>(first, last, [&](int row) { return item.position_of(row); });
}

// Keys [lo, hi) that a row sees, the length of its request and custom masks aside; in a tree, not all of them from its first bit on.
DEVICE KeyRange seen_by(const AttentionParams& p, const Item& item, int row) {
  if constexpr (kTree) return {item.first_seen(p, row), item.own_key(row) + 1};
  return visible_keys(p, item.position_of(row));
}
// Keys that some, and that all of the rows `first` to `last` see; found by a warp together.
struct RowsSeen {
  KeyRange some, all;
};
DEVICE RowsSeen seen_by_rows(const AttentionParams& p, const Item& item, int first, int last) {
  if constexpr (kTree) {
    const auto first_seen = [&](int row) { return item.first_seen(p, row); };
    return {{kWindow ? outer_of_rows<Outer::least>(first, last, first_seen) : -kFar, item.own_key(last) + 1},
            {item.all_first, min(item.first_bit, item.own_key(first) + 1)}};
  }
  const KeyRange least = visible_keys(p, outer_position<Outer::least>(item, first, last)),
                 greatest = visible_keys(p, outer_position<Outer::greatest>(item, first, last));
  return {{least.lo, greatest.hi}, {greatest.lo, least.hi}};
}
// Whether a word shows key number `bit` of its request's queries; it does every key in front of these.
DEVICE bool shows(u64 word, int bit) { return bit < 0 || (word >> bit & 1) != 0; }
// The first `count` bits.
DEVICE u64 low_bits(int count) { return count <= 0 ? 0 : count < 64 ? (u64(1) << count) - 1 : ~u64(0); }
// A word that shows key number `bit` in bit 0, and those behind it in the others.
DEVICE u64 word_from(u64 word, int bit) {
  if (bit >= 0) return bit < 64 ? word >> bit : 0;
  return (bit > -64 ? word << -bit : 0) | low_bits(-bit);
}
// What lies between a query and such a key that it sees, in depth: the keys behind that key which it sees too. 0 or below.
DEVICE int depth_to(u64 word, int bit) { return -__popcll(word >> bit >> 1); }

DEVICE int num_tasks(const AttentionParams& p) { return p.counts->num_work * p.kv_heads_now * kRowBlocks; }

// A number behind those of the first tasks, of which each of `crews` has its own; by one thread. Each crew takes numbers until one is not
// below `tasks`. So the counter is incremented as often as there are tasks, or crews if these are more; then it is zero again.
DEVICE int take_number(const AttentionParams& p, int crews, int tasks) {
  const int taken = atomicAdd(p.next_task, 1);
  if (taken + 1 == max(tasks, crews)) *p.next_task = 0;
  return crews + taken;
}

// Decode only: brings what item_of reads first.
DEVICE void prefetch_item(const AttentionParams& p, int task) { prefetch_l1(p.work + task / kRowBlocks / p.num_kv_heads); }

DEVICE Item item_of(const AttentionParams& p, int task) {
  const int row_block = task % kRowBlocks, rest = task / kRowBlocks;
  int index, kv_head;
  if constexpr (kPrefill) {  // thread blocks that run together share the keys of a few heads in L2
    const u32 num_work = u32(p.counts->num_work), together = u32(p.counts->heads_together);
    const u32 first = u32(rest) / (num_work * together) * together, heads = min(together, u32(p.kv_heads_now) - first);
    const u32 within = u32(rest) - num_work * first;
    index = int(within / heads), kv_head = p.first_kv_head + int(first + within % heads);
  } else {  // decode: the heads of a token are neighbours in most caches
    index = rest / p.num_kv_heads, kv_head = rest % p.num_kv_heads;
  }
  const WorkItem& work = p.work[index];
  Item item;
  item.kv_head = kv_head;
  item.request = work.table;
  item.q_begin = work.q_begin;
  item.partial = work.partial;
  item.merge = work.merge;
  item.piece = work.piece;
  item.row_begin = row_block * kTaskRows;
  item.num_rows = min(kTaskRows, (work.q_end - work.q_begin) * kGroup - item.row_begin);
  const int first_query = p.query_start[work.table], q_len = p.query_start[work.table + 1] - first_query;
  item.seq_len = p.seq_lens[work.table];
  item.query_index = work.q_begin - first_query;
  // Each query of a shared item sees all of its keys, as one at the last of them does.
  item.position =
      item.is_shared() ? Position::behind(p, work.kv_end - 1) : Position::token(p, work.q_begin, item.seq_len - q_len + item.query_index);
  item.set_tree(item.seq_len - q_len, item.query_index, q_len);
  item.set_all_first(-kFar);
  item.first_block = p.block_start[work.table];
  const KeyRange seen = seen_by_rows(p, item, 0, item.num_rows - 1).some;
  if constexpr (kTree && kWindow)
    item.set_all_first(outer_of_rows<Outer::greatest>(0, item.num_rows - 1, [&](int row) { return item.first_seen(p, row); }));
  item.lo = max(work.kv_begin, seen.lo);
  item.hi = min(min(work.kv_end, item.seq_len), seen.hi);
  if constexpr (kWholeItems) {
    if (work.merge >= 0) {
      if (work.partial != p.merges[work.merge].first_partial) item.num_rows = 0;
      item.hi = min(item.seq_len, seen.hi), item.partial = -1;
    }
  }
  return item;
}

// Whether a launch of a graph has no work; called before anything else. One thread block of such a launch waits for the kernel in front,
// since the next kernel waits for this launch alone, and the others end at once.
DEVICE bool is_idle(const AttentionParams& p) {
  if (!p.may_be_idle || p.counts->num_work > 0) return false;
  griddep_launch();
  if (blockIdx.x == 0) griddep_wait();
  return true;
}

// Kernels of one run() depend on what is in front of it, and not on each other: they fill the GPU together. One that is `beside` the kernel
// in front was let in when all thread blocks of that one had waited, so what they see is there. It ends behind it, for the sake of what
// comes next, which waits for this one alone; and where that waits itself, it may be let in at once.
//
// False: there is no work, and no block asks for a task.
DEVICE bool begin_launch(const AttentionParams& p) {
  if (p.next_waits) griddep_launch();
  if (!p.beside) griddep_wait();
  if (!p.next_waits) griddep_launch();
  return p.counts->num_work > 0;
}
DEVICE void end_launch(const AttentionParams& p) {
  if (p.beside) griddep_wait();
}

constexpr int kNoItem = -1;  // rows of what stands in for an item when none will come

struct Tiles {
  int first, end;  // of kTileKeys keys, that some row of the item sees
};
// At least one: an item without keys has a result too.
DEVICE Tiles tiles_of(const Item& item) {
  const int first = item.lo / kTileKeys;
  return {first, max(first + 1, (item.hi + kTileKeys - 1) / kTileKeys)};
}

// The row of partial_out and partial_state that an item's row writes its partial result to.
DEVICE long partial_row(const AttentionParams& p, const Item& item, int row) {
  return long(item.partial + item.token_of(row) - item.q_begin) * (p.num_kv_heads * kGroup) + item.head_of(row);
}

// --- logits: scale, head scale, soft cap, position bias; in log2 units at the end, or in natural ones for score_mod()

constexpr bool kPlainLogits = !kHeadScales && !kSoftCap && !kAlibi && !kRelative && !kScoreMod;  // q.k times a positive scale
constexpr float kLogitUnit = kScoreMod ? 1.f : kLog2e;

// The scale of a kv head's values. Where the rope part of keys lies apart, `v` says where, and values are a part of what lies at `k`.
DEVICE float value_scale(const AttentionParams& p, int kv_head) { return kv_scale(kRopeApart ? p.k : p.v, kv_head); }

// The factor of every q.k of a kv head.
DEVICE float logit_scale(const AttentionParams& p, int kv_head) {
  const float scale = p.scale * kv_scale(p.k, kv_head);
  if constexpr (kQType == kE4m3) return p.q_scales != nullptr ? scale * p.q_scales[kv_head * p.q_scale_stride] : scale;
  return scale;
}

struct RowTerms {     // what a row's logits need besides q.k
  float scale;        // of q.k: to kLogitUnit, or to what tanh is taken of
  float slope;        // ALiBi, in kLogitUnit
  const float* bias;  // by distance, centred
};

DEVICE RowTerms row_terms(const AttentionParams& p, int head, float scale) {
  RowTerms terms{scale, 0.f, nullptr};
  if constexpr (kHeadScales) {
    if (p.head_scales != nullptr) terms.scale *= p.head_scales[head];
  }
  if constexpr (!kSoftCap) {
    terms.scale *= kLogitUnit;
  } else if constexpr (kQType == kF32) {
    terms.scale /= p.soft_cap;
  } else {
    terms.scale *= kTanhUnit * reciprocal_approx(p.soft_cap);
  }
  if constexpr (kAlibi) terms.slope = p.alibi_slopes[head] * kLogitUnit;
  if constexpr (kRelative) terms.bias = p.bias_by_distance + long(head) * (2 * p.bias_reach + 1) + p.bias_reach;
  return terms;
}

// A logit is bent(q.k) * factor_of(row), and what its key's distance adds. The factor is positive, so it may wait: for the
// maximum, and for the multiply-add that also subtracts a reference.
DEVICE float bent(const RowTerms& row, float product) {
  if constexpr (!kSoftCap) return kHeadScales ? product * row.scale : product;
  if constexpr (kQType == kF32) return tanhf(product * row.scale);
  return tanh_of_units<(kHeadDimV > 128)>(product * row.scale);
}
DEVICE float factor_of(const AttentionParams& p, const RowTerms& row) {
  if constexpr (kSoftCap) return p.soft_cap * kLogitUnit;
  return kHeadScales ? 1.f : row.scale;
}

// The factor of ALiBi's slope. `distance` is key position - query position.
DEVICE float alibi_distance(int distance) {
  if constexpr (kAlibiSqrt) return -sqrtf(float(max(-distance, 0)));
  return float(distance);
}

// For kernels that leave no more than a factor to the exponential's argument. `distance` as above.
constexpr bool kFactorLeft = kScoreMod || (!kAlibi && !kRelative && (kSoftCap || !kHeadScales));
DEVICE float modified(const AttentionParams& p, const RowTerms& row, float product, int distance) {
  float x = bent(row, product);
  if constexpr (kFactorLeft && !kScoreMod) return x;
  x *= factor_of(p, row);
  if constexpr (kAlibi) x += row.slope * alibi_distance(distance);
  if constexpr (kRelative) x += __ldg(row.bias + max(-p.bias_reach, min(p.bias_reach, distance))) * kLogitUnit;
  return x;
}

}  // namespace imbrex::cuda
