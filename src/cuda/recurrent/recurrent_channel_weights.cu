// What tokens of a chunk are to each other in recurrent layers whose channels have decays of their own: recurrent_weights.cu's job, and
// keys and queries with their decays besides; launched by cuda/recurrent/recurrent_plan.cpp.
//
// With G_i the sums of logarithms up to and with token i, a number for each channel, and n the factors of norms,
//   A[i][j] = beta_i n_i n_j sum over channels of k_i k_j e^(G_i - G_j)   for j < i,   and P[i][j] the like of q_i, for j <= i.
// Decays may be as small as e^-60 a token: e^-G_j alone has no bound. But with R the sums in front of a block of 8 tokens, e^(G_i - R) for
// tokens of it is at most 1, and so is e^(R' - G_j) with R' the sums behind the block of j: what is in between is a product of the decays
// of whole blocks, by which first factors of matrices are multiplied on the way. Within a block e^(R - G_j) is as large as the block's
// decay is small: where that is too small, or numbers have too small a range, pairs of tokens are summed one by one.
//
// A thread block has a chunk and a value head.
#include "recurrent_triangle.cuh"

namespace imbrex::cuda {

constexpr int kThreads = kRecurrentChannelThreads, kWarps = kThreads / 32;
static_assert(kWarps == 2 * kBlocks && kWarps == kChunk / 8 && kThreads % kDimK == 0);
constexpr int kPitch = kDimK + 8;  // floats of a row of sums: so that pairs of 8 rows touch every bank once
constexpr int kEights = kChunk / 8;
// To base 2. 2 to the power of the least logarithm is 0, and sums of it can be told apart. A block that decays more is steep.
constexpr float kLeastLog = -200.f, kSteep = kType == kBf16 ? -100.f : 0.f;

struct SharedStorage {
  char k[kChunk * kDimK * kSize], q[kChunk * kDimK * kSize];
  char behind[kChunk * kDimK * kSize];  // e^(R' - G_j) k_j
  float logs[kChunk][kPitch];           // G, to base 2
  float decays[kEights][kPitch];        // of blocks of 8 tokens
  char blocks[kTriangleBytes];          // of A and D
  char p[kTriangleBytes];               // as memory has it
  float diagonal[kBlocks][16][kDiagonalPitch];
  float k_norms[kChunk], q_norms[kChunk], betas[kChunk];
  int steep[kEights];
};
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);
extern __shared__ __align__(128) char memory[];

DEVICE SharedStorage& shared_storage() { return *reinterpret_cast<SharedStorage*>(memory); }

// Two neighbouring channels of a row of a tile.
DEVICE float2 pair_of(u32 tile, int row, int channel) {
  return unpack(load_shared_element<4>(place_in(tile, row, channel / 8) + u32(channel % 8 * 2)));
}
DEVICE float2 logs_of(const SharedStorage& s, int row, int channel) { return *reinterpret_cast<const float2*>(&s.logs[row][channel]); }
DEVICE u32 pack_scaled(const float2& x, const float2& logs, const float2& less) {
  return pack(x.x * exp2_approx(logs.x - less.x), x.y * exp2_approx(logs.y - less.y));
}

// The logarithm of a channel's decay, to base 2, to some millionths of it: of a softplus by approximations of log2
// and 2^x, but where the logarithm is next to 0 by a series.
DEVICE float log2_decay(const RecurrentParams& p, const GateNumbers& g, float rate) {
  if (p.gate_kind != kSoftplusGate) return log_decay(p, g, 0.f) * kLog2e;
  constexpr float kLarge = 30.f, kSmall = 1.f / 16;  // e^-30 is nothing beside 1
  const float x = g.x + g.bias, z = exp2_approx(x * kLog2e);
  const float series = z * __fmaf_rn(z, __fmaf_rn(z, __fmaf_rn(z, -0.25f, 1.f / 3), -0.5f), 1.f) * kLog2e;
  const float s = x > kLarge ? x * kLog2e : z < kSmall ? series : log2_approx(1.f + z);
  const float more = s < p.gate_min * kLog2e ? p.gate_min * kLog2e : s;  // a NaN stays one
  return -rate * (more > p.gate_max * kLog2e ? p.gate_max * kLog2e : more);
}

