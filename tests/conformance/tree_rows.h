#pragma once
// Rows of the tensors and results of trees of drafts, by their numbers: what laws compare a tree's path with.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "conformance/host_tensor.h"

namespace imbrex::test {

// Of a [rows, heads, dim] tensor.
inline HostTensor rows_at(const HostTensor& t, const std::vector<int64_t>& rows) {
  HostTensor part = HostTensor::make(t.dtype, {int64_t(rows.size()), t.sizes[1], t.sizes[2]});
  const int64_t bytes = t.sizes[1] * t.sizes[2] * size_of(t.dtype);
  for (size_t i = 0; i < rows.size(); ++i) std::copy_n(t.bytes.begin() + rows[i] * bytes, bytes, part.bytes.begin() + int64_t(i) * bytes);
  return part;
}
// Of rows that are `width` numbers long.
inline std::vector<float> rows_at(const std::vector<float>& t, const std::vector<int64_t>& rows, int64_t width) {
  std::vector<float> part;
  for (const int64_t row : rows) part.insert(part.end(), t.begin() + row * width, t.begin() + (row + 1) * width);
  return part;
}

}  // namespace imbrex::test
