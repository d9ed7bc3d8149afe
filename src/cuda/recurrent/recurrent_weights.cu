// What tokens of a chunk are to each other in recurrent layers whose heads have one decay: T, P and the numbers of tokens of
// recurrent_chunks.cu, for all chunks of a round at a time; launched by cuda/recurrent/recurrent_plan.cpp in front of it.
//
// A thread block has a chunk, a key head, and up to kShared of its value heads, for which products of tokens are computed once, by each
// warp those of 16 tokens.
//
// Later tokens, and later rows of T, have more to do: who has which changes from block to block and from head to head, so that each of a
// multiprocessor's schedulers has as much to do as the others.
#include "recurrent_triangle.cuh"

namespace imbrex::cuda {

constexpr int kThreads = kRecurrentWeightsThreads, kWarps = kThreads / 32;
// Blocks that a multiprocessor has registers and memory for.
constexpr int kOnHopper = (kDelta ? kShared == 1 || kDimK < 128 : kNorms) ? 4 : 5, kBlocksTogether = kArch == 900 ? kOnHopper : 3;
static_assert(kWarps == kBlocks);

// Of a value head: sums of its tokens' logarithms (to base 2), and what is multiplied to values.
struct HeadNumbers {
  float logs[kChunk], betas[kChunk], steps[kChunk];
};
struct Tiles {
  char k[kChunk * kDimK * kSize], q[kChunk * kDimK * kSize];
};
// What products of tokens become, which takes their place.
struct Factors {
  Diagonal diagonals[kDelta ? kShared : 1][kBlocks];
  char blocks[kDelta ? kShared : 1][kTriangleBytes];  // of -A, and on the diagonal of D
};
struct SharedStorage {
  union {
    Tiles tiles;
    Factors factors;
  };
  float k_norms[kChunk], q_norms[kChunk];
  HeadNumbers of_head[kShared];
};
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);
extern __shared__ __align__(128) char memory[];

DEVICE SharedStorage& shared_storage() { return *reinterpret_cast<SharedStorage*>(memory); }

// Products of a warp's 16 tokens with those up to them, and of their queries with each other.
struct Scores {
  float k[2 * kBlocks][4], q[2 * kBlocks][4];
};
DEVICE void multiply_tokens(u32 k_tile, u32 q_tile, int warp, Scores& s, float (&queries)[2][4]) {
  s = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) queries[i / 4][i % 4] = 0.f;
#pragma unroll
  for (int c = 0; c < kDimK / 16; ++c) {
    u32 k[4], q[4], b[4];
    const int row = 16 * warp + lane_id() % 16, column = 2 * c + lane_id() / 16;
    load_matrix(k, place_in(k_tile, row, column));
    load_matrix(q, place_in(q_tile, row, column));
    multiply(queries[0], q, q[0], q[2]), multiply(queries[1], q, q[1], q[3]);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block > warp) continue;
      load_matrix(b, place_in(k_tile, 16 * block + row_of_lane(), 2 * c + half_of_lane()));
      if constexpr (kDelta || kNorms) multiply(s.k[2 * block], k, b[0], b[1]), multiply(s.k[2 * block + 1], k, b[2], b[3]);
      multiply(s.q[2 * block], q, b[0], b[1]), multiply(s.q[2 * block + 1], q, b[2], b[3]);
    }
  }
}

// The number on the diagonal of a block that a lane has, where it has one: of row lane / 4 and of the row 8 behind it.
DEVICE bool has_diagonal() { return lane_id() % 4 == lane_id() / 8; }
DEVICE float on_diagonal(const float (&tile)[4], int half) { return lane_id() / 4 % 2 == 0 ? tile[2 * half] : tile[2 * half + 1]; }

