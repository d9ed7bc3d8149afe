// The latents of a round's keys out of the cache, converted to the type of queries, and their rope parts into the keys of every head;
// launched by cuda/mla/steps.cpp.
//
// A warp takes a key. Memory: a record is read once; a latent is written once, its rope part once for each head, which is most of it: 128
// heads of 64 elements of 16 bits are 16 KiB a key.
#include "cuda/params.h"
#include "eight.cuh"
#include "mla_rows.cuh"

namespace imbrex::cuda {

// Records of fp8_ds_mla have elements of two types; in latent_rope the rope parts are in a tensor of their own; else they lie behind the
// latents.
enum LatentFormat : int { kPlainLatents, kDsMlaRecords, kRopeInTensor };

DEVICE float scale_of(const LatentSide& side) {
  if constexpr (element_bytes(kFrom) > 1) return 1.f;
  return side.scale_there != nullptr ? *side.scale_there : side.scale;
}

template <int from, bool vector>
DEVICE Eight<kTo> read_eight(const char* p, long dim_stride, float scale) {
  const Eight<from> e = load_eight<from, vector>(p, dim_stride);
  if constexpr (from == kTo) {
    return e;
  } else {
    float x[8];
    to_floats<from>(e, x);
    if constexpr (element_bytes(from) == 1) {
#pragma unroll
      for (float& value : x) value *= scale;
    }
    return from_floats<kTo>(x);
  }
}

DEVICE const char* record_of(const LatentSide& side, int block, int offset) {
  return side.data + block * side.block_stride + offset * side.token_stride;
}

template <bool vector>
DEVICE float ds_mla_scale_at(const char* at) {
  if constexpr (vector) return *reinterpret_cast<const float*>(at);
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) bits |= u32(u8(at[i])) << 8 * i;
  return float_of(bits);
}

template <bool vector>
DEVICE void gather_key(const GatherLatentsParams& p, int row) {
  const KeyRows range = p.ranges[range_of(p.ranges, p.num_ranges, row)];
  const int key = range.key + row - range.row, lane = lane_id();
  const long first = p.block_starts != nullptr ? p.block_starts[range.request] : range.first_block;
  const int block = p.block_ids[first + key / p.block_size], offset = key % p.block_size;
  const char* const record = record_of(p.latents, block, offset);
  char* const to = p.to + long(row) * p.rank * element_bytes(kTo);
  const float scale = scale_of(p.latents);
  for (int piece = lane; piece < p.rank / 8; piece += 32) {
    const char* const from = record + piece * 8 * p.latents.dim_stride;
    float of_piece = scale;
    if constexpr (kLatentFormat == kDsMlaRecords) of_piece = ds_mla_scale_at<vector>(record + kDsMlaScalesAt + piece * 8 / kDsMlaGroup * 4);
    store_eight<kTo, true>(to + piece * 8 * element_bytes(kTo), 0, read_eight<kFrom, vector>(from, p.latents.dim_stride, of_piece));
  }
  const int pieces = p.rope_dim / 8, all = pieces * p.num_heads;
  Eight<kTo> e{};
  int loaded = -1;  // which piece e is: always the same one where pieces divide 32
  for (int i = lane; i < all; i += 32) {
    const int piece = i % pieces, head = i / pieces;
    if (piece != loaded) {
      if constexpr (kLatentFormat == kDsMlaRecords) {
        e = read_eight<kBf16, vector>(record + kDsMlaRopeAt + piece * 16, 2, 1.f);
      } else if constexpr (kLatentFormat == kRopeInTensor) {
        e = read_eight<kFrom, vector>(record_of(p.rope, block, offset) + piece * 8 * p.rope.dim_stride, p.rope.dim_stride,
                                      scale_of(p.rope));
      } else {
        e = read_eight<kFrom, vector>(record + (p.rank + piece * 8) * p.latents.dim_stride, p.latents.dim_stride, scale);
      }
      loaded = piece;
    }
    store_eight<kTo, true>(p.to_rope + row * p.to_rope_token + head * p.to_rope_head + piece * 8 * element_bytes(kTo), 0, e);
  }
}

template <bool vector>
DEVICE void gather_latents(const GatherLatentsParams& p) {
  griddep_wait();
  constexpr int kWarps = kMlaThreads / 32;
  for (int row = int(blockIdx.x) * kWarps + int(threadIdx.x) / 32; row < p.num_rows; row += int(gridDim.x) * kWarps)
    gather_key<vector>(p, row);
}

extern "C" __global__ void __launch_bounds__(kMlaThreads) gather_latents_aligned(const __grid_constant__ GatherLatentsParams p) {
  gather_latents<true>(p);
}
// For strides and addresses that allow no wide access.
extern "C" __global__ void __launch_bounds__(kMlaThreads) gather_latents_unaligned(const __grid_constant__ GatherLatentsParams p) {
  gather_latents<false>(p);
}

}  // namespace imbrex::cuda
