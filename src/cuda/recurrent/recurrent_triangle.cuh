#pragma once
// T of a chunk, the inverse of 1 + A, as recurrent_weights.cu and recurrent_channel_weights.cu make it. A row of blocks of T is made by a
// warp: with D the inverses of 1 + A on the diagonal,
//   T[i][j] = (sum over k from j + 1 to i of T[i][k] (-A[k][j])) D[j]
// where T[i][k] is what a product gave and the first factor of the next one. Products for T are of f16, whatever the type of the keys: A is
// at most beta |k|^2, which is below 2 where a delta rule does not diverge.
//
// In shared memory blocks of -A, and on the diagonal of D, are in f16, in the order of TOrder without zeros, as four matrices of 8 rows
// each: rows 0-7 left, rows 0-7 right, rows 8-15 left, rows 8-15 right.
#include "recurrent_chunks_parts.cuh"

namespace imbrex::cuda {

constexpr int kMatrixBytes = 128;  // of 8 rows of 8 numbers

// Of -A, the triangles of 8 tokens on the diagonal of a block, whose first rows are of the block's first 8 tokens. Those of two blocks lie
// in different banks.
struct Diagonal {
  static constexpr int pitch = 12, of_triangle = 8 * pitch + 8;  // floats
  float of[2][of_triangle];
};
// A pair of neighbours of a block on -A's diagonal, in its rows from 8 on if `below`, and in its columns from 8 on if `right`. Of what is
// on the diagonal and above it nothing is read, but for what lies above both triangles, which is 0.
DEVICE void put_pair(Diagonal& d, char* block, int below, int right, int row, int column, const float2& pair) {
  if (below == right) {
    *reinterpret_cast<float2*>(d.of[below] + row * Diagonal::pitch + column) = pair;
  } else {
    *reinterpret_cast<u32*>(block + (2 * below + right) * kMatrixBytes + row * 16 + column * 2) = below ? pack_f16(pair.x, pair.y) : 0;
  }
}

// A lane's part of 8 rows of a block goes to memory, pairs of neighbours in the left and in the right half: neighbouring lanes change one
// for the other, so that each has 8 bytes and four of them a whole row. `place`: the lane's in the block's first 8 rows.
DEVICE char* place_of_pairs(char* block) {
  const int t = lane_id() % 4;
  return block + place_in_block(lane_id() / 4, t % 2) + t / 2 * 8;
}
DEVICE void store_pairs(char* place, int eight, u32 left, u32 right) {
  const bool gives_left = lane_id() % 2 != 0;
  const u32 other = shuffle(gives_left ? left : right, lane_id() ^ 1);
  *reinterpret_cast<uint2*>(place + eight * 256) = gives_left ? uint2{other, right} : uint2{left, other};
}

// D of two blocks, by a warp: of 8 tokens by substitution, a lane a column, and what is below them, -D2 A D1, by two products whose first
// factors have those of the first block in their first 8 rows and columns, and those of the second one in the others.
DEVICE void invert_diagonals(const Diagonal* diagonals, char* first, char* second) {
  const int triangle = lane_id() / 8, row = lane_id() % 8;
  const float* const rows = diagonals[triangle / 2].of[triangle % 2];
  char* const to = (triangle < 2 ? first : second) + triangle % 2 * 3 * kMatrixBytes + row * 2;
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float a[8];
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(rows + i * Diagonal::pitch + j);
      a[j] = four.x, a[j + 1] = four.y, a[j + 2] = four.z, a[j + 3] = four.w;
    }
    x[i] = i == row ? 1.f : 0.f;
#pragma unroll
    for (int j = 0; j < i; ++j) x[i] = __fmaf_rn(a[j], x[j], x[i]);
    *reinterpret_cast<u16*>(to + i * 16) = u16(pack_f16(x[i], 0.f));
  }
  __syncwarp();
  u32 d2[4], a_d1[4];
  const u32 of_lane = shared_address(triangle % 2 == 0 ? first : second) + u32(row * 16);
  load_matrix(d2, of_lane + 3 * kMatrixBytes);
  load_matrix_transposed(a_d1, of_lane + (triangle < 2 ? 2 * kMatrixBytes : 0));
  float left[4] = {}, below[4] = {};
  mma_f16(left, {d2[0], 0, 0, d2[1]}, a_d1[0], a_d1[1]);
  mma_f16(below, {pack_f16(left[0], left[1]), 0, 0, pack_f16(left[2], left[3])}, a_d1[2], a_d1[3]);
  const int place = 2 * kMatrixBytes + lane_id() * 4;
  *reinterpret_cast<u32*>(first + place) = pack_f16(below[0], below[1]);
  *reinterpret_cast<u32*>(second + place) = pack_f16(below[2], below[3]);
}

