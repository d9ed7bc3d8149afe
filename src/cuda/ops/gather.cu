// Rows from anywhere in an array into rows that lie one after the other; launched by cuda/ops/gather.cpp.
//
// Memory: every element is read and written once. A warp copies a row, element by element, because rows begin anywhere; what it is used for
// (making a replay's tokens, fetching a sample of outputs) is not on the clock.
#include "async.cuh"
#include "cuda/params.h"

namespace imbrex::cuda {

template <class Element>
DEVICE void gather(const GatherParams& p) {
  griddep_wait();
  constexpr int kRows = kGatherThreads / 32;
  const int lane = int(threadIdx.x) % 32;
  for (int row = int(blockIdx.x) * kRows + int(threadIdx.x) / 32; row < p.num_rows; row += int(gridDim.x) * kRows) {
    const Element* const from = reinterpret_cast<const Element*>(p.from) + p.offsets[row];
    Element* const to = reinterpret_cast<Element*>(p.to) + long(row) * p.row_length;
    for (int i = lane; i < p.row_length; i += 32) to[i] = from[i];
  }
}

extern "C" __global__ void __launch_bounds__(kGatherThreads) gather_1(const __grid_constant__ GatherParams p) { gather<u8>(p); }
extern "C" __global__ void __launch_bounds__(kGatherThreads) gather_2(const __grid_constant__ GatherParams p) { gather<u16>(p); }
extern "C" __global__ void __launch_bounds__(kGatherThreads) gather_4(const __grid_constant__ GatherParams p) { gather<u32>(p); }

}  // namespace imbrex::cuda