DEVICE void store_norms(const Scores& scores, const float (&queries)[2][4], int warp, SharedStorage& s) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float keys = 0.f;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      if (block == warp) keys = on_diagonal(scores.k[2 * block + half], half);
    const int row = 16 * warp + 8 * half + lane_id() / 4;
    if (!has_diagonal()) continue;
    s.k_norms[row] = kNorms ? inverse_root(keys + kNormEpsilon) : 1.f;
    s.q_norms[row] = kNorms ? inverse_root(on_diagonal(queries[half], half) + kNormEpsilon) : 1.f;
  }
}
// Products of what is divided by norms, and those of queries scaled: all that they have to be multiplied by but for decays and beta.
DEVICE void scale_scores(const RecurrentParams& p, const SharedStorage& s, int warp, Scores& scores) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * warp + 8 * half + lane_id() / 4;
    const float of_q = p.scale * s.q_norms[row], of_k = s.k_norms[row];
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const float2 norms = kNorms ? *reinterpret_cast<const float2*>(s.k_norms + 8 * i + lane_id() % 4 * 2) : float2{1.f, 1.f};
      scores.q[i][2 * half] *= of_q * norms.x, scores.q[i][2 * half + 1] *= of_q * norms.y;
      if constexpr (kDelta && kNorms) scores.k[i][2 * half] *= of_k * norms.x, scores.k[i][2 * half + 1] *= of_k * norms.y;
    }
  }
}

// What each token of a head is by itself, two of them a lane. Tokens behind the last one change nothing: they decay by 1 and write 0.
DEVICE void make_head_numbers(const RecurrentParams& p, int head, int begin, int count, HeadNumbers& n) {
  const int row = 2 * lane_id();
  float logs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float beta = 0.f, step = 0.f;
    logs[i] = 0.f;
    if (row + i < count) {
      const GateNumbers g = gate_numbers<false>(p, begin + row + i, head, 0);
      beta = beta_of(p, load_beta(p, begin + row + i, head));
      step = gate_step(p, g);
      logs[i] = log_decay(p, g, step) * kLog2e;
    }
    n.betas[row + i] = beta, n.steps[row + i] = p.scaled_values ? step : 1.f;
  }
  float sum = logs[0] + logs[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float before = shuffle(sum, max(lane_id() - step, 0));
    if (lane_id() >= step) sum += before;
  }
  n.logs[row] = sum - logs[1], n.logs[row + 1] = sum;
}

DEVICE void store_numbers(const RecurrentParams& p, const SharedStorage& s, const HeadNumbers& n, ChunkNumbers& to) {
  const float last = n.logs[kChunk - 1];
#pragma unroll
  for (int row = lane_id(); row < kChunk; row += 32) {
    const float factor = exp2_approx(n.logs[row]), beta = n.betas[row];
    to.known[row] = beta * s.k_norms[row] * factor;
    to.values[row] = beta * n.steps[row];
    to.outputs[row] = p.scale * s.q_norms[row] * factor;
    to.written[row] = s.k_norms[row] * exp2_approx(last - n.logs[row]);
  }
  if (lane_id() == 0) to.decay = exp2_approx(last);
}

