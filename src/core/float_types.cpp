// Loads and stores of one element by its DType. They are not inline: tests are compiled without optimisation, and the linker could take
// their copy of an inline function for the library's calls too.
#include "core/float_types.h"

#include <cstring>

#include "core/check.h"

namespace imbrex {

namespace {
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
}  // namespace

double load_as_double(const void* p, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::f32: return load_element<float>(p, index);
    case DType::f16: return f16_to_float(load_element<uint16_t>(p, index));
    case DType::bf16: return bf16_to_float(load_element<uint16_t>(p, index));
    case DType::fp8_e4m3: return fp8_e4m3_to_float(load_element<uint8_t>(p, index));
    case DType::fp8_e5m2: return fp8_e5m2_to_float(load_element<uint8_t>(p, index));
    case DType::u8: return load_element<uint8_t>(p, index);
    case DType::i32: return load_element<int32_t>(p, index);
    case DType::i64: return double(load_element<int64_t>(p, index));
  }
  return 0;
}

void store_from_float(void* p, DType dtype, int64_t index, float x) {
  switch (dtype) {
    case DType::f32: return store_element(p, index, x);
    case DType::f16: return store_element(p, index, float_to_f16(x));
    case DType::bf16: return store_element(p, index, float_to_bf16(x));
    case DType::fp8_e4m3: return store_element(p, index, float_to_fp8_e4m3(x));
    case DType::fp8_e5m2: return store_element(p, index, float_to_fp8_e5m2(x));
    case DType::u8:
    case DType::i32:
    case DType::i64: break;
  }
  fail("dtype.not_float", "expected a float type to store to, got {}", to_string(dtype));
}

}  // namespace imbrex
