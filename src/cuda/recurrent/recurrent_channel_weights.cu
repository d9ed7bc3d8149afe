// What tokens of a chunk are to each other in recurrent layers whose channels have decays of their own: recurrent_weights.cu's job, and
// keys and queries with their decays besides; launched by cuda/recurrent/recurrent_plan.cpp.
//
// With G_i the sums of logarithms up to and with token i, a number for each channel, and n the factors of norms,
//   A[i][j] = beta_i n_i n_j sum over channels of k_i k_j e^(G_i - G_j)   for j < i,   and P[i][j] the like of q_i, for j <= i.
// Decays may be as small as e^-60 a token: e^-G_j alone has no bound. But with R the sums at a place between j and i, both e^(G_i - R) and
// e^(R - G_j) are at most 1, so that A is a product of matrices where a place lies between all its rows and columns: of 16 tokens and
// those in front of them, with the sums in front of these 16 or with those behind other 16. On the diagonal, 16 tokens and themselves, the
// place is their middle: there one factor of tokens of the same half is as large as the decay of 8 tokens is small. Where that is too
// small, or numbers have too small a range, pairs of tokens are summed one by one.
//
// A thread block has a chunk and a value head, a warp 64 channels of 8 of its tokens.
#include "recurrent_triangle.cuh"

namespace imbrex::cuda {

constexpr int kThreads = recurrent_channel_threads(kDimK), kWarps = kThreads / 32;
constexpr int kRows = 8, kEights = kChunk / kRows, kParts = kDimK / 64;
static_assert(kWarps == kEights * kParts && kEights == 2 * kBlocks);
// To base 2. 2 to the power of the least logarithm is 0, and sums of it can be told apart. 8 tokens that decay more are steep.
constexpr float kLeastLog = -200.f, kSteep = kType == kBf16 ? -100.f : 0.f;

// Factors of products as tiles of kChunk rows, in which the first or the last 16 are those of rows beyond the next 16:
//   keys and queries with their decays since the sums in front of their 16 rows, from row 16 on; rows 0 to 15 are rows 48 to 63 with their
//   decays since row 32;
//   keys with what they have left behind their 16 rows, up to row 47; rows 48 to 63 are rows 0 to 15 behind row 32;
//   and keys, queries and keys with the sums in the middle of their 16 rows.
// They begin at so many bytes. Where there is memory for five, the last ones take the place of those which are left behind 16 rows, once
// products of these are there.
constexpr int kNumTiles = recurrent_channel_tiles(kArch / 10);
constexpr bool kFiveTiles = kNumTiles == 5;
constexpr u32 kTileBytes = kChunk * kDimK * kSize, kKeys = 0, kQueries = kTileBytes, kLeft = 2 * kTileBytes, kKeysOfMiddle = 3 * kTileBytes,
              kQueriesOfMiddle = 4 * kTileBytes, kLeftOfMiddle = (kFiveTiles ? 2 : 5) * kTileBytes, kBeyond = (kChunk - 16) * 128;
struct SharedStorage {
  char tiles[kNumTiles * kTileBytes];
  union {
    float squares[kParts][kEights][2 * kRows];  // sums of squares of keys, and of queries
    char blocks[kTriangleBytes];                // of -A and D
  };
  union {
    float logs[kEights][kDimK];   // of 8 tokens together, to base 2
    Diagonal diagonals[kBlocks];  // once tiles are there
  };
  // Of the first and of the last 16 tokens, for each half of them: e^ of sums over the tokens between these and the chunk's middle.
  float between[2][2][kDimK];
  float betas[kChunk], k_norms[kChunk], q_norms[kChunk];  // q_norms: with the scale
  int steep[kParts][kEights];
  // What the thread block has, for whom it would be too much to keep.
  char* weights;
  ChunkTokens tokens;
};
// That a multiprocessor has memory for.
constexpr int kBlocksTogether = kFiveTiles && kDimK == 128 ? 1 : 2;
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);
static_assert(smem_bytes <= recurrent_channel_weights_smem(kDimK, kArch / 10));
extern __shared__ __align__(128) char memory[];

