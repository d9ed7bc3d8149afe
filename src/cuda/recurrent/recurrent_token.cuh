#pragma once
// What a token of a recurrent layer brings: elements of its tensors, and what decays, steps and beta are made of.
#include "async.cuh"
#include "convert.cuh"
#include "cuda/recurrent_params.h"

namespace imbrex::cuda {

constexpr float kNormEpsilon = 1e-6f;  // RecurrentSpec::qk_norm

template <int type>
DEVICE float load_number(const char* p) {
  if constexpr (type == kF32) return *reinterpret_cast<const float*>(p);
  const u32 bits = *reinterpret_cast<const u16*>(p);
  return type == kBf16 ? float_of(bits << 16) : unpack_f16(bits).x;
}
// Of a tensor that is f32 or of kType.
DEVICE float load_number(const char* p, bool is_f32) { return is_f32 ? load_number<kF32>(p) : load_number<kType>(p); }
template <int type>
DEVICE void store_number(char* p, float x) {
  if constexpr (type == kF32) {
    *reinterpret_cast<float*>(p) = x;
  } else {
    *reinterpret_cast<u16*>(p) = u16(type == kBf16 ? pack_bf16(x, 0.f) : pack_f16(x, 0.f));
  }
}

// What is left of a number that is stored.
template <int type>
DEVICE float rounded_number(float x) {
  return type == kBf16 ? unpack_bf16(pack_bf16(x, 0.f)).x : type == kF16 ? unpack_f16(pack_f16(x, 0.f)).x : x;
}

// Two or four neighbours, of which `count` are there; the others are read as 0, and not written. `whole`: all are there, and aligned to
// their bytes.
template <int type, bool whole, int n>
DEVICE void load_run(const char* p, int count, float (&x)[n]) {
  static_assert(n == 2 || n == 4);
  if constexpr (!whole) {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = i < count ? load_number<type>(p + i * element_bytes(type)) : 0.f;
  } else if constexpr (type == kF32 && n == 4) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else if constexpr (type == kF32) {
    const float2 v = *reinterpret_cast<const float2*>(p);
    x[0] = v.x, x[1] = v.y;
  } else {
    u32 words[n / 2];
    if constexpr (n == 4) {
      const uint2 v = *reinterpret_cast<const uint2*>(p);
      words[0] = v.x, words[1] = v.y;
    } else {
      words[0] = *reinterpret_cast<const u32*>(p);
    }
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float2 pair = type == kBf16 ? unpack_bf16(words[i]) : unpack_f16(words[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
}
template <int type, bool whole, int n>
DEVICE void store_run(char* p, int count, const float (&x)[n]) {
  if constexpr (!whole) {
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (i < count) store_number<type>(p + i * element_bytes(type), x[i]);
  } else if constexpr (type == kF32 && n == 4) {
    *reinterpret_cast<float4*>(p) = {x[0], x[1], x[2], x[3]};
  } else if constexpr (type == kF32) {
    *reinterpret_cast<float2*>(p) = {x[0], x[1]};
  } else {
    u32 words[n / 2];
#pragma unroll
    for (int i = 0; i < n / 2; ++i) words[i] = type == kBf16 ? pack_bf16(x[2 * i], x[2 * i + 1]) : pack_f16(x[2 * i], x[2 * i + 1]);
    if constexpr (n == 4) {
      *reinterpret_cast<uint2*>(p) = {words[0], words[1]};
    } else {
      *reinterpret_cast<u32*>(p) = words[0];
    }
  }
}

// e^x to a few units in the last place: 2^x of a product whose rounding is made up for. 0 below the normal numbers, and at
// most e^88.7: an infinite 2^x and what makes up for its rounding may have a sum that is no number.
DEVICE float exp_of(float x) {
  constexpr float kLog2eRest = 1.92596299e-8f;  // of log2(e), which is no float
  x = x < -104.f ? -104.f : x > 88.7f ? 88.7f : x;
  const float power = x * kLog2e, rest = __fmaf_rn(x, kLog2eRest, __fmaf_rn(x, kLog2e, -power));
  const float approximate = exp2_approx(power);
  return __fmaf_rn(approximate, rest * kLn2, approximate);
}
DEVICE float sigmoid_of(float x) { return reciprocal_approx(1.f + exp_of(-x)); }

// 1 / sqrt(x), of an approximation and a step of Newton's.
DEVICE float inverse_root(float x) {
  const float r = exp2_approx(-0.5f * log2_approx(x));
  return r * (1.5f - 0.5f * x * r * r);
}

// log(1 + e^x), accurate however small: of z = e^-|x| <= 1 the series of 2 atanh(z / (2 + z)).
DEVICE float softplus_of(float x) {
  const float z = exp_of(x < 0.f ? x : -x), s = z * reciprocal_approx(2.f + z), squared = s * s;
  float sum = 2.f / 15;
#pragma unroll
  for (int n = 13; n > 0; n -= 2) sum = __fmaf_rn(sum, squared, 2.f / float(n));
  return __fmaf_rn(s, sum, x > 0.f ? x : 0.f);
}

// What decays are made of, of a head or of a channel.
struct GateNumbers {
  float x, bias, rate;
};

// The softplus of the gate, which is the step of Mamba's layers.
DEVICE float gate_step(const RecurrentParams& p, const GateNumbers& g) {
  const float s = softplus_of(g.x + g.bias), more = s < p.gate_min ? p.gate_min : s;  // a NaN stays one
  return more > p.gate_max ? p.gate_max : more;
}

// g of the recurrence: a state is multiplied by e^g. `step`: gate_step(), of a softplus.
DEVICE float log_decay(const RecurrentParams& p, const GateNumbers& g, float step) {
  if (p.gate_kind == kFixedGate) return -g.rate;
  if (p.gate_kind == kLogGate) return g.x;
  if (p.gate_kind == kSoftplusGate) return -exp_of(g.rate) * step;
  return p.gate_min * sigmoid_of(exp_of(g.rate) * (g.x + g.bias));
}

// What a token brings of them, and what a layer has. `channel`: of the head; read where the layer has numbers of channels.
template <bool channel_gate>
DEVICE float load_gate(const RecurrentParams& p, int token, int head, int channel) {
  if (p.gate == nullptr) return 0.f;
  const long own = channel_gate ? channel * (p.gate_is_f32 ? 4 : element_bytes(kType)) : 0;
  return load_number(p.gate + token * p.gate_token_stride + head * p.gate_head_stride + own, p.gate_is_f32);
}
template <bool channel_gate>
DEVICE GateNumbers with_parameters(const RecurrentParams& p, float x, int head, int channel) {
  return {x, p.gate_bias != nullptr ? p.gate_bias[head * p.bias_stride + (channel_gate ? channel : 0)] : 0.f,
          p.rates != nullptr ? p.rates[head * p.rates_stride + (p.channel_rates ? channel : 0)] : 0.f};
}
template <bool channel_gate>
DEVICE GateNumbers gate_numbers(const RecurrentParams& p, int token, int head, int channel) {
  return with_parameters<channel_gate>(p, load_gate<channel_gate>(p, token, head, channel), head, channel);
}

DEVICE float load_beta(const RecurrentParams& p, int token, int head) {
  return p.delta ? load_number(p.beta + token * p.beta_token_stride + head * p.beta_head_stride, p.beta_is_f32) : 1.f;
}
// The factor of what is written, of what load_beta() loads.
DEVICE float beta_of(const RecurrentParams& p, float beta) {
  return p.delta ? (p.sigmoid_beta ? sigmoid_of(beta) : beta) * p.beta_scale : 1.f;
}

// A request of the step, where it is to be computed; else it has no tokens.
struct RecurrentItem {
  int begin, end, first_row, drafts;
  char *state, *source;  // row 0 of the slots that the request writes and reads
};
// `end`: where the next request begins.
DEVICE RecurrentItem item_of(const RecurrentParams& p, const StateRequest& r, int end, int index, bool tells) {
  if (r.slot < 0 || r.begin >= end || end > p.num_tokens) return {};
  if (max(r.slot, r.source) >= p.num_slots) {
    if (tells && p.broken != nullptr) atomicMax(p.broken + kStateSlotIsThere, index + 1);
    return {};
  }
  return {r.begin, end, r.first_row, r.drafts, p.state + r.slot * p.state_slot_stride, p.state + r.source * p.state_slot_stride};
}
DEVICE RecurrentItem item_of(const RecurrentParams& p, int index, bool tells) {
  const StateRequest r = p.requests[index];
  return item_of(p, r, p.requests[index + 1].begin, index, tells);
}
// The row that a token begins from, whose own state goes to `row`, where that is not the state in front of it; else negative.
DEVICE int parent_row(const RecurrentParams& p, int token, int row) {
  if (row <= 0) return -1;
  const int parent = p.parent_rows[token];
  return parent == row - 1 ? -1 : parent;
}
// Where starts of requests fall, nobody knows which tokens are meant, and no request is computed.
DEVICE int num_requests(const RecurrentParams& p) { return p.counts->num_tokens > 0 ? p.counts->num_reqs : 0; }

// The tokens of a request that come in chunks, and those behind them, which are computed one by one.
DEVICE RecurrentItem chunks_of(const RecurrentParams& p, int index) {
  RecurrentItem item = item_of(p, index, false);
  item.end = item.begin + chunked_tokens(p.least_chunked, item.end - item.begin, item.drafts);
  return item;
}
DEVICE RecurrentItem behind_chunks(const RecurrentParams& p, RecurrentItem item) {
  const int before = chunked_tokens(p.least_chunked, item.end - item.begin, item.drafts);
  if (before > 0) item.begin += before, item.first_row = 0, item.source = item.state;
  return item;
}
DEVICE RecurrentItem tokens_of(const RecurrentParams& p, int index, bool tells) { return behind_chunks(p, item_of(p, index, tells)); }

}  // namespace imbrex::cuda
