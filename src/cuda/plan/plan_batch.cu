// A plan's lists from lengths that lie on the device: the same lists that schedule() makes of them on the host. Launched by
// cuda/plan/device_plan.cpp, in front of the layers of a step.
//
// Bound by latency: a step of 256 requests reads 2 KiB and writes some 100. So one thread block does everything, in passes with a few
// barriers each: requests -> where their items begin -> items, cut and counted by cost -> splits, written in the order of cost.
#include "async.cuh"
#include "cuda/params.h"

namespace imbrex::cuda {

constexpr int kNearRequests = 2048;  // so many have their item_start in shared memory, where a search of it is quick

struct Numbers {
  int work, merges, heads_together;
};

struct SharedStorage {
  long warp_sums[kMostPlanThreads / 32];
  int cursor[kCostBuckets];                  // splits of a bucket; then where its next split goes
  int starts_fall, longest, queries, q_len;  // the last three: of the regime, as in Load
  Numbers numbers[kPlanRegimes];
  int item_start[kNearRequests];
};

extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);
extern __shared__ char memory[];

DEVICE int num_threads() { return int(blockDim.x); }

DEVICE long shuffle_long(long x, int lane) { return long(u64(u32(shuffle(int(x >> 32), lane))) << 32 | u32(shuffle(int(x), lane))); }

DEVICE long sum_of_lanes_up_to_this(long x) {
#pragma unroll 1
  for (int distance = 1; distance < 32; distance *= 2) {
    const long other = shuffle_long(x, max(lane_id() - distance, 0));
    if (lane_id() >= distance) x += other;
  }
  return x;
}

struct Sums {
  long before, all;  // of the threads in front of this one; of the thread block
};
DEVICE Sums sums_over_block(long x, SharedStorage& s) {
  const long sum = sum_of_lanes_up_to_this(x);
  const int this_warp = warp_id();
  if (lane_id() == 31) s.warp_sums[this_warp] = sum;
  __syncthreads();
  Sums sums{sum - x, 0};
  for (int warp = 0; warp < num_threads() / 32; ++warp) {
    if (warp < this_warp) sums.before += s.warp_sums[warp];
    sums.all += s.warp_sums[warp];
  }
  __syncthreads();
  return sums;
}

// --- requests

struct Request {
  int begin, end, seq_len;  // query tokens of the batch, keys
  long mask_begin;          // bytes
};

// Whether a request has blocks, or rows of a ragged cache, for all of its keys.
DEVICE bool has_room(const PlanBatchParams& p, int r, int seq_len) {
  if (p.kv_starts == nullptr) return seq_len <= p.kv_entries * p.entry_keys;
  const long first = p.kv_starts[r], end = p.kv_starts[r + 1];
  return first >= 0 && end <= p.kv_entries && seq_len <= (end - first) * p.entry_keys;
}

// The first rule that the request breaks; kNumBatchRules: none.
DEVICE int broken_rule(const PlanBatchParams& p, int r, const Request& q) {
  if (q.begin < 0 || q.end < q.begin || (r == 0 && q.begin != 0)) return kStartsRise;
  const int q_len = q.end - q.begin;
  if (q.end > p.max_tokens) return kTokensFit;
  if ((p.max_query_len > 0 && q_len > p.max_query_len) || (q_len > 0 && q_len < p.min_query_len)) return kQueryFits;
  if (q.seq_len < 0 || q.seq_len > p.max_seq_len) return kKeysFit;
  if (p.queries_are_keys && q.seq_len < q_len) return kQueriesAreKeys;
  if (!has_room(p, r, q.seq_len)) return kBlocksSuffice;
  if (p.custom_start != nullptr && (q.mask_begin < 0 || long(q_len) * q.seq_len > p.mask_size - q.mask_begin)) return kMaskSuffices;
  return kNumBatchRules;
}

// Into the plan's own arrays, so that the caller may change his for the next step while layers run.
DEVICE void take_requests(const PlanBatchParams& p, SharedStorage& s) {
  if (threadIdx.x == 0) s.starts_fall = 0;
  __syncthreads();
  long mask_end = 0;
  for (int first = 0; first < p.num_reqs; first += num_threads()) {
    const int r = first + int(threadIdx.x);
    Request q{};
    if (r < p.num_reqs) q = {p.starts_from[r], p.starts_from[r + 1], p.lengths_from[r], 0};
    if (p.custom_start != nullptr) {
      const long pairs = max(long(q.end) - q.begin, 0l) * max(q.seq_len, 0);
      const Sums sums = sums_over_block(p.mask_is_packed ? (pairs + 7) / 8 * 8 : pairs, s);  // bits begin with a byte of their own
      q.mask_begin = mask_end + sums.before;
      mask_end += sums.all;
    }
    if (r >= p.num_reqs) continue;
    const int rule = broken_rule(p, r, q);
    if (rule < kNumBatchRules) atomicMax(p.broken + rule, r + 1);
    if (rule == kStartsRise) s.starts_fall = 1;
    p.query_start[r] = q.begin;
    if (r + 1 == p.num_reqs) p.query_start[r + 1] = q.end;
    p.seq_lens[r] = rule < kNumBatchRules ? -1 : q.seq_len;
    p.block_start[r] = p.kv_starts != nullptr ? p.kv_starts[r] : r * p.kv_stride;
    if (p.custom_start != nullptr) p.custom_start[r] = q.mask_begin;
  }
  __syncthreads();
}

