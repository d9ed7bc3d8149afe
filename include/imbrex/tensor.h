#pragma once
// A non-owning, strided view of memory on some device: what DLPack calls a tensor, without the ownership.
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace imbrex {

enum class DType : uint8_t { f32, f16, bf16, fp8_e4m3, fp8_e5m2, u8, i32, i64 };
constexpr int64_t size_of(DType t) {  // bytes an element
  switch (t) {
    case DType::fp8_e4m3:
    case DType::fp8_e5m2:
    case DType::u8: return 1;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    case DType::i64: return 8;
  }
  return 0;
}
constexpr bool is_fp8(DType t) { return t == DType::fp8_e4m3 || t == DType::fp8_e5m2; }
const char* to_string(DType);
DType parse_dtype(std::string_view);  // "bf16", "bfloat16", "fp8_e4m3", "float8_e4m3fn", ...; Error dtype.unknown

enum class DeviceType : uint8_t { cpu, cuda, plugin };  // plugin: of a platform that has registered (device_platform.h)
const char* to_string(DeviceType);

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  std::string str() const;  // "cpu", "cuda:0", "toy:0"
  friend bool operator==(const Device&, const Device&) = default;
};

struct TensorView {
  static constexpr int kMaxRank = 5;
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  int rank = 0;
  std::array<int64_t, kMaxRank> sizes{};    // in elements
  std::array<int64_t, kMaxRank> strides{};  // in elements, never bytes

  // Row-major view; throws Error tensor.size.overflow when the byte count does not fit 63 bits.
  static TensorView contiguous(void* data, DType, std::initializer_list<int64_t> sizes, Device = {});

  int64_t size(int dim) const { return sizes[dim]; }
  int64_t stride(int dim) const { return strides[dim]; }
  bool empty() const { return data == nullptr; }
  int64_t num_elements() const;
  bool is_addressable() const;  // the bytes from one element to any other fit 63 bits
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }  // the caller has checked the dtype
  TensorView slice(int dim, int64_t begin, int64_t end) const;
  TensorView select(int dim, int64_t index) const;  // drops `dim`
  std::string str() const;                          // "bf16[512, 32, 128] on cuda:0", for messages
  friend bool operator==(const TensorView&, const TensorView&) = default;
};

}  // namespace imbrex
