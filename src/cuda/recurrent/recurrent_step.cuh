#pragma once
// A thread block's part of a recurrent layer, token by token, for recurrent.cu and recurrent_stream.cu: a value head of a request and some
// of its values, whose part of the state stays in registers from the first token to the last. A lane has kQuads x 4 key channels of kValues
// values; kKeyLanes lanes share a value, so that sums over key channels take few shuffles. What a token brings is made once for the block:
// warps take tokens in turn, or parts of a token that is alone, and leave q, k, decays and values in shared memory.
#include "recurrent_finish.cuh"

namespace imbrex::cuda {

constexpr int kKeyLanes = recurrent_key_lanes(kDimK), kQuads = recurrent_quads(kDimK), kValues = kRecurrentLaneValues;
constexpr int kPadded = 4 * kKeyLanes * kQuads;  // key channels, with those that are not there
constexpr int kWarpValues = recurrent_warp_values(kDimK);
constexpr int kWarps = recurrent_warps(kDimK, kDimV), kThreads = 32 * kWarps, kRows = kWarps * kWarpValues;
constexpr int kTiles = (kDimV + kRows - 1) / kRows;
constexpr bool kOfChannels = kChannelGate || kChannelRates;
constexpr bool kFinishes = kGated || kNormed;  // outputs of aligned tensors
// That a multiprocessor is to hold: 16 warps have 128 registers a thread. Some compilations take more: with gates of channels, with trees,
// and with states of bf16 whose keys are innermost, which many requests do not need (recurrent_stream.cu).
constexpr bool kFewBlocks = (kOfChannels && (kArch != 900 || kDimK > 128)) || ((kOfChannels || kFinishes) && kTree && kStateType != kF32);
constexpr int kMostWarps = !kOfChannels && !kTree && !kKeysFirst && kStateType == kBf16 ? 12 : 16;
constexpr int kLeastBlocks = kFewBlocks ? 1 : kTree ? 2 : kMostWarps / kWarps;
constexpr int kTokens = 8;  // whose numbers are in shared memory at a time
constexpr int kSize = element_bytes(kType), kStateSize = element_bytes(kStateType);

static_assert(!kFinishes || (kDimV % 8 == 0 && kKeyLanes >= kValues && (!kNormed || kTiles == 1)));

// Numbers of values that finish a token's outputs.
template <bool is_there>
struct OutputNumbers {};
template <>
struct OutputNumbers<true> {
  float z[kRows];
  float outputs[kRows];  // in front of the norm
};
struct alignas(16) Token : OutputNumbers<kFinishes> {
  float4 q[kPadded / 4], k[kPadded / 4];
  float4 factors[kOfChannels ? kPadded / 4 : 1];  // of the state, by key channel; or of all channels
  float values[kRows];                            // as they are given
  float factor, step, beta, padding;
};

extern __shared__ __align__(16) char memory[];

constexpr int kKeysOfLane = (kPadded + 31) / 32, kRowsOfLane = (kRows + 31) / 32;  // 32 apart

// A lane's numbers of a row are 32 apart. Arrays have room for them, or for more.
template <int n>
DEVICE void load_keys(const char* row, float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < kKeysOfLane; ++i) {
    const int channel = lane_id() + 32 * i;
    x[i] = channel < kDimK ? load_number<kType>(row + channel * kSize) : 0.f;
  }
}
template <int n>
DEVICE void load_q(const RecurrentParams& p, int token, int head, float (&x)[n]) {
  load_keys(p.q + token * p.q_token_stride + head / p.group * p.q_head_stride, x);
}
template <int n>
DEVICE void load_k(const RecurrentParams& p, int token, int head, float (&x)[n]) {
  load_keys(p.k + token * p.k_token_stride + head / p.group * p.k_head_stride, x);
}
// `x`: an array's numbers from one on.
DEVICE void load_values(const char* row, int first_value, float* x) {
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i) {
    const int value = first_value + lane_id() + 32 * i;
    x[i] = value < kDimV ? load_number<kType>(row + value * kSize) : 0.f;
  }
}
DEVICE void load_values(const RecurrentParams& p, int token, int head, int first_value, float* x) {
  load_values(p.v + token * p.v_token_stride + head * p.v_head_stride, first_value, x);
}
DEVICE void load_z(const RecurrentParams& p, int token, int head, int first_value, float* x) {
  if (kGated) load_values(p.z + token * p.z_token_stride + head * p.z_head_stride, first_value, x);
}
// Gates of channels, from one on, or the one of all channels; and what a layer has for them.
template <int count>
DEVICE void load_gates(const RecurrentParams& p, int token, int head, int first_channel, float (&x)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int channel = first_channel + lane_id() + 32 * i;
    x[i] = load_gate<kChannelGate>(p, token, head, kOfChannels && channel < kDimK ? channel : 0);
  }
}
template <int count>
DEVICE void with_parameters(const RecurrentParams& p, const float (&x)[count], int head, int first_channel, GateNumbers (&gates)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int channel = first_channel + lane_id() + 32 * i;
    gates[i] = with_parameters<kChannelGate>(p, x[i], head, kOfChannels && channel < kDimK ? channel : 0);
  }
}

