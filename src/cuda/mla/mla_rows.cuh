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

}  // namespace imbrex::cuda
