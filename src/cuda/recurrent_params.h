#pragma once
// The parameters of the CUDA kernels of recurrent layers: plain structs, strides in bytes unless said otherwise. Filled by
// cuda/recurrent/recurrent.cpp.
#include "cuda/state_params.h"

namespace imbrex::cuda {

enum RecurrentGateKind : int { kFixedGate, kLogGate, kSoftplusGate, kSigmoidGate };  // RecurrentGate, in its order

struct RecurrentParams {
  const char *q, *k, *v, *gate, *beta;    // gate and beta null: there is none
  const float *rates, *gate_bias, *skip;  // null: none
  char *state, *out;
  long q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, out_token_stride, out_head_stride;
  long gate_token_stride, gate_head_stride, beta_token_stride, beta_head_stride;
  long rates_stride, bias_stride;  // floats, of a head
  long state_slot_stride, state_row_stride, state_head_stride;
  const StateRequest* requests;  // [num_reqs + 1]
  const StateCounts* counts;
  const int* parent_rows;           // of tokens of the batch, where drafts may be a tree: the row that a draft begins from
  int* broken;                      // [kNumStateRules], as in PlanStateBatchParams; null: nobody asks
  int num_slots, num_tokens;        // num_tokens: that all tensors have rows for; a request with others is left out
  char* weights;                    // of chunks from first_chunk to end_chunk: recurrent_weights_bytes() of each chunk and value head
  float *carried_in, *carried_out;  // states of the request that goes on from the round before, and in the next one
  int first_chunk, end_chunk;       // of a round
  int least_chunked;                // as chunked_tokens() says; 0: all is computed token by token
  int num_v_heads, group;           // group: value heads of a key head
  int gate_kind;                    // RecurrentGateKind
  float gate_min, gate_max;         // gate_max of a softplus: infinite where there is no limit
  float scale, beta_scale;
  bool gate_is_f32, beta_is_f32;  // else of kType
  bool delta, sigmoid_beta, scaled_values, qk_norm, channel_rates;
  bool lists_are_there;  // requests and counts were there before the kernel in front began
};

// How recurrent.cu shares a state out: lanes that share a value, quads of key channels of a lane, and values of a lane.
constexpr int kRecurrentLaneValues = 4;
constexpr int recurrent_key_lanes(int dim_k) { return dim_k > 128 ? 16 : dim_k > 16 ? 8 : dim_k > 8 ? 4 : dim_k > 4 ? 2 : 1; }
constexpr int recurrent_quads(int dim_k) { return (dim_k + 4 * recurrent_key_lanes(dim_k) - 1) / (4 * recurrent_key_lanes(dim_k)); }
constexpr int recurrent_warp_values(int dim_k) { return 32 / recurrent_key_lanes(dim_k) * kRecurrentLaneValues; }
// Of a thread block: those of a whole head where it is no larger, so that a token is made once.
constexpr int recurrent_warps(int dim_k, int dim_v) {
  const int all = (dim_v + recurrent_warp_values(dim_k) - 1) / recurrent_warp_values(dim_k);
  return all < 8 ? all : 8;
}

// recurrent_narrow.cu: heads of a lane, and of a thread block.
constexpr int kRecurrentNarrowThreads = 128;
constexpr int narrow_heads_of_lane(int dim_k) { return recurrent_quads(dim_k) < 2 ? 4 : recurrent_quads(dim_k) < 4 ? 2 : 1; }
constexpr int recurrent_narrow_heads(int dim_k) {
  return kRecurrentNarrowThreads / recurrent_key_lanes(dim_k) * narrow_heads_of_lane(dim_k);
}

// recurrent_weights.cu, recurrent_channel_weights.cu, recurrent_chunks.cu and recurrent_chunks_sm90.cu: tokens of a chunk, and threads of a
// block. Of the last two: values of a block, and chunks in shared memory.
constexpr int kRecurrentChunk = 64, kRecurrentWeightsThreads = 128, kRecurrentChannelThreads = 256, kRecurrentChunkThreads = 128,
              kRecurrentChunkSm90Threads = 256;
constexpr int kRecurrentTileValues = 64, kRecurrentChunkStages = 2;
// The first tokens of a request, which come in chunks: whole chunks, and what is left behind them if it is long enough. How a prompt is cut
// into steps of whole chunks changes none of it.
constexpr int chunked_tokens(const RecurrentParams& p, int tokens, int drafts) {
  const int rest = tokens % kRecurrentChunk;
  return p.least_chunked == 0 || drafts > 0 ? 0 : rest < p.least_chunked ? tokens - rest : tokens;
}

// What is made of a chunk and value head: triangles of tokens in blocks of 16, in 16 bits, and numbers of tokens.
// With gates of channels also keys and queries with their decays, and what a chunk leaves of each channel.
constexpr int recurrent_weights_bytes(int dim_k, bool delta, bool channels) {
  return (delta ? 2 : 1) * 10 * 512 + 4 * kRecurrentChunk * 4 + 16 + (channels ? 3 * kRecurrentChunk * dim_k * 2 + dim_k * 4 : 0);
}
// What a chunk takes of shared memory: keys, queries and values of 16 bits, the above, and for sm_90a blocks of zeros between triangles,
// and mbarriers; there matrices begin at multiples of 1024 bytes.
constexpr int recurrent_stage_bytes(int dim_k, bool delta, bool channels, bool sm90) {
  const int zeros = sm90 ? (delta ? 8 : 6) * 512 + 16 : 0, unit = sm90 ? 1024 : 128;
  const int rows = kRecurrentChunk * ((channels ? 0 : 2 * dim_k) + kRecurrentTileValues) * 2;
  const int all = rows + recurrent_weights_bytes(dim_k, delta, channels) + zeros;
  return (all + unit - 1) / unit * unit;
}

}  // namespace imbrex::cuda