// What a warp has of a block of T, and that as the first factor of a product.
struct Block {
  float of[2][4];
};
struct BlockFactor {
  u32 of[4];
};
DEVICE BlockFactor factor_of(const Block& x) {
  return {pack_f16(x.of[0][0], x.of[0][1]), pack_f16(x.of[0][2], x.of[0][3]), pack_f16(x.of[1][0], x.of[1][1]),
          pack_f16(x.of[1][2], x.of[1][3])};
}
// x += a b for a block of -A or D, in which `b` is the lane's place.
DEVICE void multiply_block(Block& x, const BlockFactor& a, u32 b) {
  u32 words[4];
  load_matrix_transposed(words, b);
  mma_f16(x.of[0], a.of, words[0], words[2]);
  mma_f16(x.of[1], a.of, words[1], words[3]);
}
DEVICE void store_block(char* place, const Block& x) {
#pragma unroll
  for (int eight = 0; eight < 2; ++eight)
    store_pairs(place, eight, pack(x.of[0][2 * eight], x.of[0][2 * eight + 1]), pack(x.of[1][2 * eight], x.of[1][2 * eight + 1]));
}
DEVICE u32 packed_anew(u32 f16) {
  if (kType == kF16) return f16;
  const float2 pair = unpack_f16(f16);
  return pack(pair.x, pair.y);
}

// The blocks of a row of T from the one so many places left of the diagonal on; `row` has those before it. `t`: the lane's place in T,
// `blocks` in -A and D.
template <int number, int left = 1>
DEVICE void make_left(BlockFactor (&row)[kBlocks], u32 blocks, char* t) {
  if constexpr (left <= number) {
    constexpr int column = number - left;
    Block sum = {}, x = {};
#pragma unroll
    for (int k = 0; k < left; ++k) multiply_block(sum, row[k], blocks + u32(TOrder::index(number - k, column) * kBlockBytes));
    multiply_block(x, factor_of(sum), blocks + u32(TOrder::index(column, column) * kBlockBytes));
    store_block(t + TOrder::index(number, column) * kBlockBytes, x);
    if constexpr (left < number) row[left] = factor_of(x), make_left<number, left + 1>(row, blocks, t);
  }
}
template <int number>
DEVICE void make_row(u32 blocks, char* t) {
  BlockFactor row[kBlocks];  // from the diagonal to the left
  constexpr int diagonal = TOrder::index(number, number) * kBlockBytes;
  const int matrix = lane_id() / 8 % 2 * 2 + lane_id() / 16;
  load_matrix(row[0].of, blocks + u32(diagonal + matrix * kMatrixBytes + lane_id() % 8 * 16));
  char* const place = place_of_pairs(t);
#pragma unroll
  for (int eight = 0; eight < 2; ++eight)
    store_pairs(place + diagonal, eight, packed_anew(row[0].of[eight]), packed_anew(row[0].of[2 + eight]));
  make_left<number>(row, blocks + u32(lane_id() * 16), place);
}
// A row of blocks of T.
DEVICE void make_row(int number, u32 blocks, char* t) {
  if (number == 0) make_row<0>(blocks, t);
  if (number == 1) make_row<1>(blocks, t);
  if (number == 2) make_row<2>(blocks, t);
  if (number == 3) make_row<3>(blocks, t);
}

}  // namespace imbrex::cuda
