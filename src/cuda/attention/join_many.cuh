#pragma once
// Joins the splits of a row that are many, for merge.cu: warps that have four dims a lane make nodes of the second level of the tree of
// pieces, and then one node of these. A block does little with any instruction, and fetching them takes as long as executing them: so loops
// are not unrolled further than a node of the first level.
#include "async.cuh"
#include "cuda/merge_params.h"
#include "row_sums.cuh"

namespace imbrex::cuda {

constexpr int kManyParts = many_merge_parts(kHeadDimV);
constexpr int kNodeSums = kPiecesTogether * kPiecesTogether;  // that become one: splits of a node, and nodes of a row
constexpr int kMostNodes = kMostManySplits / kNodeSums;
static_assert(kMostNodes <= kNodeSums);
// Warps that make nodes: rows of few dims have few.
constexpr int kManyWarps = kManyParts > 2 ? kMergeThreads / 32 : kManyParts > 0 ? 4 : 1;

// What sums of a row are multiplied by when up to kNodeSums become one, as the tree's nodes do, four by four: the same for all dims. Those
// of number i are for where it, or the node of the first level that begins with it, joins what is in front of it.
struct Factors {
  float kept_x, added, kept;  // of output dims in front, the mean of shortened ones (Shortening) included; of number i; of weights in front
  float sum;                  // of weights of number i
};

struct ManyShared {
  struct OfWarp {
    float4 splits[kNodeSums][32];  // of a node
    Factors factors[kNodeSums];
    u64 copied;  // an mbarrier: the splits are there
  } of_warps[kManyWarps];
  float4 nodes[kMostNodes][kManyParts > 0 ? kManyParts * 32 : 1];
  float2 states[kMostNodes];  // the reference, the sum of weights
};

// Lane i has the state of number i, or an empty one. Returns the node's reference.
DEVICE float find_factors(float2 state, float mean, Factors (&factors)[kNodeSums]) {
  const int lane = lane_id(), of_node = lane % kPiecesTogether;
  // The greatest reference of the lanes so far that are `step` apart, of four.
  const auto greatest = [&](float reference, int number, int step) {
    const float one = shuffle(reference, lane - step);
    if (number >= 1) reference = fmaxf(reference, one);
    const float two = shuffle(reference, lane - 2 * step);
    return number >= 2 ? fmaxf(reference, two) : reference;
  };
  const float so_far = greatest(state.x, of_node, 1),
              node = shuffle(so_far, lane / kPiecesTogether * kPiecesTogether + kPiecesTogether - 1),
              of_all = greatest(node, lane / kPiecesTogether, kPiecesTogether), own = of_node == 0 ? node : state.x,
              before = shuffle(so_far, lane - 1), nodes_before = shuffle(of_all, lane - kPiecesTogether);
  const Fold fold(of_node == 0 ? (lane == 0 ? kEmptyReference : nodes_before) : before, own);
  if (lane < kNodeSums) factors[lane] = {fold.kept * mean, fold.added, fold.kept, state.y};
  __syncwarp();
  return shuffle(of_all, kNodeSums - 1);
}

// Four dims of a row's sums, and its sum of weights.
struct NodeSums {
  float4 x{kNoSum, kNoSum, kNoSum, kNoSum};
  float sum = kNoSum;
};

// Those of a node of `count` sums, of which number i is x[i * stride].
DEVICE NodeSums join_node(const float4* x, int stride, int count, const Factors* factors, bool are_short) {
  const u32 kept_bits = are_short ? 0xfffff000u : ~0u, selector = are_short ? 0x3211u : 0x3210u;  // as Shortening, in two instructions
  const auto shorten = [=](float sum) {
    if constexpr (!kShortSums) return sum;
    const u32 bits = bits_of(sum) & kept_bits;
    return float_of(pick_bytes(bits, bits, selector));
  };
  const auto join = [&](NodeSums& sums, const float4& x, float sum, const Factors& by) {
    sums.x = {fmaf(x.x, by.added, shorten(sums.x.x) * by.kept_x), fmaf(x.y, by.added, shorten(sums.x.y) * by.kept_x),
              fmaf(x.z, by.added, shorten(sums.x.z) * by.kept_x), fmaf(x.w, by.added, shorten(sums.x.w) * by.kept_x)};
    sums.sum = fmaf(sum, by.added, sums.sum * by.kept);
  };
  NodeSums all;
#pragma unroll 1
  for (int i = 0; i < count; i += kPiecesTogether) {
    const Factors of_node = factors[i];
    NodeSums node{x[i * stride], of_node.sum};
    if (i + kPiecesTogether <= count) {
#pragma unroll
      for (int k = i + 1; k < i + kPiecesTogether; ++k) join(node, x[k * stride], factors[k].sum, factors[k]);
    } else {
#pragma unroll 1
      for (int k = i + 1; k < count; ++k) join(node, x[k * stride], factors[k].sum, factors[k]);
    }
    join(all, node.x, node.sum, of_node);
  }
  return all;
}

// Joins the splits of rows, at most kMostManySplits each.
class ManyJoiner {
 public:
  // Before a __syncthreads().
  DEVICE static void begin(ManyShared& shared) {
    if (kArch < 900 || threadIdx.x >= kManyWarps) return;
    mbarrier_init(shared_address(&shared.of_warps[threadIdx.x].copied), 1);
    mbarrier_fence_init();
  }
  DEVICE ManyJoiner(const AttentionParams& p, ManyShared& shared)
      : p_(p), shared_(shared), own_(shared.of_warps[warp_id() % kManyWarps]), copied_(shared_address(&own_.copied)) {}

