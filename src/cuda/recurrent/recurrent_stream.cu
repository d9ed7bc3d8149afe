// recurrent.cu for steps with more states than multiprocessors have room for: the same steps with the same bits. Thread blocks stay, and
// while one computes a unit, the state of its next one is on its way to shared memory; numbers of the next token, of the same unit or
// another one, are loaded meanwhile, and units are looked up ahead of both. For sm_90, aligned tensors, and drafts that are no tree.
#include "recurrent_step.cuh"

namespace imbrex::cuda {

constexpr int kBlocksTogether = recurrent_stream_blocks(kDimK, kDimV);
static_assert(kInParts && !kTree && (kKeysFirst ? kDimV : kDimK) * kStateSize % 16 == 0);

// What has a place of its own in shared memory: a warp's values where keys are innermost. Where values are, a block's values of four key
// channels; 16 bytes lie between these, so that the lanes that read those of neighbouring fours meet in no bank.
constexpr int kRowBytes = (kTiles == 1 ? kDimV : kRows) * kStateSize;
constexpr int kPieces = kKeysFirst ? (kDimK + 3) / 4 : kWarps,
              kPieceBytes = kKeysFirst ? 4 * kRowBytes + 16 : kWarpValues * kDimK * kStateSize;
constexpr int kAhead = recurrent_stream_ahead(kDimK, kDimV, kStateSize);  // states on their way
constexpr int kUnits = recurrent_stream_units(kAhead);
// Whether blocks take units in turn, or each has those that its number says.
constexpr bool kTakesUnits = recurrent_stream_has_registers(kDimK, kStateSize, kOfChannels, kFinishes);
constexpr int kNoHead = -1;  // of what a block gets when all units have been taken

// Whether states leave through shared memory, in parts of a warp's values: of a lane so many of its values.
constexpr bool kStoresPieces = recurrent_stream_stores_pieces(kDimK, kDimV, kStateSize, kOfChannels, kKeysFirst, kFinishes);
constexpr int kStoreParts = recurrent_stream_store_parts(kStateSize);
template <bool is_there>
struct StoredPieces {};
template <>
struct StoredPieces<true> {
  char stored[kWarps][kWarpValues / kStoreParts * kDimK * kStateSize];
};

// Places of tokens, states and units take turns.
struct Shared : StoredPieces<kStoresPieces> {
  Token tokens[2];                            // of the token at work, and the next one
  char states[kAhead][kPieces][kPieceBytes];  // of the next units
  StateRequest requests[2];                   // that of the last unit, and where that one ends
  u32 index;                                  // of the last unit
  Unit units[kUnits];                         // from the one at work on
  u64 loaded[kAhead][kWarps];                 // of a warp's values; where values are innermost the first one has all
};
extern "C" __device__ const unsigned smem_bytes = sizeof(Shared);
static_assert(sizeof(Shared) == recurrent_stream_bytes(kDimK, kDimV, kStateSize, kOfChannels, kKeysFirst, kFinishes));

// Units are looked up by one thread. What is made of a request would wait for it: so it is copied first.
DEVICE void begin_unit(const RecurrentParams& p, u32 index, u32 units, Shared& shared) {
  if (kTakesUnits) shared.index = index;
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
  const auto item = [&] { return item_of(p, shared.requests[0], shared.requests[1].begin, int(index / each), index % each == 0); };
  unit = unit_at(p, index, index < units ? item() : RecurrentItem{});
  if (kTakesUnits && index >= units) unit.head = kNoHead;
}
// The first ones, by as many lanes. How many requests there are is not waited for before they are loaded.
DEVICE void find_first_units(const RecurrentParams& p, Shared& shared) {
  if (lane_id() >= kUnits - 1) return;
  const u32 index = blockIdx.x + u32(lane_id()) * gridDim.x, each = units_of_request(p), request = index / each;
  StateRequest r{};
  int end = 0;
  if (request < u32(p.most_requests)) r = p.requests[request], end = p.requests[request + 1].begin;
  const bool is_there = request < u32(num_requests(p));
  shared.units[lane_id()] = unit_at(p, index, is_there ? item_of(p, r, end, int(request), index % each == 0) : RecurrentItem{});
  if (kTakesUnits && !is_there) shared.units[lane_id()].head = kNoHead;
}

// What addresses are made of: where keys are innermost, these are kept from before the loop, unless outputs need their registers. Without
// outputs kernels of such states are bound by memory alone, and a percent is lost by little: by what is computed between loads, and by
// stores with branches instead of predicates, which a constant Unit::first_value() would give them.
DEVICE int here(int x) { return kKeysFirst || !kFinishes ? x : computed_here(x); }
DEVICE int warp_of(const Lane& lane) { return kKeysFirst || kFinishes ? int(threadIdx.x / 32) : lane.value / kWarpValues; }

// A block's first states come to L2 while the kernel in front still ends, whose last blocks leave memory with little to do: what that one
// writes of them meets them there. Values that are innermost are one run of memory where a block has all of a head.
DEVICE void prefetch_state(const RecurrentParams& p, const Unit& unit) {
  if (!unit.has_state() || (kKeysFirst && kTiles > 1)) return;
  const int first = unit.first_value(), count = min(kDimV - first, kRows);
  bulk_prefetch(unit.source(p) + long(first) * kDimK * kStateSize, u32(count * kDimK * kStateSize));
}

// Has a unit's state loaded, where there is one: by a lane for its warp where keys are innermost, else by a lane for four key channels, of
// which there are some in each warp.
DEVICE void begin_state(const RecurrentParams& p, const Unit& unit, const Lane& lane, int place, Shared& shared) {
  const int warp = warp_of(lane);
  if constexpr (kKeysFirst) {
    const int piece = computed_here(lane_id()) * kWarps + warp;
    if (!unit.has_state() || piece >= kPieces) return;
    const int rows = min(kDimK - 4 * piece, 4), first = unit.first_value();
    const u32 bytes = u32((kTiles == 1 ? kDimV : min(kDimV - first, kRows)) * kStateSize), barrier = shared_address(shared.loaded[place]);
    const u32 to = shared_address(shared.states[place][piece]);
    const char* const from = unit.source(p) + (long(4 * piece) * kDimV + first) * kStateSize;
    mbarrier_arrive_expect(barrier, u32(rows) * bytes);
    if constexpr (kTiles == 1) {
      bulk_load(to, from, u32(rows) * bytes, barrier);
    } else {
      for (int i = 0; i < rows; ++i) bulk_load(to + u32(i * kRowBytes), from + long(i) * kDimV * kStateSize, bytes, barrier);
    }
  } else {
    const int first = unit.first_value() + warp * kWarpValues, count = min(kDimV - first, kWarpValues);
    if (!unit.has_state() || count <= 0) return;
    const u32 bytes = u32(count * kDimK * kStateSize), barrier = shared_address(&shared.loaded[place][warp]);
    mbarrier_arrive_expect(barrier, bytes);
    bulk_load(shared_address(shared.states[place][warp]), unit.source(p) + first * kDimK * kStateSize, bytes, barrier);
  }
}
// What has come of it: values that are not there are anything. `parities`: of the places' mbarriers.
DEVICE void end_state(const Lane& lane, int place, Shared& shared, u32& parities, State& s) {
  const int warp = warp_of(lane);
  mbarrier_wait(shared_address(&shared.loaded[place][kKeysFirst ? 0 : warp]), parities >> place & 1);
  parities ^= 1u << place;
  if constexpr (kKeysFirst) {
    // A block may have room for more values than there are.
    const char* const runs = shared.states[place][lane.key] + min(lane.value * kStateSize, kRowBytes - kValues * kStateSize);
#pragma unroll
    for (int i = 0; i < kQuads; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float x[kValues] = {};
        if (kPadded == kDimK || 4 * (kKeyLanes * i + lane.key) + c < kDimK)
          load_run<kStateType, true>(runs + i * kKeyLanes * kPieceBytes + c * kRowBytes, kValues, x);
#pragma unroll
        for (int j = 0; j < kValues; ++j) s.of[j][i][c] = x[j];
      }
  } else {
    Places<true>::load(shared.states[place][warp], here(lane.value) - warp * kWarpValues, here(lane.key), s);
  }
}

// The state of a unit: that of a block's first one comes from memory at once, those of others from shared memory.
DEVICE void take_state(const RecurrentParams& p, const Unit& unit, const Lane& lane, bool is_first, int place, Shared& shared,
                       u32& parities, State& s) {
  const int warp = warp_of(lane);
  if (!unit.has_state() || (!kKeysFirst && unit.first_value() + warp * kWarpValues >= kDimV)) {
    s = {};
  } else if (is_first) {
    Places<true>::load(unit.source(p), unit.first_value() + lane.value, lane.key, s);
  } else {
    end_state(lane, place, shared, parities, s);
  }
}

// A warp's values go to a row: pieces of memory, which bulk copies bring there while the warp goes on.
template <class Memory>
DEVICE void store_pieces(const RecurrentParams& p, const Unit& unit, const Lane& lane, int row, Memory& shared, const State& s) {
  constexpr int kRow = kDimK * kStateSize, kStoreValues = kValues / kStoreParts;
  const int first = unit.first_value() + lane.value, group = lane_id() / kKeyLanes;
  if (kDimV % kRows != 0 && first >= kDimV) return;  // the same in all of a warp
  char* const staged = shared.stored[warp_of(lane)];
#pragma unroll
  for (int part = 0; part < kStoreParts; ++part) {
    tma_wait_for_stores();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kStoreValues; ++j)
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const int channel = (i * kKeyLanes + lane.key) * 4;
        if (channel < kDimK)
          store_run<kStateType, true>(staged + (group * kStoreValues + j) * kRow + channel * kStateSize, 4,
                                      s.of[part * kStoreValues + j][i]);
      }
    async_proxy_fence();
    __syncwarp();
    if (kStoreParts > 1 ? lane.key == 0 : lane_id() == 0)
      bulk_store(unit.state(p, row) + long(first + part * kStoreValues) * kRow, shared_address(staged + group * kStoreValues * kRow),
                 u32((kStoreParts > 1 ? kStoreValues : kWarpValues) * kRow));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksTogether) recurrent_stream(const __grid_constant__ RecurrentParams p) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const bool leads = threadIdx.x == kThreads - 32;  // in the last warp, whose part of a token is small
  const Lane lane = lane_place();
  if (threadIdx.x < kAhead * kWarps)
    mbarrier_init(shared_address(&shared.loaded[0][threadIdx.x]), kKeysFirst ? kPieces : 1), mbarrier_fence_init();
  if (!p.lists_are_there) griddep_wait();
  if (threadIdx.x >= kThreads - 32) find_first_units(p, shared);
  const u32 units = u32(num_requests(p)) * units_of_request(p);
  __syncthreads();
  if (p.lists_are_there && threadIdx.x < kAhead) prefetch_state(p, shared.units[threadIdx.x]);
  griddep_wait();
  // Blocks fill the GPU: those of the next kernel begin where these end, and their lists are there when the last one does.
  griddep_launch();
  const auto load_first = [&](const Unit& unit, TokenPart& part) {
    if (unit.is_there()) load_part(p, unit.item.begin, unit.head, unit.first_value(), part);
  };
  TokenPart part;
  load_first(shared.units[0], part);
  const bool begins = kKeysFirst || lane_id() == 0;
  if (kAhead > 1 && begins) {
#pragma unroll
    for (int i = 1; i < kAhead; ++i) begin_state(p, shared.units[i], lane, i, shared);
  }
  const auto index_of = [&](u32 number) { return blockIdx.x + number * gridDim.x; };
  // Blocks have their first units by their number, and take each other one when they begin to compute one.
  u32 parities = 0, turn = 0, taken = 0;
