#pragma once
// The work items and merges that a batch is cut into. Plain ints and no includes: host code, CPU kernels and CUDA kernels all read this
// file.

namespace imbrex {

struct WorkItem {
  int table;             // whose keys: the row of the batch's tables, which is the number of a request
  int q_begin, q_end;    // query tokens of that request, counted within the batch; of any requests in a list with tokens (ListDetails)
  int kv_begin, kv_end;  // keys, counted within the table's request; kv_begin is a multiple of the policy's tile_kv
  int partial;           // first row of the partial buffers (row of the first query; the others follow); -1: write the output
  int merge = -1;        // which of the list's merges joins the partial result; -1: none, or several
  int piece = 0;         // keys of each piece of a run, the last one's may be fewer; 0: one piece; below 0: it has details, number ~piece
};
// Kernels may load an item as two times 16 bytes. It has no alignas(16): with that, the registers of the prefill kernel spill.
static_assert(sizeof(WorkItem) == 32);

// What an item does not do of what it says: WorkItem::piece tells which details are its own.
struct ItemDetails {
  int kv_head;                       // the only one that it is for; -1: it is for every one
  int first_stretch, num_stretches;  // of the list's stretches, in rising order: the keys that are computed; num_stretches -1: all of them
  int piece = 0;                     // of an item that is a run: keys of each piece, as in WorkItem
};
struct KeyStretch {
  int begin, end;  // keys, counted as those of an item; begin is a multiple of the policy's tile_kv
  int shown;       // 1: the custom mask hides none of them from any query of the item, so that its bytes need not be read; 0: it may
};

// Sums of the pieces of a request are folded as a tree, from the left: so many neighbouring pieces become one node, so many neighbouring
// nodes become one node of the next level, and so on. So it does not matter whether one thread block computes the pieces of a node (a run)
// or several do.
constexpr int kPiecesTogether = 4;
constexpr int kMostInRun = kPiecesTogether * kPiecesTogether * kPiecesTogether;

// An item before it is split by its keys.
struct CutItem {
  WorkItem whole;                // its `partial` is that of the first split; -1: the item is not split
  int num_splits = 1;            // the first ends at first_end, each further one has `split` keys, and the last the rest
  int first_end = 0, split = 0;  // of several splits
};

// Joins the partial results of tokens [q_begin, q_end) of the batch, in the order of the splits. Split s of token t is row
// first_partial + s * (q_end - q_begin) + t - q_begin; in a list with parts (ListDetails) it is row parts[first_partial + s] + t - q_begin.
struct MergeItem {
  int q_begin, q_end;
  int first_partial, num_splits;
};

}  // namespace imbrex
