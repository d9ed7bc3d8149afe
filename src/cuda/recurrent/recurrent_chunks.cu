// Prompts of recurrent layers whose heads have one decay, in chunks of 64 tokens, docs/kernels/recurrent.md; launched by
// cuda/recurrent/recurrent_plan.cpp.
//
// Within a chunk all is products of matrices. With G the sum of the logarithms of decays up to and with a token, n the factors of norms,
// and A[i][j] = beta_i n_i n_j (k_i . k_j) e^(G_i - G_j) below the diagonal, what tokens write is U = T X with T = (1 + A)^-1 and X_i =
// beta_i (v_i - n_i e^G_i S^T k_i); without the delta rule U is X, and X the values. Then
//   out_i = scale n_i e^G_i S^T q_i + sum over j <= i of P[i][j] U_j,   P[i][j] = scale n_i n_j (q_i . k_j) e^(G_i - G_j)
//   S = e^G_last S + sum over j of n_j e^(G_last - G_j) k_j U_j^T
// T and P do not depend on the state: recurrent_weights.cu makes them for many chunks at once. What is left goes from chunk to chunk. A
// thread block has a value head of a request and kWarpValues values for each of its warps, which do not depend on each other: a warp keeps
// S^T of its values in registers, where what products give has the layout that products take, and reads the rest from shared memory, to
// which the warps copy the next chunk before they compute one.
#include "recurrent_chunks_parts.cuh"

namespace imbrex::cuda {

constexpr int kWarpValues = kRecurrentChunkValues, kWarps = kTileValues / kWarpValues;
constexpr int kThreads = 32 * kWarps, kStages = kRecurrentChunkStages;
constexpr int kTiles = kDimV / kTileValues;
static_assert(kTileValues % 64 == 0 && kDimV % kTileValues == 0);

// Addresses in shared memory of a chunk.
struct Stage {
  static constexpr int keys = kChunk * kDimK * kSize, values = kChunk * kTileValues * kSize,
                       bytes = 2 * keys + values + WeightsLayout::bytes;
  static_assert(bytes % 16 == 0);
  u32 k;
  DEVICE u32 q() const { return k + keys; }
  DEVICE u32 v() const { return k + 2 * keys; }
  DEVICE u32 weights() const { return k + 2 * keys + values; }
};
extern "C" __device__ const unsigned smem_bytes = kStages * Stage::bytes;
extern __shared__ __align__(128) char memory[];

DEVICE Stage stage_of(int number) { return {shared_address(memory) + u32(number % kStages * Stage::bytes)}; }
DEVICE const ChunkNumbers& numbers_of(int number) {
  return *reinterpret_cast<const ChunkNumbers*>(memory + (number % kStages + 1) * Stage::bytes - int(sizeof(ChunkNumbers)));
}

// A head of a request and kTileValues of its values, with those of its chunks that are in the round; in the order in which a thread block
// takes them.
struct Unit {
  u32 index;
  RecurrentItem item;
  int head, first_value, first_chunk;  // the number of the request's first chunk
  int begin, end;                      // tokens in the round

  DEVICE explicit Unit(const RecurrentParams& p) : index(blockIdx.x) { find(p); }
  DEVICE bool is_there() const { return begin < end; }
  DEVICE void next(const RecurrentParams& p) { index += gridDim.x, find(p); }
  DEVICE bool is_last() const { return end == item.end; }
  DEVICE int chunk_at(int token) const { return first_chunk + (token - item.begin) / kChunk; }

 private:
  // A warp looks at 32 units at a time: of a batch with many requests few may have chunks.
  DEVICE void find(const RecurrentParams& p) {
    const u32 each = u32(p.num_v_heads * kTiles), units = u32(num_requests(p)) * each;
    begin = end = 0;
    for (; index < units; index += 32 * gridDim.x) {
      const u32 mine = index + u32(lane_id()) * gridDim.x;
      const u32 found = __ballot_sync(kFullWarp, mine < units && take(p, int(mine / each)));
      if (found == 0) continue;
      index += u32(lowest_bit(found)) * gridDim.x;
      take(p, int(index / each));
      head = int(index % each) / kTiles, first_value = int(index % each) % kTiles * kTileValues;
      return;
    }
    begin = end = 0;
  }
  DEVICE bool take(const RecurrentParams& p, int request) {
    item = chunks_of(p, request);
    first_chunk = first_chunk_of(p, request);
    begin = item.begin + max(p.first_chunk - first_chunk, 0) * kChunk;
    end = min(item.end, item.begin + max(p.end_chunk - first_chunk, 0) * kChunk);
    return begin < end;
  }
};

// --- copies

// Addresses of many copies at a time take registers, which are short where there are no matrices to store.
constexpr int kCopiesTogether = kArch >= 900 ? 64 : 1;

// The next chunk to be copied.
struct CopyCursor {
  Unit unit;
  int begin, number = 0;

