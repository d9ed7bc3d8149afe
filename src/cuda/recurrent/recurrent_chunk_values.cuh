#pragma once
// What a warp of recurrent_chunks.cu and of recurrent_chunks_sm90.cu has in registers: S^T of 16 values, and numbers of these for each
// token. What products give has the layout that products take.
#include "recurrent_chunk_units.cuh"

namespace imbrex::cuda {

constexpr int kWarpValues = 16;

// S^T of a warp's 16 values: with g = lane / 4 and t = lane % 4, values g and g + 8 at key channels 8i + 2t and the next.
struct Sums {
  float of[kDimK / 8][4];
};
// And numbers of the values for each token of a chunk, or of its first blocks of 16.
template <int blocks = kBlocks>
struct Columns {
  static constexpr int num_blocks = blocks;
  float of[2 * blocks][4];
};
// The first factor of a product over these tokens.
template <int blocks = kBlocks>
struct Factor {
  u32 of[blocks][4];
};

// The first factor of a product over 16 channels or tokens, of two neighbours of what a product gave.
DEVICE void pack_factor(const float (&low)[4], const float (&high)[4], u32 (&a)[4]) {
  a[0] = pack(low[0], low[1]), a[1] = pack(low[2], low[3]), a[2] = pack(high[0], high[1]), a[3] = pack(high[2], high[3]);
}
template <int blocks>
DEVICE Factor<blocks> factor_of(const Columns<blocks>& x) {
  Factor<blocks> a;
#pragma unroll
  for (int block = 0; block < blocks; ++block) pack_factor(x.of[2 * block], x.of[2 * block + 1], a.of[block]);
  return a;
}

// --- states

// Calls visit(two numbers of the warp's state, of neighbouring key channels; where the first lies).
template <class State, class Visit>
DEVICE void each_pair(State& s, char* state, int value, const Visit& visit) {
#pragma unroll
  for (int i = 0; i < kDimK / 8; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int v = value + lane_id() / 4 + 8 * j, k = 8 * i + lane_id() % 4 * 2;
      visit(&s.of[i][2 * j], state + (kKeysFirst ? k * kDimV + v : v * kDimK + k) * kStateSize);
    }
}
DEVICE void load_sums(char* state, int value, Sums& s) {
  each_pair(s, state, value, [](float* x, const char* at) {
    if constexpr (kKeysFirst) {
      x[0] = load_number<kStateType>(at), x[1] = load_number<kStateType>(at + kDimV * kStateSize);
    } else {
      float pair[2];
      load_run<kStateType, true>(at, 2, pair);
      x[0] = pair[0], x[1] = pair[1];
    }
  });
}
DEVICE void store_sums(char* state, int value, const Sums& s) {
  each_pair(s, state, value, [](const float* x, char* at) {
    if constexpr (kKeysFirst) {
      store_number<kStateType>(at, x[0]), store_number<kStateType>(at + kDimV * kStateSize, x[1]);
    } else {
      const float pair[2] = {x[0], x[1]};
      store_run<kStateType, true>(at, 2, pair);
    }
  });
}

// A request that has chunks in several rounds hands its state on as floats.
DEVICE i64 carried_at(const Unit& unit, int value, int number) {
  return (i64(unit.head) * kDimV + unit.first_value + value) * kDimK + number * 32 + lane_id();
}
DEVICE char* state_of(const RecurrentParams& p, const Unit& unit, int row) {
  return unit.item.state + row * p.state_row_stride + unit.head * p.state_head_stride;
}
// A row of a segment's place.
DEVICE float* segment_row(const RecurrentParams& p, const Unit& unit, int segment, int row) {
  return segment_place(p, unit.first_chunk + segment * segment_chunks(p, chunks_in(unit.item)), unit.head) + row * kDimK;
}
// Calls visit(two numbers of a warp's 16 rows, of neighbouring key channels; where they lie).
template <class State, class Visit>
DEVICE void each_pair_of_rows(State& s, float* rows, const Visit& visit) {
#pragma unroll
  for (int i = 0; i < kDimK / 8; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j)
      visit(&s.of[i][2 * j], reinterpret_cast<float2*>(rows + (lane_id() / 4 + 8 * j) * kDimK + 8 * i + lane_id() % 4 * 2));
}
// What becomes a row of what a segment does to a state: a unit vector, or without the delta rule one of ones.
DEVICE void begin_transition(int first_row, Sums& s) {
#pragma unroll
  for (int i = 0; i < kDimK / 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      s.of[i][j] = !kDelta || first_row + lane_id() / 4 + j / 2 * 8 == 8 * i + lane_id() % 4 * 2 + j % 2 ? 1.f : 0.f;
}
// The state in front of a unit's chunks in the round. That of a request with segments moves to the place of its last segment before anybody
// can write the one behind it.
DEVICE void begin_sums(const RecurrentParams& p, const Unit& unit, int value, Sums& s) {
  const int segments = p.most_segments > 1 ? segments_in(p, unit.item) : 1, row = unit.first_value + value;
  s = {};
  if (unit.is_transition()) {
    begin_transition(row - kDimV, s);
  } else if (!kEnds && segments > 1) {
    each_pair_of_rows(s, segment_row(p, unit, (unit.segment + segments - 1) % segments, row),
                      [](float* x, const float2* at) { x[0] = at->x, x[1] = at->y; });
  } else if (!kEnds && unit.begin > unit.item.begin) {
#pragma unroll
    for (int i = 0; i < kDimK / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) s.of[i][j] = p.carried_in[carried_at(unit, value, i * 4 + j)];
  } else if (unit.segment == 0 && unit.item.first_row >= 0) {
    load_sums(unit.item.source + unit.item.first_row * p.state_row_stride + unit.head * p.state_head_stride, row, s);
  }
  if (kEnds && unit.segment == 0)
    each_pair_of_rows(s, segment_row(p, unit, segments - 1, row), [](const float* x, float2* at) { *at = {x[0], x[1]}; });
}
// What a unit begins with comes to L2, by a warp, if it is the state of a slot.
DEVICE void prefetch_state(const RecurrentParams& p, const Unit& unit) {
  if (!unit.is_there() || unit.is_transition() || unit.begin > unit.item.begin || unit.item.first_row < 0) return;
  const char* const state = unit.item.source + unit.item.first_row * p.state_row_stride + unit.head * p.state_head_stride;
  if constexpr (kKeysFirst) {
#pragma unroll 1
    for (int k = lane_id(); k < kDimK; k += 32)
      bulk_prefetch(state + (k * kDimV + unit.first_value) * kStateSize, kTileValues * kStateSize);
  } else {
    if (lane_id() == 0) bulk_prefetch(state + unit.first_value * kDimK * kStateSize, kTileValues * kDimK * kStateSize);
  }
  __syncwarp();
}
DEVICE void end_sums(const RecurrentParams& p, const Unit& unit, int value, const Sums& s) {
  if constexpr (kEnds) {
    const int row = unit.first_value + value;
    if (kDelta || row < kDimV) {
      each_pair_of_rows(s, segment_row(p, unit, unit.segment, row), [](const float* x, float2* at) { *at = {x[0], x[1]}; });
    } else if (row == kDimV && lane_id() < 4) {
      float* const to = segment_row(p, unit, unit.segment, row);
#pragma unroll
      for (int i = 0; i < kDimK / 8; ++i) *reinterpret_cast<float2*>(to + 8 * i + lane_id() * 2) = {s.of[i][0], s.of[i][1]};
    }
    return;
  }
  if (unit.is_last()) {
    store_sums(state_of(p, unit, 0), unit.first_value + value, s);
  } else if (p.most_segments == 1) {
#pragma unroll
    for (int i = 0; i < kDimK / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) p.carried_out[carried_at(unit, value, i * 4 + j)] = s.of[i][j];
  }
}

// --- values and outputs

// Two numbers of neighbouring tokens that a lane has in tile i of Columns.
DEVICE float2 of_tokens(const float* numbers, int i) { return *reinterpret_cast<const float2*>(numbers + 8 * i + lane_id() % 4 * 2); }

// All such pairs of a lane, in registers: they are loaded in front of a wait for products, so that the loads take no time behind it.
template <int blocks>
struct TokenNumbers {
  float2 of[2 * blocks];
};
template <int blocks>
DEVICE TokenNumbers<blocks> load_numbers(const float* numbers) {
  TokenNumbers<blocks> x;
#pragma unroll
  for (int i = 0; i < 2 * blocks; ++i) x.of[i] = of_tokens(numbers, i);
  return x;
}
template <int blocks>
DEVICE float2 of_tokens(const TokenNumbers<blocks>& numbers, int i) {
  return numbers.of[i];
}

template <int blocks, class Numbers>
DEVICE void scale_columns(Columns<blocks>& x, const Numbers& numbers) {
#pragma unroll
  for (int i = 0; i < 2 * blocks; ++i) {
    const float2 factor = of_tokens(numbers, i);
    x.of[i][0] *= factor.x, x.of[i][1] *= factor.y, x.of[i][2] *= factor.x, x.of[i][3] *= factor.y;
  }
}
// Over the chunk at a place of shared memory.
DEVICE void decay_sums(Sums& s, int place) {
#pragma unroll
  for (int i = 0; i < kDimK / 8; ++i) {
    const float all = kChannelGate ? 0.f : numbers_at(place).decay;
    const float2 decay = kChannelGate ? *reinterpret_cast<const float2*>(decays_at(place) + 8 * i + lane_id() % 4 * 2) : float2{all, all};
    s.of[i][0] *= decay.x, s.of[i][1] *= decay.y, s.of[i][2] *= decay.x, s.of[i][3] *= decay.y;
  }
}

// A warp's values of each token, in pairs of tokens.
template <int blocks = kBlocks>
DEVICE Factor<blocks> load_values(const Stage& stage, int value) {
  Factor<blocks> v;
#pragma unroll
  for (int block = 0; block < blocks; ++block)
    load_matrix_transposed(v.of[block], place_in(stage.v(), 16 * block + row_of_lane(), value / 8 + half_of_lane()));
  return v;
}
// Those in tile i of Columns.
template <int blocks>
DEVICE void values_of_tile(const Factor<blocks>& v, int i, float (&values)[4]) {
  const float2 first = unpack(v.of[i / 2][i % 2 * 2]), second = unpack(v.of[i / 2][i % 2 * 2 + 1]);
  values[0] = first.x, values[1] = first.y, values[2] = second.x, values[3] = second.y;
}

// X in the place of what the state gives for k: the values, less what the state knows.
template <int blocks, class Numbers>
DEVICE void take_values(const Factor<blocks>& v, const Numbers& of_values, const Numbers& of_known, Columns<blocks>& x) {
#pragma unroll
  for (int i = 0; i < 2 * blocks; ++i) {
    float values[4];
    values_of_tile(v, i, values);
    const float2 factor = of_tokens(of_values, i), known = kDelta ? of_tokens(of_known, i) : float2{0.f, 0.f};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      x.of[i][j] = values[j] * (j % 2 == 0 ? factor.x : factor.y) - (kDelta ? x.of[i][j] * (j % 2 == 0 ? known.x : known.y) : 0.f);
  }
}
// Outputs as far as the state and the values make them, in the place of what the state gives for q.
template <int blocks, class Numbers>
DEVICE void begin_outputs(const Stage& stage, int value, const Numbers& numbers, float skip, Columns<blocks>& y) {
  scale_columns(y, numbers);
  if constexpr (kSkip) {
    const Factor<blocks> v = load_values<blocks>(stage, value);
#pragma unroll
    for (int i = 0; i < 2 * blocks; ++i) {
      float values[4];
      values_of_tile(v, i, values);
#pragma unroll
      for (int j = 0; j < 4; ++j) y.of[i][j] = __fmaf_rn(skip, values[j], y.of[i][j]);
    }
  }
}

// Four pairs of neighbouring tokens as rows of tokens; place(row, half) is where 8 values go.
template <class Place>
DEVICE void store_transposed(const u32 (&words)[4], const Place& place) {
  if constexpr (kArch >= 900) {
    store_matrix_transposed(place(row_of_lane(), half_of_lane()), words);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 at = place(i / 4 * 8 + lane_id() % 4 * 2 + i % 2, i / 2 % 2) - shared_address(block_memory()) + u32(lane_id() / 4 * 2);
      *reinterpret_cast<u16*>(block_memory() + at) = u16(words[i / 2] >> i % 2 * 16);
    }
  }
}

// Outputs come to the place that the warp's values had.
template <int blocks>
DEVICE void place_outputs(const Stage& stage, int value, const Columns<blocks>& y) {
#pragma unroll
  for (int block = 0; block < blocks; ++block) {
    u32 words[4];
    pack_factor(y.of[2 * block], y.of[2 * block + 1], words);
    store_transposed(words, [&](int row, int half) { return place_in(stage.v(), 16 * block + row, value / 8 + half); });
  }
}
// And from there to memory, as those of the tokens from `begin` on.
template <int blocks = kBlocks>
DEVICE void store_outputs(const RecurrentParams& p, const Unit& unit, int begin, const Stage& stage, int value) {
  constexpr int kHalves = kWarpValues / 8;
  char* const to = p.out + begin * p.out_token_stride + unit.head * p.out_head_stride + (unit.first_value + value) * kSize;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16 * blocks * kHalves / 32; ++i) {
    const int row = i * (32 / kHalves) + lane_id() / kHalves, half = lane_id() % kHalves;
    const uint4 words = load_shared(place_in(stage.v(), row, value / 8 + half));
    if (row < unit.item.end - begin) *reinterpret_cast<uint4*>(to + row * p.out_token_stride + 16 * half) = words;
  }
}

}  // namespace imbrex::cuda
