// What tokens of a chunk are to each other in recurrent layers whose channels have decays of their own: recurrent_weights.cu's job, and
// keys and queries with their decays besides; launched by cuda/recurrent/recurrent_plan.cpp.
//
// With G_i the sums of logarithms up to and with token i, a number for each channel, and n the factors of norms,
//   A[i][j] = beta_i n_i n_j sum over channels of k_i k_j e^(G_i - G_j)   for j < i,   and P[i][j] the like of q_i, for j <= i.
// Decays may be as small as e^-60 a token: e^-G_j alone has no bound. But with R the sums at a place between j and i, both e^(G_i - R) and
// e^(R - G_j) are at most 1, so that A is a product of matrices where a place lies between all its rows and columns: of 16 tokens and
// those in front of them, with the sums in front of these 16 or with those behind other 16. On the diagonal, 16 tokens and themselves, the
// place is the front of the 16 too, so that keys and queries are the same there: one factor is as large as the decay of 16 tokens is small.
// Where that is too small, or numbers have too small a range, pairs of tokens are summed one by one.
//
// A thread block has a chunk and a value head, a warp 64 channels of 8 of its tokens.
#include "recurrent_channel_logs.cuh"
#include "recurrent_triangle.cuh"

namespace imbrex::cuda {

constexpr int kThreads = recurrent_channel_threads(kDimK), kWarps = kThreads / 32;
static_assert(kWarps == kEights * kParts && kEights == 2 * kBlocks);
// 16 tokens whose logarithms' sums are less, to base 2, are steep. Keys and queries with their decays are multiplied by 2^kLift besides, so
// that these and keys divided by their decays are as far from both ends of a type's range.
constexpr float kSteep = kType == kBf16 ? -160.f : 0.f, kLift = kType == kBf16 ? 64.f : 0.f;
constexpr float kLifted = kType == kBf16 ? 0x1p64f : 1.f;

// Factors of products as tiles of kChunk rows, which begin at so many bytes:
//   keys and queries with their decays since the sums in front of their 16 rows;
//   keys with what they have left behind their 16 rows, up to row 47;
//   keys divided by their decays since the sums in front of their 16 rows, but for those of steep tokens;
//   and what belongs to rows beyond the next 16: keys and queries of rows 48 to 63 with their decays since row 32, and keys of rows 0 to 15
//   with what they have left behind row 32.
constexpr u32 kTileBytes = kChunk * kDimK * kSize, kKeys = 0, kQueries = kTileBytes, kLeft = 2 * kTileBytes, kDivided = 3 * kTileBytes,
              kSixteenBytes = 16 * 128, kKeysBeyond = 4 * kTileBytes, kQueriesBeyond = kKeysBeyond + kSixteenBytes,
              kLeftBeyond = kKeysBeyond + 2 * kSixteenBytes;
struct SharedStorage {
  char tiles[kRecurrentChannelTiles * kTileBytes];
  union {
    float squares[kParts][kEights][2 * kRows];  // sums of squares of keys, and of queries
    char blocks[kTriangleBytes];                // of -A and D
  };
  union {
    float logs[kEights][kDimK];   // of 8 tokens together, to base 2
    Diagonal diagonals[kBlocks];  // once tiles are there
  };
  // What rows of A and of P are multiplied by, and columns of both.
  float a_rows[kChunk], p_rows[kChunk], columns[kChunk];
  int steep[kParts][kBlocks];
  Work work;
};
// That a multiprocessor has memory for.
constexpr int kBlocksTogether = kDimK == 128 && kArch / 100 != 9 && kArch / 100 != 10 ? 1 : 2;
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);
static_assert(smem_bytes <= recurrent_channel_weights_smem(kDimK));
extern __shared__ __align__(128) char memory[];

DEVICE SharedStorage& shared_storage() { return *reinterpret_cast<SharedStorage*>(memory); }
DEVICE u32 tile_at(u32 tile) { return shared_address(memory) + tile; }