  DEVICE explicit CopyCursor(const RecurrentParams& p) : unit(p), begin(unit.begin) {}
  DEVICE void copy(const RecurrentParams& p) {
    if (unit.is_there()) {
      const int key_head = unit.head / p.group, count = min(unit.item.end - begin, kChunk);
      const Stage stage = stage_of(number);
      copy_rows<kDimK / 8, kThreads, kCopiesTogether>(stage.k, p.k + begin * p.k_token_stride + key_head * p.k_head_stride,
                                                      p.k_token_stride, count);
      copy_rows<kDimK / 8, kThreads, kCopiesTogether>(stage.q(), p.q + begin * p.q_token_stride + key_head * p.q_head_stride,
                                                      p.q_token_stride, count);
      copy_rows<kTileValues / 8, kThreads, kCopiesTogether>(
          stage.v(), p.v + begin * p.v_token_stride + unit.head * p.v_head_stride + unit.first_value * kSize, p.v_token_stride, count);
      const char* const weights = weights_at(p, unit.chunk_at(begin), unit.head);
#pragma unroll 1
      for (int i = int(threadIdx.x) * 16; i < WeightsLayout::bytes; i += kThreads * 16)
        copy_async<16>(stage.weights() + u32(i), weights + i);
      begin += kChunk, ++number;
      if (begin >= unit.end) unit.next(p), begin = unit.begin;
    }
    copy_async_commit();
  }
};

// --- products

// S^T of a warp's values: with g = lane / 4 and t = lane % 4, values g and g + 8 at key channels 8i + 2t and the next.
struct Sums {
  float of[kDimK / 8][4];
};
// And numbers of the values for each token of a chunk.
struct Columns {
  float of[kChunk / 8][4];
};

// The first factor of a product over 16 channels or tokens, of two neighbours of what a product gave.
DEVICE void pack_factor(const float (&low)[4], const float (&high)[4], u32 (&a)[4]) {
  a[0] = pack(low[0], low[1]), a[1] = pack(low[2], low[3]), a[2] = pack(high[0], high[1]), a[3] = pack(high[2], high[3]);
}

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

// What the state gives for each token's k and q.
DEVICE void multiply_state(const Sums& s, const Stage& stage, Columns& of_k, Columns& of_q) {
  of_k = {}, of_q = {};
#pragma unroll
  for (int c = 0; c < kDimK / 16; ++c) {
    u32 a[4], b[4];
    pack_factor(s.of[2 * c], s.of[2 * c + 1], a);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if constexpr (kDelta) {
        load_matrix(b, place_in<kDimK / 8>(stage.k, 16 * block + row_of_lane(), 2 * c + half_of_lane()));
        multiply(of_k.of[2 * block], a, b[0], b[1]), multiply(of_k.of[2 * block + 1], a, b[2], b[3]);
      }
      load_matrix(b, place_in<kDimK / 8>(stage.q(), 16 * block + row_of_lane(), 2 * c + half_of_lane()));
      multiply(of_q.of[2 * block], a, b[0], b[1]), multiply(of_q.of[2 * block + 1], a, b[2], b[3]);
    }
  }
}

// x += y W^T for a triangle W.
DEVICE void multiply_triangle(Columns& x, const Columns& y, u32 triangle) {
#pragma unroll
  for (int from = 0; from < kBlocks; ++from) {
    u32 a[4], b[4];
    pack_factor(y.of[2 * from], y.of[2 * from + 1], a);
#pragma unroll
    for (int to = from; to < kBlocks; ++to) {
      load_matrix(b, triangle + u32(block_index(to, from) * kBlockBytes + lane_id() * 16));
      multiply(x.of[2 * to], a, b[0], b[1]), multiply(x.of[2 * to + 1], a, b[2], b[3]);
    }
  }
}

// Two numbers of neighbouring tokens that a lane has in tile i of Columns.
DEVICE float2 of_tokens(const float* numbers, int i) { return *reinterpret_cast<const float2*>(numbers + 8 * i + lane_id() % 4 * 2); }

DEVICE void scale_columns(Columns& x, const float* numbers) {
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
    const float2 factor = of_tokens(numbers, i);
    x.of[i][0] *= factor.x, x.of[i][1] *= factor.y, x.of[i][2] *= factor.x, x.of[i][3] *= factor.y;
  }
}

// Calls visit(tile of Columns, the values that belong there).
template <class Visit>
DEVICE void each_value(const Stage& stage, int value, const Visit& visit) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    u32 v[4];
    load_matrix_transposed(v, place_in<kTileValues / 8>(stage.v(), 16 * block + row_of_lane(), value / 8 + half_of_lane()));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 first = unpack(v[2 * i]), second = unpack(v[2 * i + 1]);
      const float values[4] = {first.x, first.y, second.x, second.y};
      visit(2 * block + i, values);
    }
  }
}

