#pragma once
// What crosses into a CUDA kernel: plain structs, no standard header, strides in bytes. Filled by the host files, read by kernels/*.
#include "imbrex/work.h"

namespace imbrex::cuda {

enum ElementType : int { kF32, kF16, kBf16, kE4m3, kE5m2 };  // the first five of DType, in its order

struct KvSide {  // keys or values of one layer
  char* data;
  long block_stride, token_stride, head_stride, dim_stride;  // bytes; ragged: no blocks
  const float* scales;                                       // dequantisation, on the device, [1] or [num_kv_heads]; null: `scale`
  int scale_stride;                                          // elements; 0: one for all heads
  float scale;
};

struct NewRows {  // k or v of this step: [token, head, dim]
  const char* data;
  long token_stride, head_stride, dim_stride;  // bytes
};

constexpr int kWriteKvThreads = 128;

struct WriteKvParams {
  KvSide k, v;
  NewRows new_k, new_v;
  const long* slots;  // [num_tokens], on the device; negative: not written
  long slot_stride;   // elements
  int num_tokens, num_kv_heads;
};

constexpr int kCopyBlocksThreads = 256, kCopyBlocksAtOnce = 256;

// Every block of keys (or of values) as sizes[0] * sizes[1] * sizes[2] pieces of memory.
struct BlockPieces {
  char* data;
  long block_stride, piece_bytes, strides[3];  // bytes; strides innermost first
  unsigned sizes[3];
};

struct CopyBlocksParams {
  BlockPieces k, v;
  struct {
    int from, to;
  } copies[kCopyBlocksAtOnce];  // one for each blockIdx.x; within the launch, so that no copy of the list has to live on
};

}  // namespace imbrex::cuda