  // Those of `head` of `token`: number s is row row_of_split(s) of the partial buffers. The block has so many parts of the dims, of
  // kManyDims each, from `first_part` on.
  template <class RowOfSplit>
  DEVICE void join(const RowOfSplit& row_of_split, int num_splits, int token, int head, int first_part, int parts, float v_scale,
                   bool are_short) {
    const int lane = lane_id();
    const float mean = are_short ? kShortMean : 1.f;
    bool of_nodes = false;
#pragma unroll 1
    for (int sums = num_splits;; of_nodes = true) {
      const int nodes = (sums + kNodeSums - 1) / kNodeSums;
#pragma unroll 1
      for (int unit = warp_id(); unit < nodes * parts && warp_id() < kManyWarps; unit += kManyWarps) {
        const int number = unit / parts, at = (first_part + unit % parts) * 32 + lane, first = number * kNodeSums,
                  count = min(sums - first, kNodeSums);
        float2 state{kEmptyReference, kNoSum};
        if (!of_nodes) copy(row_of_split, first, count, at);
        if (lane < count)
          state = of_nodes ? shared_.states[lane] : load_l2(reinterpret_cast<const float2*>(p_.partial_state) + row_of_split(first + lane));
        const float reference = find_factors(state, mean, own_.factors);
        if (!of_nodes) wait();
        const NodeSums all = join_node(of_nodes ? &shared_.nodes[0][at] : &own_.splits[0][lane], of_nodes ? kManyParts * 32 : 32, count,
                                       own_.factors, are_short);
        __syncwarp();  // before what is read here is written
        if (nodes > 1) {
          shared_.nodes[number][at] = all.x;
          if (lane == 0 && unit % parts == 0) shared_.states[number] = {reference, all.sum};
          continue;
        }
        const RowEnd end = row_end(p_, head, reference, all.sum);
        if (at == 0) store_lse(p_, token, head, end.lse);
        const float factor = end.factor * v_scale;
        store_out(out_row(p_, token, head) + at * 4 * element_bytes(kOutType), out_is_wide(p_),
                  {ended(all.x.x, factor), ended(all.x.y, factor), ended(all.x.z, factor), ended(all.x.w, factor)});
      }
      __syncthreads();  // nodes are there, or free again
      if (nodes == 1) break;
      sums = nodes;
    }
  }

 private:
  // Begins to copy the splits of a node, of each the dims of a warp, of which this lane's are number `at` of four.
  template <class RowOfSplit>
  DEVICE void copy(const RowOfSplit& row_of_split, int first, int count, int at) {
    const float4* const from = reinterpret_cast<const float4*>(p_.partial_out) + at;
    const int lane = lane_id();
    if constexpr (kArch >= 900) {
      constexpr u32 kBytes = sizeof(own_.splits[0]);
      if (lane == 0) mbarrier_arrive_expect(copied_, u32(count) * kBytes);
      __syncwarp();
      if (lane < count)
        bulk_load(shared_address(own_.splits[lane]), from - lane + row_of_split(first + lane) * (kHeadDimV / 4), kBytes, copied_);
    } else {
#pragma unroll 1
      for (int i = 0; i < count; ++i)
        copy_async<16>(shared_address(&own_.splits[i][lane]), from + row_of_split(first + i) * (kHeadDimV / 4));
      copy_async_commit();
    }
  }
  DEVICE void wait() {
    if constexpr (kArch >= 900) {
      mbarrier_wait(copied_, parity_);
      parity_ ^= 1;
    } else {
      copy_async_wait<0>();
    }
  }

  const AttentionParams& p_;
  ManyShared& shared_;
  ManyShared::OfWarp& own_;
  u32 copied_, parity_ = 0;
};

}  // namespace imbrex::cuda