DEVICE SharedStorage& shared_storage() { return *reinterpret_cast<SharedStorage*>(memory); }
DEVICE u32 tile_at(u32 tile) { return shared_address(memory) + tile; }

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
  DEVICE float2 load(u32 tile, int row) const { return unpack(load_shared_element<4>(tile_at(tile) + place(row))); }
};
DEVICE Part part_of(int warp, const ChunkTokens& tokens) {
  const int eight = warp % kEights;
  return {eight, warp / kEights, tokens.begin + kRows * eight, tokens.count - kRows * eight};
}
// Sums of logarithms of a lane's channels since the first of 8 tokens.
struct Logs {
  float2 of[kRows];
};

DEVICE int key_head_of(const RecurrentParams& p, int head) { return int(u32(head) / u32(p.group)); }
// Copies a warp's part of rows of tokens to a tile; zeros for those that are not there.
DEVICE void copy_tokens(const Part& part, u32 tile, const char* from, long stride) {
  const int first = lane_id() / 8;
  const char* const at = from + (part.token + first) * stride + (64 * part.number + lane_id() % 8 * 8) * kSize;
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const bool there = first + 4 * i < part.count;
    copy_async<16>(tile_at(tile) + part.place(first + 4 * i, lane_id() % 8), there ? at + 4 * i * stride : from, there);
  }
}

// A number of the code that a function is made for.
template <int n>
struct Constant {
  static constexpr int value = n;
};

// log2(1 + 2^x), to some millionths of it, by approximations of log2 and 2^x, but where it is next to 0 by a series.
DEVICE float softplus_2(float x) {
  constexpr float kLarge = 43.f, kSmall = 1.f / 16;  // 2^-43 is nothing beside 1
  const float z = exp2_approx(x);
  const float series = z * __fmaf_rn(z, __fmaf_rn(z, __fmaf_rn(z, -0.25f * kLog2e, kLog2e / 3), -0.5f * kLog2e), kLog2e);
  const float log = log2_approx(1.f + z);
  return x > kLarge ? x : z < kSmall ? series : log;
}

// Sums of logarithms. Tokens behind the last one do not decay.
DEVICE void make_logs(const RecurrentParams& p, int head, const Part& part, Logs& logs) {
  const int count = part.count, channel = part.channel(), bytes = p.gate_is_f32 ? 4 : element_bytes(kType);
  const char* const from = p.gate + part.token * p.gate_token_stride + head * p.gate_head_stride + channel * bytes;
  float x[kRows][2];
  const auto load = [&](auto type, auto whole) {  // one branch for all: behind one each, loads would wait for each other
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      load_run<type.value, whole.value != 0>(from + row * p.gate_token_stride, row < count ? 2 : 0, x[row]);
  };
  const long places = reinterpret_cast<long>(p.gate) | p.gate_token_stride | p.gate_head_stride;
  if (count < kRows || (places & (2 * bytes - 1)) != 0) {
    p.gate_is_f32 ? load(Constant<kF32>{}, Constant<0>{}) : load(Constant<kType>{}, Constant<0>{});
  } else {
    p.gate_is_f32 ? load(Constant<kF32>{}, Constant<1>{}) : load(Constant<kType>{}, Constant<1>{});
  }
  float factors[2];  // of what `x` has by then
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const GateNumbers g = with_parameters<true>(p, 0.f, head, channel + i);
    const float bias = g.bias * kLog2e, rate = exp_of(g.rate);
    if (p.gate_kind == kSoftplusGate) {
      factors[i] = -rate;
#pragma unroll
      for (int row = 0; row < kRows; ++row) x[row][i] = softplus_2(__fmaf_rn(x[row][i], kLog2e, bias));
    } else if (p.gate_kind == kSigmoidGate) {
      factors[i] = p.gate_min * kLog2e;
#pragma unroll
      for (int row = 0; row < kRows; ++row) x[row][i] = reciprocal_approx(1.f + exp2_approx(-rate * __fmaf_rn(x[row][i], kLog2e, bias)));
    } else {
      factors[i] = kLog2e;
    }
  }
  if (p.gate_kind == kSoftplusGate && (p.gate_min > 0.f || p.gate_max < infinity())) {
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) {
      float& y = x[i / 2][i % 2];
      y = y < p.gate_min * kLog2e ? p.gate_min * kLog2e : y;  // a NaN stays one
      y = y > p.gate_max * kLog2e ? p.gate_max * kLog2e : y;
    }
  }
  if (count < kRows) {
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) x[i / 2][i % 2] = i / 2 < count ? x[i / 2][i % 2] : 0.f;
  }
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float first = factors[0] * x[row][0], second = factors[1] * x[row][1];
    sum.x += first < kLeastLog ? kLeastLog : first, sum.y += second < kLeastLog ? kLeastLog : second;
    logs.of[row] = sum;
  }
}

