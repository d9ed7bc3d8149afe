#pragma once
// Products of attention_sm90_latent_decode.cu over a tile of bytes. A warp reads them twice, as rows for scores and as columns for values,
// and they become f16 numbers in registers, which every e4m3 number is: the left side of products with queries or weights, which are f16
// too. No tile of 16-bit numbers is ever written.
//
// Records of fp8_ds_mla are not multiplied by their scales: sums of scores are, and weights.
#include "attention_sm90_latent_decode_sums.cuh"
#include "widen.cuh"

namespace imbrex::cuda {

constexpr int kBytesDims = kDsMla ? kDsMlaLatent : kHeadDimQk;  // of a key, that are bytes
constexpr int kDepth = 16, kPieceDims = 2 * kDepth;             // dims of a product; that a warp reads at a time
constexpr int kKeySteps = kTileKeys / kDepth;                   // steps of a tile's values

constexpr int kPieces = (kBytesDims + kPieceDims - 1) / kPieceDims;
// Groups of dims with sums of their own.
constexpr int kDimGroups = kDsMla ? kDsMlaGroups : 1, kGroupPieces = kPieces / kDimGroups;
static_assert(kPieces % kDimGroups == 0);

// Pieces and steps that a thread has read ahead of their products. More delay what else goes to shared memory.
constexpr int kPiecesAhead = kTileRows > 16 && !(kDsMla && kPlainLogits) ? 1 : 2, kStepsAhead = kPiecesAhead;
// The left sides of products stay in registers until these are done, and a warp that multiplies does nothing else: so numbers for the next
// products are widened while those of the other team are multiplied.
DEVICE void commit_products() {
  wgmma_commit();
  wgmma_wait<1>();
}

// Queries of bf16 are f16 numbers too, once a row's greatest one is between 2^14 and 2^15: but for what is less than 2^-29 of that.
constexpr bool kScalesQueries = kQType == kBf16;

// What 16 bytes of a key are to a thread: four of them, of which a product's left side has the first two in its lower eight columns.
// Queries are put into the same order: in steps of 16 dims, words 0, 2, 4 and 6 in front of the others. All threads of both teams do it,
// with the queries of bf16 made f16 on the way, and rows that do not exist left as they are.
DEVICE void prepare_queries(SharedStorage& shared, int num_rows) {
  constexpr int kLanes = 128 * kTeams / kTileRows, kSteps = kBytesDims / kDepth;  // threads of a row
  const int thread = computed_here(int(threadIdx.x)), row = thread / kLanes, first = thread % kLanes;
  const u32 line = shared_address(shared.q) + row * 128;
  const auto place = [=](int step, int half) { return line + step / 4 * kQChunkBytes + ((step % 4 * 2 + half) ^ row % 8) * 16; };
  float up = 1.f;
  if constexpr (kScalesQueries) {
    u32 top = 0;  // of the magnitudes that are finite
    const auto see = [&](u32 pair) {
      const u32 low = pair & 0x7fffu, high = pair >> 16 & 0x7fffu;
      if (low < 0x7f80u) top = max(top, low);
      if (high < 0x7f80u) top = max(top, high);
    };
#pragma unroll 1
    for (int step = first; step < kSteps; step += kLanes) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 x = load_shared(place(step, half));
        see(x.x), see(x.y), see(x.z), see(x.w);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) top = max(top, shuffle_xor(top, lanes));
    const u32 exponent = max(top >> 7, 15u);
    up = float_of((268u - exponent) << 23);
    if (first == 0) shared.q_factor[row] = row < num_rows ? float_of((exponent - 14u) << 23) : 0.f;
  }
  const auto as_f16 = [=](u32 pair) {
    if constexpr (!kScalesQueries) return pair;
    const float2 x = unpack_bf16(pair);
    return pack_f16(x.x * up, x.y * up);
  };
  if (row < num_rows) {
#pragma unroll 1
    for (int step = first; step < kSteps; step += kLanes) {
      const uint4 a = load_shared(place(step, 0)), b = load_shared(place(step, 1));
      store_shared(place(step, 0), uint4{as_f16(a.x), as_f16(a.z), as_f16(b.x), as_f16(b.z)});
      store_shared(place(step, 1), uint4{as_f16(a.y), as_f16(a.w), as_f16(b.y), as_f16(b.w)});
    }
  }
  async_proxy_fence();
}

