#pragma once
// How merge.cu shares out rows of many splits where it has blocks to spare; for the kernel and for the host that launches it.
#include "cuda/params.h"

namespace imbrex::cuda {

// Splits of such rows: more than the first, at most the second. Rows of few dims have fewer warps.
constexpr int many_splits(int head_dim_v) { return head_dim_v > 256 ? 16 : 32; }
constexpr int kMostManySplits = 192;
constexpr int kManyDims = 128;  // that a warp has then
// Thread blocks that may each have some of the dims of such a row. 0: its dims do not come out even.
constexpr int many_merge_parts(int head_dim_v) { return head_dim_v % kManyDims == 0 ? head_dim_v / kManyDims : 0; }

}  // namespace imbrex::cuda
