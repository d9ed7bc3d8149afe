#pragma once
// The pieces a batch is cut into. Plain ints and no includes: host code, CPU kernels and CUDA kernels all read this file.

namespace imbrex {

struct WorkItem {
  int request;
  int q_begin, q_end;    // query tokens, counted within the batch
  int kv_begin, kv_end;  // keys, counted within the request; kv_begin is a multiple of the policy's tile_kv
  int partial;           // first row of the partial buffers (row of token q_begin; the others follow); -1: write the output
  int merge = -1;        // which of the list's merges joins the partial result; -1: none
  int piece = 0;         // keys of each piece of a run, the last one's may be fewer; 0: the item is one piece
};
static_assert(sizeof(WorkItem) == 32);  // two loads of 16 bytes where a kernel likes that; aligned to so many, prefill's registers spill

// Sums of the pieces of a request are folded as a tree of such nodes: neighbouring pieces become one, these become one with their
// neighbours, and so on, from the left. So it does not matter whether one thread block computes the pieces of a node (a run) or several do.
constexpr int kPiecesTogether = 4;
constexpr int kMostInRun = kPiecesTogether * kPiecesTogether * kPiecesTogether;

// An item before it is split.
struct CutItem {
  WorkItem whole;                // partial: of its first split; -1: it is in one
  int num_splits = 1;            // the first ends at first_end, each further one has `split` keys, and the last the rest
  int first_end = 0, split = 0;  // of several splits
};

// Joins the partial results of tokens [q_begin, q_end): split s of token t is row first_partial + s * (q_end - q_begin) + t - q_begin.
struct MergeItem {
  int q_begin, q_end;
  int first_partial, num_splits;
};

}  // namespace imbrex
