#pragma once
// Tensors of cases and case files, in host memory that they own.
#include <span>
#include <vector>

#include "imbrex/tensor.h"

namespace imbrex {

// Owned, row-major host memory.
struct HostTensor {
  DType dtype = DType::f32;
  std::vector<int64_t> sizes;
  std::vector<char> bytes;

  static HostTensor make(DType, std::vector<int64_t> sizes);  // zeroed
  bool empty() const { return sizes.empty(); }
  int64_t num_elements() const;
  double get(int64_t index) const;
  void set(int64_t index, double value);
  void set_row(int64_t first, std::span<const double> values);  // of a float type
  TensorView view() const;                                      // empty view when there is no tensor; kernels only read it
};

HostTensor tensor_of(const std::vector<int32_t>& values);                            // i32 [values.size()]
HostTensor tensor_of(const std::vector<float>& values, std::vector<int64_t> sizes);  // f32

}  // namespace imbrex