// Likewise. Requests that are left out, and tokens behind the last one, have positions that nobody reads.
DEVICE void take_positions(const PlanBatchParams& p, const SharedStorage& s) {
  if (p.positions_from == nullptr || p.num_reqs == 0 || s.starts_fall != 0) return;
  const int tokens = min(p.query_start[p.num_reqs], p.max_tokens);
  for (int token = int(threadIdx.x); token < tokens; token += num_threads())
    p.positions[token] = max(0, min(p.positions_from[token], p.most_position));
  __syncthreads();
}

// The last of `count` rising starts that is not behind `x`.
DEVICE int last_start(const int* starts, int count, int x) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Of trees of drafts: what each token sees of the others, and where it stands. A request whose parents are no tree is left out.
DEVICE void take_trees(const PlanBatchParams& p, const SharedStorage& s) {
  if (p.tree_seen == nullptr || p.num_reqs == 0 || s.starts_fall != 0) return;
  const CutRules& rules = p.regimes[0].rules;  // windows and chunks are those of every regime
  const int tokens = min(p.query_start[p.num_reqs], p.max_tokens);
  for (int token = int(threadIdx.x); token < tokens; token += num_threads()) {
    const int r = last_start(p.query_start, p.num_reqs, token), begin = p.query_start[r], q_len = p.query_start[r + 1] - begin;
    const int own = token - begin, context = p.seq_lens[r] - q_len;
    if (own >= q_len || context < 0) continue;  // left out
    const int drafts = p.num_drafts_from == nullptr ? q_len : p.num_drafts_from[r];
    const auto parent_of = [&](int t) { return p.parents_from == nullptr || t < q_len - drafts ? t - 1 : p.parents_from[begin + t]; };
    const int parent = parent_of(own);
    const bool chained = q_len > kMostTreeTokens;
    if (drafts < 0 || drafts > q_len || parent < -1 || parent >= own || (chained && parent != own - 1)) {
      atomicMax(p.broken + kParentsFit, r + 1);
      p.seq_lens[r] = -1;
      continue;
    }
    int depth = own;
    u64 seen = 0;
    const auto first_at = [&](int position) { return visible_keys(rules, position, position, kAnyNumber).begin; };
    if (!chained) {
      // Another token's parent may be wrong: then the walk ends there.
      const auto above = [&](int t) {
        const int next = parent_of(t);
        return next < t ? next : -1;
      };
      depth = 0;
      for (int t = above(own); t >= 0; t = above(t)) ++depth;
      int place = context + depth;
      const int first = first_at(place);
      for (int t = own; t >= 0; t = above(t), --place)
        if (place >= first) seen |= u64(1) << t;
    }
    p.positions[token] = context + depth;
    p.tree_first[token] = first_at(context + depth);
    p.tree_seen[token] = seen;
  }
  __syncthreads();
}

// --- items of a regime

// Positions of query tokens [t0, t1) of a request whose first one is token `begin` of the batch.
DEVICE PositionRange positions_of(const PlanBatchParams& p, int begin, int q_len, int seq_len, int t0, int t1) {
  if (p.tree_seen != nullptr)  // windows and chunks begin by the least position; behind the last token's own key it sees none
    return {given_positions(p.positions + begin + t0, t1 - t0).first, seq_len - q_len + t1 - 1};
  return p.positions == nullptr ? usual_positions(q_len, seq_len, t0, t1) : given_positions(p.positions + begin + t0, t1 - t0);
}

// [num_reqs]: first of the request's items in the regime's list.
DEVICE int* item_starts(const PlanBatchParams& p, SharedStorage& s) { return p.num_reqs <= kNearRequests ? s.item_start : p.item_start; }

