// New keys and values into a paged cache, converted; launched by cuda/attention/write_kv.cpp.
//
// Memory: (bytes of an element before + after) * tokens * heads * (kDimK + kDimV), each once, in pieces of 8 elements: for
// 8192 tokens of 8 heads of 128 + 128 in bf16, 67 MB, 14 us at 4.8 TB/s. Arithmetic is hidden, the division by an fp8 scale too.
// A step of decode is bound by the launch. One thread block takes a token; each thread has a piece of k and one of v under way.
#include "async.cuh"
#include "eight.cuh"

namespace imbrex::cuda {

static_assert(kDimK % 8 == 0 && kDimV % 8 == 0 && kBlockSize > 0);

// An fp8 element e stands for e * scale; what is in the cache's type already was scaled by whoever made it.
template <int from>
DEVICE Eight<kTo> converted(const Eight<from>& e, float scale) {
  if constexpr (from == kTo) {
    return e;
  } else {
    float x[8];
    to_floats<from>(e, x);
    if constexpr (element_bytes(kTo) == 1) {
      if (scale != 1.f) {
#pragma unroll
        for (float& value : x) value = __fdiv_rn(value, scale);
      }
    }
    return from_floats<kTo>(x);
  }
}

DEVICE float scale_of(const KvSide& side, int head) {
  if constexpr (element_bytes(kTo) > 1) return 1.f;
  return side.scales != nullptr ? side.scales[head * side.scale_stride] : side.scale;
}

template <int dim>
struct Piece {
  static constexpr int kOfHead = dim > 0 ? dim / 8 : 1;  // values that are a part of the keys have no pieces: kDimV is 0
  int head, d;
  DEVICE explicit Piece(int index) : head(index / kOfHead), d(index % kOfHead * 8) {}
  DEVICE const char* source(const NewRows& rows, int token) const {
    return rows.data + token * rows.token_stride + head * rows.head_stride + d * rows.dim_stride;
  }
  DEVICE char* target(const KvSide& side, long block, int offset) const {
    return side.data + block * side.block_stride + offset * side.token_stride + head * side.head_stride + d * side.dim_stride;
  }
};

template <int from, bool vector>
DEVICE void write_token(const WriteKvParams& p, int token) {
  const long slot = p.slots[token * p.slot_stride];
  if (slot < 0) return;
  const long block = slot / kBlockSize;
  const int offset = int(slot % kBlockSize);
  const int pieces_k = p.num_kv_heads * (kDimK / 8), pieces_v = p.num_kv_heads * (kDimV / 8);
  for (int i = int(threadIdx.x); i < pieces_k || i < pieces_v; i += kWriteKvThreads) {
    const Piece<kDimK> k(i);
    const Piece<kDimV> v(i);
    Eight<from> new_k, new_v;
    if (i < pieces_k) new_k = load_eight<from, vector>(k.source(p.new_k, token), p.new_k.dim_stride);
    if (i < pieces_v) new_v = load_eight<from, vector>(v.source(p.new_v, token), p.new_v.dim_stride);
    if (i < pieces_k) store_eight<kTo, vector>(k.target(p.k, block, offset), p.k.dim_stride, converted<from>(new_k, scale_of(p.k, k.head)));
    if (i < pieces_v) store_eight<kTo, vector>(v.target(p.v, block, offset), p.v.dim_stride, converted<from>(new_v, scale_of(p.v, v.head)));
  }
}

template <int from, bool vector>
DEVICE void write_tokens(const WriteKvParams& p) {
  griddep_wait();
  const int tokens = p.num_tokens_now != nullptr ? min(*p.num_tokens_now, p.num_tokens) : p.num_tokens;
  for (int token = int(blockIdx.x); token < tokens; token += int(gridDim.x)) write_token<from, vector>(p, token);
  griddep_launch();
}

// Rows of kFrom, or of kTo already; and each for strides and addresses that allow no wide access.
extern "C" __global__ void __launch_bounds__(kWriteKvThreads) write_kv(const __grid_constant__ WriteKvParams p) {
  write_tokens<kFrom, true>(p);
}
extern "C" __global__ void __launch_bounds__(kWriteKvThreads) write_kv_strided(const __grid_constant__ WriteKvParams p) {
  write_tokens<kFrom, false>(p);
}
extern "C" __global__ void __launch_bounds__(kWriteKvThreads) copy_kv(const __grid_constant__ WriteKvParams p) {
  write_tokens<kTo, true>(p);
}
extern "C" __global__ void __launch_bounds__(kWriteKvThreads) copy_kv_strided(const __grid_constant__ WriteKvParams p) {
  write_tokens<kTo, false>(p);
}

}  // namespace imbrex::cuda
