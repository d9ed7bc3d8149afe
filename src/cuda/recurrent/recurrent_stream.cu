// recurrent.cu for steps with more states than multiprocessors have room for: the same steps with the same bits. Thread blocks stay, and
// while one computes a unit, the state of its next one is on its way to shared memory; numbers of the next token, of the same unit or
// another one, are loaded meanwhile, and units are looked up ahead of both. For sm_90, aligned tensors, and drafts that are no tree.
#include "recurrent_step.cuh"

namespace imbrex::cuda {

constexpr int kBlocksTogether = recurrent_stream_blocks(kDimK, kDimV);
static_assert(kInParts && !kTree && (kKeysFirst ? kDimV : kDimK) * kStateSize % 16 == 0);

constexpr int kWarpBytes = kWarpValues * (kKeysFirst ? kPadded : kDimK) * kStateSize;
constexpr int kAhead = recurrent_stream_ahead(kDimK, kDimV, kStateSize);  // states on their way
constexpr int kUnits = recurrent_stream_units(kAhead);

// Places of tokens, states and units take turns.
struct Shared {
  Token tokens[2];                          // of the token at work, and the next one
  char states[kAhead][kWarps][kWarpBytes];  // of the next units, each warp's values
  StateRequest requests[2];                 // that of the last unit, and where that one ends
  Unit units[kUnits];                       // from the one at work on
  u64 loaded[kAhead][kWarps];               // where keys are innermost
};
extern "C" __device__ const unsigned smem_bytes = sizeof(Shared);
static_assert(sizeof(Shared) == recurrent_stream_bytes(kDimK, kDimV, kStateSize, kOfChannels, kKeysFirst, kFinishes));

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
  copy_async_wait<kKeysFirst ? 1 : 0>();  // a state may still be on its way
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

// Where keys are innermost, a warp's values of a state are one piece of memory, which one copy brings. Where values are, they are rows of
// 16 or 8 of them that lie apart, and lanes copy 16 bytes at a time, as groups in the order of states: a run of floats is a lane's own;
// runs of 16 bits are of two lanes, which copy two rows of four each. Of a channel of all lanes' quads the pieces of kKeyLanes rows lie
// together, so that neither copies nor reads of neighbouring lanes meet in a bank.
constexpr int kPieceBytes = 16, kRunBytes = kValues * kStateSize, kSharers = kPieceBytes / kRunBytes;
constexpr int kPieces = kWarpValues * kStateSize / kPieceBytes;  // of a row
constexpr int piece_at(int quad, int channel, int piece, int key_lane) {
  return (((quad * 4 + channel) * kPieces + piece) * kKeyLanes + key_lane) * kPieceBytes;
}

// What addresses are made of: where keys are innermost, these are kept from before the loop, unless outputs need their registers. Without
// outputs kernels of such states are bound by memory alone, and a percent is lost by little: by what is computed between loads, and by
// stores with branches instead of predicates, which a constant Unit::first_value() would give them.
DEVICE int here(int x) { return kKeysFirst || !kFinishes ? x : computed_here(x); }
DEVICE int warp_of(const Lane& lane) { return kKeysFirst || kFinishes ? int(threadIdx.x / 32) : lane.value / kWarpValues; }

// Has a warp's values of a unit's state loaded, where there are any: by one lane where keys are innermost, else by all.
DEVICE void begin_state(const RecurrentParams& p, const Unit& unit, const Lane& lane, int place, Shared& shared) {
  const int warp = warp_of(lane), first = unit.first_value() + warp * kWarpValues;
  if constexpr (kKeysFirst) {
    const int group = lane_id() / kKeyLanes, piece = group / kSharers;
    const int value = first + piece * kSharers * kValues, row = 4 * lane.key + group % kSharers * (4 / kSharers);
    if (unit.has_state() && value < kDimV) {
      const char* const from = unit.source(p) + (long(row) * kDimV + value) * kStateSize;
      const u32 pieces = shared_address(shared.states[place][warp]) + piece_at(0, group % kSharers * (4 / kSharers), piece, lane.key);
#pragma unroll
      for (int i = 0; i < kQuads; ++i)
#pragma unroll
        for (int c = 0; c < 4 / kSharers; ++c)
          if (const int next = 4 * kKeyLanes * i + c; kPadded == kDimK || row + next < kDimK)
            copy_async<kPieceBytes>(pieces + piece_at(i, c, 0, 0), from + long(next) * kDimV * kStateSize);
    }
    copy_async_commit();
  } else {
    const int count = min(kDimV - first, kWarpValues);
    if (!unit.has_state() || count <= 0) return;
    const u32 bytes = u32(count * kDimK * kStateSize), barrier = shared_address(&shared.loaded[place][warp]);
    mbarrier_arrive_expect(barrier, bytes);
    bulk_load(shared_address(shared.states[place][warp]), unit.source(p) + first * kDimK * kStateSize, bytes, barrier);
  }
}
// What has come of it: values that are not there are anything. `parities`: of the places' mbarriers.
DEVICE void end_state(const Lane& lane, int place, Shared& shared, u32& parities, State& s) {
  const int warp = warp_of(lane);
  if constexpr (kKeysFirst) {
    if (kSharers > 1) __syncwarp();  // the other lane's copies are there too
    const int group = lane_id() / kKeyLanes;
    const char* const runs = shared.states[place][warp] + piece_at(0, 0, group / kSharers, lane.key) + group % kSharers * kRunBytes;
#pragma unroll
    for (int i = 0; i < kQuads; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float x[kValues] = {};
        if (kPadded == kDimK || 4 * (kKeyLanes * i + lane.key) + c < kDimK)
          load_run<kStateType, true>(runs + piece_at(i, c, 0, 0), kValues, x);
#pragma unroll
        for (int j = 0; j < kValues; ++j) s.of[j][i][c] = x[j];
      }
  } else {
    mbarrier_wait(shared_address(&shared.loaded[place][warp]), parities >> place & 1);
    parities ^= 1u << place;
    Places<true>::load(shared.states[place][warp], here(lane.value) - warp * kWarpValues, here(lane.key), s);
  }
}

// The state of a unit: that of a block's first one comes from memory at once, those of others from shared memory.
DEVICE void take_state(const RecurrentParams& p, const Unit& unit, const Lane& lane, bool is_first, int place, Shared& shared,
                       u32& parities, State& s) {
  if constexpr (kKeysFirst) copy_async_wait<kAhead - 1>();
  const int warp = warp_of(lane);
  if (!unit.has_state() || unit.first_value() + warp * kWarpValues >= kDimV) {
    s = {};
  } else if (is_first) {
    Places<true>::load(unit.source(p), unit.first_value() + lane.value, lane.key, s);
  } else {
    end_state(lane, place, shared, parities, s);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksTogether) recurrent_stream(const __grid_constant__ RecurrentParams p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const bool leads = threadIdx.x == kThreads - 32;  // in the last warp, whose part of a token is small
  const Lane lane = lane_place();
  if (!kKeysFirst && threadIdx.x < kAhead * kWarps) mbarrier_init(shared_address(&shared.loaded[0][threadIdx.x]), 1), mbarrier_fence_init();
  if (!p.lists_are_there) griddep_wait();
  const u32 units = u32(num_requests(p)) * units_of_request(p);
  if (threadIdx.x >= kThreads - 32) find_first_units(p, units, shared);
  __syncthreads();
  griddep_wait();
  const auto load_first = [&](const Unit& unit, TokenPart& part) {
    if (unit.is_there()) load_part(p, unit.item.begin, unit.head, unit.first_value(), part);
  };
  TokenPart part;
  load_first(shared.units[0], part);
  const auto index_of = [&](u32 number) { return blockIdx.x + number * gridDim.x; };
  const bool begins = kKeysFirst || lane_id() == 0;
  if (kAhead > 1 && begins) {
#pragma unroll
    for (int i = 1; i < kAhead; ++i) begin_state(p, shared.units[i], lane, i, shared);
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
    if (kKeysFirst && leads) begin_unit(p, index_of(number + kUnits - 1), units, shared);  // in front of copies that may take longer
    if (begins) begin_state(p, shared.units[(number + kAhead) % kUnits], lane, place, shared);
    if (number == 0 && unit.is_there()) put_part(p, part, shared.tokens[0]);
    __syncthreads();  // the unit's token is there, and one unit more
    const u32 last = number + kUnits - 1;
    if (!kKeysFirst && leads) begin_unit(p, index_of(last), units, shared);
    if (!unit.is_there()) {
      load_first(next, part);
      if (next.is_there()) put_part(p, part, shared.tokens[turn]);
    }
    const int first = unit.first_value() + lane.value;
    const auto store = [&](int row) {
      const int value = kFinishes ? unit.first_value() + here(lane.value) : first;
      Places<true>::store(unit.state(p, row), value, here(lane.key), s);
    };
    if (unit.is_there() && unit.item.end - unit.item.begin == unit.item.drafts) store(0);
#pragma unroll 1
    for (int token = unit.item.begin; token < unit.item.end; ++token, turn ^= 1) {
      const bool is_last = token + 1 == unit.item.end;
      if (token > unit.item.begin) __syncthreads();  // the token is there
      if (!is_last) load_part(p, token + 1, unit.head, unit.first_value(), part);
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
