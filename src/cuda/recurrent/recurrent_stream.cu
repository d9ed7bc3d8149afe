// recurrent.cu for steps with more states than multiprocessors have room for: the same steps with the same bits. Thread blocks stay, and
// while one computes a unit, the state of its next one is on its way to shared memory; numbers of the next token, of the same unit or
// another one, are loaded meanwhile, and units are looked up ahead of both. For sm_90, states with keys innermost, aligned tensors, and
// drafts that are no tree.
#include "recurrent_step.cuh"

namespace imbrex::cuda {

constexpr int kBlocksTogether = recurrent_stream_blocks(kDimK, kDimV);
static_assert(kInParts && !kKeysFirst && !kTree && kDimK * kStateSize % 16 == 0);

constexpr int kWarpBytes = kWarpValues * kDimK * kStateSize;
constexpr int kAhead = recurrent_stream_ahead(kDimK, kDimV, kStateSize);  // states on their way
constexpr int kUnits = recurrent_stream_units(kAhead);

// Places of tokens, states and units take turns.
struct Shared {
  Token tokens[2];                          // of the token at work, and the next one
  char states[kAhead][kWarps][kWarpBytes];  // of the next units, each warp's values
  StateRequest requests[2];                 // that of the last unit, and where that one ends
  Unit units[kUnits];                       // from the one at work on
  u64 loaded[kAhead][kWarps];
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
DEVICE Unit unit_at(const RecurrentParams& p, u32 index, const RecurrentItem& item) {
  const u32 part = index % units_of_request(p);
  return {behind_chunks(p, item), int(part) / kTiles, int(part) % kTiles * kRows};
}
DEVICE void end_unit(const RecurrentParams& p, u32 index, u32 units, Unit& unit, Shared& shared) {
  copy_async_wait<0>();
  const u32 each = units_of_request(p);
  RecurrentItem item{};
  if (index < units) item = item_of(p, shared.requests[0], shared.requests[1].begin, int(index / each), index % each == 0);
  unit = unit_at(p, index, item);
}
// The first ones, by as many lanes.
DEVICE void find_first_units(const RecurrentParams& p, u32 units, Shared& shared) {
  const u32 index = blockIdx.x + u32(lane_id()) * gridDim.x, each = units_of_request(p);
  if (lane_id() >= kUnits - 1) return;
  shared.units[lane_id()] = unit_at(p, index, index < units ? item_of(p, int(index / each), index % each == 0) : RecurrentItem{});
}

// Has a warp's values of a unit's state loaded, where there are any. By a lane.
DEVICE void begin_state(const RecurrentParams& p, const Unit& unit, int warp, int place, Shared& shared) {
  const int first = unit.first_value + warp * kWarpValues, count = min(kDimV - first, kWarpValues);
  if (!unit.has_state() || count <= 0) return;
  const u32 bytes = u32(count * kDimK * kStateSize), barrier = shared_address(&shared.loaded[place][warp]);
  mbarrier_arrive_expect(barrier, bytes);
  bulk_load(shared_address(shared.states[place][warp]), unit.source(p) + first * kDimK * kStateSize, bytes, barrier);
}

// The state of a unit: that of a block's first one comes from memory at once, those of others from shared memory.
DEVICE void take_state(const RecurrentParams& p, const Unit& unit, const Lane& lane, bool is_first, int place, Shared& shared,
                       u32& parities, State& s) {
  const int warp = lane.value / kWarpValues;
  if (!unit.has_state() || unit.first_value + warp * kWarpValues >= kDimV) {
    s = {};
  } else if (is_first) {
    Places<true>::load(unit.source(p), unit.first_value + lane.value, lane.key, s);
  } else {
    mbarrier_wait(shared_address(&shared.loaded[place][warp]), parities >> place & 1);
    parities ^= 1u << place;
    Places<true>::load(shared.states[place][warp], lane.value - warp * kWarpValues, lane.key, s);  // values that are not there are anything
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksTogether) recurrent_stream(const __grid_constant__ RecurrentParams p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const bool leads = threadIdx.x == kThreads - 32;  // in the last warp, whose part of a token is small
  const Lane lane = lane_place();
  if (threadIdx.x < kAhead * kWarps) mbarrier_init(shared_address(&shared.loaded[0][threadIdx.x]), 1), mbarrier_fence_init();
  if (!p.lists_are_there) griddep_wait();
  const u32 units = u32(num_requests(p)) * units_of_request(p);
  if (threadIdx.x >= kThreads - 32) find_first_units(p, units, shared);
  __syncthreads();
  griddep_wait();
  const auto load_first = [&](const Unit& unit, TokenPart& part) {
    if (unit.is_there()) load_part(p, unit.item.begin, unit.head, unit.first_value, part);
  };
  TokenPart part;
  load_first(shared.units[0], part);
  const auto index_of = [&](u32 number) { return blockIdx.x + number * gridDim.x; };
  if (kAhead > 1 && lane_id() == 0) {
#pragma unroll
    for (int i = 1; i < kAhead; ++i) begin_state(p, shared.units[i], lane.value / kWarpValues, i, shared);
  }
  u32 parities = 0, turn = 0;
#pragma unroll 1
  for (u32 number = 0; index_of(number) < units; ++number) {
    const Unit& unit = shared.units[number % kUnits];
    const Unit& next = shared.units[(number + 1) % kUnits];
    State s;
    const int place = int(number % kAhead);
    take_state(p, unit, lane, number == 0, place, shared, parities, s);
    __syncwarp();
    if (lane_id() == 0) begin_state(p, shared.units[(number + kAhead) % kUnits], lane.value / kWarpValues, place, shared);
    if (number == 0 && unit.is_there()) put_part(p, part, shared.tokens[0]);
    __syncthreads();  // the unit's token is there, and one unit more
    const u32 last = number + kUnits - 1;
    if (leads) begin_unit(p, index_of(last), units, shared);
    if (!unit.is_there()) {
      load_first(next, part);
      if (next.is_there()) put_part(p, part, shared.tokens[turn]);
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
      run_token<true>(p, unit, lane, token, shared.tokens[turn], s);
      if (const int row = token + 1 - (unit.item.end - unit.item.drafts); row >= 0) store(row);
      if (!is_last || next.is_there()) put_part(p, part, shared.tokens[turn ^ 1]);
    }
    if (leads) end_unit(p, index_of(last), units, shared.units[last % kUnits], shared);
  }
  griddep_launch();
}

}  // namespace imbrex::cuda