struct Placed {
  int items;
  long keys;  // of their requests, where heads_in_l2() asks for them
  Load load;  // where run_lengths() does
};
// Writes item_starts.
DEVICE Placed place_items(const PlanBatchParams& p, const RegimeLists& regime, SharedStorage& s) {
  const CutRules& rules = regime.rules;
  int* const item_start = item_starts(p, s);
  int num_items = 0;
  long keys = 0, visible = 0;
  int longest = 0, queries = 0, longest_q = 0;
  if (threadIdx.x == 0) s.longest = s.queries = s.q_len = 0;
  for (int first = 0; first < p.num_reqs; first += num_threads()) {
    const int r = first + int(threadIdx.x);
    int items = 0;
    if (r < p.num_reqs && p.seq_lens[r] >= 0) {
      const int begin = p.query_start[r], q_len = p.query_start[r + 1] - begin;
      if (is_cut(rules, q_len)) items = num_tiles(rules, q_len), keys += p.seq_lens[r], longest_q = max(longest_q, q_len);
      for (int i = 0; rules.runs && i < items; ++i) {
        const int t0 = i * rules.tile_q, t1 = min(q_len, t0 + rules.tile_q);
        const KeyRange seen = item_keys(rules, positions_of(p, begin, q_len, p.seq_lens[r], t0, t1), p.seq_lens[r]);
        visible += seen.end - seen.begin, longest = max(longest, seen.end - seen.begin), queries = max(queries, t1 - t0);
      }
    }
    const Sums sums = sums_over_block(items, s);
    if (r < p.num_reqs) item_start[r] = num_items + int(sums.before);
    num_items += int(sums.all);
  }
  if (regime.l2_keys > 0) keys = sums_over_block(keys, s).all;
  if (rules.runs) {
    atomicMax(&s.longest, longest);
    atomicMax(&s.queries, queries);
    atomicMax(&s.q_len, longest_q);
    visible = sums_over_block(visible, s).all;
  }
  __syncthreads();
  return {num_items, keys, {visible, s.longest, num_items, s.queries, s.q_len}};
}

// The request whose item this is: the last that begins with it or before, since requests without items begin where the next one does.
DEVICE int request_of(const int* item_start, int num_reqs, int item) { return last_start(item_start, num_reqs, item); }

// Writes items and merges, and counts the splits of each bucket. Partial rows begin with first_row, which moves on; returns the number of
// merges.
DEVICE int cut_items(const PlanBatchParams& p, const RegimeLists& regime, const Placed& placed, int& first_row, SharedStorage& s) {
  const CutRules& rules = regime.rules;
  const int num_items = placed.items;
  const int* const item_start = item_starts(p, s);
  RunLengths lengths = run_lengths(rules, placed.load);
  for (;;) {
    int num_merges = 0, end_row = first_row;
    for (int bucket = int(threadIdx.x); bucket < kCostBuckets; bucket += num_threads()) s.cursor[bucket] = 0;
    __syncthreads();
    for (int first = 0; first < num_items; first += num_threads()) {
      const int i = first + int(threadIdx.x);
      CutItem item{};
      long rows = 0;
      if (i < num_items) {
        const int r = request_of(item_start, p.num_reqs, i), begin = p.query_start[r], q_len = p.query_start[r + 1] - begin;
        const int seq_len = p.seq_lens[r], t0 = last_tile(rules, q_len) - (i - item_start[r]) * rules.tile_q;
        cut_item(rules, r, begin, q_len, seq_len, t0, positions_of(p, begin, q_len, seq_len, t0, tile_end(rules, q_len, t0)), {0, seq_len},
                 item);
        make_runs(rules, item, longest_run(lengths, i));
#pragma unroll 1
        for (int kind = 0; kind < kSplitKinds; ++kind) {
          const EqualSplits equal = equal_splits(item, kind, rules.cost_by_keys);
          if (equal.count > 0) atomicAdd(&s.cursor[equal.bucket], equal.count);
        }
        rows = partial_rows(item);
      }
      const Sums sums = sums_over_block(rows > 0 ? 1l << 32 | rows : 0, s);  // merges and rows at a time
      if (rows > 0) {
        item.whole.partial = end_row + int(sums.before);
        item.whole.merge = num_merges + int(sums.before >> 32);
        regime.merges[item.whole.merge] = merge_of(item);
      }
      if (i < num_items) p.items[i] = item;
      end_row += int(sums.all);
      num_merges += int(sums.all >> 32);
    }
    if (lengthen(rules, placed.load, end_row, lengths)) continue;
    first_row = end_row;
    return num_merges;
  }
}

// --- splits of a regime

// Replaces the number of splits in each bucket by the position of the first of them; returns the number of all splits.
DEVICE int place_buckets(SharedStorage& s) {
  int num_work = 0;
  for (int first = 0; first < kCostBuckets; first += num_threads()) {
    const int bucket = first + int(threadIdx.x);
    const Sums sums = sums_over_block(bucket < kCostBuckets ? s.cursor[bucket] : 0, s);
    if (bucket < kCostBuckets) s.cursor[bucket] = num_work + int(sums.before);
    num_work += int(sums.all);
  }
  __syncthreads();
  return num_work;
}