// q or k, times `factor`.
template <int n>
DEVICE void put_keys(const RecurrentParams& p, const float (&x)[n], float factor, float4* to) {
  if (p.qk_norm) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) squares = __fmaf_rn(x[i], x[i], squares);
    factor *= inverse_root(sum_over(squares) + kNormEpsilon);
  }
#pragma unroll
  for (int i = 0; i < kKeysOfLane; ++i)
    if (lane_id() + 32 * i < kPadded) reinterpret_cast<float*>(to)[lane_id() + 32 * i] = x[i] * factor;
}
DEVICE void put_values(const float* x, float (&to)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i)
    if (lane_id() + 32 * i < kRows) to[lane_id() + 32 * i] = x[i];
}
template <class Numbers>
DEVICE void put_z(const float* x, Numbers& t) {
  if constexpr (kGated) put_values(x, t.z);
}
template <int count>
DEVICE void put_gates(const RecurrentParams& p, const GateNumbers (&gates)[count], float beta, int first_channel, Token& t) {
  float step = 1.f;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int channel = first_channel + lane_id() + 32 * i;
    step = gate_step(p, gates[i]);
    const float factor = exp_of(log_decay(p, gates[i], step));
    if (!kOfChannels) t.factor = factor;
    if (kOfChannels && channel < kPadded) reinterpret_cast<float*>(t.factors)[channel] = factor;
  }
  if (lane_id() == 0 && first_channel == 0) t.step = p.scaled_values ? step : 1.f, t.beta = beta_of(p, beta);
}

// A whole token, of several: all of it is loaded before any is used, since loads behind a store would wait for each other.
DEVICE void make_token(const RecurrentParams& p, int token, int head, int first_value, Token& t) {
  constexpr int kGates = kOfChannels ? kKeysOfLane : 1;
  float q[kKeysOfLane], k[kKeysOfLane], values[kRowsOfLane], x[kGates];
  load_q(p, token, head, q), load_k(p, token, head, k), load_gates(p, token, head, 0, x);
  load_values(p, token, head, first_value, values);
  const float beta = load_beta(p, token, head);
  put_values(values, t.values), put_keys(p, q, p.scale, t.q), put_keys(p, k, 1.f, t.k);
  GateNumbers gates[kGates];  // for which most registers are needed
  with_parameters(p, x, head, 0, gates), put_gates(p, gates, beta, 0, t);
  if constexpr (kGated) {
    float z[kRowsOfLane];
    load_z(p, token, head, first_value, z), put_z(z, t);
  }
}

// A token alone is made in parts, a warp each: gates, by channels where there are warps for it, then q, k and values.
constexpr bool kChannelParts = kOfChannels && kWarps >= kKeysOfLane + 3;
constexpr int kGateParts = kChannelParts ? kKeysOfLane : 1, kGatesOfPart = kOfChannels && !kChannelParts ? kKeysOfLane : 1;
constexpr int largest(int a, int b, int c) { return a > b ? (a > c ? a : c) : b > c ? b : c; }
constexpr int kPartOfQ = kGateParts, kPartOfK = kPartOfQ + 1, kPartOfValues = kPartOfQ + 2, kParts = kPartOfQ + 3;
constexpr bool kInParts = kWarps >= kParts;
// z of outputs is of a warp without another part, or of that of values, behind these.
constexpr int kPartOfZ = kWarps > kParts ? kParts : kPartOfValues, kBeforeZ = kWarps > kParts ? 0 : kRowsOfLane;