// Copies a warp's part of rows of tokens to a tile; zeros for those that are not there, whose addresses are those of the last one.
DEVICE void copy_tokens(const Part& part, u32 tile, const char* from, long stride) {
  const int first = lane_id() / 8, last = part.token + part.count - 1;
  from = computed_here(from + (64 * part.number + lane_id() % 8 * 8) * kSize);
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const int token = part.token + first + 4 * i;
    copy_async<16>(tile_at(tile) + part.place(first + 4 * i, lane_id() % 8), from + i64(u32(min(token, last))) * stride, token <= last);
  }
}
DEVICE void copy_keys_and_queries(const RecurrentParams& p, const Part& part, const Work& work, u32 keys, u32 queries) {
  copy_tokens(part, keys, p.k + work.k, p.k_token_stride);
  copy_tokens(part, queries, p.q + work.q, p.q_token_stride);
  copy_async_commit();
}

// Sums of squares of a warp's channels: the diagonal of what keys, and queries below them, are with each other.
DEVICE void sum_squares(const Part& part, float (&to)[2 * kRows]) {
  const u32 place = tile_at(lane_id() % 16 < kRows ? kKeys : kQueries) + part.place(lane_id() % kRows, lane_id() / 16);
  float keys[4] = {}, queries[4] = {};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    u32 a[4];
    load_matrix(a, place ^ u32(32 * step));
    multiply(keys, a, a[0], a[2]), multiply(queries, a, a[1], a[3]);
  }
  const int row = lane_id() / 4;
  if (lane_id() % 4 != row / 2) return;
  to[row] = row % 2 == 0 ? keys[0] : keys[1], to[kRows + row] = row % 2 == 0 ? queries[2] : queries[3];
}

// Factors of norms, and numbers of 8 tokens, a lane a token.
DEVICE void make_numbers(const RecurrentParams& p, const Part& part, SharedStorage& s, ChunkNumbers& n) {
  const int row = kRows * part.eight + lane_id();
  const float beta = lane_id() < part.count ? beta_of(p, load_beta(p, part.token + lane_id(), s.work.head)) : 0.f;
  float norms[2] = {1.f, 1.f};
#pragma unroll
  for (int i = 0; kNorms && i < 2; ++i) {
    float sum = kNormEpsilon;
#pragma unroll
    for (int number = 0; number < kParts; ++number) sum += s.squares[number][part.eight][kRows * i + lane_id()];
    norms[i] = inverse_root(sum);
  }
  const float known = beta * norms[0], outputs = p.scale * norms[1];
  n.values[row] = beta, n.known[row] = known, n.written[row] = norms[0], n.outputs[row] = outputs;
  s.a_rows[row] = -known, s.p_rows[row] = outputs, s.columns[row] = norms[0];
  if (row == 0) n.decay = 1.f;
}

DEVICE float2 operator+(const float2& a, const float2& b) { return {a.x + b.x, a.y + b.y}; }
DEVICE float2 operator-(const float2& a, const float2& b) { return {a.x - b.x, a.y - b.y}; }
DEVICE float2 operator*(const float2& a, const float2& b) { return {a.x * b.x, a.y * b.y}; }
DEVICE float2 exp2_of(const float2& x) { return {exp2_approx(x.x), exp2_approx(x.y)}; }
DEVICE u32 pack(const float2& x) { return pack(x.x, x.y); }
DEVICE float2& pair_at(float* p) { return *reinterpret_cast<float2*>(p); }

// What sums over other tokens of the chunk are to 8 of them.
struct Around {
  float2 front, whole;   // logarithms: what is added to those of the 8, and the sum of their 16 tokens, both lifted
  float2 before, after;  // e^ of sums over the tokens in front of their 16, without the lift, and behind these
  float2 between;        // of the first and of the last 16 tokens: e^ of sums over those between them and the chunk's middle
};
DEVICE Around sums_around(const SharedStorage& s, const Part& part) {
  const int block = part.eight / 2;
  float2 sums[kBlocks];
  const float* const logs = &s.logs[0][part.channel()];
  const auto log_of = [&](int eight) { return *reinterpret_cast<const float2*>(logs + eight * kDimK); };
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) sums[i] = log_of(2 * i) + log_of(2 * i + 1);
  Around x;
  x.front = {kLift, kLift};
  if (part.eight % 2 != 0) x.front = x.front + log_of(part.eight - 1);
  float2 before = {-kLift, -kLift}, after = {0.f, 0.f};
  x.between = {0.f, 0.f};
  if (block == 0) {
    x.whole = sums[0], x.between = sums[1], after = sums[1] + sums[2] + sums[3];
  } else if (block == 1) {
    x.whole = sums[1], before = before + sums[0], after = sums[2] + sums[3];
  } else if (block == 2) {
    x.whole = sums[2], before = before + (sums[0] + sums[1]), after = sums[3];
  } else {
    x.whole = sums[3], x.between = sums[2], before = before + (sums[0] + sums[1] + sums[2]);
  }
  x.whole = x.whole + float2{kLift, kLift};
  x.before = exp2_of(before), x.after = exp2_of(after), x.between = exp2_of(x.between);
  return x;
}