// Sums of squares of a warp's channels: the diagonal of what keys, and queries below them, are with each other.
DEVICE void sum_squares(const Part& part, float (&to)[2 * kRows]) {
  const u32 tile = tile_at(lane_id() % 16 < kRows ? kKeysOfMiddle : kQueriesOfMiddle);
  float keys[4] = {}, queries[4] = {};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    u32 a[4];
    load_matrix(a, tile + part.place(lane_id() % kRows, 2 * step + lane_id() / 16));
    multiply(keys, a, a[0], a[2]), multiply(queries, a, a[1], a[3]);
  }
  const int row = lane_id() / 4;
  if (lane_id() % 4 != row / 2) return;
  to[row] = row % 2 == 0 ? keys[0] : keys[1], to[kRows + row] = row % 2 == 0 ? queries[2] : queries[3];
}

// Factors of norms, and numbers of 8 tokens, a lane a token.
DEVICE void make_numbers(const RecurrentParams& p, int head, const Part& part, SharedStorage& s, ChunkNumbers& n) {
  const int row = kRows * part.eight + lane_id();
  const float beta = lane_id() < part.count ? beta_of(p, load_beta(p, part.token + lane_id(), head)) : 0.f;
  float norms[2] = {1.f, 1.f};
#pragma unroll
  for (int i = 0; kNorms && i < 2; ++i) {
    float sum = kNormEpsilon;
#pragma unroll
    for (int number = 0; number < kParts; ++number) sum += s.squares[number][part.eight][kRows * i + lane_id()];
    norms[i] = inverse_root(sum);
  }
  s.betas[row] = n.values[row] = beta, n.known[row] = beta * norms[0];
  s.k_norms[row] = n.written[row] = norms[0];
  s.q_norms[row] = n.outputs[row] = p.scale * norms[1];
  if (row == 0) n.decay = 1.f;
}

DEVICE float2 operator+(const float2& a, const float2& b) { return {a.x + b.x, a.y + b.y}; }
DEVICE float2 operator-(const float2& a, const float2& b) { return {a.x - b.x, a.y - b.y}; }
DEVICE float2 operator*(const float2& a, const float2& b) { return {a.x * b.x, a.y * b.y}; }
DEVICE float2 exp2_of(const float2& x) { return {exp2_approx(x.x), exp2_approx(x.y)}; }
DEVICE u32 pack(const float2& x) { return pack(x.x, x.y); }
DEVICE float2& pair_at(float* p) { return *reinterpret_cast<float2*>(p); }

