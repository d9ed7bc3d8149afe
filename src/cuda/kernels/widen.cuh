#pragma once
// A warp widens rows of e4m3 in shared memory: from where TMA has put bytes, swizzled, to where it would have put 16-bit numbers.
#include "convert.cuh"

namespace imbrex::cuda {

// Two bytes of `four`, of which half 0 has the lower ones.
template <int type>
DEVICE u32 widened(u32 four, int half) {
  if constexpr (type == kF16) return e4m3_to_f16(four, half);
  const float2 pair = unpack_e4m3(four, half);
  return pack_bf16(pair.x, pair.y);
}

// A lane's place in eight rows: a piece of 16 bytes in half a line of one row, two pieces when widened. Eight neighbouring lanes have two
// rows, chosen so that their pieces lie in different banks, as bytes and as 16-bit numbers.
struct WidenedPlace {
  u32 from, to;
};
template <int width>
DEVICE WidenedPlace widened_place() {
  const int lane = lane_id(), row = lane / 8 ^ lane / 4 % 2 * 5, piece = lane % 4;
  const int exchanged = width == 128 ? row : row / 2 % 4;
  return {u32(row * width + (piece ^ exchanged) * 16), u32(row * 128 + (2 * piece ^ row) * 16)};
}

// `rows` of them, a multiple of eight, of `dim` dims. `from`, `to`: the lane's place in the first eight; chunks are of `width` bytes, and
// of 64 numbers. at_once: pieces that a lane has under way, as many as registers are there for.
template <int type, int dim, int rows, int width, int from_chunk_bytes, int to_chunk_bytes, int at_once>
DEVICE void widen_rows(u32 from, u32 to) {
  constexpr int kHalves = (dim + 63) / 64, kPieces = rows / 8 * kHalves, kAtOnce = kPieces % at_once == 0 ? at_once : 1;
#pragma unroll
  for (int i = 0; i < kPieces; i += kAtOnce) {
    uint4 bytes[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int half = (i + j) % kHalves, row = (i + j) / kHalves * 8;
      bytes[j] = load_shared((from ^ half % 2 * 64) + half / 2 * from_chunk_bytes + row * width);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int half = (i + j) % kHalves, row = (i + j) / kHalves * 8;
      const u32 at = half * to_chunk_bytes + row * 128;
      const uint4& b = bytes[j];
      store_shared(to + at, uint4{widened<type>(b.x, 0), widened<type>(b.x, 1), widened<type>(b.y, 0), widened<type>(b.y, 1)});
      store_shared((to ^ 16) + at, uint4{widened<type>(b.z, 0), widened<type>(b.z, 1), widened<type>(b.w, 0), widened<type>(b.w, 1)});
    }
  }
}

}  // namespace imbrex::cuda