// 8 tokens' rows of all tiles, and those of memory's, of their keys and queries.
template <bool steep>
DEVICE void store_tiles(const Part& part, const Logs& logs, const Around& around, char* weights) {
  const int block = part.eight / 2;
  const float2 whole = steep ? around.whole : exp2_of(around.whole);
  // The row's number changes bits 4 to 6 of a place. From a place in shared memory to that in the first of memory's tiles it is as far.
  const u32 memory_at = shared_address(memory), first = memory_at + part.place(0);
  char* const from_tiles = computed_here(weights - memory_at);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const u32 place = first ^ u32(row * 16), tiles = place + u32(row * 128);
    char* const to = from_tiles + place + row * 128;
    const auto load = [&](u32 tile) { return unpack(load_shared_element<4>(tiles + tile)); };
    const auto store = [&](int tile, const float2& x) { *reinterpret_cast<u32*>(to + tile) = pack(x); };
    const float2 log = logs.of[row] + around.front, key = load(kKeys), query = load(kQueries);
    const float2 forward = exp2_of(log), k = key * forward, q = query * forward;
    if constexpr (kDelta) store_shared(tiles + kKeys, pack(k));
    store_shared(tiles + kQueries, pack(q));
    store(WeightsLayout::known, k * around.before), store(WeightsLayout::asked, q * around.before);
    float2 left;
    if constexpr (steep) {
      left = key * exp2_of(whole - log);
    } else {
      left = key * exp2_of(float2{-log.x, -log.y});
      store_shared(tiles + kDivided, pack(left));
      left = left * whole;
    }
    store(WeightsLayout::written, left * around.after);
    // The rows beyond the next 16 lie from row 0 on in the tiles of the last 16, and from row 32 on in that of the first 16.
    if (block == kBlocks - 1) {
      if constexpr (kDelta) store_shared(tiles + kKeysBeyond - (kBlocks - 1) * kSixteenBytes, pack(k * around.between));
      store_shared(tiles + kQueriesBeyond - (kBlocks - 1) * kSixteenBytes, pack(q * around.between));
    } else {
      store_shared(tiles + kLeft, pack(left));
      if (block == 0) store_shared(tiles + kLeftBeyond, pack(left * around.between));
    }
  }
}

DEVICE bool is_steep(const SharedStorage& s, int block) { return (s.steep[0][block] | s.steep[kParts - 1][block]) != 0; }

// Products of 16 rows and 16 rows of two tiles over all channels. Which 16 bytes of a row a step reads changes bits 5 and 6 of their place.
DEVICE void multiply_rows(Block& x, u32 rows, u32 left) {
  rows = place_in(rows, lane_id() % 16, lane_id() / 16), left = place_in(left, row_of_lane(), half_of_lane());
#pragma unroll
  for (int step = 0; step < kDimK / 16; ++step) {
    const u32 turn = u32(step % 4 * 32), column = u32(step / 4 * kColumnBytes);
    u32 a[4], b[4];
    load_matrix(a, (rows ^ turn) + column), load_matrix(b, (left ^ turn) + column);
    multiply(x.of[0], a, b[0], b[1]), multiply(x.of[1], a, b[2], b[3]);
  }
}

