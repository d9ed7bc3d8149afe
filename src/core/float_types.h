#pragma once
// Element access by DType, with the conversions of small_floats.h: for the reference backend, tests and tools.
#include <span>

#include "core/small_floats.h"
#include "imbrex/tensor.h"

namespace imbrex {

// Element `index` (counted in elements; no alignment needed) as a double. Exact for every type but i64.
double load_as_double(const void* p, DType dtype, int64_t index);
inline float load_as_float(const void* p, DType dtype, int64_t index) { return float(load_as_double(p, dtype, index)); }

// Rounds to nearest even, once. Error dtype.not_float for integer types.
void store_from_float(void* p, DType dtype, int64_t index, float x);
inline void store_from_double(void* p, DType dtype, int64_t index, double x) {
  store_from_float(p, dtype, index, dtype == DType::f32 ? float(x) : narrow_to_odd(x));
}

// The same for elements that lie `stride` apart, from element `first` on: the type is looked at once.
void load_as_doubles(const void* p, DType dtype, int64_t first, int64_t stride, std::span<double> to);
void store_from_doubles(void* p, DType dtype, int64_t first, int64_t stride, std::span<const double> from);

}  // namespace imbrex
