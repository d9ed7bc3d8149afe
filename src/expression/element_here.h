#pragma once
// Elements of tensors for texts whose loads stay where they are. No headers, since NVRTC reads this file too.
#ifndef __CUDA_ARCH__
#include "expression/operations.h"
#endif

namespace imbrex::operations {

// An element, as element() gives it, whose load a compiler leaves where the text has it: it is no plain load, which ptxas moves behind
// barriers to where the value is used.
#ifdef __CUDA_ARCH__
inline unsigned load_here(const void* from) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}
inline int element_of(const int* data, long at) { return int(load_here(data + at)); }
inline float element_of(const float* data, long at) { return as_float(load_here(data + at)); }
inline unsigned char element_of(const unsigned char* data, long at) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u8 %0, [%1];" : "=r"(value) : "l"(data + at));
  return (unsigned char)(value);
}
template <class T>
inline T element_here(const ExpressionTensorData& tensor, int i, int j = 0, int k = 0) {
  const bool inside =
      unsigned(i) < unsigned(tensor.sizes[0]) && unsigned(j) < unsigned(tensor.sizes[1]) && unsigned(k) < unsigned(tensor.sizes[2]);
  const long at = i * tensor.strides[0] + j * tensor.strides[1] + k * tensor.strides[2];
  const T value = element_of(static_cast<const T*>(tensor.data), inside ? at : 0);
  return inside ? value : T(0);
}
#else
template <class T>
inline T element_here(const ExpressionTensorData& tensor, int i, int j = 0, int k = 0) {
  return element<T>(tensor, i, j, k);
}
#endif
inline bool element_here_bool(const ExpressionTensorData& tensor, int i, int j = 0, int k = 0) {
  return element_here<unsigned char>(tensor, i, j, k) != 0;
}

}  // namespace imbrex::operations