// A block of A or of P, whose number there is `at`. `x`: products of keys and queries with their decays.
template <bool queries, bool diagonal>
DEVICE void store_products(int row, int column, int at, Block& x, char* weights, SharedStorage& s) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  const float* const factors = (queries ? s.p_rows : s.a_rows) + 16 * row + g;
  const float* const norms = s.columns + 16 * column + 2 * t;
  const float2 pairs[2] = {*reinterpret_cast<const float2*>(norms), *reinterpret_cast<const float2*>(norms + 8)};
  const bool steep = diagonal && is_steep(s, row);
  char* const block = s.blocks + at * kBlockBytes;
  char* const to = weights + WeightsLayout::p + at * kBlockBytes;
#pragma unroll
  for (int eight = 0; eight < 2; ++eight) {
    const float factor = diagonal ? factors[8 * eight] : factors[8 * eight] * (1.f / kLifted);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 y = {factor * x.of[half][2 * eight] * pairs[half].x, factor * x.of[half][2 * eight + 1] * pairs[half].y};
      if (diagonal && eight == half) y = {g >= 2 * t + !queries ? y.x : 0.f, g > 2 * t + !queries ? y.y : 0.f};
      if (diagonal && eight < half) y = {0.f, 0.f};
      if (steep && eight >= half) continue;
      if constexpr (queries)
        *reinterpret_cast<u32*>(to + word_in_block(eight, half)) = pack(y.x, y.y);
      else if constexpr (diagonal)
        put_pair(s.diagonals[row], block, eight, half, g, 2 * t, y);
      else
        *reinterpret_cast<u32*>(block + (2 * eight + half) * kMatrixBytes + lane_id() * 4) = pack_f16(y.x, y.y);
    }
  }
}

// A block of A or of P, if its row is one of the first `num_blocks`; of the ten the diagonal's come first.
constexpr int kTriangle = kTriangleBytes / kBlockBytes;
template <bool queries>
DEVICE void make_products(int block, int num_blocks, char* weights, SharedStorage& s) {
  constexpr u32 kRowsAt = queries ? kQueries : kKeys, kRowsBeyond = queries ? kQueriesBeyond : kKeysBeyond;
  const auto index = [](int row, int column) constexpr { return u64(queries ? POrder::index(row, column) : TOrder::index(row, column)); };
  // Of blocks four bits each, their rows, columns and numbers: those on the diagonal, those next to it, the one whose columns are beyond
  // the next 16 rows, the one whose rows are too, and the one whose rows alone are.
  constexpr u64 kRowOf = 0x3323213210, kColumnOf = 0x1002103210;
  constexpr u64 kNumberOf = index(0, 0) | index(1, 1) << 4 | index(2, 2) << 8 | index(3, 3) << 12 | index(1, 0) << 16 | index(2, 1) << 20 |
                            index(3, 2) << 24 | index(2, 0) << 28 | index(3, 0) << 32 | index(3, 1) << 36;
  const int row = int(kRowOf >> 4 * block & 15), column = int(kColumnOf >> 4 * block & 15), at = int(kNumberOf >> 4 * block & 15);
  if (row >= num_blocks) return;
  const bool diagonal = block < kBlocks;
  const u32 rows = block < 8 ? kRowsAt + u32(row) * kSixteenBytes : kRowsBeyond;
  const u32 left = block == 7 || block == 8 ? kLeftBeyond : (diagonal ? kDivided : kLeft) + u32(column) * kSixteenBytes;
  Block x = {};
  if (kSteep < 0.f || !diagonal) multiply_rows(x, tile_at(rows), tile_at(left));
  diagonal ? store_products<queries, true>(row, column, at, x, weights, s) : store_products<queries, false>(row, column, at, x, weights, s);
}
// A, and the first of P, by all warps; the others of P by four of them, while two others invert.
constexpr int kFirstProducts = 16, kInverting = kBlocks / 2;
static_assert(kFirstProducts % kWarps == 0);
DEVICE void make_first_products(int warp, int num_blocks, char* weights, SharedStorage& s) {
#pragma unroll 1
  for (int block = warp; block < kFirstProducts; block += kWarps) {
    if (block >= kTriangle) {
      make_products<true>(block - kTriangle, num_blocks, weights, s);
    } else if constexpr (kDelta) {
      make_products<false>(block, num_blocks, weights, s);
    }
  }
}
DEVICE void make_other_products(int warp, int num_blocks, char* weights, SharedStorage& s) {
  const int block = warp - kInverting + kFirstProducts - kTriangle;
  if (warp >= kInverting && block < kTriangle) make_products<true>(block, num_blocks, weights, s);
}

