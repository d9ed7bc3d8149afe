#pragma once
// Checks of a tensor's memory layout that kernels rely on, since they multiply indices and strides unchecked. A view without data passes.
#include "imbrex/tensor.h"

namespace imbrex {

// Elements are aligned to their size, and the bytes between any two of them fit 63 bits. Errors tensor.alignment, tensor.strides.
void check_layout(const TensorView&, const char* name);
// Checks a tensor that is written: as check_layout(), and that no two elements have the same address, where threads would race. Error
// tensor.overlap.
void check_written_layout(const TensorView&, const char* name);

// Whether two tensors may have memory in common. The answer is exact for parts of one larger array, which have its strides or one row; of
// others it is yes if the bytes from first to last element have some in common.
bool may_meet(const TensorView&, const TensorView&);

// The stride of a dimension in bytes; 0 for a dimension of one element, whose stride may be any number.
inline int64_t byte_stride(const TensorView& t, int dim) { return t.size(dim) > 1 ? t.stride(dim) * size_of(t.dtype) : 0; }

}  // namespace imbrex
