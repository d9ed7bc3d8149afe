#pragma once
// Logarithms of decays of channels, of a chunk and a value head, as recurrent_channel_weights.cu sums them: which tokens and channels a
// warp of its thread blocks has, and what these are multiplied by from token to token.
#include "recurrent_chunks_parts.cuh"

namespace imbrex::cuda {

constexpr int kRows = 8, kEights = kChunk / kRows, kParts = kDimK / 64;  // a warp has so many tokens, and 64 channels
// To base 2. 2 to the power of the least logarithm is 0, and sums of it can be told apart.
constexpr float kLeastLog = -200.f;

// What a thread block computes.
struct Work {
  long k, q, gate, rates, biases;  // where those of the head begin
  ChunkTokens tokens;
  int head;
};

// Which tokens and channels a warp has. A lane has two channels.
struct Part {
  int eight, number;
  int token, count;  // the first of the 8, and how many of them are there
  DEVICE int channel() const { return 64 * number + 2 * lane_id(); }
  // Where 16 bytes of a row lie in a tile.
  DEVICE u32 place(int row, int sixteen) const {
    return u32(number * kColumnBytes + (kRows * eight + row) * 128) + (u32(sixteen) ^ u32(row)) * 16;
  }
  // And a lane's channels.
  DEVICE u32 place(int row) const { return place(row, lane_id() / 4) + u32(lane_id() % 4 * 4); }
};
DEVICE Part part_of(int warp, const ChunkTokens& tokens) {
  const int eight = int(u32(warp) % kEights);
  return {eight, int(u32(warp) / kEights), tokens.begin + kRows * eight, tokens.count - kRows * eight};
}
// Sums of logarithms of a lane's channels since the first of 8 tokens.
struct Logs {
  float2 of[kRows];
};

// A number of the code that a function is made for.
template <int n>
struct Constant {
  static constexpr int value = n;
};

// log2(1 + 2^x), to some hundred-thousandths of it, by approximations of log2 and 2^x, but where it is next to 0 by a series. If not
// `exact`, it may be infinite where x is large.
template <bool exact>
DEVICE float softplus_2(float x) {
  constexpr float kLarge = 43.f, kSmall = 1.f / 128;  // 2^-43 is nothing beside 1
  const float z = exp2_approx(x), series = z * __fmaf_rn(z, -0.5f * kLog2e, kLog2e), log = log2_approx(1.f + z);
  const float y = z < kSmall ? series : log;
  return exact && x > kLarge ? x : y;
}

// Sums of logarithms. Tokens behind the last one do not decay. If not `exact`, they are good where that of all tokens is at least
// kLeastLog.
template <bool exact>
DEVICE void make_logs(const RecurrentParams& p, const Work& work, const Part& part, Logs& logs) {
  const int count = part.count, channel = part.channel(), bytes = p.gate_is_f32 ? 4 : element_bytes(kType);
  const char* const from = p.gate + work.gate + i64(u32(part.token)) * p.gate_token_stride + channel * bytes;
  float x[kRows][2], biases[2] = {0.f, 0.f}, rates[2] = {0.f, 0.f};
  if (p.gate_kind != kLogGate) {
    const float* const of_biases = p.gate_bias + work.biases + channel;
    const float* const of_rates = p.rates + work.rates + (p.channel_rates ? channel : 0);
    if (p.gate_bias != nullptr) biases[0] = of_biases[0], biases[1] = of_biases[1];
    if (p.rates != nullptr) rates[0] = of_rates[0], rates[1] = of_rates[p.channel_rates];
  }
  const auto load = [&](auto type, auto whole) {  // one branch for all: behind one each, loads would wait for each other
    const char* at = from;
#pragma unroll
    for (int row = 0; row < kRows; ++row, at = computed_here(at + p.gate_token_stride))
      load_run<type.value, whole.value != 0>(at, row < count ? 2 : 0, x[row]);
  };
  const u32 places = u32(reinterpret_cast<long>(p.gate) | work.gate | p.gate_token_stride);
  if (count < kRows || (places & u32(2 * bytes - 1)) != 0) {
    p.gate_is_f32 ? load(Constant<kF32>{}, Constant<0>{}) : load(Constant<kType>{}, Constant<0>{});
  } else {
    p.gate_is_f32 ? load(Constant<kF32>{}, Constant<1>{}) : load(Constant<kType>{}, Constant<1>{});
  }
  float factors[2] = {kLog2e, kLog2e};  // of what `x` has by then
  if (p.gate_kind != kLogGate) {
    biases[0] *= kLog2e, biases[1] *= kLog2e;
    rates[0] = exp_of(rates[0]), rates[1] = p.channel_rates ? exp_of(rates[1]) : rates[0];
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) x[i / 2][i % 2] = __fmaf_rn(x[i / 2][i % 2], kLog2e, biases[i % 2]);
    if (p.gate_kind == kSoftplusGate) {
      factors[0] = -rates[0], factors[1] = -rates[1];
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i) x[i / 2][i % 2] = softplus_2<exact>(x[i / 2][i % 2]);
      if (p.gate_min > 0.f || p.gate_max < infinity()) {
#pragma unroll
        for (int i = 0; i < 2 * kRows; ++i) {
          float& y = x[i / 2][i % 2];
          y = y < p.gate_min * kLog2e ? p.gate_min * kLog2e : y;  // a NaN stays one
          y = y > p.gate_max * kLog2e ? p.gate_max * kLog2e : y;
        }
      }
    } else {
      factors[0] = factors[1] = p.gate_min * kLog2e;
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i) x[i / 2][i % 2] = reciprocal_approx(1.f + exp2_approx(-rates[i % 2] * x[i / 2][i % 2]));
    }
  }
  if (count < kRows) {
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) x[i / 2][i % 2] = i / 2 < count ? x[i / 2][i % 2] : 0.f;
  }
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if constexpr (exact) {
      const float first = factors[0] * x[row][0], second = factors[1] * x[row][1];
      sum.x += first < kLeastLog ? kLeastLog : first, sum.y += second < kLeastLog ? kLeastLog : second;
    } else {
      sum = {__fmaf_rn(factors[0], x[row][0], sum.x), __fmaf_rn(factors[1], x[row][1], sum.y)};
    }
    logs.of[row] = sum;
  }
}
// Whether there is a lane with channels whose sums are below a limit, or are no numbers.
DEVICE bool are_below(const float2& sums, float limit) { return any_lane(!(sums.x >= limit) || !(sums.y >= limit)); }

}  // namespace imbrex::cuda