// What a warp's rows have of a head, two of them a lane, and where what becomes of its scores goes: the lane's places in the first block of
// P, in memory, and of -A.
struct HeadRows {
  const HeadNumbers& numbers;
  float logs[2], betas[2];
  char *p, *a;
};
// P and -A of a block.
template <int block, bool diagonal>
DEVICE void store_block_scores(const Scores& scores, const HeadRows& rows, char* p, char* a, Diagonal* d) {
  const int row = lane_id() / 4, pair = lane_id() % 4 * 2;
  u32 words[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 others = *reinterpret_cast<const float2*>(rows.numbers.logs + 16 * block + 8 * i + pair);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 factors = {exp2_approx(rows.logs[half] - others.x), exp2_approx(rows.logs[half] - others.y)};
      if (diagonal && half < i) factors = {0.f, 0.f};
      if (diagonal && half == i) factors = {row >= pair ? factors.x : 0.f, row > pair ? factors.y : 0.f};
      const float* const q = scores.q[2 * block + i] + 2 * half;
      words[half][i] = pack(factors.x * q[0], factors.y * q[1]);
      if constexpr (kDelta) {
        const float* const k = scores.k[2 * block + i] + 2 * half;
        const float2 products = {-rows.betas[half] * factors.x * k[0], -rows.betas[half] * factors.y * k[1]};
        if constexpr (diagonal) {
          put_pair(*d, a, half, i, row, pair, products);
        } else {
          *reinterpret_cast<u32*>(a + (2 * half + i) * kMatrixBytes + lane_id() * 4) = pack_f16(products.x, products.y);
        }
      }
    }
  }
  store_pairs(p, 0, words[0][0], words[0][1]), store_pairs(p, 1, words[1][0], words[1][1]);
}
// Of a warp's row of blocks, from one on.
template <int block = 0>
DEVICE void store_scores(const Scores& scores, int warp, const HeadRows& rows, Diagonal* diagonals) {
  char *const p = rows.p + POrder::index(0, block) * kBlockBytes, *const a = rows.a + TOrder::index(warp, block) * kBlockBytes;
  if (block == warp) {
    store_block_scores<block, true>(scores, rows, p, a, diagonals + block);
  } else if constexpr (block + 1 < kBlocks) {
    store_block_scores<block, false>(scores, rows, p, a, nullptr);
    store_scores<block + 1>(scores, warp, rows, diagonals);
  }
}
DEVICE void store_scores(const Scores& scores, int warp, SharedStorage& s, int head, char* weights) {
  const HeadNumbers& n = s.of_head[head];
  const int row = 16 * warp + lane_id() / 4;
  const HeadRows rows{n,
                      {n.logs[row], n.logs[row + 8]},
                      {n.betas[row], n.betas[row + 8]},
                      place_of_pairs(weights + WeightsLayout::p + warp * kBlockBytes),
                      s.factors.blocks[head]};
  store_scores(scores, warp, rows, s.factors.diagonals[head]);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksTogether) recurrent_weights(const __grid_constant__ RecurrentParams p) {
  griddep_wait();
  SharedStorage& s = shared_storage();
  const int warp = warp_id(), shares = (p.group + kShared - 1) / kShared, parts = p.num_v_heads / p.group * shares;
  const int chunk = p.first_chunk + int(blockIdx.x) / parts, part = int(blockIdx.x) % parts, key_head = part / shares;
  const auto [begin, count] = tokens_of_chunk(p, chunk);
  if (count > 0) {
    const u32 k = shared_address(memory), q = k + sizeof s.tiles.k, blocks = shared_address(memory) + u32(s.factors.blocks[0] - memory);
    const char* const from_k = p.k + begin * p.k_token_stride + key_head * p.k_head_stride;
    const char* const from_q = p.q + begin * p.q_token_stride + key_head * p.q_head_stride;
    if (count == kChunk) {
      copy_rows<kDimK / 8, kThreads, 64, true>(k, from_k, p.k_token_stride, count);
      copy_rows<kDimK / 8, kThreads, 64, true>(q, from_q, p.q_token_stride, count);
    } else {
      copy_rows<kDimK / 8, kThreads, 1>(k, from_k, p.k_token_stride, count);
      copy_rows<kDimK / 8, kThreads, 1>(q, from_q, p.q_token_stride, count);
    }
    copy_async_commit();
    const int first = key_head * p.group + part % shares * kShared, heads = min((key_head + 1) * p.group - first, kShared);
    for (int i = warp; i < heads; i += kWarps) make_head_numbers(p, first + i, begin, count, s.of_head[i]);
    copy_async_wait<0>();
    __syncthreads();
    const int own = (warp + int(blockIdx.x)) % kBlocks;  // block of tokens
    Scores scores;
    float queries[2][4];
    multiply_tokens(k, q, own, scores, queries);
    store_norms(scores, queries, own, s);
    __syncthreads();
    scale_scores(p, s, own, scores);
    for (int i = warp; i < heads; i += kWarps)
      store_numbers(p, s, s.of_head[i], *reinterpret_cast<ChunkNumbers*>(weights_at(p, chunk, first + i) + WeightsLayout::numbers));
#pragma unroll 1
    for (int i = 0; i < heads; ++i) store_scores(scores, own, s, i, weights_at(p, chunk, first + i));
    if constexpr (kDelta) {
      __syncthreads();
#pragma unroll 1
      for (int pair = warp; pair < heads * kBlocks / 2; pair += kWarps) {
        const int i = pair / (kBlocks / 2), block = pair % (kBlocks / 2) * 2;
        char* const of_head = s.factors.blocks[i];
        invert_diagonals(s.factors.diagonals[i] + block, of_head + TOrder::index(block, block) * kBlockBytes,
                         of_head + TOrder::index(block + 1, block + 1) * kBlockBytes);
      }
      __syncthreads();
#pragma unroll 1
      for (int i = 0; i < heads; ++i) make_row((own + i) % kBlocks, blocks + u32(i * kTriangleBytes), weights_at(p, chunk, first + i));
    }
  }
  griddep_launch();
}

}  // namespace imbrex::cuda
