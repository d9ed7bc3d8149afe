// New latents and their rope parts into records of fp8_ds_mla, quantised in one pass; launched by cuda/attention/write_kv.cpp.
//
// A thread block takes a token. Each of its first 64 threads has eight elements of the latent, 16 neighbours those that share a scale; each
// of the next eight has eight of the rope part. Memory: 576 elements in and 656 bytes out of a token, each once.
#include "async.cuh"
#include "cuda/params.h"
#include "eight.cuh"

namespace imbrex::cuda {

constexpr int kLatentThreads = kDsMlaLatent / 8, kGroupThreads = kDsMlaGroup / 8, kRecordThreads = kLatentThreads + kDsMlaRope / 8;
static_assert(kRecordThreads <= kWriteKvThreads && kGroupThreads == 16 && kLatentThreads % 32 == 0 && kBlockSize > 0);

// The largest magnitude, as bits, of the elements of 16 lanes.
DEVICE u32 largest_of_group(const float (&x)[8]) {
  u32 largest = 0;
#pragma unroll
  for (const float value : x) largest = max(largest, ds_mla_magnitude(bits_of(value)));
#pragma unroll
  for (int lanes = kGroupThreads / 2; lanes > 0; lanes /= 2) largest = max(largest, shuffle_xor(largest, lanes));
  return largest;
}

template <bool vector>
DEVICE void store_scale(char* to, u32 bits) {
  if constexpr (vector) {
    *reinterpret_cast<u32*>(to) = bits;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = char(bits >> 8 * i);
  }
}

template <bool vector>
DEVICE void write_record(const WriteKvParams& p, int token) {
  const long slot = p.slots[token * p.slot_stride];
  const int thread = int(threadIdx.x);
  if (slot < 0 || thread >= kRecordThreads) return;
  char* const record = p.k.data + slot / kBlockSize * p.k.block_stride + slot % kBlockSize * p.k.token_stride;
  const bool latent = thread < kLatentThreads;
  const NewRows& rows = latent ? p.new_k : p.new_v;  // new_v: the rope parts
  const int piece = latent ? thread : thread - kLatentThreads;
  float x[8];
  to_floats<kFrom>(load_eight<kFrom, vector>(rows.data + token * rows.token_stride + piece * 8 * rows.dim_stride, rows.dim_stride), x);
  if (!latent) {
    store_eight<kBf16, vector>(record + kDsMlaRopeAt + piece * 16, 2, from_floats<kBf16>(x));
    return;
  }
  const u32 scale = ds_mla_scale(largest_of_group(x));
  const float factor = float_of(ds_mla_reciprocal(scale));
#pragma unroll
  for (float& value : x) value *= factor;
  store_eight<kE4m3, vector>(record + thread * 8, 1, from_floats<kE4m3>(x));
  if (thread % kGroupThreads == 0) store_scale<vector>(record + kDsMlaScalesAt + thread / kGroupThreads * 4, scale);
}

template <bool vector>
DEVICE void write_records(const WriteKvParams& p) {
  griddep_wait();
  const int tokens = p.num_tokens_now != nullptr ? min(*p.num_tokens_now, p.num_tokens) : p.num_tokens;
  for (int token = int(blockIdx.x); token < tokens; token += int(gridDim.x)) write_record<vector>(p, token);
  griddep_launch();
}

extern "C" __global__ void __launch_bounds__(kWriteKvThreads) write_ds_mla(const __grid_constant__ WriteKvParams p) {
  write_records<true>(p);
}
// For strides and addresses that allow no wide access.
extern "C" __global__ void __launch_bounds__(kWriteKvThreads) write_ds_mla_strided(const __grid_constant__ WriteKvParams p) {
  write_records<false>(p);
}

}  // namespace imbrex::cuda
