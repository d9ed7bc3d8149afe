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
  const StateRequest* requests;  // [num_reqs + 1], with room for [most_requests + 1]
  const StateCounts* counts;
  int* taken;              // StateCounts::taken of these
  const int* parent_rows;  // of tokens of the batch, where drafts may be a tree: the row that a draft begins from
  int* broken;             // [kNumStateRules], as in PlanStateBatchParams; null: nobody asks
  int most_requests;
  int num_slots, num_tokens;         // num_tokens: that all tensors have rows for; a request with others is left out
  char* weights;                     // of chunks from first_chunk to end_chunk: recurrent_weights_bytes() of each chunk and value head
  float *carried_in, *carried_out;   // states of the request that goes on from the round before, and in the next one
  int first_chunk, end_chunk;        // of a round
  float* segments;                   // states at ends of segments and what these do to a state: recurrent_segment_rows() rows of each head
  int most_segments, least_segment;  // as segment_chunks() says; 1: no request has segments, and there may be several rounds
  int least_chunked;                 // as chunked_tokens() says; 0: all is computed token by token
  int chunk_stages;                  // chunks that a thread block of recurrent_chunks_sm90.cu has in shared memory
  bool lone_chunks;                  // its blocks have a multiprocessor each, whenever they come to one
  int num_v_heads, group;            // group: value heads of a key head
  int gate_kind;                     // RecurrentGateKind
  float gate_min, gate_max;          // gate_max of a softplus: infinite where there is no limit
  float scale, beta_scale;
  bool gate_is_f32, beta_is_f32;  // else of kType
  bool delta, sigmoid_beta, scaled_values, qk_norm, channel_rates;
  bool lists_are_there;  // requests and counts were there before the kernel in front began
  // Of outputs that a kernel finishes itself: as in RecurrentOutputParams, rows being heads.
  const char *z, *norm_weight;
  long z_token_stride, z_head_stride, weight_head_stride;
  float norm_eps;
  bool weight_is_f32;
};

enum OutputGateKind : int { kNoOutputGate, kSiluOutputs, kSigmoidOutputs };  // OutputGate, in its order
enum OutputNormKind : int { kNoNorm, kNormBeforeGate, kNormAfterGate };      // OutputNorm, in its order

// recurrent_outputs.cu: the numbers of a token are groups, and lie in rows: those of a head, or of all heads where these are neighbours.
struct RecurrentOutputParams {
  char* out;
  const char *z, *weight;  // null: none
  long out_token_stride, out_row_stride, z_token_stride, z_row_stride, weight_row_stride;
  const StateRequest* requests;  // [num_reqs + 1]
  const StateCounts* counts;
  int num_slots, num_tokens;                              // as in RecurrentParams
  int groups, group_numbers, token_numbers, row_numbers;  // groups of a token
  float inverse_numbers, eps;                             // 1 / group_numbers
  bool weight_is_f32;                                     // else of kType
  int least_chunked;  // where other tokens than those in chunks are finished: RecurrentParams::least_chunked; else 0
};
constexpr int kRecurrentOutputThreads = 256;
// Lanes that share a group, as few as can have an eight each, of a warp at most.
constexpr int recurrent_output_lanes(int numbers) {
  int lanes = 1;
  while (lanes < 32 && lanes * 8 < numbers) lanes *= 2;
  return lanes;
}

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

