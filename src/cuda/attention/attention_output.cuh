#pragma once
// The end of an output row, for kernels that hold all of its sums: sink, division, LSE, and the way to memory.
#include "convert.cuh"
#include "cuda/params.h"

namespace imbrex::cuda {

constexpr float kEmptyReference = -1e30f;  // of a row that has seen no key: finite, so that no infinities are subtracted

// A row's weights are 2^(logit - reference). The reference moves when a maximum, `top`, has outgrown it by more than `slack`, in log2
// units; the maximum weighs 2^fresh then. True if it moves; the row's sums so far have to be multiplied by `factor`. By const reference,
// because a plain argument would be compared the other way round, in other machine code.
DEVICE bool move_reference(float& reference, const float& top, float slack, float fresh, float& factor) {
  const bool moves = top > reference + slack;
  factor = moves ? exp2_approx(reference - (top - fresh)) : 1.f;
  if (moves) reference = top - fresh;
  return moves;
}

// Dequantisation of keys or values.
DEVICE float kv_scale(const KvSide& side, int kv_head) {
  return side.scales != nullptr ? side.scales[kv_head * side.scale_stride] : side.scale;
}

struct RowEnd {
  float factor;  // of the sums of weighted values; 0: no key was seen, and they may be anything
  float lse;     // natural log
};

// The final factor and LSE of a row, from its reference (log2 units) and its sum of exponentials.
DEVICE RowEnd row_end(const AttentionParams& p, int head, float reference, float sum) {
  if (sum == 0.f) return {0.f, -infinity()};
  float weight = 1.f;
  if constexpr (kSinks) {
    const float sink = p.sinks[head] * kLog2e, top = fmaxf(reference, sink);
    weight = exp2_approx(reference - top);
    sum = sum * weight + exp2_approx(sink - top);
    reference = top;
  }
  return {weight * reciprocal_approx(sum), (reference + log2_approx(sum)) * kLn2};
}

DEVICE float ended(float sum, float factor) { return factor == 0.f ? 0.f : sum * factor; }

DEVICE char* out_row(const AttentionParams& p, int token, int head) {
  return p.out + token * p.out_token_stride + head * p.out_head_stride;
}

DEVICE void store_lse(const AttentionParams& p, int token, int head, float lse) {
  if (p.lse != nullptr) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = lse;
}

// Whether rows of the output allow accesses of 16 bytes.
DEVICE bool out_is_wide(const AttentionParams& p) {
  return ((reinterpret_cast<u64>(p.out) | u64(p.out_token_stride) | u64(p.out_head_stride)) & 15) == 0;
}

// Four neighbours; `wide`: out_is_wide().
DEVICE void store_out(char* at, bool wide, const float4& x) {
  if constexpr (kOutType == kF32) {
    if (wide) {
      *reinterpret_cast<float4*>(at) = x;
    } else {
      float* const to = reinterpret_cast<float*>(at);
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
  } else {
    const u32 low = kOutType == kBf16 ? pack_bf16(x.x, x.y) : pack_f16(x.x, x.y);
    const u32 high = kOutType == kBf16 ? pack_bf16(x.z, x.w) : pack_f16(x.z, x.w);
    if (wide) {
      *reinterpret_cast<uint2*>(at) = {low, high};
    } else {
      u16* const to = reinterpret_cast<u16*>(at);
      to[0] = u16(low), to[1] = u16(low >> 16), to[2] = u16(high), to[3] = u16(high >> 16);
    }
  }
}

// Two neighbours; `aligned`: to both.
DEVICE void store_pair(char* at, bool aligned, const float2& x) {
  if constexpr (kOutType == kF32) {
    reinterpret_cast<float*>(at)[0] = x.x, reinterpret_cast<float*>(at)[1] = x.y;
  } else {
    const u32 pair = kOutType == kBf16 ? pack_bf16(x.x, x.y) : pack_f16(x.x, x.y);
    if (aligned) {
      *reinterpret_cast<u32*>(at) = pair;
    } else {
      reinterpret_cast<u16*>(at)[0] = u16(pair), reinterpret_cast<u16*>(at)[1] = u16(pair >> 16);
    }
  }
}

}  // namespace imbrex::cuda
