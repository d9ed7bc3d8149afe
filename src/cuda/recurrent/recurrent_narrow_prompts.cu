// Prompts of recurrent layers whose heads have values of one dimension (Mamba1): what recurrent_narrow.cu computes, with the same bits.
// Launched by cuda/recurrent/recurrent_plan.cpp, for aligned tensors as recurrent_narrow_aligned is.
//
// A thread block has kHeads heads of a request, whose states stay in registers of half of its warps from the first token to the last. The
// other half makes what tokens bring, kTokens of them at a time: steps of heads, keys and queries go to shared memory in one of two places,
// while those in the other one are computed, and numbers of the tokens behind them are on their way to registers. So nobody waits for
// memory, and exponentials, of which each number of a state needs one a token, are the limit.
#include "recurrent_narrow.cuh"

namespace imbrex::cuda {

constexpr int kThreads = kRecurrentNarrowPromptThreads, kMakers = kThreads / 2, kTokens = narrow_prompt_tokens(kDimK);
constexpr int kHeads = narrow_prompt_heads(kDimK);
constexpr int kTokensApart = kMakers / kHeads, kSteps = kTokens * kHeads / kMakers;  // of a maker, who has one head
constexpr int kKeyTokens = kMakers / kKeyLanes;                                      // whose keys are made at a time
constexpr int kLeastBlocks = kType == kF32 ? 1 : kRecurrentNarrowPromptBlocks;       // the others have too few registers
static_assert(kWholeQuads && kMakers % kHeads == 0 && kTokens % kTokensApart == 0 && kTokens <= kKeyTokens);

// What tokens bring. Steps of a lane's heads are neighbours.
struct Tile {
  float4 q[kTokens][kPadded / 4], k[kTokens][kPadded / 4];
  HeadStep steps[kTokens][kHeads / kOfLane][kOfLane];
  float values[kTokens][kHeads];
};
struct Shared {
  Tile tiles[2];
};
extern "C" __device__ const unsigned smem_bytes = sizeof(Shared);
extern __shared__ __align__(16) char memory[];

// Heads of a request that a thread block computes at a time.
struct Unit {
  RecurrentItem item;
  int first_head, heads;
  DEVICE int tiles() const { return (item.end - item.begin + kTokens - 1) / kTokens; }
  DEVICE int tokens(int tile) const { return min(item.end - item.begin - tile * kTokens, kTokens); }
};

// A maker's numbers of a tile, as they lie in memory: of a head kTokensApart tokens apart, and of one token's keys.
struct Maker {
  int index;  // among makers
  float bias;
  u32 values[kSteps], gates[kSteps];
  RawKeys q, k;

  DEVICE int place() const { return index % kHeads; }
  DEVICE int head(const Unit& unit) const { return unit.first_head + min(place(), unit.heads - 1); }
  DEVICE int token(int i) const { return index / kHeads + i * kTokensApart; }

