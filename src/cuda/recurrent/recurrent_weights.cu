// What tokens of a chunk are to each other in recurrent layers whose heads have one decay: T, P and the numbers of tokens of
// recurrent_chunks.cu, for all chunks of a round at a time; launched by cuda/recurrent/recurrent_plan.cpp in front of it.
//
// A thread block has a chunk, a key head, and up to kShared of its value heads, for which products of tokens are computed once. Warp w has
// the 16 tokens of block w, and makes row w of blocks of T by itself: with D the inverses of 1 + A on the diagonal,
//   T[i][j] = -(sum over k from j + 1 to i of T[i][k] A[k][j]) D[j]
// where T[i][k] is what a product gave and the first factor of the next one. Products for T are of f16, whatever the type of the keys: A is
// at most beta |k|^2, which is below 2 where a delta rule does not diverge.
#include "find_request.cuh"
#include "recurrent_chunks_parts.cuh"

namespace imbrex::cuda {

constexpr int kThreads = kRecurrentWeightsThreads, kWarps = kThreads / 32;
static_assert(kWarps == kBlocks);
constexpr int kDiagonalPitch = 20;  // floats of a row

// Of a value head: sums of its tokens' logarithms (to base 2), and what is multiplied to values.
struct HeadNumbers {
  float logs[kChunk], betas[kChunk], steps[kChunk];
};
struct SharedStorage {
  char k[kChunk * kDimK * kSize], q[kChunk * kDimK * kSize];
  char blocks[2][kTriangleBytes];  // of A, and on the diagonal of D, in f16; heads take turns
  float k_norms[kChunk], q_norms[kChunk];
  HeadNumbers of_head[kShared];
  float diagonal[kWarps][16][kDiagonalPitch];  // of A
};
static_assert(kShared <= kWarps);
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
    load_matrix(k, place_in<kDimK / 8>(k_tile, row, column));
    load_matrix(q, place_in<kDimK / 8>(q_tile, row, column));
    multiply(queries[0], q, q[0], q[2]), multiply(queries[1], q, q[1], q[3]);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block > warp) continue;
      load_matrix(b, place_in<kDimK / 8>(k_tile, 16 * block + row_of_lane(), 2 * c + half_of_lane()));
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

// P to memory, and A to shared memory: blocks below the diagonal in f16, the one on it as floats.
DEVICE void store_scores(const RecurrentParams& p, const Scores& scores, int warp, SharedStorage& s, const HeadNumbers& w, u32 blocks,
                         char* weights) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * warp + 8 * half + lane_id() / 4;
    const float log = w.logs[row], q_factor = p.scale * s.q_norms[row], k_factor = w.betas[row] * s.k_norms[row];
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      if (i > 2 * warp + 1) continue;
      const int column = 8 * i + lane_id() % 4 * 2;
      const float2 logs = *reinterpret_cast<const float2*>(w.logs + column), norms = *reinterpret_cast<const float2*>(s.k_norms + column);
      const float factors[2] = {row >= column ? exp2_approx(log - logs.x) * norms.x : 0.f,
                                row > column ? exp2_approx(log - logs.y) * norms.y : 0.f};
      const float(&q)[4] = scores.q[i];
      const float(&k)[4] = scores.k[i];
      const int word = block_index(warp, i / 2) * kBlockBytes + (2 * half + i % 2) * 128 + lane_id() * 4;
      *reinterpret_cast<u32*>(weights + WeightsLayout::p + word) =
          pack(q_factor * factors[0] * q[2 * half], q_factor * factors[1] * q[2 * half + 1]);
      if constexpr (!kDelta) continue;
      const float a[2] = {row > column ? k_factor * factors[0] * k[2 * half] : 0.f,
                          row > column + 1 ? k_factor * factors[1] * k[2 * half + 1] : 0.f};
      if (i / 2 == warp) {
        *reinterpret_cast<float2*>(&s.diagonal[warp][row % 16][column % 16]) = {a[0], a[1]};
      } else {
        store_shared(blocks + u32(word), pack_f16(a[0], a[1]));
      }
    }
  }
}

// D of a warp's tokens by substitution, a lane a column; two lanes have the same one.
DEVICE void invert_diagonal(int warp, const float (&diagonal)[16][kDiagonalPitch], char* blocks) {
  const int column = lane_id() % 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sums[2] = {i == column ? 1.f : 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < i; ++j) sums[j % 2] = __fmaf_rn(-diagonal[i][j], x[j], sums[j % 2]);
    x[i] = sums[0] + sums[1];
  }
  char* const to = blocks + block_index(warp, warp) * kBlockBytes + column / 8 * 128 + column % 8 * 2;
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (i / 8 == lane_id() / 16) *reinterpret_cast<u16*>(to + i / 8 * 256 + i % 8 * 16) = u16(pack_f16(x[i], 0.f));
}

