// Rows of heads between the tokens of a batch and a list of them, bit by bit; launched by cuda/mla/steps.cpp.
//
// Memory: every byte is read and written once; each thread has a piece at a time, of neighbouring heads of a row.
#include "mla_rows.cuh"

namespace imbrex::cuda {

template <class Word>
DEVICE void copy_rows(const CopyRowsParams& p) {
  griddep_wait();
  const int* const now = p.lengths.num_tokens;
  const int rows = now != nullptr && *now < p.num_rows ? *now : p.num_rows;
  const long words = p.bytes / int(sizeof(Word)), of_row = words * p.num_heads, all = of_row * rows;
  for (long i = long(blockIdx.x) * kMlaThreads + threadIdx.x; i < all; i += long(gridDim.x) * kMlaThreads) {
    const int row = int(i / of_row), head = int(i % of_row / words);
    const long at = i % words * long(sizeof(Word));
    int token = row;
    if (p.lengths.seq_lens != nullptr && is_left_out(p.lengths, row)) continue;
    if (p.ranges != nullptr) {
      const TokenRows range = p.ranges[range_of(p.ranges, p.num_ranges, row)];
      token = range.token + row - range.row;
    }
    const long from = p.from_tokens ? token : row, to = p.from_tokens ? row : token;
    *reinterpret_cast<Word*>(p.to + to * p.to_row + head * p.to_head + at) =
        *reinterpret_cast<const Word*>(p.from + from * p.from_row + head * p.from_head + at);
  }
}

extern "C" __global__ void __launch_bounds__(kMlaThreads) copy_rows_16(const __grid_constant__ CopyRowsParams p) { copy_rows<uint4>(p); }
extern "C" __global__ void __launch_bounds__(kMlaThreads) copy_rows_2(const __grid_constant__ CopyRowsParams p) { copy_rows<u16>(p); }

}  // namespace imbrex::cuda
