#pragma once
// What recurrent_weights.cu hands to recurrent_chunks.cu, and products of 16-bit numbers as both write them.
#include "recurrent_token.cuh"

namespace imbrex::cuda {

constexpr int kChunk = kRecurrentChunk, kBlocks = kChunk / 16;  // blocks of 16 tokens
constexpr int kSize = element_bytes(kType), kStateSize = element_bytes(kStateType);
constexpr int kBlockBytes = 16 * 16 * kSize;
static_assert(kChunk == 64 && kSize == 2 && kDimK % 64 == 0);

DEVICE u32 pack(float low, float high) { return kType == kBf16 ? pack_bf16(low, high) : pack_f16(low, high); }
DEVICE float2 unpack(u32 pair) { return kType == kBf16 ? unpack_bf16(pair) : unpack_f16(pair); }
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { kType == kBf16 ? mma_bf16(d, a, b0, b1) : mma_f16(d, a, b0, b1); }

// Where 8 elements of a row of a tile lie, `chunks` times 8 in a row: so that a matrix of 8 rows touches every bank once.
template <int chunks>
DEVICE u32 place_in(u32 tile, int row, int column) {
  static_assert(chunks % 8 == 0);
  return tile + u32((row * chunks + (column ^ row % 8)) * 16);
}

// Copies rows of up to kChunk tokens to a tile, by all `threads` of a block; zeros for those that are not there.
template <int columns, int threads, int together = 64>
DEVICE void copy_rows(u32 tile, const char* from, long stride, int count) {
#pragma unroll together
  for (int i = 0; i < kChunk * columns / threads; ++i) {
    const int at = i * threads + int(threadIdx.x), row = at / columns, column = at % columns;
    copy_async<16>(place_in<columns>(tile, row, column), from + (row < count ? row : 0) * stride + column * 16, row < count);
  }
}

// The place of a lane in the four matrices of 16 rows and 16 columns: rows 0-7 left, rows 0-7 right, rows 8-15 left, rows 8-15 right.
DEVICE int row_of_lane() { return lane_id() % 8 + lane_id() / 16 * 8; }
DEVICE int half_of_lane() { return lane_id() / 8 % 2; }

// A lower triangle of a chunk's tokens, without what is above the diagonal's blocks: block after block, each as its four matrices, each a
// row after the other. A lane's part of a product, a pair of neighbours in a row, is word `lane` of a matrix.
constexpr int block_index(int row, int column) { return row * (row + 1) / 2 + column; }
constexpr int kTriangleBytes = block_index(kBlocks, 0) * kBlockBytes;

// Numbers of each token that products are multiplied by: the state's for k, the values, the state's for q, what is written.
struct ChunkNumbers {
  float known[kChunk], values[kChunk], outputs[kChunk], written[kChunk];
  float decay, padding[3];  // of the state, over the whole chunk
};
// Of a chunk and value head: T where there is the delta rule, P, and numbers.
struct WeightsLayout {
  static constexpr int p = kDelta ? kTriangleBytes : 0, numbers = p + kTriangleBytes, bytes = numbers + int(sizeof(ChunkNumbers));
};
static_assert(WeightsLayout::bytes == recurrent_weights_bytes(kDelta));

// A chunk has a number of its own in a step: 64ths of the tokens in front of its request, and requests there, and chunks of its request.
DEVICE int first_chunk_of(const RecurrentParams& p, int request) { return p.requests[request].begin / kChunk + request; }
DEVICE char* weights_at(const RecurrentParams& p, int chunk, int head) {
  return p.weights + (i64(chunk - p.first_chunk) * p.num_v_heads + head) * WeightsLayout::bytes;
}

}  // namespace imbrex::cuda
