#pragma once
// What crosses into a CUDA kernel: plain structs, no standard header, strides in bytes. Filled by the host files, read by kernels/*.
#include "imbrex/work.h"

namespace imbrex::cuda {

enum ElementType : int { kF32, kF16, kBf16, kE4m3, kE5m2 };  // the first five of DType, in its order

struct KvSide {  // keys or values of one layer, in a paged cache
  char* data;
  long block_stride, token_stride, head_stride, dim_stride;  // bytes
  const float* scales;                                       // dequantisation, on the device; null: 1
  int scale_stride;                                          // elements; 0: one for all heads
  int dim;                                                   // elements of a row
};

struct NewRows {  // k or v of this step: [token, head, dim]
  const char* data;
  long token_stride, head_stride, dim_stride;  // bytes
};

struct WriteKvParams {
  KvSide k, v;
  NewRows new_k, new_v;
  const long* slots;  // [num_tokens], -1: not written
  long slot_stride;   // elements
  int num_tokens, block_size, num_kv_heads;
};

struct BlockPieces {  // one block of keys or values as `counts` product pieces of `piece_bytes` each, innermost first
  char* data;
  long block_stride, piece_bytes;  // bytes
  long counts[3], strides[3];      // strides in bytes
};

struct CopyBlocksParams {
  BlockPieces k, v;
  const int* copies;  // [num_copies, 2]: from, to
  int num_copies;
};

}  // namespace imbrex::cuda
