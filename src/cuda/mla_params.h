#pragma once
// The parameters of the CUDA kernels of latent attention: plain structs, strides in bytes. Filled by cuda/mla/steps.cpp.

namespace imbrex::cuda {

constexpr int kMlaThreads = 256;

// Rows of some list, from `row` to the next range's, that are neighbouring tokens of the batch from `token` on. Where rows are results of a
// round: whether they are the first ones of these tokens, and the last, and the row of sums that the first of them has.
struct TokenRows {
  int row, token;
  int sum;
  int first, last;
};

// Neighbouring keys of a request, from `key` on, as rows of a round from `row` to the next one's.
struct KeyRows {
  int row, request;
  int key;
  int padding;
  long first_block;  // where the request's blocks begin among the ids; not used where the batch's own starts are read
};

// Latents of a cache or, apart, their rope parts.
struct LatentSide {
  const char* data;
  long block_stride, token_stride, dim_stride;
  const float* scale_there;  // on the device; null: `scale`
  float scale;
};

struct GatherLatentsParams {
  LatentSide latents, rope;  // rope: where it is in a tensor of its own
  const int* block_ids;
  const int* block_starts;  // of the batch, i32 [requests + 1] on the device; null: KeyRows::first_block
  const KeyRows* ranges;    // [num_ranges], rows rising
  int num_ranges, num_rows;
  int block_size, rank, rope_dim, num_heads;
  char* to;                          // [num_rows, rank] of kTo, contiguous
  char* to_rope;                     // of the first row and head
  long to_rope_token, to_rope_head;  // strides
};

// What the device knows of a step's lengths: the arrays of the plan of attention that the step was made for.
struct LengthsThere {
  const int* num_tokens = nullptr;
  const int* num_reqs = nullptr;
  const int* query_start = nullptr;  // [num_reqs + 1]
  const int* seq_lens = nullptr;     // [num_reqs]; below 0 for a request that is left out, because it broke a rule
};

struct CopyRowsParams {
  const char* from;
  char* to;
  long from_row, from_head, to_row, to_head;
  const TokenRows* ranges;  // [num_ranges], rows rising; null: row i is token i
  int num_ranges;
  bool from_tokens;  // `from` has a row for each token, and `to` for each row; else it is the other way around
  int num_rows, num_heads;
  int bytes;  // of a head's row
  // With num_tokens, no more rows are copied; with the other three, beside which row i is token i, none of requests that are left out.
  LengthsThere lengths;
};

struct AddPartsParams {
  const float* part;      // [num_rows, num_heads, dim], contiguous
  const float* part_lse;  // [num_rows, num_heads], contiguous
  float* sum;             // [tokens of a slice, num_heads, dim]: what earlier parts of a token add up to
  float* sum_lse;         // [tokens of a slice, num_heads]
  const float* sinks;     // [num_heads] or null
  char* out;
  float* lse;                             // or null
  long out_token, out_head;               // bytes
  long lse_token, lse_head, sink_stride;  // elements
  const TokenRows* ranges;                // [num_ranges], rows rising
  int num_ranges, num_rows, num_heads, dim;
  int out_type;
};

}  // namespace imbrex::cuda