// 8 tokens' rows of all tiles, and those of memory's, of their keys and queries, which lie in the middle's. `lower`: they are the lower
// half of their 16 tokens. `left_of_middle` has what goes to that tile, where it has no place yet.
template <bool lower>
DEVICE void store_tiles(SharedStorage& s, const Part& part, const Logs& logs, char* weights, u32 (&left_of_middle)[kRows]) {
  const int eight = part.eight, block = eight / 2, channel = part.channel();
  // e^ of sums over the tokens in front of the 8 and behind them, and over the other half of their 16 tokens.
  float2 before = {0.f, 0.f}, after = {0.f, 0.f};
#pragma unroll 1
  for (int e = 0; e < eight; ++e) before = before + pair_at(&s.logs[e][channel]);
#pragma unroll 1
  for (int e = eight + 1; e < kEights; ++e) after = after + pair_at(&s.logs[e][channel]);
  const float2 other = exp2_of(pair_at(&s.logs[eight ^ 1][channel])), own = logs.of[kRows - 1];
  float2& between = pair_at(&s.between[block / 2][lower][channel]);
  if (block == 0) between = exp2_of(pair_at(&s.logs[2][channel]) + pair_at(&s.logs[3][channel]));
  if (block == kBlocks - 1) between = exp2_of(pair_at(&s.logs[4][channel]) + pair_at(&s.logs[5][channel]));
  before = exp2_of(before), after = exp2_of(after);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const u32 place = part.place(row), tiles = shared_address(memory) + place;
    char* const to = weights + place;
    const auto store = [&](int tile, const float2& x) { *reinterpret_cast<u32*>(to + tile) = pack(x); };
    // Keys and queries with decays since the front of the 8, and keys with what is left behind them. The middle of the 16 tokens is one of
    // these places; at the other one factors are above 1.
    const float2 log = logs.of[row], rest = own - log, key = part.load(kKeysOfMiddle, row), query = part.load(kQueriesOfMiddle, row);
    const float2 forward = exp2_of(log), back = exp2_of(lower ? float2{-log.x, -log.y} : float2{-rest.x, -rest.y});
    float2 k = key * forward, q = query * forward, left = key * exp2_of(rest);
    if constexpr (kDelta) store_shared(tiles + kKeysOfMiddle, pack(lower ? k : key * back));
    store_shared(tiles + kQueriesOfMiddle, pack(lower ? q : query * back));
    left_of_middle[row] = pack(lower ? key * back : left);
    if constexpr (!kFiveTiles) store_shared(tiles + kLeftOfMiddle, left_of_middle[row]);
    store(WeightsLayout::known, k * before), store(WeightsLayout::asked, q * before), store(WeightsLayout::written, left * after);
    if constexpr (lower) {
      k = k * other, q = q * other;
    } else {
      left = left * other;
    }
    if (block > 0) {
      if constexpr (kDelta) store_shared(tiles + kKeys, pack(k));
      store_shared(tiles + kQueries, pack(q));
    }
    if (block == kBlocks - 1) {
      if constexpr (kDelta) store_shared(tiles + kKeys - kBeyond, pack(k * between));
      store_shared(tiles + kQueries - kBeyond, pack(q * between));
    } else {
      store_shared(tiles + kLeft, pack(left));
    }
    if (block == 0) store_shared(tiles + kLeft + kBeyond, pack(left * between));
  }
  if (eight == kEights - 1) pair_at(reinterpret_cast<float*>(weights + WeightsLayout::decays) + channel) = before * exp2_of(own);
}

DEVICE bool is_steep(const SharedStorage& s, int eight) { return (s.steep[0][eight] | s.steep[kParts - 1][eight]) != 0; }

// Products of 16 rows and 8 rows of two tiles over all channels.
DEVICE void multiply_rows(float (&x)[4], u32 rows, int row, u32 left, int column) {
#pragma unroll
  for (int steps = 0; steps < kDimK / 32; ++steps) {
    u32 b[4];
    load_matrix(b, place_in(left, column + lane_id() % 8, 4 * steps + lane_id() / 8));
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      u32 a[4];
      load_matrix(a, place_in(rows, row + lane_id() % 16, 2 * (2 * steps + step) + lane_id() / 16));
      multiply(x, a, b[2 * step], b[2 * step + 1]);
    }
  }
}

// Of A or of P, half a block: 16 rows and 8 columns, below the diagonal or on it. `x`: products of keys and queries with their decays.
template <bool queries>
DEVICE void store_half(int row, int column, int half, const float (&x)[4], char* weights, SharedStorage& s) {
  const int g = lane_id() / 4, t = lane_id() % 4, first = 16 * row, token = 16 * column + 8 * half + 2 * t;
  const float2 norms = pair_at(s.k_norms + token);
#pragma unroll
  for (int eight = 0; eight < 2; ++eight) {
    if (row == column && eight == half && is_steep(s, 2 * row + eight)) continue;
    const int own = first + 8 * eight + g;
    const float factor = queries ? s.q_norms[own] : -s.betas[own] * s.k_norms[own];
    const float y = own >= token + !queries ? factor * norms.x * x[2 * eight] : 0.f;
    const float z = own > token + !queries ? factor * norms.y * x[2 * eight + 1] : 0.f;
    if constexpr (queries)
      *reinterpret_cast<u32*>(weights + WeightsLayout::p + POrder::index(row, column) * kBlockBytes + word_in_block(eight, half)) =
          pack(y, z);
    else if (row == column)
      put_pair(s.diagonals[row], s.blocks + TOrder::index(row, row) * kBlockBytes, eight, half, g, 2 * t, {y, z});
    else
      *reinterpret_cast<u32*>(s.blocks + TOrder::index(row, column) * kBlockBytes + (2 * eight + half) * kMatrixBytes + lane_id() * 4) =
          pack_f16(y, z);
  }
}