// X in the place of what the state gives for k: the values, less what the state knows. And outputs as far as the state and the values make
// them.
DEVICE void take_values(const Stage& stage, const ChunkNumbers& n, int value, float skip, Columns& x, Columns& y) {
  each_value(stage, value, [&](int i, const float(&values)[4]) {
    const float2 factor = of_tokens(n.values, i), output = of_tokens(n.outputs, i);
    const float2 known = kDelta ? of_tokens(n.known, i) : float2{0.f, 0.f};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool first = j % 2 == 0;
      y.of[i][j] = __fmaf_rn(y.of[i][j], first ? output.x : output.y, skip * values[j]);
      x.of[i][j] = values[j] * (first ? factor.x : factor.y) - (kDelta ? x.of[i][j] * (first ? known.x : known.y) : 0.f);
    }
  });
}

// S^T = e^G_last S^T + U^T k.
DEVICE void add_written(Sums& s, const Columns& u, const Stage& stage, float decay) {
#pragma unroll
  for (int i = 0; i < kDimK / 8; ++i)
#pragma unroll
    for (float& x : s.of[i]) x *= decay;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    u32 a[4], b[4];
    pack_factor(u.of[2 * block], u.of[2 * block + 1], a);
#pragma unroll
    for (int c = 0; c < kDimK / 16; ++c) {
      load_matrix_transposed(b, place_in<kDimK / 8>(stage.k, 16 * block + lane_id() % 16, 2 * c + lane_id() / 16));
      multiply(s.of[2 * c], a, b[0], b[1]), multiply(s.of[2 * c + 1], a, b[2], b[3]);
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
      const u32 at = place(i / 4 * 8 + lane_id() % 4 * 2 + i % 2, i / 2 % 2) - shared_address(memory) + u32(lane_id() / 4 * 2);
      *reinterpret_cast<u16*>(memory + at) = u16(words[i / 2] >> i % 2 * 16);
    }
  }
}

// Outputs go out by the place that the warp's values had.
DEVICE void store_outputs(const Stage& stage, const Columns& y, int value, char* to, long stride, int count) {
  constexpr int kHalves = kWarpValues / 8;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    u32 words[4];
    pack_factor(y.of[2 * block], y.of[2 * block + 1], words);
    store_transposed(words, [&](int row, int half) { return place_in<kTileValues / 8>(stage.v(), 16 * block + row, value / 8 + half); });
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kChunk * kHalves / 32; ++i) {
    const int row = i * (32 / kHalves) + lane_id() / kHalves, half = lane_id() % kHalves;
    const uint4 words = load_shared(place_in<kTileValues / 8>(stage.v(), row, value / 8 + half));
    if (row < count) *reinterpret_cast<uint4*>(to + row * stride + 16 * half) = words;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksTogether) recurrent_chunks(const __grid_constant__ RecurrentParams p) {
  griddep_wait();
  const int value = warp_id() * kWarpValues;
  int number = 0;
  CopyCursor ahead(p);
  ahead.copy(p);
  for (Unit unit(p); unit.is_there(); unit.next(p)) {
    Sums s = {};
    // A request that has chunks in several rounds hands its state on as floats.
    const auto place = [&](int row) { return unit.item.state + row * p.state_row_stride + unit.head * p.state_head_stride; };
    const auto carried = [&](int number) { return (i64(unit.head) * kDimV + unit.first_value + value) * kDimK + number * 32 + lane_id(); };
    if (unit.begin > unit.item.begin) {
#pragma unroll
      for (int i = 0; i < kDimK / 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) s.of[i][j] = p.carried_in[carried(i * 4 + j)];
    } else if (unit.item.first_row >= 0) {
      load_sums(place(unit.item.first_row), unit.first_value + value, s);
    }
#pragma unroll 1
    for (int begin = unit.begin; begin < unit.end; begin += kChunk, ++number) {
      copy_async_wait<0>();
      __syncthreads();  // the chunk is there, and all warps have computed the one before it
      ahead.copy(p);
      const Stage stage = stage_of(number);
      const ChunkNumbers& n = numbers_of(number);
      Columns u, y;  // u: what the state gives for k, then X, then U
      multiply_state(s, stage, u, y);
      take_values(stage, n, value, p.skip != nullptr ? p.skip[unit.head] : 0.f, u, y);
      if constexpr (kDelta) {
        Columns x = u;
        u = {};
        multiply_triangle(u, x, stage.weights());
      }
      multiply_triangle(y, u, stage.weights() + WeightsLayout::p);
      scale_columns(u, n.written);
      add_written(s, u, stage, n.decay);
      store_outputs(stage, y, value,
                    p.out + begin * p.out_token_stride + unit.head * p.out_head_stride + (unit.first_value + value) * kSize,
                    p.out_token_stride, unit.item.end - begin);
    }
    if (unit.is_last()) {
      store_sums(place(0), unit.first_value + value, s);
    } else {
#pragma unroll
      for (int i = 0; i < kDimK / 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) p.carried_out[carried(i * 4 + j)] = s.of[i][j];
    }
  }
  griddep_launch();
}

}  // namespace imbrex::cuda