// Steep tokens and themselves: of 8 rows and 8 columns what is on the diagonal and below it, by a warp, a lane a token j and two tokens i.
// `logs` are sums since the first of 8 tokens.
constexpr int kPitch = kDimK + 8;  // floats of a row of `logs`: so that pairs of 8 rows touch every bank once
constexpr u32 kSteepKeys = 3 * kTileBytes, kSteepQueries = 4 * kTileBytes;
DEVICE void sum_pairs(int rows, int columns, const float* logs, char* weights, SharedStorage& s) {
  const int block = rows / 2, half = columns % 2, j = kRows * columns + lane_id() % 8, i = kRows * rows + lane_id() / 8 * 2;
  const auto pair_of = [&](u32 tile, int row, int channel) {
    return unpack(load_shared_element<4>(place_in(tile_at(tile), row, channel / 8) + u32(channel % 8 * 2)));
  };
  const auto logs_of = [&](int row, int channel) { return *reinterpret_cast<const float2*>(logs + row * kPitch + channel); };
  float of_k[2] = {0.f, 0.f}, of_q[2] = {0.f, 0.f};
#pragma unroll 2
  for (int channel = 0; channel < kDimK; channel += 2) {
    const float2 key = pair_of(kSteepKeys, j, channel), log = logs_of(j, channel);
    const float2 since = rows == columns ? log : log - logs_of(kRows * columns + kRows - 1, channel);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float2 decayed = key * exp2_of(logs_of(i + row, channel) - since);
      const float2 x = pair_of(kSteepKeys, i + row, channel), y = pair_of(kSteepQueries, i + row, channel);
      of_k[row] = __fmaf_rn(x.x, decayed.x, __fmaf_rn(x.y, decayed.y, of_k[row]));
      of_q[row] = __fmaf_rn(y.x, decayed.x, __fmaf_rn(y.y, decayed.y, of_q[row]));
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int token = i + row, at = token % 16;  // of the chunk, and of the block
    const float norm = s.columns[j], a = norm * s.a_rows[token] * of_k[row], b = norm * s.p_rows[token] * of_q[row];
    if (rows == columns)
      s.diagonals[block].of[half][at % 8 * Diagonal::pitch + j % 8] = token > j ? a : 0.f;
    else
      *reinterpret_cast<u16*>(s.blocks + TOrder::index(block, block) * kBlockBytes + 2 * kMatrixBytes + at % 8 * 16 + j % 8 * 2) =
          u16(pack_f16(a, 0.f));
    *reinterpret_cast<u16*>(weights + WeightsLayout::p + POrder::index(block, block) * kBlockBytes + place_in_block(at, half) + j % 8 * 2) =
        u16(pack(token >= j ? b : 0.f, 0.f));
  }
}
// Of all steep tokens, once nobody reads tiles: there keys, queries and sums of logarithms come again.
DEVICE void sum_steep(const RecurrentParams& p, const Part& part, int warp, char* weights, SharedStorage& s) {
  static_assert(kChunk * kPitch * int(sizeof(float)) <= int(kSteepKeys));
  float* const all = reinterpret_cast<float*>(s.tiles);
  copy_keys_and_queries(p, part, s.work, kSteepKeys, kSteepQueries);
  Logs logs;
  make_logs<true>(p, s.work, part, logs);
#pragma unroll
  for (int row = 0; row < kRows; ++row) pair_at(all + (kRows * part.eight + row) * kPitch + part.channel()) = logs.of[row];
  copy_async_wait<0>();
  __syncthreads();
  // Three of each block: on the diagonal twice, and below it.
#pragma unroll 1
  for (int number = warp; number < 3 * kBlocks; number += kWarps) {
    const int block = number % kBlocks, rows = 2 * block + (number >= kBlocks);
    if (is_steep(s, block)) sum_pairs(rows, 2 * block + (number / kBlocks == 1), all, weights, s);
  }
  __syncthreads();
}

