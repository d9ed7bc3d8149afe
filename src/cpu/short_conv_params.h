#pragma once
// The parameters of a CPU kernel of the short convolution: plain structs, strides in bytes. Filled by cpu/short_conv.cpp.
#include "cpu/params.h"

namespace imbrex::cpu {

constexpr int kShortConvWidth = 8;  // ShortConvSpec::width at most

struct ShortConvParams {
  const char *input, *weight, *bias;  // bias null: none
  char *state, *out;
  long input_stride, weight_dim_stride, weight_tap_stride, state_slot_stride, state_row_stride, out_stride;
  int type;  // ElementType
  int dim, width;
  bool gated;              // rows of the input are B, C and x of a token, otherwise x
  bool silu;               // of the sums
  bool past_caches;        // outputs, whose rows are aligned to a line of 64 bytes and in all more than caches hold
  bool tree;               // ShortConvSpec::tree_drafts
  const int* parent_rows;  // of the batch's tokens, as in StateStep; null: drafts begin from those in front of them
};

// Some tokens of a request. The item that begins it reads the state, and writes it when all is read. Where drafts may be a tree, those of
// the request lie behind its tokens here, and come with that item, which may have no others.
struct ShortConvItem {
  int begin, end;                       // tokens of the batch, out of
  int request_begin, request_end;       // those of the request
  int slot, source, first_row, drafts;  // as in StateRequest
  bool fresh;
};

struct ShortConvKernels {
  const char* isa;
  // Items in order, for channels [dim_begin, dim_end). `scratch`: scratch_bytes() of these, aligned to a line of 64 bytes.
  void (*run)(const ShortConvParams&, const ShortConvItem* items, int count, int dim_begin, int dim_end, char* scratch);
  long (*scratch_bytes)(int dims, int width);
};

}  // namespace imbrex::cpu