#pragma unroll 1
  for (u32 number = 0; kTakesUnits ? shared.units[number % kUnits].head != kNoHead : index_of(number) < units; ++number) {
    const Unit& unit = shared.units[number % kUnits];
    const Unit& next = shared.units[(number + 1) % kUnits];
    State s;
    const int place = int(number % kAhead);
    take_state(p, unit, lane, number == 0, place, shared, parities, s);
    __syncwarp();
    if (!kKeysFirst && begins) begin_state(p, shared.units[(number + kAhead) % kUnits], lane, place, shared);
    if (number == 0 && unit.is_there()) put_part(p, part, shared.tokens[0]);
    __syncthreads();  // the unit's token is there, and one unit more
    const u32 last = number + kUnits - 1;
    if (kKeysFirst) begin_state(p, shared.units[(number + kAhead) % kUnits], lane, place, shared);  // all warps have read this one
    if (leads) begin_unit(p, kTakesUnits && number > 0 ? taken + kUnits * gridDim.x : index_of(last), units, shared);
    if (kTakesUnits && leads) taken = u32(atomicAdd(p.taken, 1));
    if (!unit.is_there()) {
      load_first(next, part);
      if (next.is_there()) put_part(p, part, shared.tokens[turn]);
    }
    const int first = unit.first_value() + lane.value;
    const auto store = [&](int row) {
      if constexpr (kStoresPieces) return store_pieces(p, unit, lane, row, shared, s);
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
    if (leads) end_unit(p, kTakesUnits ? shared.index : index_of(last), units, shared.units[last % kUnits], shared);
    if (kTakesUnits && leads && taken == units - 1) *p.taken = 0;  // all have been: the next launch begins again
  }
  if (kStoresPieces) tma_wait_for_stores();  // shared memory is this block's until it is read
}

}  // namespace imbrex::cuda
