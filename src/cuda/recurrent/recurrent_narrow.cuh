#pragma once
// Heads with values of one dimension and without the delta rule (Mamba1), for recurrent_narrow.cu and recurrent_narrow_prompts.cu:
// kKeyLanes lanes share kOfLane heads, a constant of the kernel, and a lane has kQuads times four numbers of the state of each, 4 kKeyLanes
// apart. What a head's gate and value bring, and its outputs, are made by the lanes that own the head. Both kernels compute the same bits.
//
// A decay is 2^(coefficient times a number of the head): the coefficient is e^rates / ln 2 and the number the step of a softplus, and so
// on.
#include "recurrent_token.cuh"

namespace imbrex::cuda {

constexpr int kKeyLanes = recurrent_key_lanes(kDimK), kQuads = recurrent_quads(kDimK);
constexpr int kPadded = 4 * kKeyLanes * kQuads;  // key channels, with those that are not there
constexpr int kGroups = 32 / kKeyLanes;          // of lanes of a warp that share heads
constexpr int kOwners = kKeyLanes / kOfLane;     // lanes that make what a head brings
constexpr int kSize = element_bytes(kType), kStateSize = element_bytes(kStateType);
constexpr bool kWholeQuads = kDimK % 4 == 0;
static_assert(kKeyLanes % kOfLane == 0);

// A lane's place: its part of key channels, and its heads, counted from the block's first one.
struct NarrowLane {
  int part, first, own;
  DEVICE int head(int j) const { return first + j * kGroups; }
};
DEVICE NarrowLane narrow_lane(int warp) {
  const int part = lane_id() % kKeyLanes, first = warp * kGroups * kOfLane + lane_id() / kKeyLanes;
  return {part, first, first + part / kOwners * kGroups};
}
// The number of a lane's head j, of the number that each lane has of its own head.
DEVICE float of_head(float own, int j) { return shuffle(own, lane_id() / kKeyLanes * kKeyLanes + j * kOwners); }

// Numbers of a lane's key channels.
struct Keys {
  float of[kQuads][4];
};
template <class Visit>
DEVICE void each_channel(const NarrowLane& lane, const Visit& visit) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) visit(i, c, (i * kKeyLanes + lane.part) * 4 + c);
}

// q or k as they lie in memory.
struct RawKeys {
  u32 of[kQuads][kType == kF32 ? 4 : 2];
};
template <bool aligned>
DEVICE void load_raw(const char* from, const NarrowLane& lane, RawKeys& raw) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int channel = (i * kKeyLanes + lane.part) * 4;
    const char* const at = from + channel * kSize;
    if constexpr (aligned && kWholeQuads && kType == kF32) {
      const uint4 x = channel < kDimK ? *reinterpret_cast<const uint4*>(at) : uint4{};
      raw.of[i][0] = x.x, raw.of[i][1] = x.y, raw.of[i][2] = x.z, raw.of[i][3] = x.w;
    } else if constexpr (aligned && kWholeQuads) {
      const uint2 x = channel < kDimK ? *reinterpret_cast<const uint2*>(at) : uint2{};
      raw.of[i][0] = x.x, raw.of[i][1] = x.y;
    } else {
      u32 words[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        words[c] = 0;
        if (channel + c >= kDimK) continue;
        words[c] = kType == kF32 ? *reinterpret_cast<const u32*>(at + 4 * c) : u32(*reinterpret_cast<const u16*>(at + 2 * c));
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if constexpr (kType == kF32) {
          raw.of[i][c] = words[c];
        } else if (c % 2 == 0) {
          raw.of[i][c / 2] = words[c] | words[c + 1] << 16;
        }
      }
    }
  }
}
// Keys, or queries with their scale. All lanes of a warp together.
template <bool is_key>
DEVICE Keys keys_of(const RecurrentParams& p, const RawKeys& raw) {
  Keys x;
  float squares = 0.f, factor = is_key ? 1.f : p.scale;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if constexpr (kType == kF32) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x.of[i][c] = float_of(raw.of[i][c]);
    } else {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float2 pair = kType == kBf16 ? unpack_bf16(raw.of[i][c]) : unpack_f16(raw.of[i][c]);
        x.of[i][2 * c] = pair.x, x.of[i][2 * c + 1] = pair.y;
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) squares = __fmaf_rn(x.of[i][c], x.of[i][c], squares);
  }
  if (p.qk_norm) factor *= inverse_root(sum_over<kKeyLanes>(squares) + kNormEpsilon);
  if (p.qk_norm || !is_key) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) x.of[i][c] *= factor;
  }
  return x;
}

