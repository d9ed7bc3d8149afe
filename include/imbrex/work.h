#pragma once
// The pieces a batch is cut into. Plain ints and no includes: host code, CPU kernels and CUDA kernels all read this file.

namespace imbrex {

struct WorkItem {
  int request;
  int q_begin, q_end;    // query tokens, counted within the batch
  int kv_begin, kv_end;  // keys, counted within the request; kv_begin is a multiple of the policy's tile_kv
  int partial;           // first row of the partial buffers (row of token q_begin; the others follow); -1: write the output
  int merge = -1;        // which of the list's merges joins the partial result; -1: none
};

// An item before it is split.
struct CutItem {
  WorkItem whole;                // partial: of its first piece; -1: it is in one piece
  int num_pieces = 1;            // the first ends at first_end, each further one has `piece` keys, and the last the rest
  int first_end = 0, piece = 0;  // of several pieces
};

// Joins the partial results of tokens [q_begin, q_end): split s of token t is row first_partial + s * (q_end - q_begin) + t - q_begin.
struct MergeItem {
  int q_begin, q_end;
  int first_partial, num_splits;
};

}  // namespace imbrex
