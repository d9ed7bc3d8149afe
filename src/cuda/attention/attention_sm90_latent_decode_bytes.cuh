#pragma once
// Products of attention_sm90_latent_decode.cu over a tile of bytes. A warp reads them twice, as rows for scores and as columns for values,
// and they become f16 numbers in registers, which every e4m3 number is: the left side of products with queries or weights, which are f16
// too. No tile of 16-bit numbers is ever written.
//
// Records of fp8_ds_mla are not multiplied by their scales: sums of scores are, and weights.
#include "attention_sm90_latent_decode_load.cuh"
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
// The neighbouring dims of the output that a warp has: of one group.
constexpr int kWarpDims = 16 * kBlocksEach;
static_assert(!kDsMla || kDsMlaGroup % kWarpDims == 0);

// Pieces and steps that a thread has read ahead of their products. More delay what else goes to shared memory.
constexpr int kPiecesAhead = kTileRows > 16 && !kPlainLogits ? 1 : 2, kStepsAhead = kPiecesAhead;
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

// Two of four bytes as f16 numbers. The conversion reads the upper ones where they are, if they are a number of their own to the compiler:
// a shift would cost as much as the conversion.
template <int type>
DEVICE u32 widened_half(u32 four, int half) {
  struct Halves {
    u16 low, high;
  };
  return widened<type>(half == 0 ? four : __builtin_bit_cast(Halves, four).high, 0);
}

// The left side of a product of 16 keys (rows g and g + 8, with g = lane_id() / 4) and 16 dims, of the four bytes that a thread has of
// each.
DEVICE void operand_of_keys(u32 low, u32 high, u32 (&a)[4]) {
  a[0] = widened_half<kF16>(low, 0), a[1] = widened_half<kF16>(high, 0), a[2] = widened_half<kF16>(low, 1),
  a[3] = widened_half<kF16>(high, 1);
}
// And of 16 dims and 16 keys, of which a thread has dims 2 g and 2 g + 1: of two keys among the lower eight, and among the others. The
// product's row g is dim 2 g, and row g + 8 is dim 2 g + 1.
template <int type>
DEVICE void operand_of_dims(u32 low, u32 high, u32 (&a)[4]) {
  constexpr u32 kByDim = 0x3120;  // from the order of keys
  low = pick_bytes(low, 0, kByDim), high = pick_bytes(high, 0, kByDim);
  a[0] = widened_half<type>(low, 0), a[1] = widened_half<type>(low, 1), a[2] = widened_half<type>(high, 0),
  a[3] = widened_half<type>(high, 1);
}

DEVICE void load_words(u32 from, u32 (&x)[4]) {
  const uint4 four = load_shared(from);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}

// Whether a scale, relative to a power of two, leaves weights of f16 as exact as those of bf16: they are up to 2^kSlack there.
DEVICE bool fits_f16(float scale) { return scale == 0.f || (fabsf(scale) >= 0x1p-6f && fabsf(scale) <= 0x1p7f); }

// Of a power of two.
DEVICE float reciprocal_of_power(float x) { return float_of((254u << 23) - bits_of(x)); }
template <class Columns>
DEVICE void multiply(Columns& columns, float factor) {
  for (auto& column : columns) {
#pragma unroll
    for (float& x : column) x *= factor;
  }
}

// Where a tile's scales of keys lie for the products of values, as numbers of the weights' type: those that a thread needs for two steps,
// of pairs of keys, are neighbours.
using ScalesOfTile = u16[kDsMlaGroups][kDsMla ? kTileKeys : 1];
DEVICE int place_of_scale(int key) { return key / 32 * 32 + key / 2 % 4 * 8 + key / 16 % 2 * 4 + key / 8 % 2 * 2 + key % 2; }
// Puts what ByteTile::take_scales() has taken.
template <int type, int n>
DEVICE void put_scales(ScalesOfTile& to, int warp, const float (&scales)[n]) {
  const int lane = lane_id();
#pragma unroll
  for (int h = 0; h < n; ++h)
    to[lane % kDsMlaGroups][place_of_scale(warp * 16 + h * 8 + lane / 4)] = u16(pack_16<type>(scales[h], scales[h]));
}

// A thread's words of 16 keys and each 16 of the warp's dims, of steps that are read ahead.
using ValueBytes = u32[kStepsAhead][kBlocksEach][2];

// Products of pairs.
template <int type>
DEVICE u32 multiplied(u32 a, u32 b) {
  return type == kBf16 ? multiply_bf16(a, b) : multiply_f16(a, b);
}