// All that is made of a warp's tokens and channels.
DEVICE void make_tiles(const RecurrentParams& p, const Part& part, char* weights, SharedStorage& s) {
  const Work& work = s.work;
  const bool is_there = part.eight < kEights / 2 || !is_half(work.tokens.count);
  Logs logs = {};
  if (is_there) {
    copy_keys_and_queries(p, part, work, kKeys, kQueries);
    make_logs<false>(p, work, part, logs);
    if (are_below(logs.of[kRows - 1], kLeastLog)) make_logs<true>(p, work, part, logs);
  }
  pair_at(&s.logs[part.eight][part.channel()]) = logs.of[kRows - 1];
  copy_async_wait<0>();
  __syncwarp();
  if (kNorms && is_there) sum_squares(part, s.squares[part.number][part.eight]);
  __syncthreads();
  if (part.eight == kEights - 1) {
    float2 sum = logs.of[kRows - 1];
#pragma unroll
    for (int eight = kEights - 2; eight >= 0; --eight) sum = sum + pair_at(&s.logs[eight][part.channel()]);
    pair_at(reinterpret_cast<float*>(weights + WeightsLayout::decays) + part.channel()) = exp2_of(sum);
  }
  if (!is_there) {
    if (lane_id() == 0 && part.eight % 2 == 0) s.steep[part.number][part.eight / 2] = false;
    return;
  }
  if (part.number == 0 && lane_id() < kRows) make_numbers(p, part, s, *reinterpret_cast<ChunkNumbers*>(weights + WeightsLayout::numbers));
  const Around around = sums_around(s, part);
  const int block = part.eight / 2;
  const bool steep = kSteep < 0.f ? are_below(around.whole, kSteep + kLift) : work.tokens.count > 16 * block;
  if (lane_id() == 0 && part.eight % 2 == 0) s.steep[part.number][block] = steep;
  if (kSteep < 0.f && !steep) {
    store_tiles<false>(part, logs, around, weights);
  } else {
    store_tiles<true>(part, logs, around, weights);
  }
}

// Finds the thread block's work, by one warp for all.
DEVICE void find_work(const RecurrentParams& p, Work& work) {
  const u32 heads = u32(p.num_v_heads), chunk = blockIdx.x / heads, head = blockIdx.x - chunk * heads, key_head = head / u32(p.group);
  const ChunkTokens tokens = tokens_of_chunk(p, p.first_chunk + int(chunk));
  if (lane_id() != 0) return;
  work = {key_head * p.k_head_stride,
          key_head * p.q_head_stride,
          head * p.gate_head_stride,
          head * p.rates_stride,
          head * p.bias_stride,
          tokens,
          int(head)};
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksTogether)
    recurrent_channel_weights(const __grid_constant__ RecurrentParams p) {
  griddep_wait();
  if (p.lone_chunks) griddep_launch();  // its blocks set up meanwhile
  SharedStorage& s = shared_storage();
  const int warp = warp_id();
  if (warp == 0) find_work(p, s.work);
  __syncthreads();
  if (s.work.tokens.count > 0) {
    char* const weights = p.weights + i64(blockIdx.x) * WeightsLayout::bytes;  // weights_at()
    make_tiles(p, part_of(warp, s.work.tokens), weights, s);
    __syncthreads();
    const int num_blocks = is_half(s.work.tokens.count) ? kBlocks / 2 : kBlocks;  // of 16 tokens
    make_first_products(warp, num_blocks, weights, s);
    __syncthreads();
    make_other_products(warp, num_blocks, weights, s);
    bool steep = false;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) steep |= is_steep(s, block);
    if (steep) {
      __syncthreads();  // all have read tiles
      sum_steep(p, part_of(warp, s.work.tokens), warp, weights, s);
    }
    if constexpr (kDelta) {
      const u32 blocks = shared_address(memory) + u32(s.blocks - memory);
      if (warp < num_blocks / 2) {
        const int block = 2 * warp;
        invert_diagonals(s.diagonals + block, s.blocks + TOrder::index(block, block) * kBlockBytes,
                         s.blocks + TOrder::index(block + 1, block + 1) * kBlockBytes);
      }
      __syncthreads();
      if (warp < num_blocks) make_row(warp, blocks, weights);
    }
  }
}

}  // namespace imbrex::cuda
