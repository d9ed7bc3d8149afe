// Recurrent layers token by token, docs/kernels/recurrent.md; launched by cuda/recurrent/recurrent_plan.cpp.
//
// A thread block has a value head of a request and some of its values, whose part of the state stays in registers from the first token to
// the last: in decode each number is read and written once, which is all there is to do. A lane has kQuads x 4 key channels of kValues
// values; kKeyLanes lanes share a value, so that sums over key channels take few shuffles. What a token brings is made once for the block:
// warps take tokens in turn, and leave q, k, decays and values in shared memory.
#include "recurrent_token.cuh"

namespace imbrex::cuda {

constexpr int kKeyLanes = recurrent_key_lanes(kDimK), kQuads = recurrent_quads(kDimK), kValues = kRecurrentLaneValues;
constexpr int kPadded = 4 * kKeyLanes * kQuads;  // key channels, with those that are not there
constexpr int kWarpValues = recurrent_warp_values(kDimK);
constexpr int kWarps = recurrent_warps(kDimK, kDimV), kThreads = 32 * kWarps, kRows = kWarps * kWarpValues;
constexpr int kTiles = (kDimV + kRows - 1) / kRows;
// That a multiprocessor is to hold: gates of channels take registers, for which only some compilations have enough.
constexpr int kLeastBlocks = (kChannelGate || kChannelRates) && (kArch != 900 || kDimK > 128) ? 1 : 2;
constexpr int kTokens = 8;  // whose numbers are in shared memory at a time
constexpr int kSize = element_bytes(kType), kStateSize = element_bytes(kStateType);

struct Token {
  float4 q[kPadded / 4], k[kPadded / 4];
  float4 factors[kChannelGate || kChannelRates ? kPadded / 4 : 1];  // of the state, by key channel; or of all channels
  float values[kRows];                                              // as they are given
  float factor, step, beta, padding;
};

extern "C" __device__ const unsigned smem_bytes = kTokens * sizeof(Token);
extern __shared__ __align__(16) char memory[];

constexpr bool kOfChannels = kChannelGate || kChannelRates;
constexpr int kKeysOfLane = (kPadded + 31) / 32, kRowsOfLane = (kRows + 31) / 32;  // 32 apart

// What a lane loads of a token, all of it before any is used: loads behind a store would wait for each other.
struct LoadedToken {
  float q[kKeysOfLane], k[kKeysOfLane], values[kRowsOfLane];
  float gates[kOfChannels ? kKeysOfLane : 1], beta;
};

// Parts of a token. One token is made by several warps, each a part; of several tokens a warp makes whole ones.
constexpr int kOfQ = 1, kOfK = 2, kOfGates = 4, kOfValues = 8, kWhole = kOfQ | kOfK | kOfGates | kOfValues;
constexpr int kParts = kWarps < 4 ? 1 : 4;
DEVICE int part_of(int warp) { return kParts == 1 ? kWhole : warp == 0 ? kOfGates : warp == 1 ? kOfQ : warp == 2 ? kOfK : kOfValues; }

DEVICE void load_token(const RecurrentParams& p, int token, int head, int first_value, int parts, LoadedToken& x) {
  const int key_head = head / p.group;
  const char* const q = p.q + token * p.q_token_stride + key_head * p.q_head_stride;
  const char* const k = p.k + token * p.k_token_stride + key_head * p.k_head_stride;
  const char* const values = p.v + token * p.v_token_stride + head * p.v_head_stride;
#pragma unroll
  for (int i = 0; i < kKeysOfLane; ++i) {
    const int channel = lane_id() + 32 * i, mine = channel < kDimK ? channel : 0;
    x.q[i] = (parts & kOfQ) != 0 && channel < kDimK ? load_number<kType>(q + channel * kSize) : 0.f;
    x.k[i] = (parts & kOfK) != 0 && channel < kDimK ? load_number<kType>(k + channel * kSize) : 0.f;
    if ((kOfChannels || i == 0) && (parts & kOfGates) != 0)
      x.gates[kOfChannels ? i : 0] = load_gate<kChannelGate>(p, token, head, kOfChannels ? mine : 0);
  }
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i) {
    const int value = first_value + lane_id() + 32 * i;
    x.values[i] = (parts & kOfValues) != 0 && value < kDimV ? load_number<kType>(values + value * kSize) : 0.f;
  }
  if ((parts & kOfGates) != 0) x.beta = load_beta(p, token, head);
}

// q or k, times `factor`.
DEVICE void put_key(const RecurrentParams& p, const float (&x)[kKeysOfLane], float factor, float4* to) {
  if (p.qk_norm) {
    float squares = 0.f;
#pragma unroll
    for (const float number : x) squares = __fmaf_rn(number, number, squares);
    factor *= inverse_root(sum_over(squares) + kNormEpsilon);
  }
#pragma unroll
  for (int i = 0; i < kKeysOfLane; ++i)
    if (lane_id() + 32 * i < kPadded) reinterpret_cast<float*>(to)[lane_id() + 32 * i] = x[i] * factor;
}

