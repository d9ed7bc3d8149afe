// Recurrent layers whose heads have values of one dimension and no delta rule (Mamba1), token by token; launched by
// cuda/recurrent/recurrent_plan.cpp.
//
// A state is a few numbers for each head, so a thread block takes kHeads heads: kKeyLanes lanes share a head, a lane has four key channels
// of kOfLane heads in registers. What tokens bring of each head comes to shared memory kTokens at a time, and their q and k where all heads
// of the block share them.
#include "recurrent_token.cuh"

namespace imbrex::cuda {

constexpr int kKeyLanes = recurrent_key_lanes(kDimK), kQuads = recurrent_quads(kDimK), kOfLane = narrow_heads_of_lane(kDimK);
constexpr int kPadded = 4 * kKeyLanes * kQuads;
constexpr int kHeads = recurrent_narrow_heads(kDimK);
constexpr int kTokens = 8;
constexpr int kSize = element_bytes(kType), kStateSize = element_bytes(kStateType);

// A token's numbers: of a head the value, what is written for it, and what its decay is made of: the step of a softplus, the decay's
// logarithm of the gate log, the gate's sum with its bias of a sigmoid.
struct Token {
  float values[kHeads], written[kHeads], gates[kHeads];
  float4 q[kPadded / 4], k[kPadded / 4];
};

extern "C" __device__ const unsigned smem_bytes = kTokens * sizeof(Token);
extern __shared__ __align__(16) char memory[];

struct Keys {
  float of[kQuads][4];
};

// q or k of a lane's channels. All lanes of a warp together, each for a key head of its own.
DEVICE Keys load_keys(const RecurrentParams& p, const char* from, float factor) {
  Keys x;
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int channel = (i * kKeyLanes + lane_id() % kKeyLanes) * 4 + c;
      x.of[i][c] = channel < kDimK ? load_number<kType>(from + channel * kSize) : 0.f;
      squares = __fmaf_rn(x.of[i][c], x.of[i][c], squares);
    }
  if (p.qk_norm) factor *= inverse_root(sum_over<kKeyLanes>(squares) + kNormEpsilon);
#pragma unroll
  for (int i = 0; i < kQuads; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) x.of[i][c] *= factor;
  return x;
}
DEVICE Keys load_q(const RecurrentParams& p, int token, int head) {
  return load_keys(p, p.q + token * p.q_token_stride + head / p.group * p.q_head_stride, p.scale);
}
DEVICE Keys load_k(const RecurrentParams& p, int token, int head) {
  return load_keys(p, p.k + token * p.k_token_stride + head / p.group * p.k_head_stride, 1.f);
}
// Between shared memory and a lane.
DEVICE void put_keys(const Keys& x, float4* to) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i) to[i * kKeyLanes + lane_id() % kKeyLanes] = {x.of[i][0], x.of[i][1], x.of[i][2], x.of[i][3]};
}
DEVICE Keys take_keys(const float4* from) {
  Keys x;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const float4 v = from[i * kKeyLanes + lane_id() % kKeyLanes];
    x.of[i][0] = v.x, x.of[i][1] = v.y, x.of[i][2] = v.z, x.of[i][3] = v.w;
  }
  return x;
}

// What a token brings of a head.
DEVICE void put_head(const RecurrentParams& p, int token, int head, int place, Token& t) {
  const float value = load_number<kType>(p.v + token * p.v_token_stride + head * p.v_head_stride);
  const GateNumbers g = gate_numbers<false>(p, token, head, 0);
  const float step = gate_step(p, g);
  t.values[place] = value;
  t.written[place] = p.scaled_values ? value * step : value;
  t.gates[place] = p.gate_kind == kSoftplusGate ? step : p.gate_kind == kLogGate ? g.x : g.x + g.bias;
}

// The factor of a state. `rate`: e^rates, or of the gate fixed the rate itself.
DEVICE float factor_of(const RecurrentParams& p, float gate, float rate) {
  if (p.gate_kind == kFixedGate) return exp_of(-rate);
  if (p.gate_kind == kLogGate) return exp_of(gate);
  if (p.gate_kind == kSoftplusGate) return exp_of(-rate * gate);
  return exp_of(p.gate_min * sigmoid_of(rate * gate));
}

// The heads of a lane: states, and what decays are made of.
struct Heads {
  Keys states[kOfLane], rates[kOfLane];
};

DEVICE void load_rates(const RecurrentParams& p, int head, Keys& rates) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int channel = (i * kKeyLanes + lane_id() % kKeyLanes) * 4 + c;
      float rate = 0.f;
      if (p.rates != nullptr && channel < kDimK) rate = p.rates[head * p.rates_stride + (p.channel_rates ? channel : 0)];
      rates.of[i][c] = p.gate_kind == kFixedGate ? rate : exp_of(rate);
    }
}