// lines_at() queries, in a register that is the same for the whole warp: descriptors lie in such registers, and what the compiler knows to
// be the same is computed there.
DEVICE u32 query_lines(const SharedStorage& shared) { return shuffle(lines_at(shared_address(shared.q)), 0); }

// A warp's view of the tile whose records lie at `records`.
class ByteTile {
 public:
  DEVICE ByteTile(u32 records, int team, int warp) : records_(records), team_(team), warp_(warp) {}

  // The scores of all keys. `q`: query_lines().
  DEVICE void multiply_keys(const SharedStorage& shared, u32 q, Column& sums) const {
    const int lane = lane_id(), key = warp_ * 16 + lane / 4;
    const u32 from = records_ + (warp_ * 16 + lane % 16) * kRowBytes + lane / 16 * 16;
    const auto factor_of = [&](int column) { return kScalesQueries ? shared.q_factor[row_of_column(column)] : 1.f; };
    u32 scales[2][4];  // of the thread's keys
    if constexpr (kDsMla) {
      multiply_rope(from, q, sums);
      load_words(scales_of(key), scales[0]), load_words(scales_of(key + 8), scales[1]);
    }
    u32 bytes[kPiecesAhead][4];
#pragma unroll
    for (int i = 0; i < kPiecesAhead; ++i) load_matrix(bytes[i], from + i * kPieceDims);
    Column products[2];  // records: while the sums of one group are added, the next one's are computed
    const auto add = [&](int group) {
      const Column& of_group = products[group % 2];
#pragma unroll
      for (int i = 0; i < kTileRows / 2; ++i) sums[i] = fmaf(of_group[i], float_of(scales[i / 2 % 2][group]), sums[i]);
    };
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int group = i / kGroupPieces, in_group = i % kGroupPieces;
      Column& of_group = kDsMla ? products[group % 2] : sums;
      u32 operands[2][4];
      u32(&x)[4] = bytes[i % kPiecesAhead];
      operand_of_keys(x[0], x[1], operands[0]), operand_of_keys(x[2], x[3], operands[1]);
      if (i + kPiecesAhead < kPieces) load_matrix(x, from + (i + kPiecesAhead) * kPieceDims);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int dim = i * kPieceDims + step * kDepth;
        if (dim < kBytesDims)
          Wgmma<kTileRows, kF16>::template registers<false>(of_group, operands[step], descriptor(q, dim / 64 * kQChunkBytes + dim % 64 * 2),
                                                            in_group + step > 0);
      }
      commit_products();
      if constexpr (kDsMla) {
        if (i == 0) {  // the sums over dims of bf16 are done, and become relative to the rows' factors, as those over bytes are
          pin(sums);
#pragma unroll
          for (int k = 0; k < kColumns; ++k) {
            const float up = reciprocal_of_power(factor_of(k));
            of_column(sums, k, 0) *= up, of_column(sums, k, 1) *= up;
          }
        }
        if (in_group == 0 && group > 0) pin(products[(group - 1) % 2]), add(group - 1);
      }
    }
    if constexpr (kDsMla) {
      finish<0>(products[(kDimGroups - 1) % 2]), add(kDimGroups - 1);
    } else {
      finish<0>(sums);
    }
