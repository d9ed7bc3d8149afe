#pragma once
// The boxes of a tile of latents, which one lane starts: there are many, of up to nine chunks for each page. (Where a lane starts a box
// because of its number, or of the page that it has found, compilers make a loop over lanes of each load.)
#include "attention_sm90_stream.cuh"

namespace imbrex::cuda {

// Loads chunks of `width` bytes of a tile's keys, from a dim on. at_once: pages whose blocks are known before the first of them is loaded.
// blocks: thread blocks of a cluster that get them, at the same place. `all`: chunks that come to this block, from others too.
template <int chunks, int width, int at_once, int blocks = 1>
DEVICE void load_latents(const TensorMap& map, const Item& item, const Box& box, u32 to, u32 full, u64 l2, int first_dim = 0,
                         int all = chunks) {
  constexpr int kAtOnce = at_once < kPages ? at_once : kPages;
  const u32 pages = __ballot_sync(kFullWarp, box.loads);
  const int begin = box.key - lane_id() * kPageRows, head = item.kv_head;
  if (elect_one()) mbarrier_arrive_expect(full, u32(__popc(pages)) * (kPageRows * width) * u32(all));
#pragma unroll 1
  for (int first = 0; first < kPages; first += kAtOnce) {
    int block[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) block[i] = shuffle(box.block, first + i);
    if (!elect_one()) continue;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int page = first + i, row = row_of_key(item.first_block, begin + page * kPageRows);
#pragma unroll
      for (int c = 0; c < chunks && (pages >> page & 1) != 0; ++c) {
        const u32 place = to + page * kPageRows * width + c * kBytesOf<width>;
        const int dim = first_dim + c * kDimsOf<width>;
        if constexpr (blocks > 1) {
          tma_load_to_all(place, map, full, l2, blocks, dim, row, head, block[i]);
        } else {
          tma_load(place, map, full, l2, dim, row, head, block[i]);
        }
      }
    }
  }
}

}  // namespace imbrex::cuda