  // Of the unit's tile, if it has so many.
  DEVICE void load(const RecurrentParams& p, const Unit& unit, int tile) {
    if (tile >= unit.tiles()) return;
    const int first = unit.item.begin + tile * kTokens, last = unit.tokens(tile) - 1;
    const char* const v = p.v + first * p.v_token_stride + head(unit) * p.v_head_stride;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) values[i] = load_raw(v + long(min(token(i), last)) * int(p.v_token_stride), kType == kF32);
    if (p.gate != nullptr) {
      const char* const gate = p.gate + first * p.gate_token_stride + head(unit) * p.gate_head_stride;
      const auto load_gates = [&](bool is_f32) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) gates[i] = load_raw(gate + long(min(token(i), last)) * int(p.gate_token_stride), is_f32);
      };
      kType == kF32 || p.gate_is_f32 ? load_gates(true) : load_gates(false);
    }
    const int key_token = first + min(index / kKeyLanes, last), key_head = unit.first_head / p.group;
    const NarrowLane lane{lane_id() % kKeyLanes, 0, 0};
    load_raw<true>(p.q + key_token * p.q_token_stride + key_head * p.q_head_stride, lane, q);
    load_raw<true>(p.k + key_token * p.k_token_stride + key_head * p.k_head_stride, lane, k);
  }

  DEVICE void make(const RecurrentParams& p, Tile& to) const {
    constexpr int kWarpHeads = kGroups * kOfLane;
    const int in_warp = place() % kWarpHeads, group = place() / kWarpHeads * kGroups + in_warp % kGroups;
    const auto make_steps = [&]<bool softplus, bool gate_is_f32>() {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const float value = number_of(values[i], kType == kF32);
        to.steps[token(i)][group][in_warp / kGroups] = head_step<softplus>(p, value, number_of(gates[i], gate_is_f32), bias);
        to.values[token(i)][place()] = skipped_value(p, value);
      }
    };
    const bool gate_is_f32 = kType == kF32 || p.gate_is_f32;
    if (p.gate_kind != kSoftplusGate) {
      gate_is_f32 ? make_steps.template operator()<false, true>() : make_steps.template operator()<false, false>();
    } else {
      gate_is_f32 ? make_steps.template operator()<true, true>() : make_steps.template operator()<true, false>();
    }
    const Keys of_q = keys_of<false>(p, q), of_k = keys_of<true>(p, k);
    if (index / kKeyLanes >= kTokens) return;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int quad = i * kKeyLanes + lane_id() % kKeyLanes;
      to.q[index / kKeyLanes][quad] = {of_q.of[i][0], of_q.of[i][1], of_q.of[i][2], of_q.of[i][3]};
      to.k[index / kKeyLanes][quad] = {of_k.of[i][0], of_k.of[i][1], of_k.of[i][2], of_k.of[i][3]};
    }
  }
};

// The heads of a lane that computes.
struct Computer {
  NarrowLane lane;
  Keys coefficients[kOfLane], states[kOfLane];
  float skip;

  DEVICE int head(const Unit& unit, int j) const { return unit.first_head + min(lane.head(j), unit.heads - 1); }
  DEVICE bool is_there(const Unit& unit, int j) const { return lane.head(j) < unit.heads; }