DEVICE void put_gates(const RecurrentParams& p, const LoadedToken& x, int head, Token& t) {
  constexpr int kGates = kOfChannels ? kKeysOfLane : 1;
  GateNumbers gates[kGates];
#pragma unroll
  for (int i = 0; i < kGates; ++i) {
    const int channel = lane_id() + 32 * i;
    gates[i] = with_parameters<kChannelGate>(p, x.gates[i], head, kOfChannels && channel < kDimK ? channel : 0);
  }
  float step = 1.f;
#pragma unroll
  for (int i = 0; i < kGates; ++i) {
    step = gate_step(p, gates[i]);
    const float factor = exp_of(log_decay(p, gates[i], step));
    if (!kOfChannels) t.factor = factor;
    if (kOfChannels && lane_id() + 32 * i < kPadded) reinterpret_cast<float*>(t.factors)[lane_id() + 32 * i] = factor;
  }
  if (lane_id() == 0) t.step = p.scaled_values ? step : 1.f, t.beta = beta_of(p, x.beta);
}

// Gates come last, for which most registers are needed.
DEVICE void put_token(const RecurrentParams& p, const LoadedToken& x, int head, int parts, Token& t) {
  if ((parts & kOfQ) != 0) put_key(p, x.q, p.scale, t.q);
  if ((parts & kOfK) != 0) put_key(p, x.k, 1.f, t.k);
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i)
    if ((parts & kOfValues) != 0 && lane_id() + 32 * i < kRows) t.values[lane_id() + 32 * i] = x.values[i];
  if ((parts & kOfGates) != 0) put_gates(p, x, head, t);
}

// A lane's part of a state: values [first, first + kValues), and of each kQuads times four key channels, 4 kKeyLanes apart.
struct State {
  float of[kValues][kQuads][4];
};

template <bool aligned>
struct Places {
  static constexpr bool whole = aligned && (kKeysFirst ? kDimV % kValues == 0 : kDimK % 4 == 0);
  // Calls visit(numbers of the state, where they lie, how many of them are there).
  template <class Visit>
  static DEVICE void each(char* head, int first, int key_lane, const Visit& visit) {
    if constexpr (kKeysFirst) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int channel = (i * kKeyLanes + key_lane) * 4 + c;
          visit(i, c, head + (long(channel) * kDimV + first) * kStateSize, channel < kDimK ? min(kDimV - first, kValues) : 0);
        }
    } else {
#pragma unroll
      for (int j = 0; j < kValues; ++j)
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
          const int channel = (i * kKeyLanes + key_lane) * 4;
          visit(j, i, head + (long(first + j) * kDimK + channel) * kStateSize, first + j < kDimV ? min(kDimK - channel, 4) : 0);
        }
    }
  }
  static DEVICE void load(char* head, int first, int key_lane, State& s) {
    each(head, first, key_lane, [&](int a, int b, const char* at, int count) {
      if constexpr (kKeysFirst) {
        float x[kValues] = {};
        if (count > 0) load_run<kStateType, whole>(at, count, x);
#pragma unroll
        for (int j = 0; j < kValues; ++j) s.of[j][a][b] = x[j];
      } else {
        if (count > 0) {
          load_run<kStateType, whole>(at, count, s.of[a][b]);
        } else {
#pragma unroll
          for (int c = 0; c < 4; ++c) s.of[a][b][c] = 0.f;
        }
      }
    });
  }
  static DEVICE void store(char* head, int first, int key_lane, const State& s) {
    each(head, first, key_lane, [&](int a, int b, char* at, int count) {
      if (count <= 0) return;
      if constexpr (kKeysFirst) {
        float x[kValues];
#pragma unroll
        for (int j = 0; j < kValues; ++j) x[j] = s.of[j][a][b];
        store_run<kStateType, whole>(at, count, x);
      } else {
        store_run<kStateType, whole>(at, count, s.of[a][b]);
      }
    });
  }
};

// Makes each of a lane's sums that of all lanes which share the values.
DEVICE void sum_keys(float (&x)[kValues]) {
#pragma unroll
  for (int j = 0; j < kValues; ++j) x[j] = sum_over<kKeyLanes>(x[j]);
}

// The step of a token: `y` is what the state gives for q.
DEVICE void step_of(const RecurrentParams& p, const Token& t, int key_lane, const float* given, State& s, float (&y)[kValues]) {
  float known[kValues] = {};
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const float4 k = t.k[i * kKeyLanes + key_lane];
    float4 f = {t.factor, t.factor, t.factor, t.factor};
    if constexpr (kOfChannels) f = t.factors[i * kKeyLanes + key_lane];
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      float(&x)[4] = s.of[j][i];
      x[0] *= f.x, x[1] *= f.y, x[2] *= f.z, x[3] *= f.w;
      known[j] = __fmaf_rn(x[0], k.x, __fmaf_rn(x[1], k.y, __fmaf_rn(x[2], k.z, __fmaf_rn(x[3], k.w, known[j]))));
    }
  }
  float written[kValues];
  if (p.delta) sum_keys(known);
