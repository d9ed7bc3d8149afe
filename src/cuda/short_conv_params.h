#pragma once
// The parameters of the CUDA kernel of the short convolution: plain structs, strides in bytes. Filled by cuda/short_conv/short_conv.cpp.
#include "cuda/state_params.h"

namespace imbrex::cuda {

constexpr int kShortConvThreads = 128;
constexpr int kShortConvLaneBytes = 16;  // of a row, that a thread has

struct ShortConvParams {
  const char *input, *weight, *bias;
  char *state, *out;
  long input_stride, weight_dim_stride, weight_tap_stride, state_slot_stride, state_row_stride, out_stride;
  const StateRequest* requests;  // [num_reqs + 1]
  const StateCounts* counts;
  const int* parent_rows;           // of tokens of the batch, where drafts may be a tree: which rows a draft begins from
  int* broken;                      // [kNumStateRules], as in PlanStateBatchParams; null: nobody asks
  int dim, num_slots, num_tokens;   // num_tokens: that input and out have rows for; a request with others is left out
  int chunks_at_once, most_chunks;  // that the GPU holds, and whose number times tiles fits 31 bits
  bool lists_are_there;             // requests and counts were there before the kernel in front began
};

// Tokens of a unit of work: as few as keep the GPU busy, in whole waves of units. A unit reads what `width - 1` tokens in front of its own
// have, and what a request's first and last tokens have is needed in one place, so it has as many as a request has, if those are few.
constexpr int short_conv_chunk(const StateCounts& step, int chunks_at_once, int most_chunks) {
  constexpr int kMost = 64, kFew = 4;
  if (step.num_tokens <= 0) return 1;
  const int last = step.num_tokens - 1, waves = last / kMost / chunks_at_once + 1;
  const int even = last / waves / chunks_at_once + 1, least = last / most_chunks + 1, each = step.num_tokens / step.num_reqs;
  const int few = each < kFew ? each : kFew, chunk = even > few ? even : few;
  return chunk > least ? chunk : least;
}

}  // namespace imbrex::cuda
