#pragma once
// What kernels take for granted of a tensor's memory, since they multiply indices and strides unchecked. A view without data passes.
#include "imbrex/tensor.h"

namespace imbrex {

// Elements are aligned to their size, and the bytes between any two of them fit 63 bits. Errors tensor.alignment, tensor.strides.
void check_layout(const TensorView&, const char* name);
// Also, no two elements share their place: threads would race for it. Error tensor.overlap.
void check_written_layout(const TensorView&, const char* name);

// In bytes; 0 for a dimension of one element, whose stride may be any number.
inline int64_t byte_stride(const TensorView& t, int dim) { return t.size(dim) > 1 ? t.stride(dim) * size_of(t.dtype) : 0; }

}  // namespace imbrex