#pragma unroll
  for (int j = 0; j < kValues; ++j) written[j] = t.beta * (given[j] * t.step - (p.delta ? known[j] : 0.f)), y[j] = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const float4 k = t.k[i * kKeyLanes + key_lane], q = t.q[i * kKeyLanes + key_lane];
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      float(&x)[4] = s.of[j][i];
      x[0] = __fmaf_rn(k.x, written[j], x[0]), x[1] = __fmaf_rn(k.y, written[j], x[1]);
      x[2] = __fmaf_rn(k.z, written[j], x[2]), x[3] = __fmaf_rn(k.w, written[j], x[3]);
      y[j] = __fmaf_rn(x[0], q.x, __fmaf_rn(x[1], q.y, __fmaf_rn(x[2], q.z, __fmaf_rn(x[3], q.w, y[j]))));
    }
  }
  sum_keys(y);
}

// A part of a request that a thread block computes at a time: some values of a head.
struct Unit {
  RecurrentItem item;
  int head, first_value;
  DEVICE bool is_there() const { return item.begin < item.end; }
  DEVICE char* state(const RecurrentParams& p, int row) const { return item.state + row * p.state_row_stride + head * p.state_head_stride; }
  DEVICE char* source(const RecurrentParams& p) const {
    return item.source + item.first_row * p.state_row_stride + head * p.state_head_stride;
  }
};
DEVICE Unit unit_at(const RecurrentParams& p, u32 index) {
  const u32 each = u32(p.num_v_heads * kTiles), part = index % each;
  return {tokens_of(p, int(index / each), part == 0 && threadIdx.x == 0), int(part) / kTiles, int(part) % kTiles * kRows};
}

// The lane's place in a block: the values that it has, counted from the block's first one, and its key channels.
struct Lane {
  int value, key;
};
DEVICE Lane lane_place() { return {warp_id() * kWarpValues + lane_id() / kKeyLanes * kValues, lane_id() % kKeyLanes}; }

template <bool aligned>
DEVICE void load_state(const RecurrentParams& p, const Unit& unit, const Lane& lane, State& s) {
  if (unit.is_there() && unit.item.first_row >= 0) {
    Places<aligned>::load(unit.source(p), unit.first_value + lane.value, lane.key, s);
  } else {
    s = {};
  }
}

template <bool aligned>
DEVICE void run_tokens(const RecurrentParams& p, const Unit& unit, const Lane& lane, State& s) {
  Token* const tokens = reinterpret_cast<Token*>(memory);
  const RecurrentItem& item = unit.item;
  const int first = unit.first_value + lane.value;
  const float skip = p.skip != nullptr ? p.skip[unit.head] : 0.f;
  const auto store = [&](int row) {
    Places<aligned>::store(unit.state(p, row), first, lane.key, s);
    if constexpr (kTree && kStateType != kF32) {  // drafts begin from what the rows keep
#pragma unroll
      for (auto& of_value : s.of)
#pragma unroll
        for (auto& quad : of_value)
#pragma unroll
          for (float& x : quad) x = rounded_number<kStateType>(x);
    }
  };
  // What is read of the slot has been read.
  if (item.end - item.begin == item.drafts) store(0);
#pragma unroll 1
  for (int begin = item.begin; begin < item.end; begin += kTokens) {
    const int count = min(item.end - begin, kTokens);
    __syncthreads();  // those that were here have been read
    const bool alone = count == 1 && kParts > 1;
    for (int t = warp_id(); t < (alone ? kParts : count); t += kWarps) {
      LoadedToken loaded;
      const int of = alone ? 0 : t, parts = alone ? part_of(t) : kWhole;
      load_token(p, begin + of, unit.head, unit.first_value, parts, loaded);
      put_token(p, loaded, unit.head, parts, tokens[of]);
    }
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const auto row = [&] { return begin + t + 1 - (item.end - item.drafts); };
      if constexpr (kTree) {
        if (const int parent = parent_row(p, begin + t, row()); parent >= 0)
          Places<aligned>::load(unit.state(p, parent), first, lane.key, s);
      }
      const float* const given = tokens[t].values + lane.value;
      float y[kValues];
      step_of(p, tokens[t], lane.key, given, s, y);
      if (lane.key == 0 && first < kDimV) {
#pragma unroll
        for (int j = 0; j < kValues; ++j) y[j] = __fmaf_rn(skip, given[j], y[j]);
        char* const to = p.out + (begin + t) * p.out_token_stride + unit.head * p.out_head_stride + long(first) * kSize;
        store_run<kType, aligned && kDimV % kValues == 0>(to, min(kDimV - first, kValues), y);
      }
      if (row() >= 0) store(row());
    }
  }
}

template <bool aligned>
DEVICE void recurrent(const RecurrentParams& p) {
  if (!p.lists_are_there) griddep_wait();
  const u32 units = u32(num_requests(p) * p.num_v_heads * kTiles);
  const Lane lane = lane_place();
#pragma unroll 1
  for (u32 index = blockIdx.x; index < units; index += gridDim.x) {
    const Unit unit = unit_at(p, index);
    griddep_wait();
    if (!unit.is_there()) continue;
    State s;
    load_state<aligned>(p, unit, lane, s);
    run_tokens<aligned>(p, unit, lane, s);
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