#pragma unroll
    for (int k = 0; kScalesQueries && k < kColumns; ++k) {
      const float factor = factor_of(k);
      of_column(sums, k, 0) *= factor, of_column(sums, k, 1) *= factor;
    }
  }

  // Adds values of the warp's dims times the weights at `weights`: of this tile and, if there is a `second` one, of that, whose weights are
  // behind this one's. `scales`, likewise: what weights of a key are multiplied by, for each group of dims. `left` is called when all bytes
  // of a tile have been read.
  // `bytes`: as begin_values() leaves it.
  template <int type, class Left>
  DEVICE void multiply_values(bool both, u32 second, u32 weights, u32 scales, ValueBytes& bytes, Column (&out)[kBlocksEach],
                              const Left& left) const {
    constexpr int kRowTiles = kTileRows / 8, kSteps = kTeams * kKeySteps;
    const int lane = lane_id(), row = lane / 16 * 8 + lane % 8;
    const u32 of_group = scales + (group() * kTileKeys + place_of_scale(lane % 4 * 2)) * 2;
    const auto load = [&](int step, u32(&x)[kBlocksEach][2]) { load_step(step < kKeySteps ? records_ : second, step % kKeySteps, x); };
    u32 of_keys[4];  // the scales of the thread's keys, in pairs, for two steps
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int tile = step / kKeySteps, in_tile = step % kKeySteps;
      if (tile > 0 && in_tile == 0 && !both) break;
      u32(&x)[kBlocksEach][2] = bytes[step % kStepsAhead];
      u32 right[kRowTiles / 2][4];  // the weights of 16 rows
      if (kDsMla && step % 2 == 0) load_words(of_group + (tile * kDsMlaGroups * kTileKeys + in_tile * 16) * 2, of_keys);
#pragma unroll
      for (int i = 0; i < kRowTiles / 2; ++i) {
        load_matrix(right[i], weights + (tile * kTileRows + 16 * i + row) * 128 + (2 * in_tile + lane / 8 % 2 ^ row % 8) * 16);
#pragma unroll
        for (int j = 0; kDsMla && j < 4; ++j) right[i][j] = multiplied<type>(right[i][j], of_keys[step % 2 * 2 + j % 2]);
      }
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b) {
        u32 left_side[4];
        operand_of_dims<type>(x[b][0], x[b][1], left_side);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          float(&sums)[4] = part_of<8>(out[b], 8 * i);
          const u32 b0 = right[i / 2][i % 2 * 2], b1 = right[i / 2][i % 2 * 2 + 1];
          if constexpr (type == kBf16) {
            mma_bf16(sums, left_side, b0, b1);
          } else {
            mma_f16(sums, left_side, b0, b1);
          }
        }
      }
      if (step + kStepsAhead < kSteps) load(step + kStepsAhead, x);
      if (in_tile + 1 == kKeySteps) left();
    }
  }

  DEVICE void begin_values(ValueBytes& bytes) const {
#pragma unroll
    for (int step = 0; step < kStepsAhead; ++step) load_step(records_, step, bytes[step]);
  }

  // The group of the warp's dims.
  DEVICE int group() const { return (team_ * 4 + warp_) * kWarpDims / kDsMlaGroup; }
  // Where a key of the tile has its scales, and that for a group of dims.
  DEVICE u32 scales_of(int key) const { return records_ + key * kRowBytes + kDsMlaScalesAt; }
  DEVICE float scale_of(int key, int group) const { return float_of(load_shared_element<4>(scales_of(key) + group * 4)); }
  // What weights of the thread's keys are multiplied by for the group of its place among four lanes: scales times `up`, or nothing.
  template <int n>
  DEVICE void take_scales(float up, float (&scales)[n]) const {
    const int lane = lane_id();
#pragma unroll
    for (int h = 0; h < n; ++h) {
      const float scale = scale_of(warp_ * 16 + h * 8 + lane / 4, lane % kDsMlaGroups);
      scales[h] = up == 0.f ? 0.f : scale * up;
    }
  }
  // 1 / a power of two near that scale.
  DEVICE float up_of(int key, int group) const {
    constexpr u32 kBias = 127, kMost = 64;
    const u32 scale = bits_of(scale_of(key, group));
    return float_of((2 * kBias - min(max(scale >> 23 & 255u, kBias - kMost), kBias + kMost)) << 23);
  }

 private:
  // Starts the products of the dims that are bf16.
  DEVICE void multiply_rope(u32 from, u32 q, Column& sums) const {
    constexpr int kSteps = kDsMlaRope / kDepth;
    u32 keys[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_matrix(keys[step], from + kDsMlaRopeAt + step * 32);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      Wgmma<kTileRows, kBf16>::template registers<false>(sums, keys[step], descriptor(q, kDsMlaLatent / 64 * kQChunkBytes + step * 32),
                                                         step);
    wgmma_commit();
  }

  DEVICE void load_step(u32 records, int step, u32 (&bytes)[kBlocksEach][2]) const {
    const int lane = lane_id();
    const u32 from = records + (step * 16 + lane % 16) * kRowBytes + (team_ * 4 + warp_) * kWarpDims;
#pragma unroll
    for (int b = 0; b + 1 < kBlocksEach; b += 2) {
      u32 x[4];
      load_matrix_transposed(x, from + (b + lane / 16) * 16);
      bytes[b][0] = x[0], bytes[b][1] = x[1], bytes[b + 1][0] = x[2], bytes[b + 1][1] = x[3];
    }
    if constexpr (kBlocksEach % 2 != 0) load_matrix_transposed(bytes[kBlocksEach - 1], from + (kBlocksEach - 1) * 16);
  }

  const u32 records_;
  const int team_, warp_;
};

}  // namespace imbrex::cuda
