#pragma once
// Sums of a row over several ranges of keys become one: from memory, where thread blocks have left pieces of an item or runs of pieces, and
// in registers, where one block has several pieces. Always from the left, as kPiecesTogether's tree, by the same arithmetic: a result has
// the same bits whoever computed what. Sums are without the values' scale, which the end of a row applies.
#include "attention_output.cuh"
#include "fragment.cuh"
#include "short_sums.cuh"

namespace imbrex::cuda {

constexpr float kNoSum = -0.f;  // of no keys: whatever is added to it, -0 too, keeps its bits

// Joins sums that are relative to two references, those of rising keys in their order.
struct Fold {
  float reference;    // of the result
  float kept, added;  // what the sums so far and the others are multiplied by

  DEVICE Fold(float sums, float others)
      : reference(fmaxf(sums, others)), kept(exp2_approx(sums - reference)), added(exp2_approx(others - reference)) {}
  // Spelt out: a compiler could contract either product.
  DEVICE float operator()(float sum, float other) const { return fmaf(other, added, sum * kept); }
};

// The same for numbers of the output, of which the sums so far may be `short`: shortened(), as short_sums.cuh says.
template <bool is_short>
struct OutputFold {
  float kept, added;

  DEVICE explicit OutputFold(const Fold& fold) : kept(is_short ? fold.kept * kShortMean : fold.kept), added(fold.added) {}
  DEVICE float of_kept(float sum, float other) const { return fmaf(other, added, sum * kept); }  // which is shortened by now
  DEVICE float operator()(float sum, float other) const { return of_kept(is_short ? shortened(sum) : sum, other); }
};

// Sums of a thread's two rows become relative to references that have moved.
template <class Out>
DEVICE void rescale(const float (&factor)[2], float (&sum)[2], Out& out) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] *= factor[h];
    each_of_row(out, h, [=](float& x, int) { x *= factor[h]; });
  }
}

// The sums of a thread's two rows, and the references that they are relative to.
template <class Out, bool is_short = false>
struct FragmentSums {
  float reference[2], sum[2];
  Out out;

  DEVICE void clear(float none) {
#pragma unroll
    for (int h = 0; h < 2; ++h) reference[h] = kEmptyReference, sum[h] = none;
    fill(out, none);
  }
  DEVICE void rescale(const float (&factor)[2]) { cuda::rescale(factor, sum, out); }
  DEVICE void fold(const FragmentSums& others) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Fold fold(reference[h], others.reference[h]);
      const OutputFold<is_short> output(fold);
      reference[h] = fold.reference, sum[h] = fold(sum[h], others.sum[h]);
#pragma unroll
      for (int i = 0; i < 2 * kTilesOf<Out>; ++i)
        at(out, i / 2, h, i % 2) = output(at(out, i / 2, h, i % 2), at(others.out, i / 2, h, i % 2));
    }
  }
};

// A thread has four neighbouring dims of a row, and four more half a row later, so that the threads of a warp access contiguous memory.
constexpr int kEights = kHeadDimV / 8, kHighDims = kHeadDimV / 2;
// The first dim of thread `i` of those that have a row together, or several rows one after the other.
DEVICE int first_dim_of(int i) { return i % kEights * 4; }

// Eight dims of a row, four from `d` on and four from `d + kHighDims` on: its sums so far, and what they are relative to.
struct RowSums {
  float reference = kEmptyReference, sum = kNoSum, x[8] = {kNoSum, kNoSum, kNoSum, kNoSum, kNoSum, kNoSum, kNoSum, kNoSum};

  // Empty sums become the others, bit for bit, and others that are empty change nothing, unless they shorten().
  DEVICE void fold(const RowSums& others, bool shortens) {
    const Fold fold(reference, others.reference);
    const Shortening shorten(shortens);
    const float kept = fold.kept * shorten.mean;
    reference = fold.reference, sum = fold(sum, others.sum);
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = fmaf(others.x[k], fold.added, shorten(x[k]) * kept);
  }

