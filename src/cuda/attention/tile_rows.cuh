#pragma once
// A tile of keys row by row, where pages are too small for boxes of TMA: copies of 16 bytes a lane, to where TMA's swizzle would put them.
#include "async.cuh"
#include "tile_pages.cuh"

namespace imbrex::cuda {

constexpr int kRowParts = (kTileKeys + 31) / 32;

// The blocks of the tile's rows lane_id(), 32 + lane_id() and so on; negative: the row is left out. They are loaded a tile ahead, since
// under load each takes a microsecond.
struct RowBlocks {
  int of[kRowParts];
};

// Loads the blocks of the keys of the tile at `begin`; those outside of [lo, hi) are left out.
DEVICE RowBlocks row_blocks(const AttentionParams& p, long first_block, int begin, int lo, int hi) {
  RowBlocks blocks;
#pragma unroll
  for (int part = 0; part < kRowParts; ++part) {
    const int row = 32 * part + lane_id(), key = begin + row;
    const bool wanted = row < kTileKeys && key >= lo && key < hi;
    blocks.of[part] = wanted ? __ldg(block_id_of(p, first_block, key)) : -1;
  }
  return blocks;
}

// Rows of `row_bytes`, a multiple of 16, in chunks of `width` bytes, that of the swizzle, which are chunk_bytes apart; what the last chunk
// lacks is zero. Each lane arrives at `full` when its copies are there. `unrolled`: groups of rows, as many as registers are there for.
template <int row_bytes, int chunk_bytes, int unrolled, int width = 128>
DEVICE void copy_rows(const KvSide& side, int kv_head, const RowBlocks& blocks, int begin, u32 to, u32 full) {
  constexpr int kPieces = width / 16, kRowsAtOnce = 32 / kPieces;
  const int lane = lane_id(), piece = lane % kPieces;
  const char* const head = side.data + kv_head * side.head_stride + piece * 16;
#pragma unroll
  for (int part = 0; part < kRowParts; ++part) {
    const i64 at = blocks.of[part] < 0 ? -1 : offset_in_block(side, blocks.of[part], begin + 32 * part + lane);
#pragma unroll(unrolled)
    for (int i = 0; i < 32; i += kRowsAtOnce) {
      const int row = i + lane / kPieces;
      const u32 low = shuffle(u32(at), row), high = shuffle(u32(u64(at) >> 32), row);
      const i64 from = i64(u64(high) << 32 | low);
      const u32 place = to + (32 * part + row) * width + (piece ^ row * width / 128 % kPieces) * 16;
#pragma unroll
      for (int chunk = 0; chunk * width < row_bytes; ++chunk)
        if (from >= 0) copy_async<16>(place + chunk * chunk_bytes, head + from + chunk * width, chunk * width + piece * 16 < row_bytes);
    }
  }
  mbarrier_arrive_after_copies(full);
}

}  // namespace imbrex::cuda