// The position of the first of each thread's equal splits: those of a bucket are in the order of the threads. Warps take turns with the
// cursors; `warps` of them have splits.
DEVICE int place_equal(const EqualSplits& equal, int warps, SharedStorage& s) {
  const int packed = equal.count << 9 | equal.bucket;  // counts are far below 2^22: cut_policy() bounds the splits of an item
  static_assert(kCostBuckets == 1 << 9);
  int before = 0, all = 0;
#pragma unroll 8
  for (int lane = 0; lane < 32; ++lane) {
    const int other = shuffle(packed, lane);
    if ((other & (kCostBuckets - 1)) != equal.bucket) continue;
    all += other >> 9;
    if (lane < lane_id()) before += other >> 9;
  }
  const int this_warp = warp_id();
  int at = 0;
  for (int warp = 0; warp < warps; ++warp) {
    if (warp == this_warp) {
      at = s.cursor[equal.bucket];
      __syncwarp();
      s.cursor[equal.bucket] = at + all;  // the same from every lane of the bucket
    }
    __syncthreads();
  }
  return at + before;
}

// Splits of a warp's threads, one for each lane at a time, so that neighbours write neighbours.
DEVICE void write_equal(const CutItem* items, int first_kind, const EqualSplits& equal, int at, WorkItem* work) {
  const int end = int(sum_of_lanes_up_to_this(equal.count)), begin = end - equal.count, count = shuffle(end, 31);
  for (int split = lane_id(); split - lane_id() < count; split += 32) {
    int owner = 0;  // lanes whose splits end in front of this one
#pragma unroll 1
    for (int step = 16; step > 0; step /= 2) {
      if (shuffle(end, owner + step - 1) <= split) owner += step;
    }
    const int index = split - shuffle(begin, owner), to = shuffle(at, owner) + index, number = shuffle(equal.first, owner) + index;
    if (split < count) work[to] = split_of(items[(first_kind + owner) / kSplitKinds], number);
  }
}

DEVICE void write_work(const PlanBatchParams& p, const RegimeLists& regime, int num_items, SharedStorage& s) {
  const int num_kinds = num_items * kSplitKinds;
  for (int first = 0; first < num_kinds; first += num_threads()) {
    const int i = first + int(threadIdx.x);
    EqualSplits equal{};
    if (i < num_kinds) equal = equal_splits(p.items[i / kSplitKinds], i % kSplitKinds, regime.rules.cost_by_keys);
    const int warps = min(num_threads(), num_kinds - first + 31) / 32;
    const int at = place_equal(equal, warps, s);
    write_equal(p.items, i - lane_id(), equal, at, regime.work);
  }
}

DEVICE Numbers plan_regime(const PlanBatchParams& p, const RegimeLists& regime, int& first_row, SharedStorage& s) {
  if (regime.work == nullptr || s.starts_fall != 0) return {0, 0, 1};
  const Placed placed = place_items(p, regime, s);
  if (placed.items == 0) return {0, 0, 1};
  const int num_merges = cut_items(p, regime, placed, first_row, s);
  const int num_work = place_buckets(s);
  write_work(p, regime, placed.items, s);
  __syncthreads();
  return {num_work, num_merges, heads_in_l2(regime.l2_keys, placed.keys, p.num_kv_heads)};
}

extern "C" __global__ void __launch_bounds__(kMostPlanThreads) plan_batch(const __grid_constant__ PlanBatchParams p) {
  SharedStorage& s = *reinterpret_cast<SharedStorage*>(memory);
  griddep_wait();
  take_requests(p, s);
  take_positions(p, s);
  take_trees(p, s);
  int first_row = 0;
#pragma unroll 1
  for (int regime = 0; regime < kPlanRegimes; ++regime) {
    const Numbers numbers = plan_regime(p, p.regimes[regime], first_row, s);
    if (threadIdx.x == 0) s.numbers[regime] = numbers;
  }
  if (threadIdx.x > 0) return;
  const bool empty = p.num_reqs == 0 || s.starts_fall != 0;
  const int num_tokens = empty ? 0 : min(p.query_start[p.num_reqs], p.max_tokens);
  for (int regime = 0; regime < kPlanRegimes; ++regime) {
    const Numbers& numbers = s.numbers[regime];
    const PlanCounts counts{numbers.work, numbers.merges, num_tokens, p.num_reqs, numbers.heads_together};
    *p.regimes[regime].counts = counts;
    if (regime == kPlanRegimes - 1 && p.flat != nullptr)
      *p.flat = {counts, {0, 0, num_tokens, p.num_reqs, 1}, 0};  // the last one is prefill
  }
}

}  // namespace imbrex::cuda
