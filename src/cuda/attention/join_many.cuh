#pragma once
// Joins the splits of a row that are many.
#include "row_sums.cuh"

namespace imbrex::cuda {

// As join_splits() does, by sixteen neighbouring lanes with a node each at a time. Four of them fold theirs while the others do, and then
// all fold what the fours have, which is a node of the third level.
template <class RowOfSplit>
DEVICE RowSums join_many_splits(const AttentionParams& p, const RowOfSplit& row_of_split, int num_splits, int d, int lane, bool are_short) {
  constexpr int kLanes = kPiecesTogether * kPiecesTogether;
  const int first_lane = lane_id() / kLanes * kLanes;
  RowSums all;
#pragma unroll 1
  for (int begin = 0; begin < num_splits; begin += kLanes * kPiecesTogether) {
    const auto begin_of = [&](int of_lane) { return begin + of_lane * kPiecesTogether; };
    RowSums node[kPiecesTogether], level2, level3;
#pragma unroll
    for (int k = 0; k < kPiecesTogether; ++k)
      if (const int split = begin_of(lane) + k; split < num_splits) node[k].take(p, row_of_split(split), d);
#pragma unroll
    for (int k = 1; k < kPiecesTogether; ++k) node[0].fold(node[k], are_short && begin_of(lane) + k < num_splits);
#pragma unroll 1
    for (int i = 0; i < kPiecesTogether; ++i) {
      const int from = lane / kPiecesTogether * kPiecesTogether + i;
      const RowSums other = node[0].of_lane(first_lane + from);
      if (begin_of(from) < num_splits) level2.fold(other, are_short);
    }
#pragma unroll 1
    for (int from = 0; from < kLanes; from += kPiecesTogether) {
      const RowSums other = level2.of_lane(first_lane + from);
      if (begin_of(from) < num_splits) level3.fold(other, are_short);
    }
    all.fold(level3, are_short);
  }
  return all;
}

}  // namespace imbrex::cuda