  DEVICE void begin(const RecurrentParams& p, const Unit& unit) {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      load_rates(p, lane, head(unit, j), coefficients[j]);
      states[j] = {};
      if (unit.item.first_row < 0) continue;
      const char* const from = unit.item.source + unit.item.first_row * p.state_row_stride;
      load_state<true>(from + head(unit, j) * p.state_head_stride, lane, states[j]);
    }
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) make_coefficients(p, coefficients[j]);
    skip = p.skip != nullptr ? p.skip[unit.first_head + min(lane.own, unit.heads - 1)] : 0.f;
  }
  DEVICE void end(const RecurrentParams& p, const Unit& unit) const {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j)
      if (is_there(unit, j)) store_state<true>(unit.item.state + head(unit, j) * p.state_head_stride, lane, states[j]);
  }

  DEVICE Keys take_keys(const float4* from) const {
    Keys x;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 v = from[i * kKeyLanes + lane.part];
      x.of[i][0] = v.x, x.of[i][1] = v.y, x.of[i][2] = v.z, x.of[i][3] = v.w;
    }
    return x;
  }
  // A token's step, and a lane's part of the output of its own head.
  DEVICE float step(const RecurrentParams& p, const Tile& tile, int token) {
    const Keys q = take_keys(tile.q[token]), k = take_keys(tile.k[token]);
    const HeadStep* const steps = tile.steps[token][lane.first / (kGroups * kOfLane) * kGroups + lane_id() / kKeyLanes];
    float y[kOfLane];
    if constexpr (kOfLane == 2) {
      const float4 both = *reinterpret_cast<const float4*>(steps);
      step_head<false>(p, k, q, coefficients[0], {both.x, both.y}, states[0], y[0]);
      step_head<false>(p, k, q, coefficients[1], {both.z, both.w}, states[1], y[1]);
    } else {
      step_head<false>(p, k, q, coefficients[0], steps[0], states[0], y[0]);
    }
    return part_of_own<kKeyLanes>(y);
  }

  // `whole`: all tokens of the tile are there.
  template <bool whole>
  DEVICE void run(const RecurrentParams& p, const Unit& unit, int number, const Tile& tile) {
    const int count = whole ? kTokens : unit.tokens(number), own = min(lane.own, unit.heads - 1);
    char* const out = p.out + long(unit.item.begin + number * kTokens) * p.out_token_stride + (unit.first_head + own) * p.out_head_stride;
    const auto put = [&](int token, float y, bool is_last_lane) {
      y = __fmaf_rn(skip, tile.values[token][own], y);
      if (is_last_lane && lane.own < unit.heads) store_number<kType>(out + long(token) * int(p.out_token_stride), y);
    };
    // Two tokens at a time, whose sums lanes share out.
    constexpr int kHalf = kOwners / 2;
#pragma unroll 2
    for (int token = 0; token + 2 <= count; token += 2) {
      const float first = step(p, tile, token), second = step(p, tile, token + 1);
      if constexpr (kHalf > 0) {
        const bool upper = lane.part % kOwners >= kHalf;
        const float y = (upper ? second : first) + shuffle_xor(upper ? first : second, kHalf);
        put(token + upper, sum_over<kHalf>(y), lane.part % kHalf == 0);
      } else {
        put(token, first, true), put(token + 1, second, true);
      }
    }
    if (!whole && count % 2 == 1) put(count - 1, sum_over<kOwners>(step(p, tile, count - 1)), lane.part % kOwners == 0);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kLeastBlocks) recurrent_narrow_prompts(const __grid_constant__ RecurrentParams p) {
  griddep_wait();
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const bool makes = warp_id() >= kMakers / 32;
  const u32 parts = u32(p.num_v_heads + kHeads - 1) / kHeads, units = u32(num_requests(p)) * parts;
  Maker maker;
  Computer computer;
  maker.index = int(threadIdx.x) - kMakers, computer.lane = narrow_lane(int(threadIdx.x) / 32);
#pragma unroll 1
  for (u32 index = blockIdx.x; index < units; index += gridDim.x) {
    Unit unit;
    unit.first_head = int(index % parts) * kHeads, unit.heads = min(kHeads, p.num_v_heads - unit.first_head);
    unit.item = item_of(p, int(index / parts), unit.first_head == 0 && threadIdx.x == 0);
    unit.item.begin = shuffle(unit.item.begin, 0),
    unit.item.end = shuffle(unit.item.end, 0);  // so the compiler knows that warps stay together
    if (unit.item.begin >= unit.item.end || !is_narrow_prompt(p, unit.item.end - unit.item.begin, unit.item.drafts)) continue;
    if (makes) {
      maker.bias = p.gate_bias != nullptr ? p.gate_bias[maker.head(unit) * p.bias_stride] : 0.f;
      maker.load(p, unit, 0), maker.make(p, s.tiles[0]), maker.load(p, unit, 1);
    } else {
      computer.begin(p, unit);
    }
    __syncthreads();
#pragma unroll 1
    for (int tile = 0; tile < unit.tiles(); ++tile) {
      if (!makes) {
        unit.tokens(tile) == kTokens ? computer.run<true>(p, unit, tile, s.tiles[tile % 2])
                                     : computer.run<false>(p, unit, tile, s.tiles[tile % 2]);
      } else if (tile + 1 < unit.tiles()) {
        maker.make(p, s.tiles[(tile + 1) % 2]), maker.load(p, unit, tile + 2);
      }
      __syncthreads();  // a tile is there, and another one has been read
    }
    if (!makes) computer.end(p, unit);
  }
  griddep_launch();
}

}  // namespace imbrex::cuda