  DEVICE RowSums of_lane(int lane) const {
    RowSums other;
    other.reference = shuffle(reference, lane), other.sum = shuffle(sum, lane);
#pragma unroll
    for (int k = 0; k < 8; ++k) other.x[k] = shuffle(x[k], lane);
    return other;
  }

  // leave() writes the sums to a row of the partial buffers; take() reads them.
  DEVICE void leave(const AttentionParams& p, long row, int d) const {
    if (d == 0) reinterpret_cast<float2*>(p.partial_state)[row] = {reference, sum};
    float* const to = p.partial_out + row * kHeadDimV + d;
    *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
    *reinterpret_cast<float4*>(to + kHighDims) = {x[4], x[5], x[6], x[7]};
  }
  DEVICE void take(const AttentionParams& p, long row, int d) {
    const float2 state = load_l2(reinterpret_cast<const float2*>(p.partial_state) + row);
    const float* const from = p.partial_out + row * kHeadDimV + d;
    const float4 low = load_l2(reinterpret_cast<const float4*>(from)), high = load_l2(reinterpret_cast<const float4*>(from + kHighDims));
    *this = {state.x, state.y, {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }

  DEVICE void store(const AttentionParams& p, int token, int head, int d, float v_scale, bool wide) {
    const RowEnd end = row_end(p, head, reference, sum);
    if (d == 0) store_lse(p, token, head, end.lse);
#pragma unroll
    for (float& value : x) value = ended(value, end.factor * v_scale);
    char* const to = out_row(p, token, head) + d * element_bytes(kOutType);
    store_out(to, wide, {x[0], x[1], x[2], x[3]});
    store_out(to + kHighDims * element_bytes(kOutType), wide, {x[4], x[5], x[6], x[7]});
  }
};

// RowSums of a row whose split number s is row row_of_split(s) of the partial buffers. A thread has the loads of kNodes nodes of the tree
// under way at the same time: where the memory is busy, they take many times as long as what is done with them. Several lanes may share the
// splits out. Where it `shortens`, sums so far are shortened when others join them, if they `are_short`.
template <int kNodes, int kLanes, bool shortens = false, class RowOfSplit>
DEVICE RowSums join_splits(const AttentionParams& p, const RowOfSplit& row_of_split, int num_splits, int d, int lane,
                           bool are_short = shortens) {
  constexpr int kSplits = kNodes * kPiecesTogether;  // of a lane, at a time
  RowSums all, level3, level2;                       // of the tree: nodes that are not complete
  int nodes = 0;                                     // of the first level that are in them
#pragma unroll 1
  for (int s = 0; s < num_splits; s += kLanes * kSplits) {
    RowSums node[kNodes][kPiecesTogether];
    const auto begin_of = [&](int n, int l) { return s + (n * kLanes + l) * kPiecesTogether; };
#pragma unroll
    for (int n = 0; n < kNodes; ++n) {
#pragma unroll
      for (int k = 0; k < kPiecesTogether; ++k) {
        const int split = begin_of(n, lane) + k;
        if (split < num_splits) node[n][k].take(p, row_of_split(split), d);
      }
    }
#pragma unroll
    for (int n = 0; n < kNodes; ++n) {
#pragma unroll
      for (int k = 1; k < kPiecesTogether; ++k) node[n][0].fold(node[n][k], are_short && begin_of(n, lane) + k < num_splits);
#pragma unroll shortens ? 1 : kLanes  // shortened sums take more instructions
      for (int l = 0; l < kLanes; ++l) {
        if (begin_of(n, l) >= num_splits) break;
        if (nodes > 0 && nodes % kPiecesTogether == 0) {
          level3.fold(level2, are_short);
          level2 = {};
          if (nodes % (kPiecesTogether * kPiecesTogether) == 0) {
            all.fold(level3, are_short);
            level3 = {};
          }
        }
        level2.fold(kLanes == 1 ? node[n][0] : node[n][0].of_lane(lane_id() / kLanes * kLanes + l), are_short);
        ++nodes;
      }
    }
  }
  if (nodes <= kPiecesTogether) return level2;
  level3.fold(level2, are_short);
  all.fold(level3, are_short);
  return all;
}

}  // namespace imbrex::cuda
