// Joins the splits of every merge of a list, as attention kernels do when the last one is there: a text for the host alone.
#include "attention_fold.cuh"

namespace imbrex::cuda {

extern "C" __device__ const unsigned smem_bytes = 0;
constexpr int kJoiningThreads = 64;

DEVICE void join_all_pieces(const AttentionParams& p) {
  for (int merge = 0; merge < p.counts->num_merges; ++merge) {
    const MergeItem& m = p.merges[merge];
    for (int kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
      Item item{};
      item.kv_head = kv_head;
      item.num_rows = (m.q_end - m.q_begin) * kGroup;
      join_pieces<kJoiningThreads>(p, item, m);
    }
  }
}

}  // namespace imbrex::cuda