// What a warp has of A or of P, as one of `kWarps / 2`: on the diagonal, and below it.
template <bool queries, bool diagonal, bool below>
DEVICE void make_products(int warp, char* weights, SharedStorage& s) {
  constexpr int kMakers = kWarps / 2, kDiagonals = 2 * kBlocks / kMakers, kBelow = (kBlocks * (kBlocks - 1) + kMakers - 1) / kMakers;
  // Of a block below the diagonal, four bits each: its row and column, and where the tiles have these.
  constexpr u32 kRowOf = 0x332321, kColumnOf = 0x010210, kFirstOf = 0x002321, kSecondOf = 0x313210;
#pragma unroll
  for (int i = 0; i < (diagonal ? kDiagonals : 0); ++i) {
    const int number = warp + kMakers * i, block = number / 2;
    float x[4] = {};
    multiply_rows(x, tile_at(queries ? kQueriesOfMiddle : kKeysOfMiddle), 16 * block, tile_at(kLeftOfMiddle), 8 * number);
    store_half<queries>(block, block, number % 2, x, weights, s);
  }
#pragma unroll
  for (int i = 0; i < (below ? kBelow : 0); ++i) {
    const int number = warp + kMakers * i, half = number % 2, shift = 4 * (number / 2);
    if (number >= kBlocks * (kBlocks - 1)) continue;
    float x[4] = {};
    multiply_rows(x, tile_at(queries ? kQueries : kKeys), int(kFirstOf >> shift & 15) * 16, tile_at(kLeft),
                  int(kSecondOf >> shift & 15) * 16 + 8 * half);
    store_half<queries>(int(kRowOf >> shift & 15), int(kColumnOf >> shift & 15), half, x, weights, s);
  }
}

// Steep tokens and themselves: what is on the diagonal and below it, by a warp, a lane a token j and two tokens i. `logs` are sums since
// the first of them.
constexpr int kPitch = kDimK + 8;  // floats of a row of `logs`: so that pairs of 8 rows touch every bank once
DEVICE void sum_pairs(int eight, const float* logs, char* weights, SharedStorage& s) {
  const int block = eight / 2, half = eight % 2, first = kRows * eight, j = first + lane_id() % 8, i = first + lane_id() / 8 * 2;
  const auto pair_of = [&](u32 tile, int row, int channel) {
    return unpack(load_shared_element<4>(place_in(tile_at(tile), row, channel / 8) + u32(channel % 8 * 2)));
  };
  const auto logs_of = [&](int row, int channel) { return *reinterpret_cast<const float2*>(logs + row * kPitch + channel); };
  float of_k[2] = {0.f, 0.f}, of_q[2] = {0.f, 0.f};
#pragma unroll 4
  for (int channel = 0; channel < kDimK; channel += 2) {
    const float2 key = pair_of(kKeysOfMiddle, j, channel), since = logs_of(j, channel);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float2 decayed = key * exp2_of(logs_of(i + row, channel) - since);
      const float2 x = pair_of(kKeysOfMiddle, i + row, channel), y = pair_of(kQueriesOfMiddle, i + row, channel);
      of_k[row] = __fmaf_rn(x.x, decayed.x, __fmaf_rn(x.y, decayed.y, of_k[row]));
      of_q[row] = __fmaf_rn(y.x, decayed.x, __fmaf_rn(y.y, decayed.y, of_q[row]));
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int token = i + row, at = token % 16;  // of the chunk, and of the block
    const float a = s.betas[token] * s.k_norms[token] * s.k_norms[j] * of_k[row], b = s.q_norms[token] * s.k_norms[j] * of_q[row];
    s.diagonals[block].of[half][at % 8 * Diagonal::pitch + j % 8] = token > j ? -a : 0.f;
    *reinterpret_cast<u16*>(weights + WeightsLayout::p + POrder::index(block, block) * kBlockBytes + place_in_block(at, half) + j % 8 * 2) =
        u16(pack(token >= j ? b : 0.f, 0.f));
  }
}
// Of all steep tokens, once nobody reads tiles: there keys, queries and sums of logarithms come again.
DEVICE void sum_steep(const RecurrentParams& p, int head, const Part& part, char* weights, SharedStorage& s) {
  static_assert(kChunk * kPitch * int(sizeof(float)) <= int(kKeysOfMiddle));
  float* const all = reinterpret_cast<float*>(s.tiles);
  copy_tokens(part, kKeysOfMiddle, p.k + key_head_of(p, head) * p.k_head_stride, p.k_token_stride);
  copy_tokens(part, kQueriesOfMiddle, p.q + key_head_of(p, head) * p.q_head_stride, p.q_token_stride);
  copy_async_commit();
  Logs logs;
  make_logs(p, head, part, logs);
#pragma unroll
  for (int row = 0; row < kRows; ++row) pair_at(all + (kRows * part.eight + row) * kPitch + part.channel()) = logs.of[row];
  copy_async_wait<0>();
  __syncthreads();
  if (part.number == 0 && is_steep(s, part.eight)) sum_pairs(part.eight, all, weights, s);
  __syncthreads();
}

