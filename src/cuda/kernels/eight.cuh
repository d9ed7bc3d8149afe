#pragma once
// Eight neighbouring elements of a row in registers: read, converted and written by kernels that touch rows of any type and stride.
#include "convert.cuh"

namespace imbrex::cuda {

// Eight neighbours of a row, as they lie in memory.
template <int type>
struct Eight {
  u32 words[2 * element_bytes(type)];
};

// `vector`: elements lie one after the other, aligned to 16 bytes (8 for fp8).
template <int type, bool vector>
DEVICE Eight<type> load_eight(const char* p, long dim_stride) {
  Eight<type> e;
  if constexpr (!vector) {
    for (u32& word : e.words) word = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const char* at = p + i * dim_stride;
      if constexpr (element_bytes(type) == 4) {
        e.words[i] = *reinterpret_cast<const u32*>(at);
      } else if constexpr (element_bytes(type) == 2) {
        e.words[i / 2] |= u32(*reinterpret_cast<const u16*>(at)) << i % 2 * 16;
      } else {
        e.words[i / 4] |= u32(*reinterpret_cast<const u8*>(at)) << i % 4 * 8;
      }
    }
  } else if constexpr (element_bytes(type) == 1) {
    const uint2 v = load_once_8(p);
    e.words[0] = v.x, e.words[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < element_bytes(type) / 2; ++i) {
      const uint4 v = load_once_16(p + 16 * i);
      e.words[4 * i] = v.x, e.words[4 * i + 1] = v.y, e.words[4 * i + 2] = v.z, e.words[4 * i + 3] = v.w;
    }
  }
  return e;
}

template <int type, bool vector>
DEVICE void store_eight(char* p, long dim_stride, const Eight<type>& e) {
  if constexpr (!vector) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      char* at = p + i * dim_stride;
      if constexpr (element_bytes(type) == 4) {
        *reinterpret_cast<u32*>(at) = e.words[i];
      } else if constexpr (element_bytes(type) == 2) {
        *reinterpret_cast<u16*>(at) = u16(e.words[i / 2] >> i % 2 * 16);
      } else {
        *reinterpret_cast<u8*>(at) = u8(e.words[i / 4] >> i % 4 * 8);
      }
    }
  } else if constexpr (element_bytes(type) == 1) {
    *reinterpret_cast<uint2*>(p) = {e.words[0], e.words[1]};
  } else {
#pragma unroll
    for (int i = 0; i < element_bytes(type) / 2; ++i)
      reinterpret_cast<uint4*>(p)[i] = {e.words[4 * i], e.words[4 * i + 1], e.words[4 * i + 2], e.words[4 * i + 3]};
  }
}

template <int type>
DEVICE void to_floats(const Eight<type>& e, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 pair;
    if constexpr (type == kF32) pair = {float_of(e.words[2 * i]), float_of(e.words[2 * i + 1])};
    if constexpr (type == kF16) pair = unpack_f16(e.words[i]);
    if constexpr (type == kBf16) pair = unpack_bf16(e.words[i]);
    if constexpr (type == kE4m3) pair = unpack_e4m3(e.words[i / 2], i % 2);
    if constexpr (type == kE5m2) pair = unpack_e5m2(e.words[i / 2], i % 2);
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}

template <int type>
DEVICE Eight<type> from_floats(const float (&x)[8]) {
  Eight<type> e;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = x[2 * i], high = x[2 * i + 1];
    if constexpr (type == kF32) e.words[2 * i] = bits_of(low), e.words[2 * i + 1] = bits_of(high);
    if constexpr (type == kF16) e.words[i] = pack_f16(low, high);
    if constexpr (type == kBf16) e.words[i] = pack_bf16(low, high);
    if constexpr (type == kE4m3 || type == kE5m2) {
      const u32 pair = type == kE4m3 ? pack_e4m3(low, high) : pack_e5m2(low, high);
      e.words[i / 2] = i % 2 == 0 ? pair : e.words[i / 2] | pair << 16;
    }
  }
  return e;
}

}  // namespace imbrex::cuda
