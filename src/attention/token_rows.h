#pragma once
// Rows of some tokens of a batch, taken out of its tensors and put back.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "core/check.h"
#include "imbrex/parallel.h"
#include "imbrex/tensor.h"

namespace imbrex {

// Uninitialised memory for rows of one tensor; pages that are never touched cost nothing.
class RowBuffer {
 public:
  RowBuffer(int64_t rows, int64_t row_bytes)
      : memory_(std::make_unique_for_overwrite<std::byte[]>(size_t(checked_mul("phase_plan.size", rows, row_bytes)))) {}
  std::byte* data() const { return memory_.get(); }

 private:
  std::unique_ptr<std::byte[]> memory_;
};

struct TokenRange {
  int begin, end;  // tokens of the batch
};

// Calls body(row of the part, row of the batch) for every token of the ranges, spread over the threads by rows.
template <class F>
void for_rows(const ParallelFor& threads, const std::vector<TokenRange>& ranges, const F& body) {
  struct Argument {
    const std::vector<TokenRange>& ranges;
    const F& body;
    int num_workers;
  } argument{ranges, body, threads.invoke ? std::max(threads.num_workers, 1) : 1};
  const auto work = [](void* pointer, int worker) {
    const auto& a = *static_cast<Argument*>(pointer);
    int row = 0;
    for (const TokenRange& range : a.ranges) {
      for (int token = range.begin; token < range.end; ++token, ++row) {
        if (row % a.num_workers == worker) a.body(row, token);
      }
    }
  };
  if (argument.num_workers == 1) {
    work(&argument, 0);
  } else {
    threads.invoke(threads.context, argument.num_workers, work, &argument);
  }
}

// Rows of heads, or of one number a head (lse). The target's numbers lie next to each other.
inline void copy_row(const TensorView& from, int64_t from_row, const TensorView& to, int64_t to_row) {
  const int64_t size = size_of(from.dtype), dim = from.rank == 2 ? 1 : from.size(2), stride = from.rank == 2 ? 1 : from.stride(2);
  const auto* source = from.as<const std::byte>() + from_row * from.stride(0) * size;
  auto* target = to.as<std::byte>() + to_row * to.stride(0) * size;
  for (int64_t h = 0; h < from.size(1); ++h) {
    const auto* head = source + h * from.stride(1) * size;
    auto* copy = target + h * to.stride(1) * size;
    if (stride == 1) {
      std::memcpy(copy, head, size_t(dim * size));
    } else {
      for (int64_t d = 0; d < dim; ++d) std::memcpy(copy + d * size, head + d * stride * size, size_t(size));
    }
  }
}

}  // namespace imbrex