// A number as it lies in memory, and what it is.
DEVICE u32 load_raw(const char* p, bool is_f32) {
  return is_f32 ? *reinterpret_cast<const u32*>(p) : u32(*reinterpret_cast<const u16*>(p));
}
DEVICE float number_of(u32 raw, bool is_f32) {
  return is_f32 || kType == kF32 ? float_of(raw) : kType == kBf16 ? float_of(raw << 16) : unpack_f16(raw).x;
}

// What a token brings of a head: what decays are made of, and what is written to the state.
struct HeadStep {
  float decay, written;
};
template <bool softplus>
DEVICE HeadStep head_step(const RecurrentParams& p, float value, float gate, float bias) {
  if constexpr (softplus) {
    const float step = gate_step(p, {gate, bias, 0.f});
    return {step, p.scaled_values ? value * step : value};
  }
  return {p.gate_kind == kFixedGate ? 1.f : p.gate_kind == kLogGate ? gate : gate + bias, value};
}
// A skip is a product of this and its factor, which is 0 where a layer has none.
DEVICE float skipped_value(const RecurrentParams& p, float value) { return p.skip != nullptr ? value : 0.f; }

// Of a head's channels.
DEVICE void load_rates(const RecurrentParams& p, const NarrowLane& lane, int head, Keys& rates) {
  each_channel(lane, [&](int i, int c, int channel) {
    rates.of[i][c] = 0.f;
    if (p.rates != nullptr && channel < kDimK) rates.of[i][c] = p.rates[head * p.rates_stride + (p.channel_rates ? channel : 0)];
  });
}
DEVICE void make_coefficients(const RecurrentParams& p, Keys& rates) {
  constexpr float kMost = 88.f;  // so that a coefficient is finite, and 0 times it 0
  const auto each = [&](const auto& of) {
#pragma unroll
    for (auto& quad : rates.of)
#pragma unroll
      for (float& x : quad) x = of(x);
  };
  if (p.gate_kind == kSoftplusGate) {
    each([](float rate) { return exp_of(rate > kMost ? kMost : rate) * -kLog2e; });
  } else if (p.gate_kind == kSigmoidGate) {
    each([](float rate) { return exp_of(rate); });
  } else {
    const bool fixed = p.gate_kind == kFixedGate;
    each([=](float rate) { return fixed ? -rate * kLog2e : kLog2e; });
  }
}

// A head's step: y is a lane's part of the output.
template <bool sigmoid>
DEVICE void step_head(const RecurrentParams& p, const Keys& k, const Keys& q, const Keys& coefficients, const HeadStep& step, Keys& state,
                      float& y) {
  y = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float exponent = coefficients.of[i][c] * step.decay;
      if constexpr (sigmoid) exponent = p.gate_min * kLog2e * sigmoid_of(exponent);
      float& x = state.of[i][c];
      x = __fmaf_rn(x, exp2_approx(exponent), k.of[i][c] * step.written);
      y = __fmaf_rn(x, q.of[i][c], y);
    }
}

// Parts of outputs are added up: first between lanes that own different heads, so that each has a part of its own head. The order of
// additions is that of sum_over<lanes>(), however many heads there are.
template <int lanes, int heads>
DEVICE float part_of_own(const float (&y)[heads]) {
  if constexpr (heads == 1) {
    return y[0];
  } else {
    constexpr int half = heads / 2;
    const bool upper = lane_id() % lanes >= lanes / 2;
    float kept[half];
#pragma unroll
    for (int j = 0; j < half; ++j) kept[j] = (upper ? y[half + j] : y[j]) + shuffle_xor(upper ? y[j] : y[half + j], lanes / 2);
    return part_of_own<lanes / 2>(kept);
  }
}

// A head's state where a row of a slot has it.
template <bool aligned>
DEVICE void load_state(const char* from, const NarrowLane& lane, Keys& state) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int channel = (i * kKeyLanes + lane.part) * 4;
    if (channel < kDimK) load_run<kStateType, aligned && kWholeQuads>(from + channel * kStateSize, kDimK - channel, state.of[i]);
  }
}
template <bool aligned>
DEVICE void store_state(char* to, const NarrowLane& lane, const Keys& state) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int channel = (i * kKeyLanes + lane.part) * 4;
    if (channel < kDimK) store_run<kStateType, aligned && kWholeQuads>(to + channel * kStateSize, kDimK - channel, state.of[i]);
  }
}

}  // namespace imbrex::cuda