// A warp's part: keys or values, or what gates are made of and beta.
struct TokenPart {
  float x[largest(kKeysOfLane, kRowsOfLane + (kGated ? kBeforeZ : 0), 3 * kGatesOfPart + 1)];
};
DEVICE void load_part(const RecurrentParams& p, int token, int head, int first_value, TokenPart& part) {
  const int warp = warp_id();
  if (warp < kGateParts) {
    float x[kGatesOfPart];
    GateNumbers gates[kGatesOfPart];
    load_gates(p, token, head, 32 * warp, x), with_parameters(p, x, head, 32 * warp, gates);
#pragma unroll
    for (int i = 0; i < kGatesOfPart; ++i) part.x[3 * i] = gates[i].x, part.x[3 * i + 1] = gates[i].bias, part.x[3 * i + 2] = gates[i].rate;
    part.x[3 * kGatesOfPart] = load_beta(p, token, head);
  }
  if (warp == kPartOfQ) load_q(p, token, head, part.x);
  if (warp == kPartOfK) load_k(p, token, head, part.x);
  if (warp == kPartOfValues) load_values(p, token, head, first_value, part.x);
  if (kGated && warp == kPartOfZ) load_z(p, token, head, first_value, part.x + kBeforeZ);
}
DEVICE void put_part(const RecurrentParams& p, const TokenPart& part, Token& t) {
  const int warp = warp_id();
  if (warp < kGateParts) {
    GateNumbers gates[kGatesOfPart];
#pragma unroll
    for (int i = 0; i < kGatesOfPart; ++i) gates[i] = {part.x[3 * i], part.x[3 * i + 1], part.x[3 * i + 2]};
    put_gates(p, gates, part.x[3 * kGatesOfPart], 32 * warp, t);
  }
  if (warp == kPartOfQ) put_keys(p, part.x, p.scale, t.q);
  if (warp == kPartOfK) put_keys(p, part.x, 1.f, t.k);
  if (warp == kPartOfValues) put_values(part.x, t.values);
  if (kGated && warp == kPartOfZ) put_z(part.x + kBeforeZ, t);
}

// A lane's part of a state: values [first, first + kValues), and of each kQuads times four key channels, 4 kKeyLanes apart.
struct State {
  float of[kValues][kQuads][4];
};