// A type of elements as an argument.
template <int type>
struct Type {
  static constexpr int value = type;
};

// G: each thread a channel of consecutive tokens, then what is in front of these. Tokens behind the last one do not decay.
DEVICE void make_logs(const RecurrentParams& p, int head, int begin, int count, SharedStorage& s) {
  constexpr int kParts = kThreads / kDimK, kTokens = kChunk / kParts, kTogether = 16;
  const int channel = int(threadIdx.x) % kDimK, first = int(threadIdx.x) / kDimK * kTokens;
  GateNumbers g = with_parameters<true>(p, 0.f, head, channel);
  const float rate = p.gate_kind == kSoftplusGate ? exp_of(g.rate) : 0.f;
  const char* const from =
      p.gate + begin * p.gate_token_stride + head * p.gate_head_stride + channel * (p.gate_is_f32 ? 4 : element_bytes(kType));
  float sum = 0.f;
#pragma unroll 1
  for (int row = first; row < first + kTokens; row += kTogether) {
    float gates[kTogether];
    const auto load = [&](auto type) {  // one branch for all: behind one each, loads would wait for each other
#pragma unroll
      for (int i = 0; i < kTogether; ++i) gates[i] = load_number<type.value>(from + min(row + i, count - 1) * p.gate_token_stride);
    };
    p.gate_is_f32 ? load(Type<kF32>{}) : load(Type<kType>{});
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      g.x = gates[i];
      const float log = row + i < count ? log2_decay(p, g, rate) : 0.f;
      sum += log < kLeastLog ? kLeastLog : log;  // a NaN stays one
      s.logs[row + i][channel] = sum;
    }
  }
  if (int(threadIdx.x) < kEights) s.steep[threadIdx.x] = 0;
  __syncthreads();
  float before = 0.f;
#pragma unroll
  for (int part = 1; part < kParts; ++part)
    if (part * kTokens <= first) before += s.logs[part * kTokens - 1][channel];
  __syncthreads();
  if (first == 0) return;
#pragma unroll 8
  for (int row = first; row < first + kTokens; ++row) s.logs[row][channel] += before;
}

// Factors of norms and beta, by a warp for each of its tokens.
DEVICE void make_token_numbers(const RecurrentParams& p, int head, int begin, int count, u32 k, u32 q, SharedStorage& s) {
  constexpr int kRows = kChunk / kWarps;
#pragma unroll 2
  for (int row = warp_id() * kRows; row < (warp_id() + 1) * kRows; ++row) {
    float keys = 0.f, queries = 0.f;
#pragma unroll
    for (int channel = 2 * lane_id(); kNorms && channel < kDimK; channel += 64) {
      const float2 a = pair_of(k, row, channel), b = pair_of(q, row, channel);
      keys = __fmaf_rn(a.x, a.x, __fmaf_rn(a.y, a.y, keys)), queries = __fmaf_rn(b.x, b.x, __fmaf_rn(b.y, b.y, queries));
    }
#pragma unroll
    for (int step = 16; kNorms && step > 0; step /= 2) {
      keys += shuffle(keys, lane_id() ^ step), queries += shuffle(queries, lane_id() ^ step);
    }
    if (lane_id() != 0) continue;
    s.k_norms[row] = kNorms ? inverse_root(keys + kNormEpsilon) : 1.f;
    s.q_norms[row] = p.scale * (kNorms ? inverse_root(queries + kNormEpsilon) : 1.f);
    s.betas[row] = row < count ? beta_of(p, load_beta(p, begin + row, head)) : 0.f;
  }
}