// x += a b for a block of A or D; what a product gave is the first factor.
struct Block {
  float of[2][4];
};
DEVICE void multiply_block(Block& x, const Block& a, u32 b) {
  u32 words[4];
  const u32 factor[4] = {pack_f16(a.of[0][0], a.of[0][1]), pack_f16(a.of[0][2], a.of[0][3]), pack_f16(a.of[1][0], a.of[1][1]),
                         pack_f16(a.of[1][2], a.of[1][3])};
  load_matrix_transposed(words, b + u32(lane_id() * 16));
  mma_f16(x.of[0], factor, words[0], words[2]);
  mma_f16(x.of[1], factor, words[1], words[3]);
}
DEVICE void store_block(char* to, const Block& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    *reinterpret_cast<u32*>(to + i * 128 + lane_id() * 4) = pack(x.of[i % 2][i / 2 * 2], x.of[i % 2][i / 2 * 2 + 1]);
}

// A row of blocks of T.
DEVICE void make_row(int warp, u32 blocks, char* t) {
  Block row[kBlocks];  // from the diagonal to the left
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_f16(load_shared_element<4>(blocks + u32(block_index(warp, warp) * kBlockBytes + i * 128 + lane_id() * 4)));
    row[0].of[i % 2][i / 2 * 2] = pair.x, row[0].of[i % 2][i / 2 * 2 + 1] = pair.y;
  }
  store_block(t + block_index(warp, warp) * kBlockBytes, row[0]);
#pragma unroll
  for (int left = 1; left < kBlocks; ++left) {
    if (left > warp) continue;
    const int column = warp - left;
    Block sum = {};
    row[left] = {};
#pragma unroll
    for (int k = 0; k < left; ++k) multiply_block(sum, row[k], blocks + u32(block_index(warp - k, column) * kBlockBytes));
    multiply_block(row[left], sum, blocks + u32(block_index(column, column) * kBlockBytes));
#pragma unroll
    for (int i = 0; i < 8; ++i) row[left].of[i / 4][i % 4] = -row[left].of[i / 4][i % 4];
    store_block(t + block_index(warp, column) * kBlockBytes, row[left]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) recurrent_weights(const __grid_constant__ RecurrentParams p) {
  griddep_wait();
  SharedStorage& s = shared_storage();
  const int warp = warp_id(), shares = (p.group + kShared - 1) / kShared, parts = p.num_v_heads / p.group * shares;
  const int chunk = p.first_chunk + int(blockIdx.x) / parts, part = int(blockIdx.x) % parts, key_head = part / shares;
  const int num_reqs = num_requests(p), request = find_request(num_reqs, chunk, [&](int r) { return first_chunk_of(p, r); });
  const RecurrentItem item = num_reqs > 0 ? chunks_of(p, request) : RecurrentItem{};
  const int begin = item.begin + (chunk - first_chunk_of(p, request)) * kChunk, count = min(item.end - begin, kChunk);
  if (count > 0) {
    const u32 k = shared_address(memory), q = k + sizeof s.k, first_blocks = q + sizeof s.q;
    copy_rows<kDimK / 8, kThreads>(k, p.k + begin * p.k_token_stride + key_head * p.k_head_stride, p.k_token_stride, count);
    copy_rows<kDimK / 8, kThreads>(q, p.q + begin * p.q_token_stride + key_head * p.q_head_stride, p.q_token_stride, count);
    copy_async_commit();
    const int first = key_head * p.group + part % shares * kShared, heads = min((key_head + 1) * p.group - first, kShared);
    if (warp < heads) make_head_numbers(p, first + warp, begin, count, s.of_head[warp]);
    copy_async_wait<0>();
    __syncthreads();
    Scores scores;
    float queries[2][4];
    multiply_tokens(k, q, warp, scores, queries);
    store_norms(scores, queries, warp, s);
    __syncthreads();
    if (warp < heads)
      store_numbers(p, s, s.of_head[warp], *reinterpret_cast<ChunkNumbers*>(weights_at(p, chunk, first + warp) + WeightsLayout::numbers));
#pragma unroll 1
    for (int i = 0; i < heads; ++i) {
      char* const weights = weights_at(p, chunk, first + i);
      const u32 blocks = first_blocks + u32(i % 2 * kTriangleBytes);
      store_scores(p, scores, warp, s, s.of_head[i], blocks, weights);
      if constexpr (kDelta) {
        __syncwarp();
        invert_diagonal(warp, s.diagonal[warp], s.blocks[i % 2]);
        __syncthreads();
        make_row(warp, blocks, weights);
      }
    }
  }
  griddep_launch();
}

}  // namespace imbrex::cuda