template <bool aligned>
struct Places {
  static constexpr bool whole = aligned && (kKeysFirst ? kDimV % kValues == 0 : kDimK % 4 == 0);
  // Calls visit(numbers of the state, where they lie, how many of them are there).
  template <class Pointer, class Visit>
  static DEVICE void each(Pointer head, int first, int key_lane, const Visit& visit) {
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
  static DEVICE void load(const char* head, int first, int key_lane, State& s) {
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
  int head, first;
  // Known where that saves registers (recurrent_stream.cu).
  DEVICE int first_value() const { return kTiles == 1 && (kKeysFirst || kFinishes) ? 0 : first; }
  DEVICE bool is_there() const { return item.begin < item.end; }
  DEVICE bool has_state() const { return is_there() && item.first_row >= 0; }
  DEVICE char* state(const RecurrentParams& p, int row) const { return item.state + row * p.state_row_stride + head * p.state_head_stride; }
  DEVICE const char* source(const RecurrentParams& p) const {
    return item.source + item.first_row * p.state_row_stride + head * p.state_head_stride;
  }
};
constexpr u32 units_of_request(const RecurrentParams& p) { return u32(p.num_v_heads * kTiles); }

// The lane's place in a block: the values that it has, counted from the block's first one, and its key channels.
struct Lane {
  int value, key;
};
DEVICE Lane lane_place() { return {warp_id() * kWarpValues + lane_id() / kKeyLanes * kValues, lane_id() % kKeyLanes}; }

// Gates and norms the outputs of a token, and stores them: lanes that share values have one each. Bits are those of recurrent_outputs.cu,
// whose lanes have eights. A norm is of all values of the block, which waits for them. `row`: that of the head.
template <class Numbers>
DEVICE void finish_outputs(const RecurrentParams& p, const Unit& unit, const Lane& lane, Numbers& t, float skip, const float (&y)[kValues],
                           char* row) {
  const int key_lane = computed_here(lane.key), own = key_lane % kValues, value = lane.value + own;
  float x = y[0];
#pragma unroll
  for (int j = 1; j < kValues; ++j) x = own == j ? y[j] : x;
  x = rounded_number<kType>(__fmaf_rn(skip, t.values[value], x));
  if constexpr (kGated && kGateFirst) x = gated(x, t.z[value]);
  if constexpr (kNormed) {
    if (key_lane < kValues) t.outputs[value] = x;
    const char* const weights = p.norm_weight + unit.head * p.weight_head_stride;
    const float weight = value < kDimV ? load_number(weights + value * (p.weight_is_f32 ? 4 : kSize), p.weight_is_f32) : 0.f;
    __syncthreads();
    constexpr int kLanes = recurrent_output_lanes(kDimV);
    const int eight = computed_here(lane_id()) % kLanes;
    float squares = 0.f;
    if (eight < kDimV / 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 four = reinterpret_cast<const float4*>(t.outputs)[2 * eight + i];
        squares = __fmaf_rn(four.y, four.y, __fmaf_rn(four.x, four.x, squares));
        squares = __fmaf_rn(four.w, four.w, __fmaf_rn(four.z, four.z, squares));
      }
    }
    x *= norm_factor(sum_over<kLanes>(squares), 1.f / float(kDimV), p.norm_eps) * weight;
  }
  if constexpr (kGated && !kGateFirst) x = gated(x, t.z[value]);
  const int place = unit.first_value() + value;
  if (key_lane < kValues && place < kDimV) store_number<kType>(row + long(place) * kSize, x);
}

// A token's step and its outputs.
template <bool aligned>
DEVICE void run_token(const RecurrentParams& p, const Unit& unit, const Lane& lane, int token, Token& t, State& s) {
  constexpr bool kFinishesHere = kFinishes && aligned;
  const int first = unit.first_value() + lane.value;
  const float* const given = t.values + lane.value;
  float y[kValues];
  step_of(p, t, lane.key, given, s, y);
  if (!kFinishesHere && (lane.key != 0 || first >= kDimV)) return;
  const float skip = p.skip != nullptr ? p.skip[unit.head] : 0.f;
  const auto row = [&] { return p.out + token * p.out_token_stride + unit.head * p.out_head_stride; };
  if constexpr (kFinishesHere) {
    finish_outputs(p, unit, lane, t, skip, y, row());
  } else {
#pragma unroll
    for (int j = 0; j < kValues; ++j) y[j] = __fmaf_rn(skip, given[j], y[j]);
    store_run<kType, aligned && kDimV % kValues == 0>(row() + long(first) * kSize, min(kDimV - first, kValues), y);
  }
}

// All tokens of a unit, and the rows that they leave. `tokens`: kTokens places in shared memory.
template <bool aligned>
DEVICE void run_tokens(const RecurrentParams& p, const Unit& unit, const Lane& lane, Token* tokens, State& s) {
  const RecurrentItem& item = unit.item;
  const auto store = [&](int row) {
    Places<aligned>::store(unit.state(p, row), unit.first_value() + lane.value, lane.key, s);
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
    if (kInParts && count == 1) {
      TokenPart part;
      load_part(p, begin, unit.head, unit.first_value(), part);
      put_part(p, part, tokens[0]);
    } else {
      for (int t = warp_id(); t < count; t += kWarps) make_token(p, begin + t, unit.head, unit.first_value(), tokens[t]);
    }
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const auto row = [&] { return begin + t + 1 - (item.end - item.drafts); };
      if constexpr (kTree) {
        if (const int parent = parent_row(p, begin + t, row()); parent >= 0)
          Places<aligned>::load(unit.state(p, parent), unit.first_value() + lane.value, lane.key, s);
      }
      run_token<aligned>(p, unit, lane, begin + t, tokens[t], s);
      if (row() >= 0) store(row());
    }
  }
}

}  // namespace imbrex::cuda