// Keys and queries with their decays, 8 channels of a token at a time, and what the state is multiplied by.
DEVICE void store_tiles(SharedStorage& s, u32 k, u32 q, char* weights) {
  constexpr int kColumns = kDimK / 8;
#pragma unroll 2
  for (int i = int(threadIdx.x); i < kChunk * kColumns; i += kThreads) {
    const int row = i / kColumns, column = i % kColumns;
    const uint4 keys = load_shared(place_in(k, row, column)), queries = load_shared(place_in(q, row, column));
    const u32 of_k[4] = {keys.x, keys.y, keys.z, keys.w}, of_q[4] = {queries.x, queries.y, queries.z, queries.w};
    u32 known[4], asked[4], written[4], behind[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 logs = logs_of(s, row, 8 * column + 2 * j), last = logs_of(s, kChunk - 1, 8 * column + 2 * j);
      const float2 a = unpack(of_k[j]), b = unpack(of_q[j]), key = {a.x * s.k_norms[row], a.y * s.k_norms[row]};
      known[j] = pack_scaled(key, logs, {0.f, 0.f});
      asked[j] = pack_scaled({b.x * s.q_norms[row], b.y * s.q_norms[row]}, logs, {0.f, 0.f});
      written[j] = pack_scaled(key, last, logs);
      behind[j] = pack_scaled(a, logs_of(s, row | 7, 8 * column + 2 * j), logs);
    }
    *reinterpret_cast<uint4*>(s.behind + place_in(0, row, column)) = {behind[0], behind[1], behind[2], behind[3]};
    char* const to = weights + place_in(0, row, column);
    *reinterpret_cast<uint4*>(to + WeightsLayout::known) = {known[0], known[1], known[2], known[3]};
    *reinterpret_cast<uint4*>(to + WeightsLayout::asked) = {asked[0], asked[1], asked[2], asked[3]};
    *reinterpret_cast<uint4*>(to + WeightsLayout::written) = {written[0], written[1], written[2], written[3]};
  }
  for (int i = int(threadIdx.x); i < kEights * kDimK; i += kThreads) {
    const int eight = i / kDimK, channel = i % kDimK;
    const float log = s.logs[8 * eight + 7][channel] - (eight > 0 ? s.logs[8 * eight - 1][channel] : 0.f);
    s.decays[eight][channel] = exp2_approx(log);
    if (!(log >= kSteep)) s.steep[eight] = 1;
  }
  if (int(threadIdx.x) < kDimK)
    reinterpret_cast<float*>(weights + WeightsLayout::decays)[threadIdx.x] = exp2_approx(s.logs[kChunk - 1][threadIdx.x]);
  ChunkNumbers& n = *reinterpret_cast<ChunkNumbers*>(weights + WeightsLayout::numbers);
  if (int(threadIdx.x) < kChunk) {
    n.known[threadIdx.x] = n.values[threadIdx.x] = s.betas[threadIdx.x];
    n.outputs[threadIdx.x] = n.written[threadIdx.x] = 1.f;
  }
  if (threadIdx.x == 0) n.decay = 1.f;
}

// A lane's part of 8 rows and 8 columns of a block.
struct Scores {
  float of[4];
};