// All that is made of a warp's tokens and channels.
DEVICE void make_tiles(const RecurrentParams& p, int head, const Part& part, SharedStorage& s, u32 (&left_of_middle)[kRows]) {
  copy_tokens(part, kKeysOfMiddle, p.k + key_head_of(p, head) * p.k_head_stride, p.k_token_stride);
  copy_tokens(part, kQueriesOfMiddle, p.q + key_head_of(p, head) * p.q_head_stride, p.q_token_stride);
  copy_async_commit();
  Logs logs;
  make_logs(p, head, part, logs);
  const float2 all = logs.of[kRows - 1];
  const bool steep = any_lane(!(all.x >= kSteep) || !(all.y >= kSteep));
  if (lane_id() == 0) s.steep[part.number][part.eight] = steep;
  pair_at(&s.logs[part.eight][part.channel()]) = all;
  copy_async_wait<0>();
  __syncwarp();
  if constexpr (kNorms) sum_squares(part, s.squares[part.number][part.eight]);
  __syncthreads();
  if (part.number == 0 && lane_id() < kRows)
    make_numbers(p, head, part, s, *reinterpret_cast<ChunkNumbers*>(s.weights + WeightsLayout::numbers));
  part.eight % 2 != 0 ? store_tiles<true>(s, part, logs, s.weights, left_of_middle)
                      : store_tiles<false>(s, part, logs, s.weights, left_of_middle);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksTogether)
    recurrent_channel_weights(const __grid_constant__ RecurrentParams p) {
  griddep_wait();
  SharedStorage& s = shared_storage();
  const u32 heads = u32(p.num_v_heads), first = blockIdx.x / heads;
  const int chunk = p.first_chunk + int(first), head = int(blockIdx.x - first * heads);
  const ChunkTokens tokens = tokens_of_chunk(p, chunk);
  if (tokens.count > 0) {
    if (threadIdx.x == 0) s.weights = weights_at(p, chunk, head), s.tokens = tokens;
    u32 left_of_middle[kRows];
    make_tiles(p, head, part_of(warp_id(), tokens), s, left_of_middle);
    __syncthreads();
    const int warp = warp_id();
    if constexpr (kFiveTiles) {
      if (kDelta && warp < kWarps / 2) make_products<false, false, true>(warp, s.weights, s);
      if (warp >= kWarps / 2) make_products<true, false, true>(warp - kWarps / 2, s.weights, s);
      __syncthreads();
      const Part part = part_of(warp, s.tokens);
#pragma unroll
      for (int row = 0; row < kRows; ++row) store_shared(tile_at(kLeftOfMiddle) + part.place(row), left_of_middle[row]);
      __syncthreads();
    }
    if (kDelta && warp < kWarps / 2) make_products<false, true, !kFiveTiles>(warp, s.weights, s);
    if (warp >= kWarps / 2) make_products<true, true, !kFiveTiles>(warp - kWarps / 2, s.weights, s);
    __syncthreads();
    bool steep = false;
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) steep |= is_steep(s, eight);
    if (steep) sum_steep(p, head, part_of(warp, s.tokens), s.weights, s);
    if constexpr (kDelta) {
      const u32 blocks = shared_address(memory) + u32(s.blocks - memory);
      if (warp < kBlocks / 2) {
        const int block = 2 * warp;
        invert_diagonals(s.diagonals + block, s.blocks + TOrder::index(block, block) * kBlockBytes,
                         s.blocks + TOrder::index(block + 1, block + 1) * kBlockBytes);
      }
      __syncthreads();
      if (warp < kBlocks) make_row(warp, blocks, s.weights);
    }
  }
  griddep_launch();
}

}  // namespace imbrex::cuda
