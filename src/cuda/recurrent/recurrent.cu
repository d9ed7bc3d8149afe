// Recurrent layers token by token, docs/kernels/recurrent.md; launched by cuda/recurrent/recurrent_plan.cpp.
//
// A thread block has a value head of a request and some of its values: in decode each number of the state is read and written once, which
// is all there is to do. recurrent_stream.cu does the same for steps of many states.
#include "recurrent_step.cuh"

namespace imbrex::cuda {

extern "C" __device__ const unsigned smem_bytes = kTokens * sizeof(Token);

template <bool aligned>
DEVICE void recurrent(const RecurrentParams& p) {
  if (!p.lists_are_there) griddep_wait();
  const u32 each = units_of_request(p), units = u32(num_requests(p)) * each;
  const Lane lane = lane_place();
#pragma unroll 1
  for (u32 index = blockIdx.x; index < units; index += gridDim.x) {
    const u32 part = index % each;
    const RecurrentItem item = tokens_of(p, int(index / each), part == 0 && threadIdx.x == 0);
    const Unit unit{item, int(part) / kTiles, int(part) % kTiles * kRows};
    griddep_wait();
    if (!unit.is_there()) continue;
    State s{};
    if (unit.has_state()) Places<aligned>::load(unit.source(p), unit.first_value() + lane.value, lane.key, s);
    run_tokens<aligned>(p, unit, lane, reinterpret_cast<Token*>(memory), s);
  }
  griddep_wait();  // also where there is nothing to do: the kernel behind this one may rely on the one in front of it
  griddep_launch();
}

// States and outputs that are aligned to 16 bytes, and others.
extern "C" __global__ void __launch_bounds__(kThreads, kLeastBlocks) recurrent_aligned(const __grid_constant__ RecurrentParams p) {
  recurrent<true>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads, kLeastBlocks) recurrent_unaligned(const __grid_constant__ RecurrentParams p) {
  recurrent<false>(p);
}

}  // namespace imbrex::cuda