// Rows of 16 tokens with those in front of them and, where these are not steep, with those of their own blocks: of keys for A, or of
// queries for P. Own blocks come last, as tiles 2 * block and the next.
template <bool queries>
DEVICE void multiply_rows(int block, u32 k, u32 q, SharedStorage& s) {
  const int g = lane_id() / 4, t = lane_id() % 4, first = 16 * block, own = 2 * block;
  Scores before[kEights - 1] = {}, within[2] = {};  // `before` counted from the rows to the front: the first one is of the last 8 rows
  const u32 rows = queries ? q : k, behind = shared_address(memory) + u32(s.behind - memory);
#pragma unroll 1
  for (int step = 0; step < kDimK / 16; ++step) {
    const int channels[2] = {16 * step + 2 * t, 16 * step + 8 + 2 * t};
    float2 x[2][2], start[2][2];  // of rows g and 8 + g, and of two pairs of channels: e^(G_i - R) times the row, and R
#pragma unroll
    for (int eight = 0; eight < 2; ++eight)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + 8 * eight + g, channel = channels[half];
        start[eight][half] = own + eight > 0 ? logs_of(s, first + 8 * eight - 1, channel) : float2{0.f, 0.f};
        const float2 given = pair_of(rows, row, channel), logs = logs_of(s, row, channel);
        x[eight][half] = {given.x * exp2_approx(logs.x - start[eight][half].x), given.y * exp2_approx(logs.y - start[eight][half].y)};
      }
    const auto factor_of = [&](bool upper, bool lower, u32(&a)[4]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[2 * half] = upper ? pack(x[0][half].x, x[0][half].y) : 0;
        a[2 * half + 1] = lower ? pack(x[1][half].x, x[1][half].y) : 0;
      }
    };
    u32 a[4];
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      factor_of(eight == 0, eight == 1, a);
      u32 b[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        b[half] = pack_scaled(pair_of(k, first + 8 * eight + g, channels[half]), start[eight][half],
                              logs_of(s, first + 8 * eight + g, channels[half]));
      multiply(within[eight].of, a, b[0], b[1]);
    }
#pragma unroll
    for (int back = 0; back < kEights - 1; ++back) {
      const int tile = own - back;
      if (tile < 0) continue;
      factor_of(back > 0, true, a);
      const u32 at = place_in(behind, 8 * tile + g, 2 * step) + u32(4 * t),
                next = place_in(behind, 8 * tile + g, 2 * step + 1) + u32(4 * t);
      multiply(before[back].of, a, load_shared_element<4>(at), load_shared_element<4>(next));
      // On to the tile in front: the block between it and the rows decays too.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 decay = *reinterpret_cast<const float2*>(&s.decays[tile][channels[half]]);
        if (back > 0) x[0][half].x *= decay.x, x[0][half].y *= decay.y;
        x[1][half].x *= decay.x, x[1][half].y *= decay.y;
      }
    }
  }
  // Of tokens 8 * eight + g of the rows and 8 * tile + 2t and the next.
  const auto store = [&](const Scores& sums, int eight, int tile, bool diagonal) {
    const int row = first + 8 * eight + g, token = 8 * tile + 2 * t;
    const float factor = queries ? s.q_norms[row] : s.betas[row] * s.k_norms[row];
    float y[2] = {factor * s.k_norms[token] * sums.of[2 * eight], factor * s.k_norms[token + 1] * sums.of[2 * eight + 1]};
    if (diagonal) y[0] = row >= token + !queries ? y[0] : 0.f, y[1] = row > token + !queries ? y[1] : 0.f;
    if constexpr (queries) {
      *reinterpret_cast<u32*>(s.p + POrder::index(block, tile / 2) * kBlockBytes + word_in_block(eight, tile % 2)) = pack(y[0], y[1]);
    } else if (tile < own) {
      *reinterpret_cast<u32*>(s.blocks + TOrder::index(block, tile / 2) * kBlockBytes + (2 * eight + tile % 2) * 128 + lane_id() * 4) =
          pack_f16(y[0], y[1]);
    } else {
      *reinterpret_cast<float2*>(&s.diagonal[block][8 * eight + g][8 * (tile % 2) + 2 * t]) = {y[0], y[1]};
    }
  };
#pragma unroll
  for (int back = 0; back < kEights - 1; ++back) {
    const int tile = own - back;
    if (tile < 0) continue;
    if (back > 0) store(before[back], 0, tile, false);
    store(before[back], 1, tile, false);
  }
#pragma unroll
  for (int eight = 0; eight < 2; ++eight)
    if (s.steep[own + eight] == 0) store(within[eight], eight, own + eight, true);
  if constexpr (queries) store(Scores{}, 0, own + 1, false);
}