// The left side of a product of 16 keys (rows g and g + 8, with g = lane_id() / 4) and 16 dims, of the four bytes that a thread has of
// each.
DEVICE void operand_of_keys(u32 low, u32 high, u32 (&a)[4]) {
  a[0] = e4m3_to_f16(low, 0), a[1] = e4m3_to_f16(high, 0), a[2] = e4m3_to_f16(low, 1), a[3] = e4m3_to_f16(high, 1);
}
// And of 16 dims and 16 keys, of which a thread has dims 2 g and 2 g + 1: of two keys among the lower eight, and among the others. The
// product's row g is dim 2 g, and row g + 8 is dim 2 g + 1.
template <int type>
DEVICE void operand_of_dims(u32 low, u32 high, u32 (&a)[4]) {
  constexpr u32 kByDim = 0x3120;  // from the order of keys
  low = pick_bytes(low, 0, kByDim), high = pick_bytes(high, 0, kByDim);
  a[0] = widened<type>(low, 0), a[1] = widened<type>(low, 1), a[2] = widened<type>(high, 0), a[3] = widened<type>(high, 1);
}

// Whether a scale, relative to a power of two, leaves weights of f16 as exact as those of bf16: they are up to 2^kSlack there.
DEVICE bool fits_f16(float scale) { return scale == 0.f || (fabsf(scale) >= 0x1p-6f && fabsf(scale) <= 0x1p7f); }

template <int type>
DEVICE u32 pack_16(float low, float high) {
  return type == kBf16 ? pack_bf16(low, high) : pack_f16(low, high);
}

// Products of pairs.
template <int type>
DEVICE u32 multiplied(u32 a, u32 b) {
  return type == kBf16 ? multiply_bf16(a, b) : multiply_f16(a, b);
}

// A warp's view of the tile whose records lie at `records`.
class ByteTile {
 public:
  DEVICE ByteTile(u32 records, int team, int warp) : records_(records), team_(team), warp_(warp) {}

