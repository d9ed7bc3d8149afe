#pragma once
// How merge.cu shares out rows of very many splits where it has blocks to spare; for the kernel and for the host that launches it.
#include "cuda/params.h"

namespace imbrex::cuda {

constexpr int kManySplits = 32;      // of a row, with more of which it is worth it
constexpr int kManyMergeLanes = 16;  // threads that share out the splits of eight dims then
// Thread blocks that each have some of the dims of a row then. 0: its dims do not come out even.
constexpr int many_merge_parts(int head_dim_v) {
  constexpr int kDims = kMergeThreads / kManyMergeLanes * 8;
  return head_dim_v % kDims == 0 ? head_dim_v / kDims : 0;
}

}  // namespace imbrex::cuda