// 8 tokens of a steep block and themselves, by a warp, a lane a token j and two tokens i: what is on the diagonal and below it.
DEVICE void sum_pairs(int eighth, u32 k, u32 q, SharedStorage& s) {
  const int j = 8 * eighth + lane_id() % 8, i = 8 * eighth + lane_id() / 8 * 2;
  float of_k[2] = {0.f, 0.f}, of_q[2] = {0.f, 0.f};
#pragma unroll 4
  for (int channel = 0; channel < kDimK; channel += 2) {
    const float2 key = pair_of(k, j, channel), logs = logs_of(s, j, channel);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float2 own = logs_of(s, i + row, channel), x = pair_of(k, i + row, channel), y = pair_of(q, i + row, channel);
      const float first = key.x * exp2_approx(own.x - logs.x), second = key.y * exp2_approx(own.y - logs.y);
      of_k[row] = __fmaf_rn(x.x, first, __fmaf_rn(x.y, second, of_k[row]));
      of_q[row] = __fmaf_rn(y.x, first, __fmaf_rn(y.y, second, of_q[row]));
    }
  }
  const int block = eighth / 2, half = eighth % 2;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int at = 8 * half + i % 8 + row;  // in the block
    const float norm = s.k_norms[j], a = s.betas[i + row] * s.k_norms[i + row] * norm * of_k[row],
                p = s.q_norms[i + row] * norm * of_q[row];
    s.diagonal[block][at][8 * half + j % 8] = i + row > j ? a : 0.f;
    *reinterpret_cast<u16*>(s.p + POrder::index(block, block) * kBlockBytes + place_in_block(at, half) + j % 8 * 2) =
        u16(pack(i + row >= j ? p : 0.f, 0.f));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) recurrent_channel_weights(const __grid_constant__ RecurrentParams p) {
  griddep_wait();
  SharedStorage& s = shared_storage();
  const int chunk = p.first_chunk + int(blockIdx.x) / p.num_v_heads, head = int(blockIdx.x) % p.num_v_heads, key_head = head / p.group;
  const auto [begin, count] = tokens_of_chunk(p, chunk);
  if (count > 0) {
    const u32 k = shared_address(memory), q = k + sizeof s.k;
    copy_rows<kDimK / 8, kThreads>(k, p.k + begin * p.k_token_stride + key_head * p.k_head_stride, p.k_token_stride, count);
    copy_rows<kDimK / 8, kThreads>(q, p.q + begin * p.q_token_stride + key_head * p.q_head_stride, p.q_token_stride, count);
    copy_async_commit();
    make_logs(p, head, begin, count, s);
    copy_async_wait<0>();
    __syncthreads();
    make_token_numbers(p, head, begin, count, k, q, s);
    __syncthreads();
    char* const weights = weights_at(p, chunk, head);
    store_tiles(s, k, q, weights);
    __syncthreads();
    // Later rows have more to do: who has which is such that each of a multiprocessor's schedulers has as much to do as the others.
    const int warp = warp_id();
    if (warp < kBlocks && kDelta) multiply_rows<false>(warp, k, q, s);
    if (warp >= kBlocks) multiply_rows<true>(2 * kBlocks - 1 - warp, k, q, s);
    if (s.steep[warp] != 0) sum_pairs(warp, k, q, s);
    __syncthreads();
    if constexpr (kDelta) {
      const u32 blocks = shared_address(memory) + u32(s.blocks - memory);
      if (warp < kBlocks / 2) {
        const int block = 2 * warp + lane_id() / 16;
        invert_diagonal(s.diagonal[block], s.blocks + TOrder::index(block, block) * kBlockBytes);
      }
      __syncthreads();
      if (warp < kBlocks) make_row(warp, blocks, weights);
    }
    constexpr int kFirst = kDelta ? 32 * kBlocks : 0;  // thread that copies
    for (int i = int(threadIdx.x) - kFirst; i >= 0 && i < kTriangleBytes / 16; i += kThreads - kFirst)
      reinterpret_cast<uint4*>(weights + WeightsLayout::p)[i] = reinterpret_cast<const uint4*>(s.p)[i];
  }
  griddep_launch();
}

}  // namespace imbrex::cuda
