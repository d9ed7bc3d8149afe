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

// Calls visit(load) with the function that loads elements of the type from p. Conversions are lambdas, each a type of its own, so that each
// has a loop of its own in what is visited.
template <class Visit>
auto with_load(const void* p, DType dtype, Visit visit) {
  const auto decoded = [&]<class T>(auto decode, T) {
    return visit([=](int64_t index) { return double(decode(load_element<T>(p, index))); });
  };
  const auto itself = [](auto value) { return value; };
  switch (dtype) {
    case DType::f32: return decoded(itself, float());
    case DType::f16: return decoded([](uint16_t code) { return f16_to_float(code); }, uint16_t());
    case DType::bf16: return decoded([](uint16_t code) { return bf16_to_float(code); }, uint16_t());
    case DType::fp8_e4m3: return decoded([](uint8_t code) { return fp8_e4m3_to_float(code); }, uint8_t());
    case DType::fp8_e5m2: return decoded([](uint8_t code) { return fp8_e5m2_to_float(code); }, uint8_t());
    case DType::u8: return decoded(itself, uint8_t());
    case DType::i32: return decoded(itself, int32_t());
    case DType::i64: return decoded(itself, int64_t());
  }
  fail("dtype.not_float", "expected a type of elements, got {}", int(dtype));
}

// Calls visit(store) with the function that rounds floats to the type and stores them at p.
template <class Visit>
void with_store(void* p, DType dtype, Visit visit) {
  const auto encoded = [&](auto encode) { visit([=](int64_t index, float x) { store_element(p, index, encode(x)); }); };
  switch (dtype) {
    case DType::f32: return encoded([](float x) { return x; });
    case DType::f16: return encoded([](float x) { return float_to_f16(x); });
    case DType::bf16: return encoded([](float x) { return float_to_bf16(x); });
    case DType::fp8_e4m3: return encoded([](float x) { return float_to_fp8_e4m3(x); });
    case DType::fp8_e5m2: return encoded([](float x) { return float_to_fp8_e5m2(x); });
    case DType::u8:
    case DType::i32:
    case DType::i64: break;
  }
  fail("dtype.not_float", "expected a float type to store to, got {}", to_string(dtype));
}
}  // namespace

double load_as_double(const void* p, DType dtype, int64_t index) {
  return with_load(p, dtype, [index](auto load) { return load(index); });
}

void load_as_doubles(const void* p, DType dtype, int64_t first, int64_t stride, std::span<double> to) {
  with_load(p, dtype, [=](auto load) {
    for (size_t i = 0; i < to.size(); ++i) to[i] = load(first + int64_t(i) * stride);
  });
}

void store_from_float(void* p, DType dtype, int64_t index, float x) {
  with_store(p, dtype, [=](auto store) { store(index, x); });
}

void store_from_doubles(void* p, DType dtype, int64_t first, int64_t stride, std::span<const double> from) {
  with_store(p, dtype, [=](auto store) {
    for (size_t i = 0; i < from.size(); ++i)
      store(first + int64_t(i) * stride, dtype == DType::f32 ? float(from[i]) : narrow_to_odd(from[i]));
  });
}

}  // namespace imbrex