// recurrent_stream.cu: blocks of a multiprocessor, states that are on their way to one, two where there is room for them, units that it
// knows, and bytes of shared memory. A token there has q and k, decays of channels or of all, values and four numbers more, and z, weights
// and outputs where the kernel finishes these; there are two of them, two requests of 16 bytes, an index, units of 40, and mbarriers.
// States with values innermost have 16 bytes more for each four key channels.
constexpr int recurrent_stream_blocks(int dim_k, int dim_v) { return 16 / recurrent_warps(dim_k, dim_v); }
constexpr int recurrent_stream_rows(int dim_k, int dim_v) { return recurrent_warps(dim_k, dim_v) * recurrent_warp_values(dim_k); }
constexpr int recurrent_stream_ahead(int dim_k, int dim_v, int state_size) {
  return recurrent_stream_blocks(dim_k, dim_v) * recurrent_stream_rows(dim_k, dim_v) * dim_k * state_size > (64 << 10) ? 1 : 2;
}
constexpr int recurrent_stream_units(int ahead) { return ahead + 3; }
// Whether a kernel has registers left to take units in turn and to store pieces.
constexpr bool recurrent_stream_has_registers(int dim_k, int state_size, bool channels, bool finishes) {
  return dim_k <= 128 && !(channels && finishes && state_size == 4);
}
// Where keys are innermost, and all warps of a block have all of their values, states leave through shared memory too, which has room for a
// warp's values in so many parts.
constexpr bool recurrent_stream_stores_pieces(int dim_k, int dim_v, int state_size, bool channels, bool keys_first, bool finishes) {
  return !keys_first && dim_k % 4 == 0 && dim_v % recurrent_warp_values(dim_k) == 0 &&
         recurrent_stream_has_registers(dim_k, state_size, channels, finishes);
}
constexpr int recurrent_stream_store_parts(int state_size) { return state_size > 2 ? 2 : 1; }
constexpr int recurrent_lane_keys(int dim_k) { return 4 * recurrent_key_lanes(dim_k) * recurrent_quads(dim_k); }  // of all lanes
constexpr int recurrent_stream_bytes(int dim_k, int dim_v, int state_size, bool channels, bool keys_first, bool finishes) {
  const int rows = recurrent_stream_rows(dim_k, dim_v), ahead = recurrent_stream_ahead(dim_k, dim_v, state_size);
  const int keys = recurrent_lane_keys(dim_k), token = 4 * (2 * keys + (channels ? keys : 4) + (finishes ? 3 : 1) * rows + 4);
  const int fours = (dim_k + 3) / 4, values = dim_v < rows ? dim_v : rows;
  const int numbers = keys_first ? fours * (4 * values * state_size + 16) : rows * dim_k * state_size;
  const int state = numbers + recurrent_warps(dim_k, dim_v) * 8;
  const bool pieces = recurrent_stream_stores_pieces(dim_k, dim_v, state_size, channels, keys_first, finishes);
  const int stored = pieces ? numbers / recurrent_stream_store_parts(state_size) : 0;
  return (2 * token + ahead * state + stored + 2 * 16 + 8 + recurrent_stream_units(ahead) * 40 + 15) / 16 * 16;
}

// recurrent_narrow.cu: threads of a block, blocks that a multiprocessor is to hold, which stay, states that are on their way to one, heads
// of a lane, which has at most 16 numbers of states, and of a block.
constexpr int kRecurrentNarrowThreads = 64, kRecurrentNarrowAhead = 3;
constexpr int recurrent_narrow_blocks(int dim_k) { return recurrent_quads(dim_k) > 2 ? 6 : 8; }
constexpr int narrow_heads_of_lane(int dim_k) {
  const int most = recurrent_quads(dim_k) > 2 ? 1 : 4 / recurrent_quads(dim_k), lanes = recurrent_key_lanes(dim_k);
  return most < lanes ? most : lanes;
}
constexpr int recurrent_narrow_heads(int dim_k) {
  return kRecurrentNarrowThreads / recurrent_key_lanes(dim_k) * narrow_heads_of_lane(dim_k);
}
// recurrent_narrow_prompts.cu: threads of a block, half of which make what the others compute with, heads of a lane and of a block, tokens
// that are in shared memory together, and tokens of a request at least.
constexpr int kRecurrentNarrowPromptThreads = 256, kRecurrentNarrowPromptBlocks = 2, kLeastNarrowPrompt = 16;
constexpr int narrow_prompt_heads_of_lane(int dim_k) { return recurrent_key_lanes(dim_k) > 1 && recurrent_quads(dim_k) == 1 ? 2 : 1; }
constexpr int narrow_prompt_heads(int dim_k) {
  return kRecurrentNarrowPromptThreads / 2 / recurrent_key_lanes(dim_k) * narrow_prompt_heads_of_lane(dim_k);
}
constexpr int narrow_prompt_tokens(int dim_k) { return dim_k > 8 ? 16 : 8; }
// Whether a request is for recurrent_narrow_prompts.cu.
constexpr bool is_narrow_prompt(const RecurrentParams& p, int tokens, int drafts) {
  return p.least_chunked > 0 && drafts == 0 && tokens >= p.least_chunked;
}

