#pragma once
// The boxes of a tile of latents, which one lane starts: there are many, of up to nine chunks for each page. (Where a lane starts a box
// because of its number, or of the page that it has found, compilers make a loop over lanes of each load.)
#include "attention_sm90_stream.cuh"

namespace imbrex::cuda {

// Loads chunks of `width` bytes of a tile's keys, from a dim on. at_once: pages whose blocks are known before the first of them is loaded.
template <int chunks, int width, int at_once>
DEVICE void load_latents(const TensorMap& map, const Item& item, const Box& box, u32 to, u32 full, u64 l2, int first_dim = 0) {
  constexpr int kAtOnce = at_once < kPages ? at_once : kPages;
  const u32 pages = __ballot_sync(kFullWarp, box.loads);
  const int begin = box.key - lane_id() * kPageRows, head = item.kv_head;
  if (elect_one()) mbarrier_arrive_expect(full, u32(__popc(pages)) * (kPageRows * width * chunks));
#pragma unroll 1
  for (int first = 0; first < kPages; first += kAtOnce) {
    int blocks[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) blocks[i] = shuffle(box.block, first + i);
    if (!elect_one()) continue;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int page = first + i, row = row_of_key(item.first_block, begin + page * kPageRows);
#pragma unroll
      for (int c = 0; c < chunks && (pages >> page & 1) != 0; ++c)
        tma_load(to + page * kPageRows * width + c * kBytesOf<width>, map, full, l2, first_dim + c * kDimsOf<width>, row, head, blocks[i]);
    }
  }
}

}  // namespace imbrex::cuda
