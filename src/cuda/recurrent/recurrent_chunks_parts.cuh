#pragma once
// What recurrent_weights.cu and recurrent_channel_weights.cu hand to recurrent_chunks.cu and recurrent_chunks_sm90.cu, and products of
// 16-bit numbers as these write them.
#include "find_request.cuh"
#include "recurrent_token.cuh"

namespace imbrex::cuda {

constexpr int kChunk = kRecurrentChunk, kBlocks = kChunk / 16;  // blocks of 16 tokens
constexpr int kSize = element_bytes(kType), kStateSize = element_bytes(kStateType);
constexpr int kBlockBytes = 16 * 16 * kSize;
static_assert(kChunk == 64 && kSize == 2 && kDimK % 64 == 0);

DEVICE u32 pack(float low, float high) { return kType == kBf16 ? pack_bf16(low, high) : pack_f16(low, high); }
DEVICE float2 unpack(u32 pair) { return kType == kBf16 ? unpack_bf16(pair) : unpack_f16(pair); }
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { kType == kBf16 ? mma_bf16(d, a, b0, b1) : mma_f16(d, a, b0, b1); }

// Where 8 elements of a row of a tile lie, `column` counted in eights. A tile of kChunk rows has columns of 64 elements, 128 bytes a row,
// whose 16 bytes change places by the row: so that a matrix of 8 rows touches every bank once, and as wgmma's swizzle of 128 bytes has it.
constexpr int kColumnBytes = kChunk * 128;
DEVICE u32 place_in(u32 tile, int row, int column) {
  return tile + u32(column / 8 * kColumnBytes + row * 128 + (column % 8 ^ row % 8) * 16);
}

// Copies rows of up to kChunk tokens, `columns` times 8 elements, to a tile, by all `threads` of a block; zeros for those that are not
// there. `whole`: all are.
template <int columns, int threads, int together = 64, bool whole = false>
DEVICE void copy_rows(u32 tile, const char* from, long stride, int count) {
  static_assert(columns % 8 == 0 && threads % columns == 0 && kChunk % (threads / columns) == 0);
  constexpr int kRows = threads / columns;  // that are copied at a time
  const int first = int(threadIdx.x) / columns, column = int(threadIdx.x) % columns;
  const char* at = from + first * stride + column * 16;
#pragma unroll together
  for (int i = 0; i < kChunk / kRows; ++i, at += kRows * stride) {
    const int row = first + i * kRows;
    if constexpr (whole) {
      copy_async<16>(place_in(tile, row, column), at);
    } else {
      copy_async<16>(place_in(tile, row, column), row < count ? at : from, row < count);
    }
  }
}

// The place of a lane in the four matrices of 16 rows and 16 columns: rows 0-7 left, rows 0-7 right, rows 8-15 left, rows 8-15 right.
DEVICE int row_of_lane() { return lane_id() % 8 + lane_id() / 16 * 8; }
DEVICE int half_of_lane() { return lane_id() / 8 % 2; }

// A lower triangle of a chunk's tokens, in blocks of 16 x 16 without those above the diagonal. A block has a row of 32 bytes after the
// other, whose halves change places in every other four rows: as wgmma's swizzle of 32 bytes has it, and so that a matrix of 8 rows touches
// every bank once.
//
// For wgmma there are blocks of zeros in shared memory too, so that products go over whole columns: of T over those of rows 0 to 31 and
// over those of rows 32 to 63, where one block of zeros each is enough; of P over those of all rows.
static_assert(kBlocks == 4);
constexpr bool kPadded = kArch == 900 && kArchFeatures;
constexpr int kTriangleBytes = 10 * kBlockBytes;
struct TOrder {
  static constexpr int zeros[] = {2, 10}, num_zeros = kPadded ? 2 : 0, padded_bytes = (10 + num_zeros) * kBlockBytes;
  static constexpr int index(int row, int column) { return row < 2 ? column + row : 3 + 2 * column - column / 3 + row - 2; }
  static constexpr int pad(int index) { return kPadded ? index + (index >= 2) + (index >= 9) : index; }
};
struct POrder {
  static constexpr int zeros[] = {4, 8, 9, 12, 13, 14}, num_zeros = kPadded ? 6 : 0, padded_bytes = (10 + num_zeros) * kBlockBytes;
  static constexpr int index(int row, int column) { return 3 * column - column * (column - 1) / 2 + row; }
  static constexpr int pad(int index) { return kPadded ? index + (index >= 4) + 2 * (index >= 7) + 3 * (index >= 9) : index; }
};
// For wgmma, where channels have decays of their own, a chunk of no more tokens than the first half of its rows has nothing but that half:
// of the others' blocks and rows nothing is made, copied or multiplied.
constexpr int kHalf = kChunk / 2;
DEVICE bool is_half(int count) { return kPadded && kChannelGate && count <= kHalf; }

DEVICE int place_in_block(int row, int half) { return row * 32 + (half ^ row / 4 % 2) * 16; }
// Where the two words of a lane's part of a product lie, rows lane / 4 and 8 further on, in the left or the right half.
DEVICE int word_in_block(int eight, int half) { return place_in_block(8 * eight + lane_id() / 4, half) + lane_id() % 4 * 4; }

// Numbers of each token that products are multiplied by: the state's for k, the values, the state's for q, what is written.
struct ChunkNumbers {
  float known[kChunk], values[kChunk], outputs[kChunk], written[kChunk];
  float decay, padding[3];  // of the state, over the whole chunk
};
// Of a chunk and value head: T where there is the delta rule, P, and numbers. With gates of channels also, with G the sums of channels,
// what the state is multiplied by over the chunk, e^G_last, and tiles as shared memory has them of e^G_i k_i, e^G_i q_i and e^(G_last -
// G_i) k_i.
struct WeightsLayout {
  static constexpr int p = kDelta ? kTriangleBytes : 0, numbers = p + kTriangleBytes, decays = numbers + int(sizeof(ChunkNumbers)),
                       tile = kChunk * kDimK * kSize, known = decays + kDimK * 4, asked = known + tile, written = asked + tile,
                       bytes = kChannelGate ? written + tile : decays;
};
static_assert(WeightsLayout::bytes == recurrent_weights_bytes(kDimK, kDelta, kChannelGate));

// A chunk has a number of its own in a step: 64ths of the tokens in front of its request, and requests there, and chunks of its request.
DEVICE int first_chunk_of(const RecurrentParams& p, int request) { return p.requests[request].begin / kChunk + request; }
// The tokens of a chunk; none where no chunk has the number.
struct ChunkTokens {
  int begin, count;
};
DEVICE ChunkTokens tokens_of_chunk(const RecurrentParams& p, int chunk) {
  const int num_reqs = num_requests(p);
  if (num_reqs == 0) return {};
  const int request = find_request(num_reqs, chunk, [&](int r) { return first_chunk_of(p, r); });
  const RecurrentItem item = chunks_of(p, request);
  const int begin = item.begin + (chunk - first_chunk_of(p, request)) * kChunk;
  return {begin, min(item.end - begin, kChunk)};
}
DEVICE char* weights_at(const RecurrentParams& p, int chunk, int head) {
  return p.weights + (i64(chunk - p.first_chunk) * p.num_v_heads + head) * WeightsLayout::bytes;
}

}  // namespace imbrex::cuda