template <bool aligned>
DEVICE void load_state(const char* from, Keys& state) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int channel = (i * kKeyLanes + lane_id() % kKeyLanes) * 4;
    if (channel < kDimK) load_run<kStateType, aligned && kDimK % 4 == 0>(from + channel * kStateSize, kDimK - channel, state.of[i]);
  }
}
template <bool aligned>
DEVICE void store_state(char* to, const Keys& state) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int channel = (i * kKeyLanes + lane_id() % kKeyLanes) * 4;
    if (channel < kDimK) store_run<kStateType, aligned && kDimK % 4 == 0>(to + channel * kStateSize, kDimK - channel, state.of[i]);
  }
}

template <bool aligned>
DEVICE void run_heads(const RecurrentParams& p, const RecurrentItem& item, int first_head, int heads) {
  Token* const tokens = reinterpret_cast<Token*>(memory);
  const int mine = int(threadIdx.x) / kKeyLanes * kOfLane;  // of the block, the lane's first head
  const bool shared = first_head / p.group == (first_head + heads - 1) / p.group;
  Heads h = {};
  const auto state_of = [&](int row, int j) {
    return item.state + row * p.state_row_stride + (first_head + mine + j) * p.state_head_stride;
  };
  const auto store = [&](int row) {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      if (mine + j < heads) store_state<aligned>(state_of(row, j), h.states[j]);
      if constexpr (kTree && kStateType != kF32) {  // drafts begin from what the rows keep
#pragma unroll
        for (auto& quad : h.states[j].of)
#pragma unroll
          for (float& x : quad) x = rounded_number<kStateType>(x);
      }
    }
  };
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) {
    if (mine + j >= heads) continue;
    if (item.first_row >= 0)
      load_state<aligned>(item.source + item.first_row * p.state_row_stride + (first_head + mine + j) * p.state_head_stride, h.states[j]);
    load_rates(p, first_head + mine + j, h.rates[j]);
  }
  if (item.end - item.begin == item.drafts) store(0);  // what is read of the slot has been read
#pragma unroll 1
  for (int begin = item.begin; begin < item.end; begin += kTokens) {
    const int count = min(item.end - begin, kTokens);
    __syncthreads();  // those that were here have been read
    for (int i = int(threadIdx.x); i < count * heads; i += kRecurrentNarrowThreads)
      put_head(p, begin + i / heads, first_head + i % heads, i % heads, tokens[i / heads]);
    if (shared) {
      for (int t = warp_id(); t < count; t += kRecurrentNarrowThreads / 32) {
        const Keys q = load_q(p, begin + t, first_head), k = load_k(p, begin + t, first_head);
        if (lane_id() < kKeyLanes) put_keys(q, tokens[t].q), put_keys(k, tokens[t].k);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const int row = begin + t + 1 - (item.end - item.drafts);
      if constexpr (kTree) {
        const int parent = parent_row(p, begin + t, row);
#pragma unroll
        for (int j = 0; j < kOfLane; ++j)
          if (parent >= 0 && mine + j < heads) load_state<aligned>(state_of(parent, j), h.states[j]);
      }
      const Token& token = tokens[t];
      Keys q, k;
      if (shared) q = take_keys(token.q), k = take_keys(token.k);
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) {
        const int place = min(mine + j, heads - 1), head = first_head + place;
        if (!shared) q = load_q(p, begin + t, head), k = load_k(p, begin + t, head);
        float y = 0.f;
#pragma unroll
        for (int i = 0; i < kQuads; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float& x = h.states[j].of[i][c];
            x = __fmaf_rn(k.of[i][c], token.written[place], x * factor_of(p, token.gates[place], h.rates[j].of[i][c]));
            y = __fmaf_rn(x, q.of[i][c], y);
          }
        y = sum_over<kKeyLanes>(y);
        if (p.skip != nullptr) y = __fmaf_rn(p.skip[head], token.values[place], y);
        if (lane_id() % kKeyLanes == 0 && mine + j < heads)
          store_number<kType>(p.out + (begin + t) * p.out_token_stride + head * p.out_head_stride, y);
      }
      if (row >= 0) store(row);
    }
  }
}

template <bool aligned>
DEVICE void recurrent_narrow(const RecurrentParams& p) {
  if (!p.lists_are_there) griddep_wait();
  const int each = (p.num_v_heads + kHeads - 1) / kHeads;
  const u32 units = u32(num_requests(p) * each);
#pragma unroll 1
  for (u32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int part = int(unit % u32(each));
    const RecurrentItem item = item_of(p, int(unit / u32(each)), part == 0 && threadIdx.x == 0);
    griddep_wait();
    if (item.begin < item.end) run_heads<aligned>(p, item, part * kHeads, min(p.num_v_heads - part * kHeads, kHeads));
  }
  griddep_wait();  // also where there is nothing to do: the kernel behind this one may rely on the one in front of it
  griddep_launch();
}

// States that are aligned to 16 bytes, and others.
extern "C" __global__ void __launch_bounds__(kRecurrentNarrowThreads, 1)
    recurrent_narrow_aligned(const __grid_constant__ RecurrentParams p) {
  recurrent_narrow<true>(p);
}
extern "C" __global__ void __launch_bounds__(kRecurrentNarrowThreads, kTree ? 1 : 0)
    recurrent_narrow_unaligned(const __grid_constant__ RecurrentParams p) {
  recurrent_narrow<false>(p);
}

}  // namespace imbrex::cuda
