// Whole blocks of a paged cache from one place to another, any strides; launched by cuda/ops/copy_blocks.cpp.
//
// Memory: every byte of a block is read and written once. blockIdx.x is the copy; the thread blocks along y share it. An entry point
// for each width of access that the layout may allow.
#include "async.cuh"
#include "cuda/params.h"

namespace imbrex::cuda {

template <class Word>
DEVICE void copy_side(const BlockPieces& side, int from, int to) {
  const char* const source = side.data + from * side.block_stride;
  char* const target = side.data + to * side.block_stride;
  const u32 words = u32(side.piece_bytes / long(sizeof(Word))), total = words * side.sizes[0] * side.sizes[1] * side.sizes[2];
  const u32 step = gridDim.y * kCopyBlocksThreads;
#pragma unroll 4
  for (u32 i = blockIdx.y * kCopyBlocksThreads + threadIdx.x; i < total; i += step) {
    const u32 piece = i / words, word = i % words;
    const u32 inner = piece % side.sizes[0], outer = piece / side.sizes[0];
    const long at = inner * side.strides[0] + outer % side.sizes[1] * side.strides[1] + outer / side.sizes[1] * side.strides[2] +
                    word * long(sizeof(Word));
    // No block is both read and written by one call, so the loads may go past the stores.
    *reinterpret_cast<Word*>(target + at) = __ldg(reinterpret_cast<const Word*>(source + at));
  }
}

template <class Word>
DEVICE void copy_block(const CopyBlocksParams& p) {
  griddep_wait();
  const auto copy = p.copies[blockIdx.x];
  copy_side<Word>(p.k, copy.from, copy.to);
  copy_side<Word>(p.v, copy.from, copy.to);
  griddep_launch();
}

extern "C" __global__ void __launch_bounds__(kCopyBlocksThreads) copy_blocks_16(const __grid_constant__ CopyBlocksParams p) {
  copy_block<uint4>(p);
}
extern "C" __global__ void __launch_bounds__(kCopyBlocksThreads) copy_blocks_8(const __grid_constant__ CopyBlocksParams p) {
  copy_block<uint2>(p);
}
extern "C" __global__ void __launch_bounds__(kCopyBlocksThreads) copy_blocks_4(const __grid_constant__ CopyBlocksParams p) {
  copy_block<u32>(p);
}
extern "C" __global__ void __launch_bounds__(kCopyBlocksThreads) copy_blocks_2(const __grid_constant__ CopyBlocksParams p) {
  copy_block<u16>(p);
}
extern "C" __global__ void __launch_bounds__(kCopyBlocksThreads) copy_blocks_1(const __grid_constant__ CopyBlocksParams p) {
  copy_block<u8>(p);
}

}  // namespace imbrex::cuda
