#pragma once
// Lists of ranges of rows, as kernels of latent attention find a row in them.
#include "async.cuh"
#include "cuda/mla_params.h"

namespace imbrex::cuda {

// The last range that begins at the row or in front of it; the first one begins at row 0.
template <class Range>
DEVICE int range_of(const Range* ranges, int count, int row) {
  int low = 0, high = count;  // it is in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (ranges[middle].row <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Whether a token is of a request that is left out. Requests without tokens begin where the next one does.
DEVICE bool is_left_out(const LengthsThere& lengths, int token) {
  int low = 0, high = *lengths.num_reqs;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (lengths.query_start[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return lengths.seq_lens[low] < 0;
}

}  // namespace imbrex::cuda