  // The scores of all keys.
  DEVICE void multiply_keys(const SharedStorage& shared, Column& sums) const {
    const int lane = lane_id();
    const u32 from = records_ + (warp_ * 16 + lane % 16) * kRowBytes + lane / 16 * 16, q = shared_address(shared.q);
    if constexpr (!kDsMla) {
      multiply_group<0>(from, q, sums);
      finish<0>(sums);
#pragma unroll
      for (int k = 0; kScalesQueries && k < kColumns; ++k) {
        const float factor = shared.q_factor[row_of_column(k)];
        of_column(sums, k, 0) *= factor, of_column(sums, k, 1) *= factor;
      }
    } else {
      constexpr int kSteps = kDsMlaRope / kDepth;
      u32 bytes[kSteps][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_matrix(bytes[step], from + kDsMlaRopeAt + step * 32);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        Wgmma<kTileRows, kBf16>::template registers<false>(sums, bytes[step], descriptor(q + kDsMlaLatent / 64 * kQChunkBytes + step * 32),
                                                           step);
      commit_products();
      add_group<0>(from, q, shared, sums);
      add_group<1>(from, q, shared, sums);
      add_group<2>(from, q, shared, sums);
      add_group<3>(from, q, shared, sums);
    }
  }

  // Adds values of the team's dims times the weights at `weights`, with the scales at `scales` that each key has for a group of dims.
  // `left` is called when all bytes have been read.
  template <int type, class Left>
  DEVICE void multiply_values(u32 weights, u32 scales, Column (&out)[kBlocksEach], const Left& left) const {
    constexpr int kRowTiles = kTileRows / 8;
    const int lane = lane_id(), row = lane / 16 * 8 + lane % 8;
    u32 bytes[kStepsAhead][kBlocksEach][2];  // a thread's words of 16 keys and each of the team's blocks of 64 dims
#pragma unroll
    for (int step = 0; step < kStepsAhead; ++step) load_step(step, bytes[step]);
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      u32(&x)[kBlocksEach][2] = bytes[step % kStepsAhead];
      u32 right[kRowTiles / 2][4];  // the weights of 16 rows
#pragma unroll
      for (int i = 0; i < kRowTiles / 2; ++i)
        load_matrix(right[i], weights + (16 * i + row) * 128 + (2 * step + lane / 8 % 2 ^ row % 8) * 16);
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b) {
        u32 left_side[4], of_keys[2];
        operand_of_dims<type>(x[b][0], x[b][1], left_side);
        if constexpr (kDsMla) {
          const u32 from = scales + (b * kTeams * 64 / kDsMlaGroup * kTileKeys + step * 16 + lane % 4 * 2) * 2;
          of_keys[0] = load_shared_element<4>(from), of_keys[1] = load_shared_element<4>(from + 16);
        }
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          u32 b0 = right[i / 2][i % 2 * 2], b1 = right[i / 2][i % 2 * 2 + 1];
          if constexpr (kDsMla) b0 = multiplied<type>(b0, of_keys[0]), b1 = multiplied<type>(b1, of_keys[1]);
          float(&sums)[4] = part_of<8>(out[b], 8 * i);
          if constexpr (type == kBf16) {
            mma_bf16(sums, left_side, b0, b1);
          } else {
            mma_f16(sums, left_side, b0, b1);
          }
        }
      }
      if (step + kStepsAhead < kKeySteps) load_step(step + kStepsAhead, x);
    }
    left();
  }

  // The scale that a key of the tile has for a group of dims.
  DEVICE float scale_of(int key, int group) const {
    return float_of(load_shared_element<4>(records_ + key * kRowBytes + kDsMlaScalesAt + group * 4));
  }
  // 1 / a power of two near the scales of that key.
  DEVICE void set_up(int key, float (&up)[kDsMlaGroups]) const {
    constexpr u32 kBias = 127, kMost = 64;
#pragma unroll
    for (int g = 0; g < kDsMlaGroups; ++g) {
      const u32 scale = bits_of(scale_of(key, g));
      up[g] = float_of((2 * kBias - min(max(scale >> 23 & 255u, kBias - kMost), kBias + kMost)) << 23);
    }
  }

 private:
  // Starts the products of a group of dims.
  template <int group>
  DEVICE void multiply_group(u32 from, u32 q, Column& sums) const {
    constexpr int kFirst = group * kGroupPieces;
    u32 bytes[kPiecesAhead][4];
#pragma unroll
    for (int i = 0; i < kPiecesAhead; ++i) load_matrix(bytes[i], from + (kFirst + i) * kPieceDims);
#pragma unroll
    for (int i = 0; i < kGroupPieces; ++i) {
      u32 operands[2][4];
      u32(&x)[4] = bytes[i % kPiecesAhead];
      operand_of_keys(x[0], x[1], operands[0]), operand_of_keys(x[2], x[3], operands[1]);
      if (i + kPiecesAhead < kGroupPieces) load_matrix(x, from + (kFirst + i + kPiecesAhead) * kPieceDims);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int dim = (kFirst + i) * kPieceDims + step * kDepth;
        if (dim < kBytesDims)
          Wgmma<kTileRows, kF16>::template registers<false>(sums, operands[step], descriptor(q + dim / 64 * kQChunkBytes + dim % 64 * 2),
                                                            i + step > 0);
      }
      commit_products();
    }
  }

  // Adds scores over a group of dims, times the scale that each key has for it.
  template <int group>
  DEVICE void add_group(u32 from, u32 q, const SharedStorage& shared, Column& sums) const {
    Column of_group;
    multiply_group<group>(from, q, of_group);
    finish<0>(of_group);
    if constexpr (group == 0) pin(sums);
    const int key = warp_ * 16 + lane_id() / 4;
    const float low = scale_of(key, group), high = scale_of(key + 8, group);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      const float factor = shared.q_factor[row_of_column(k)];
      of_column(sums, k, 0) = fmaf(of_column(of_group, k, 0) * factor, low, of_column(sums, k, 0));
      of_column(sums, k, 1) = fmaf(of_column(of_group, k, 1) * factor, high, of_column(sums, k, 1));
    }
  }

  DEVICE void load_step(int step, u32 (&bytes)[kBlocksEach][2]) const {
    const int lane = lane_id();
    const u32 from = records_ + (step * 16 + lane % 16) * kRowBytes + team_ * 64 + warp_ * 16;
#pragma unroll
    for (int b = 0; b + 1 < kBlocksEach; b += 2) {
      u32 x[4];
      load_matrix_transposed(x, from + (b + lane / 16) * (kTeams * 64));
      bytes[b][0] = x[0], bytes[b][1] = x[1], bytes[b + 1][0] = x[2], bytes[b + 1][1] = x[3];
    }
    if constexpr (kBlocksEach % 2 != 0) load_matrix_transposed(bytes[kBlocksEach - 1], from + (kBlocksEach - 1) * (kTeams * 64));
  }

  const u32 records_;
  const int team_, warp_;
};

}  // namespace imbrex::cuda
