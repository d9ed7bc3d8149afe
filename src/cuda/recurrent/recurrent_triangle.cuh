#pragma once
// T of a chunk, the inverse of 1 + A, as recurrent_weights.cu and recurrent_channel_weights.cu make it. A row of blocks of T is made by a
// warp: with D the inverses of 1 + A on the diagonal,
//   T[i][j] = -(sum over k from j + 1 to i of T[i][k] A[k][j]) D[j]
// where T[i][k] is what a product gave and the first factor of the next one. Products for T are of f16, whatever the type of the keys: A is
// at most beta |k|^2, which is below 2 where a delta rule does not diverge.
//
// In shared memory blocks of A, and on the diagonal of D, are in f16, in the order of TOrder without zeros, as four matrices of 8 rows
// each: rows 0-7 left, rows 0-7 right, rows 8-15 left, rows 8-15 right.
#include "recurrent_chunks_parts.cuh"

namespace imbrex::cuda {

constexpr int kDiagonalPitch = 20;  // floats of a row of a block on A's diagonal

// A lane's part of 8 rows of a block goes to memory, pairs of neighbours in the left and in the right half: neighbouring lanes change one
// for the other, so that each has 8 bytes and four of them a whole row.
DEVICE void store_pairs(char* block, int eight, u32 left, u32 right) {
  const int t = lane_id() % 4, half = t % 2;
  const u32 other = shuffle(half == 0 ? right : left, lane_id() ^ 1);
  char* const to = block + place_in_block(8 * eight + lane_id() / 4, half) + t / 2 * 8;
  *reinterpret_cast<uint2*>(to) = half == 0 ? uint2{left, other} : uint2{other, right};
}

// D of 16 tokens by substitution, by half a warp, a lane a column.
DEVICE void invert_diagonal(const float (&diagonal)[16][kDiagonalPitch], char* block) {
  const int column = lane_id() % 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sums[2] = {i == column ? 1.f : 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < i; ++j) sums[j % 2] = __fmaf_rn(-diagonal[i][j], x[j], sums[j % 2]);
    x[i] = sums[0] + sums[1];
  }
  char* const to = block + column / 8 * 128 + column % 8 * 2;
#pragma unroll
  for (int i = 0; i < 16; ++i) *reinterpret_cast<u16*>(to + i / 8 * 256 + i % 8 * 16) = u16(pack_f16(x[i], 0.f));
}

// x += a b for a block of A or D; what a product gave is the first factor.
struct Block {
  float of[2][4];
};
DEVICE void multiply_block(Block& x, const Block& a, u32 b) {
  u32 words[4];
  const u32 factor[4] = {pack_f16(a.of[0][0], a.of[0][1]), pack_f16(a.of[0][2], a.of[0][3]), pack_f16(a.of[1][0], a.of[1][1]),
                         pack_f16(a.of[1][2], a.of[1][3])};
  load_matrix_transposed(words, b + u32(lane_id() * 16));
  mma_f16(x.of[0], factor, words[0], words[2]);
  mma_f16(x.of[1], factor, words[1], words[3]);
}
DEVICE void store_block(char* to, const Block& x) {
#pragma unroll
  for (int eight = 0; eight < 2; ++eight)
    store_pairs(to, eight, pack(x.of[0][2 * eight], x.of[0][2 * eight + 1]), pack(x.of[1][2 * eight], x.of[1][2 * eight + 1]));
}

// The blocks of a row of T from the one so many places left of the diagonal on; `row` has those before it.
template <int left>
DEVICE void make_left(int number, Block (&row)[kBlocks], u32 blocks, char* t) {
  if (left > number) return;
  const int column = number - left;
  Block sum = {};
  row[left] = {};
#pragma unroll
  for (int k = 0; k < left; ++k) multiply_block(sum, row[k], blocks + u32(TOrder::index(number - k, column) * kBlockBytes));
  multiply_block(row[left], sum, blocks + u32(TOrder::index(column, column) * kBlockBytes));
#pragma unroll
  for (int i = 0; i < 8; ++i) row[left].of[i / 4][i % 4] = -row[left].of[i / 4][i % 4];
  store_block(t + TOrder::index(number, column) * kBlockBytes, row[left]);
  if constexpr (left + 1 < kBlocks) make_left<left + 1>(number, row, blocks, t);
}
// A row of blocks of T.
DEVICE void make_row(int number, u32 blocks, char* t) {
  Block row[kBlocks];  // from the diagonal to the left
  const u32 diagonal = blocks + u32(TOrder::index(number, number) * kBlockBytes + lane_id() * 4);
  const auto load = [&](int matrix, float(&tile)[4], int half) {
    const float2 pair = unpack_f16(load_shared_element<4>(diagonal + u32(matrix * 128)));
    tile[2 * half] = pair.x, tile[2 * half + 1] = pair.y;
  };
  load(0, row[0].of[0], 0), load(1, row[0].of[1], 0), load(2, row[0].of[0], 1), load(3, row[0].of[1], 1);
  store_block(t + TOrder::index(number, number) * kBlockBytes, row[0]);
  make_left<1>(number, row, blocks, t);
}

}  // namespace imbrex::cuda
