// Prompts of recurrent layers in chunks of 64 tokens, docs/kernels/recurrent.md; launched by cuda/recurrent/recurrent_plan.cpp.
//
// Within a chunk all is products of matrices. With G the sum of the logarithms of decays up to and with a token, n the factors of norms,
// and A[i][j] = beta_i n_i n_j (k_i . k_j) e^(G_i - G_j) below the diagonal, what tokens write is U = T X with T = (1 + A)^-1 and X_i =
// beta_i (v_i - n_i e^G_i S^T k_i); without the delta rule U is X, and X the values. Then
//   out_i = scale n_i e^G_i S^T q_i + sum over j <= i of P[i][j] U_j,   P[i][j] = scale n_i n_j (q_i . k_j) e^(G_i - G_j)
//   S = e^G_last S + sum over j of n_j e^(G_last - G_j) k_j U_j^T
// T and P do not depend on the state: recurrent_weights.cu makes them for many chunks at once. What is left goes from chunk to chunk. A
// thread block has a value head of a request and kTileValues of its values, 16 for each of its warps, which do not depend on each other:
// S^T of these is in registers, and all else in shared memory. Where it has places for two chunks, the warps copy the next one before they
// compute one; where it has one place, they copy each part as soon as nobody reads the one before it.
//
// Where channels have decays of their own, keys and queries come with these from recurrent_channel_weights.cu.
//
// recurrent_chunks_sm90.cu is the same with other products.
#include "recurrent_chunk_values.cuh"

