// What tokens of a chunk are to each other in recurrent layers whose channels have decays of their own: recurrent_weights.cu's job, and
// keys and queries with their decays besides; launched by cuda/recurrent/recurrent_plan.cpp.
//
// With G_i the sums of logarithms up to and with token i, a number for each channel, and n the factors of norms,
//   A[i][j] = beta_i n_i n_j sum over channels of k_i k_j e^(G_i - G_j)   for j < i,   and P[i][j] the like of q_i, for j <= i.
// Decays may be as small as e^-60 a token: e^-G_j alone has no bound. Rows of 16 tokens and all those in front of them are products of
// matrices, whose factors are e^(G_i - R) k_i and e^(R - G_j) k_j with R the sums in front of the rows: both powers are at most 1. Within
// 16 tokens the same is done for the last 8 and the first 8 of them, and what is left, 8 tokens and themselves, is summed pair by pair.
//
// A thread block has a chunk and a value head.
#include "find_request.cuh"
#include "recurrent_triangle.cuh"

namespace imbrex::cuda {

constexpr int kThreads = kRecurrentChannelThreads, kWarps = kThreads / 32;
static_assert(kWarps == 2 * kBlocks && kThreads % kDimK == 0);
constexpr int kPitch = kDimK + 8;    // floats of a row of sums: so that pairs of 8 rows touch every bank once
constexpr float kLeastLog = -200.f;  // 2 to the power of it is 0, and sums of it can be told apart

struct SharedStorage {
  char k[kChunk * kDimK * kSize], q[kChunk * kDimK * kSize];
  float logs[kChunk][kPitch];   // G, to base 2
  char blocks[kTriangleBytes];  // of A and D
  char p[kTriangleBytes];       // as memory has it
  float diagonal[kBlocks][16][kDiagonalPitch];
  float k_norms[kChunk], q_norms[kChunk], betas[kChunk];
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

// G: each thread a channel of consecutive tokens, then what is in front of these. Tokens behind the last one do not decay.
DEVICE void make_logs(const RecurrentParams& p, int head, int begin, int count, SharedStorage& s) {
  constexpr int kParts = kThreads / kDimK, kTokens = kChunk / kParts;
  const int channel = int(threadIdx.x) % kDimK, first = int(threadIdx.x) / kDimK * kTokens;
  GateNumbers g = with_parameters<true>(p, 0.f, head, channel);
  float sum = 0.f;
#pragma unroll 8
  for (int row = first; row < first + kTokens; ++row) {
    if (row < count) {
      g.x = load_gate<true>(p, begin + row, head, channel);
      const float log = log_decay(p, g, gate_step(p, g)) * kLog2e;
      sum += log < kLeastLog ? kLeastLog : log;  // a NaN stays one
    }
    s.logs[row][channel] = sum;
  }
  __syncthreads();
  float before = 0.f;
#pragma unroll
  for (int part = 1; part < kParts; ++part)
    if (part * kTokens <= first) before += s.logs[part * kTokens - 1][channel];
  __syncthreads();
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
DEVICE void store_tiles(const SharedStorage& s, u32 k, u32 q, char* weights) {
  constexpr int kColumns = kDimK / 8;
#pragma unroll 2
  for (int i = int(threadIdx.x); i < kChunk * kColumns; i += kThreads) {
    const int row = i / kColumns, column = i % kColumns;
    const uint4 keys = load_shared(place_in(k, row, column)), queries = load_shared(place_in(q, row, column));
    const u32 of_k[4] = {keys.x, keys.y, keys.z, keys.w}, of_q[4] = {queries.x, queries.y, queries.z, queries.w};
    u32 known[4], asked[4], written[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 logs = logs_of(s, row, 8 * column + 2 * j), last = logs_of(s, kChunk - 1, 8 * column + 2 * j);
      const float2 a = unpack(of_k[j]), b = unpack(of_q[j]), key = {a.x * s.k_norms[row], a.y * s.k_norms[row]};
      known[j] = pack_scaled(key, logs, {0.f, 0.f});
      asked[j] = pack_scaled({b.x * s.q_norms[row], b.y * s.q_norms[row]}, logs, {0.f, 0.f});
      written[j] = pack_scaled(key, last, logs);
    }
    char* const to = weights + place_in(0, row, column);
    *reinterpret_cast<uint4*>(to + WeightsLayout::known) = {known[0], known[1], known[2], known[3]};
    *reinterpret_cast<uint4*>(to + WeightsLayout::asked) = {asked[0], asked[1], asked[2], asked[3]};
    *reinterpret_cast<uint4*>(to + WeightsLayout::written) = {written[0], written[1], written[2], written[3]};
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

// Rows of 16 tokens with those in front of them, and their last 8 with their first 8: of keys for A, or of queries for P.
template <bool queries>
DEVICE void multiply_rows(int block, u32 k, u32 q, SharedStorage& s) {
  const int g = lane_id() / 4, t = lane_id() % 4, first = 16 * block;
  Scores before[2 * (kBlocks - 1)] = {}, within = {}, none = {};
  const u32 rows = queries ? q : k;
#pragma unroll 2
  for (int step = 0; step < kDimK / 16; ++step) {
    u32 a[4], inner[4] = {0, 0, 0, 0};
    float2 start[2], middle[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel = 16 * step + 8 * half + 2 * t;
      start[half] = block > 0 ? logs_of(s, first - 1, channel) : float2{0.f, 0.f}, middle[half] = logs_of(s, first + 7, channel);
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const int row = first + 8 * eight + g;
        const float2 x = pair_of(rows, row, channel), logs = logs_of(s, row, channel);
        a[2 * half + eight] = pack_scaled(x, logs, start[half]);
        if (eight == 1) inner[2 * half + 1] = pack_scaled(x, logs, middle[half]);
      }
    }
    const auto column = [&](int token, const float2(&from)[2], u32(&b)[2]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = 16 * step + 8 * half + 2 * t;
        b[half] = pack_scaled(pair_of(k, token, channel), from[half], logs_of(s, token, channel));
      }
    };
    u32 b[2];
#pragma unroll
    for (int tile = 0; tile < 2 * (kBlocks - 1); ++tile) {
      if (tile >= 2 * block) continue;
      column(8 * tile + g, start, b);
      multiply(before[tile].of, a, b[0], b[1]);
    }
    column(first + g, middle, b);
    multiply(within.of, inner, b[0], b[1]);
  }
  // Of tokens 8 * eight + g of the rows and 8 * tile + 2t and the next.
  const auto scaled = [&](const float* x, int eight, int tile, float(&y)[2]) {
    const int row = first + 8 * eight + g, token = 8 * tile + 2 * t;
    const float factor = queries ? s.q_norms[row] : s.betas[row] * s.k_norms[row];
    y[0] = factor * s.k_norms[token] * x[2 * eight], y[1] = factor * s.k_norms[token + 1] * x[2 * eight + 1];
  };
  const auto store = [&](const Scores& x, int eight, int tile) {
    float y[2];
    scaled(x.of, eight, tile, y);
    if constexpr (queries) {
      *reinterpret_cast<u32*>(s.p + POrder::index(block, tile / 2) * kBlockBytes + word_in_block(eight, tile % 2)) = pack(y[0], y[1]);
    } else if (tile / 2 < block) {
      *reinterpret_cast<u32*>(s.blocks + TOrder::index(block, tile / 2) * kBlockBytes + (2 * eight + tile % 2) * 128 + lane_id() * 4) =
          pack_f16(y[0], y[1]);
    } else {
      *reinterpret_cast<float2*>(&s.diagonal[block][8 * eight + g][8 * (tile % 2) + 2 * t]) = {y[0], y[1]};
    }
  };
#pragma unroll
  for (int tile = 0; tile < 2 * (kBlocks - 1); ++tile)
    if (tile < 2 * block) store(before[tile], 0, tile), store(before[tile], 1, tile);
  store(within, 1, 2 * block);
  if constexpr (queries) store(none, 0, 2 * block + 1);
}

// 8 tokens and themselves, by a warp, a lane a token j and two tokens i: what is on the diagonal and below it.
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
  const int num_reqs = num_requests(p), request = find_request(num_reqs, chunk, [&](int r) { return first_chunk_of(p, r); });
  const RecurrentItem item = num_reqs > 0 ? chunks_of(p, request) : RecurrentItem{};
  const int begin = item.begin + (chunk - first_chunk_of(p, request)) * kChunk, count = min(item.end - begin, kChunk);
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
    // What comes first of a warp's rows has least to do, and of another's most: so that schedulers have as much to do as each other.
    const int warp = warp_id();
    if (warp < kBlocks && kDelta) multiply_rows<false>(warp, k, q, s);
    if (warp >= kBlocks) multiply_rows<true>(2 * kBlocks - 1 - warp, k, q, s);
    sum_pairs(warp, k, q, s);
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
