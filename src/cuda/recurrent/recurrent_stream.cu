// recurrent.cu for steps with more states than multiprocessors have room for: the same steps with the same bits. Thread blocks stay, and
// while one computes a unit, the state of its next one is on its way to shared memory; numbers of the next token, of the same unit or
// another one, are loaded meanwhile, and units are looked up two ahead. For sm_90, states with keys innermost, aligned tensors, and drafts
// that are no tree.
#include "recurrent_step.cuh"

namespace imbrex::cuda {

constexpr int kBlocksTogether = recurrent_stream_blocks(kDimK, kDimV);
static_assert(kInParts && !kKeysFirst && !kTree && kDimK * kStateSize % 16 == 0);

// Tokens and units take turns: the one at work, the next one, and of units the one behind it.
struct Shared {
  Token tokens[2];
  char state[kRows * kDimK * kStateSize];  // of the next unit
  StateRequest requests[2];                // that of the unit behind it, and where that one ends
  Unit units[3];
  u64 loaded;
};
extern "C" __device__ const unsigned smem_bytes = sizeof(Shared);
static_assert(sizeof(Shared) == recurrent_stream_bytes(kDimK, kDimV, kStateSize, kOfChannels));

// Units are looked up by one thread. What is made of a request would wait for it: so it is copied first.
DEVICE void begin_unit(const RecurrentParams& p, u32 index, u32 units, Shared& shared) {
  const StateRequest* const requests = p.requests + index / units_of_request(p);
  const u32 to = shared_address(shared.requests);
  if (index < units) copy_async<16>(to, requests), copy_async<16>(to + 16, requests + 1);
  copy_async_commit();
}
DEVICE void end_unit(const RecurrentParams& p, u32 index, u32 units, Unit& unit, Shared& shared) {
  copy_async_wait<0>();
  const u32 each = units_of_request(p), part = index % each;
  const int request = int(index / each);
  unit = {{}, int(part) / kTiles, int(part) % kTiles * kRows};
  if (index < units) unit.item = behind_chunks(p, item_of(p, shared.requests[0], shared.requests[1].begin, request, part == 0));
}

DEVICE void begin_state(const RecurrentParams& p, const Unit& unit, Shared& shared) {
  const u32 bytes = u32(min(kDimV - unit.first_value, kRows) * kDimK * kStateSize), barrier = shared_address(&shared.loaded);
  mbarrier_arrive_expect(barrier, bytes);
  bulk_load(shared_address(shared.state), unit.source(p) + unit.first_value * kDimK * kStateSize, bytes, barrier);
}

// The state of a unit: that of the first one comes from memory at once, those of others from shared memory.
DEVICE void take_state(const RecurrentParams& p, const Unit& unit, const Lane& lane, bool is_first, Shared& shared, u32& parity, State& s) {
  if (!unit.has_state()) {
    s = {};
  } else if (is_first) {
    Places<true>::load(unit.source(p), unit.first_value + lane.value, lane.key, s);
  } else {
    mbarrier_wait(shared_address(&shared.loaded), parity);
    parity ^= 1;
    Places<true>::load(shared.state, lane.value, lane.key, s);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksTogether) recurrent_stream(const __grid_constant__ RecurrentParams p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const bool leads = threadIdx.x == kThreads - 32;  // in a warp whose part of a token is small
  const Lane lane = lane_place();
  if (leads) mbarrier_init(shared_address(&shared.loaded), 1), mbarrier_fence_init();
  if (!p.lists_are_there) griddep_wait();
  const u32 units = u32(num_requests(p)) * units_of_request(p);
  if (leads) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 index = blockIdx.x + i * gridDim.x;
      begin_unit(p, index, units, shared);
      end_unit(p, index, units, shared.units[i], shared);
    }
  }
  __syncthreads();
  griddep_wait();
  const auto load_first = [&](const Unit& unit, TokenPart& part) {
    if (unit.is_there()) load_part(p, unit.item.begin, unit.head, unit.first_value, part);
  };
  TokenPart part;
  load_first(shared.units[0], part);
  u32 parity = 0, turn = 0, at = 0;
#pragma unroll 1
  for (u32 index = blockIdx.x; index < units; index += gridDim.x) {
    const Unit& unit = shared.units[at];
    const u32 next_at = at == 2 ? 0 : at + 1;
    const Unit& next = shared.units[next_at];
    State s;
    take_state(p, unit, lane, index == blockIdx.x, shared, parity, s);
    if (index == blockIdx.x && unit.is_there()) put_part(p, part, unit.head, shared.tokens[0]);
    __syncthreads();  // the state has been read, and the next unit is there
    if (leads) {
      if (next.has_state()) begin_state(p, next, shared);
      begin_unit(p, index + 2 * gridDim.x, units, shared);
    }
    if (!unit.is_there()) {
      load_first(next, part);
      if (next.is_there()) put_part(p, part, next.head, shared.tokens[turn]);
    }
    const int first = unit.first_value + lane.value;
    const auto store = [&](int row) { Places<true>::store(unit.state(p, row), first, lane.key, s); };
    if (unit.is_there() && unit.item.end - unit.item.begin == unit.item.drafts) store(0);
#pragma unroll 1
    for (int token = unit.item.begin; token < unit.item.end; ++token, turn ^= 1) {
      const bool is_last = token + 1 == unit.item.end;
      if (token > unit.item.begin) __syncthreads();  // the token is there
      if (!is_last) load_part(p, token + 1, unit.head, unit.first_value, part);
      if (is_last) load_first(next, part);
      run_token<true>(p, unit, lane, token, shared.tokens[turn], p.skip != nullptr ? p.skip[unit.head] : 0.f, s);
      if (const int row = token + 1 - (unit.item.end - unit.item.drafts); row >= 0) store(row);
      if (!is_last || next.is_there()) put_part(p, part, is_last ? next.head : unit.head, shared.tokens[turn ^ 1]);
    }
    if (leads) end_unit(p, index + 2 * gridDim.x, units, shared.units[next_at == 2 ? 0 : next_at + 1], shared);
    at = next_at;
  }
  griddep_launch();
}

}  // namespace imbrex::cuda