namespace imbrex::cuda {

constexpr int kThreads = kRecurrentChunkThreads;
static_assert(kThreads / 32 * kWarpValues == kTileValues);
constexpr int kCopiesTogether = kArch >= 900 ? 64 : 1;  // addresses of many take registers, which are short where no matrices can be stored
constexpr bool kOnePlace = kStages == 1;
static_assert(kOnePlace || (kStages == 2 && !kChannelGate));
extern "C" __device__ const unsigned smem_bytes = kStages * Stage::bytes;

// --- copies

DEVICE void copy_bytes(u32 to, const char* from, int bytes) {
#pragma unroll 1
  for (int i = int(threadIdx.x) * 16; i < bytes; i += kThreads * 16) copy_async<16>(to + u32(i), from + i);
}
DEVICE Stage stage_of(int number) { return stage_at(number % kStages); }
DEVICE int tokens_of(const ChunkCursor& ahead) { return min(ahead.unit.end - ahead.begin, kChunk); }

// What of a chunk only products with the state read: queries and, where channels have decays of their own, keys.
DEVICE void copy_asked(const RecurrentParams& p, const ChunkCursor& ahead, int number) {
  if (ahead.is_there()) {
    const Stage stage = stage_of(number);
    if constexpr (kChannelGate) {
      const char* const weights = ahead.weights(p);
      if constexpr (kDelta) copy_bytes(stage.k(), weights + WeightsLayout::known, Stage::keys);
      if constexpr (!kEnds) copy_bytes(stage.q(), weights + WeightsLayout::asked, Stage::keys);
    } else if constexpr (!kEnds) {
      copy_rows<kDimK / 8, kThreads, kCopiesTogether>(stage.q(), p.q + ahead.begin * p.q_token_stride + ahead.key_head(p) * p.q_head_stride,
                                                      p.q_token_stride, tokens_of(ahead));
    }
  }
  copy_async_commit();
}
// The rest of it, and on to the next one.
DEVICE void copy_rest(const RecurrentParams& p, ChunkCursor& ahead, int number) {
  if (ahead.is_there()) {
    const Unit& unit = ahead.unit;
    const int begin = ahead.begin, count = tokens_of(ahead);
    const Stage stage = stage_of(number);
    const char* const weights = ahead.weights(p);
    if constexpr (kChannelGate)
      copy_bytes(stage.written(), weights + WeightsLayout::written, Stage::keys);
    else
      copy_rows<kDimK / 8, kThreads, kCopiesTogether>(stage.k(), p.k + begin * p.k_token_stride + ahead.key_head(p) * p.k_head_stride,
                                                      p.k_token_stride, count);
    if (!unit.is_transition())
      copy_rows<kTileValues / 8, kThreads, kCopiesTogether>(
          stage.v(), p.v + begin * p.v_token_stride + unit.head * p.v_head_stride + unit.first_value * kSize, p.v_token_stride, count);
    copy_bytes(stage.t(), weights, kChannelGate ? WeightsLayout::known : WeightsLayout::bytes);
    ahead.next(p);
  }
  copy_async_commit();
}

// --- products

// What the state gives for each token's k, then for its q.
DEVICE void multiply_state(const Sums& s, const Stage& stage, Columns<>& of_k, Columns<>& of_q) {
  of_k = {}, of_q = {};
#pragma unroll
  for (int c = 0; c < kDimK / 16; ++c) {
    u32 a[4], b[4];
    pack_factor(s.of[2 * c], s.of[2 * c + 1], a);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if constexpr (kDelta) {
        load_matrix(b, place_in(stage.k(), 16 * block + row_of_lane(), 2 * c + half_of_lane()));
        multiply(of_k.of[2 * block], a, b[0], b[1]), multiply(of_k.of[2 * block + 1], a, b[2], b[3]);
      }
      if constexpr (kEnds) continue;
      load_matrix(b, place_in(stage.q(), 16 * block + row_of_lane(), 2 * c + half_of_lane()));
      multiply(of_q.of[2 * block], a, b[0], b[1]), multiply(of_q.of[2 * block + 1], a, b[2], b[3]);
    }
  }
}
// x += y W^T for a triangle W.
template <class Order>
DEVICE void add_triangle(const Factor<>& y, u32 triangle, Columns<>& x) {
#pragma unroll
  for (int from = 0; from < kBlocks; ++from) {
#pragma unroll
    for (int to = from; to < kBlocks; ++to) {
      u32 b[4];
      load_matrix(b, triangle + u32(Order::index(to, from) * kBlockBytes + place_in_block(row_of_lane(), half_of_lane())));
      multiply(x.of[2 * to], y.of[from], b[0], b[1]), multiply(x.of[2 * to + 1], y.of[from], b[2], b[3]);
    }
  }
}
// x = y T^T.
DEVICE void multiply_t(const Factor<>& y, const Stage& stage, Columns<>& x) {
  x = {};
  add_triangle<TOrder>(y, stage.t(), x);
}
// x += y P^T.
DEVICE void multiply_p(const Factor<>& y, const Stage& stage, Columns<>& x) { add_triangle<POrder>(y, stage.p(), x); }
// S^T += U^T k.
DEVICE void multiply_written(const Factor<>& u, const Stage& stage, Sums& s) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int c = 0; c < kDimK / 16; ++c) {
      u32 b[4];
      load_matrix_transposed(b, place_in(stage.written(), 16 * block + lane_id() % 16, 2 * c + lane_id() / 16));
      multiply(s.of[2 * c], u.of[block], b[0], b[1]), multiply(s.of[2 * c + 1], u.of[block], b[2], b[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksTogether) recurrent_chunks(const __grid_constant__ RecurrentParams p) {
  griddep_wait();
  const int value = warp_id() * kWarpValues;
  int number = 0;
  ChunkCursor ahead(p);
  copy_asked(p, ahead, 0), copy_rest(p, ahead, 0);
  for (Unit unit(p); unit.is_there(); unit.next(p)) {
    Sums s;
    begin_sums(p, unit, value, s);
    const float skip = kSkip ? p.skip[unit.head] : 0.f;
#pragma unroll 1
    for (int begin = unit.begin; begin < unit.end; begin += kChunk, ++number) {
      copy_async_wait<kOnePlace && kChannelGate ? 1 : 0>();
      __syncthreads();  // what the state multiplies is there, and of two places the rest too; all warps have computed the chunk before it
      if constexpr (!kOnePlace) copy_asked(p, ahead, number + 1), copy_rest(p, ahead, number + 1);
      const Stage stage = stage_of(number);
      const ChunkNumbers& n = numbers_at(number % kStages);
      Columns<> u, y;  // u: what the state gives for k, then X, then U
      multiply_state(s, stage, u, y);
      if constexpr (kOnePlace) {
        copy_async_wait<0>();
        __syncthreads();  // the rest is there, and all warps have read what the next chunk's takes the place of
        copy_asked(p, ahead, number + 1);
      }
      const Factor<> v = unit.is_transition() ? Factor<>{} : load_values(stage, value);
      take_values<kBlocks, const float*>(v, n.values, n.known, u);
      if constexpr (!kEnds) begin_outputs<kBlocks, const float*>(stage, value, n.outputs, skip, y);
      if constexpr (kDelta) multiply_t(factor_of(u), stage, u);
      if constexpr (!kEnds) multiply_p(factor_of(u), stage, y);
      scale_columns<kBlocks, const float*>(u, n.written);
      decay_sums(s, number % kStages);
      multiply_written(factor_of(u), stage, s);
      if constexpr (!kEnds) place_outputs(stage, value, y), store_outputs(p, unit, begin, stage, value);
      if constexpr (kOnePlace) {
        __syncthreads();  // all warps have read the rest
        copy_rest(p, ahead, number + 1);
      }
    }
    end_sums(p, unit, value, s);
  }
  griddep_launch();
}

}  // namespace imbrex::cuda