// recurrent_weights.cu, recurrent_channel_weights.cu, recurrent_chunks.cu and recurrent_chunks_sm90.cu: tokens of a chunk, and threads of a
// block. Of the last two: values of a block, and chunks in shared memory at most.
constexpr int kRecurrentChunk = 64, kRecurrentWeightsThreads = 128, kRecurrentChunkThreads = 128, kRecurrentChunkSm90Threads = 256;
constexpr int recurrent_channel_threads(int dim_k) { return 4 * dim_k; }
// The shared memory of recurrent_channel_weights.cu: tiles of keys and queries, and numbers.
constexpr int kRecurrentChannelTiles = 5;
constexpr int recurrent_channel_weights_smem(int dim_k) {
  return kRecurrentChannelTiles * kRecurrentChunk * dim_k * 2 + 2 * 10 * 512 + 16 * dim_k + 1024;
}
constexpr int kRecurrentTileValues = 64, kRecurrentChunkStages = 2;
// The first tokens of a request, which come in chunks: whole chunks, and what is left behind them if it is long enough. How a prompt is cut
// into steps of whole chunks changes none of it.
constexpr int chunked_tokens(int least_chunked, int tokens, int drafts) {
  const int rest = tokens % kRecurrentChunk;
  return least_chunked == 0 || drafts > 0 ? 0 : rest < least_chunked ? tokens - rest : tokens;
}

// Where heads are few, chunks of a long request come in segments, which are computed beside each other: chunks of each segment but the last
// one. It is that of the request alone. A segment's place in `segments` is the number of its first chunk, divided by the least length.
constexpr int kLeastSegments = 3;
constexpr int segment_chunks(const RecurrentParams& p, int chunks) {
  const int most = chunks / p.least_segment, count = most < p.most_segments ? most : p.most_segments;
  return count < kLeastSegments ? chunks : (chunks + count - 1) / count;
}
// Of a head in a segment's place, rows of head_dim_k floats: the state, and what the segment does to the one in front of it. With the delta
// rule that is a matrix, without it a factor of each key channel.
constexpr int recurrent_transition_rows(int dim_k, bool delta) { return delta ? dim_k : 1; }
constexpr int recurrent_segment_rows(int dim_k, int dim_v, bool delta) { return dim_v + recurrent_transition_rows(dim_k, delta); }
// recurrent_segments.cu: values of a thread block, which has the transitions of two segments in shared memory, and the state in two parts.
constexpr int kRecurrentJoinThreads = 256, kRecurrentJoinValues = 16;
constexpr int recurrent_join_bytes(int dim_k, bool delta) {
  return 2 * recurrent_transition_rows(dim_k, delta) * (dim_k + 4) * 4 + 2 * kRecurrentJoinValues * (dim_k + 8) * 2;
}

// What is made of a chunk and value head: triangles of tokens in blocks of 16, in 16 bits, and numbers of tokens.
// With gates of channels also keys and queries with their decays, and what a chunk leaves of each channel.
constexpr int recurrent_weights_bytes(int dim_k, bool delta, bool channels) {
  return (delta ? 2 : 1) * 10 * 512 + 4 * kRecurrentChunk * 4 + 16 + (channels ? 3 * kRecurrentChunk * dim_k * 2 + dim_k * 4 : 0);
}
// What a chunk takes of shared memory: keys, queries and values of 16 bits, the above, and for sm_90a blocks of zeros between triangles,
// and mbarriers; there matrices begin at multiples of 1024 bytes, and with kEnds there are neither queries nor P.
constexpr int recurrent_stage_bytes(int dim_k, bool delta, bool channels, bool sm90, bool ends) {
  const bool asked = !(sm90 && ends);
  const int zeros = sm90 ? ((delta ? 2 : 0) + (asked ? 6 : 0)) * 512 + 32 : 0, unit = sm90 ? 1024 : 128;
  const int rows = kRecurrentChunk * ((channels ? 0 : 2 * dim_k) + kRecurrentTileValues) * 2;
  const int all = rows + recurrent_weights_bytes(dim_k, delta, channels) + zeros - (asked ? 0 : kRecurrentChunk * dim_k * 2 + 10 * 512);
  return (all + unit - 1) / unit * unit;
}
// recurrent_chunks_sm90.cu: chunks in shared memory, where so many thread blocks share a multiprocessor.
constexpr int recurrent_chunk_sm90_stages(int stage_bytes, int blocks) {
  constexpr int kMost = 4, kSmem = 228 << 10, kOfBlock = 1 << 10;
  const int room = (kSmem / blocks - kOfBlock) / stage_bytes;
  return room < kMost ? room : kMost;
}

}  // namespace imbrex::cuda
