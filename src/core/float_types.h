#pragma once
// Element access by DType, with the conversions of small_floats.h: for the reference backend, tests and tools.
#include <cstring>

#include "core/check.h"
#include "core/small_floats.h"
#include "imbrex/tensor.h"

namespace imbrex {


namespace detail {
template <class T>
T load_element(const void* p, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(p) + index * int64_t(sizeof(T)), sizeof(T));
  return value;
}
template <class T>
void store_element(void* p, int64_t index, T value) {
  std::memcpy(static_cast<char*>(p) + index * int64_t(sizeof(T)), &value, sizeof(T));
}
}  // namespace detail

// Element `index` (counted in elements; no alignment needed) as a double. Exact for every type but i64.
inline double load_as_double(const void* p, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::f32: return detail::load_element<float>(p, index);
    case DType::f16: return f16_to_float(detail::load_element<uint16_t>(p, index));
    case DType::bf16: return bf16_to_float(detail::load_element<uint16_t>(p, index));
    case DType::fp8_e4m3: return fp8_e4m3_to_float(detail::load_element<uint8_t>(p, index));
    case DType::fp8_e5m2: return fp8_e5m2_to_float(detail::load_element<uint8_t>(p, index));
    case DType::u8: return detail::load_element<uint8_t>(p, index);
    case DType::i32: return detail::load_element<int32_t>(p, index);
    case DType::i64: return double(detail::load_element<int64_t>(p, index));
  }
  return 0;
}
inline float load_as_float(const void* p, DType dtype, int64_t index) { return float(load_as_double(p, dtype, index)); }

// Rounds to nearest even, once. Error dtype.not_float for integer types.
inline void store_from_float(void* p, DType dtype, int64_t index, float x) {
  switch (dtype) {
    case DType::f32: return detail::store_element(p, index, x);
    case DType::f16: return detail::store_element(p, index, float_to_f16(x));
    case DType::bf16: return detail::store_element(p, index, float_to_bf16(x));
    case DType::fp8_e4m3: return detail::store_element(p, index, float_to_fp8_e4m3(x));
    case DType::fp8_e5m2: return detail::store_element(p, index, float_to_fp8_e5m2(x));
    case DType::u8:
    case DType::i32:
    case DType::i64: break;
  }
  fail("dtype.not_float", "expected a float type to store to, got {}", to_string(dtype));
}
inline void store_from_double(void* p, DType dtype, int64_t index, double x) {
  store_from_float(p, dtype, index, dtype == DType::f32 ? float(x) : narrow_to_odd(x));
}

}  // namespace imbrex
