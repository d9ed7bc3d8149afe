// TensorView and the element types: the views that every other file takes and hands on.
#include "imbrex/tensor.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "core/platform_names.h"
#include "core/tensor_format.h"
#include "core/text.h"
#include "imbrex/device_platform.h"

namespace imbrex {

const char* to_string(DType t) {
  switch (t) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::fp8_e4m3: return "fp8_e4m3";
    case DType::fp8_e5m2: return "fp8_e5m2";
    case DType::u8: return "u8";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
  }
  return "unknown";
}

DType parse_dtype(std::string_view text) {
  // Names of element types: those of imbrex first, then those of PyTorch, vLLM and safetensors.
  static constexpr struct {
    std::string_view name;
    DType dtype;
  } kNames[] = {
      {"f32", DType::f32},           {"f16", DType::f16},
      {"bf16", DType::bf16},         {"fp8_e4m3", DType::fp8_e4m3},
      {"fp8_e5m2", DType::fp8_e5m2}, {"u8", DType::u8},
      {"i32", DType::i32},           {"i64", DType::i64},
      {"float32", DType::f32},       {"float", DType::f32},
      {"float16", DType::f16},       {"half", DType::f16},
      {"bfloat16", DType::bf16},     {"fp8", DType::fp8_e4m3},
      {"e4m3", DType::fp8_e4m3},     {"fp8_e4m3fn", DType::fp8_e4m3},
      {"f8_e4m3", DType::fp8_e4m3},  {"float8_e4m3fn", DType::fp8_e4m3},
      {"e5m2", DType::fp8_e5m2},     {"f8_e5m2", DType::fp8_e5m2},
      {"uint8", DType::u8},          {"float8_e5m2", DType::fp8_e5m2},
      {"int32", DType::i32},         {"int64", DType::i64},
  };
  const std::string lower = to_lower(text);
  for (const auto& entry : kNames)
    if (entry.name == lower) return entry.dtype;
  fail("dtype.unknown", "expected one of f32, f16, bf16, fp8_e4m3, fp8_e5m2, u8, i32, i64, got \"{}\"", text);
}

const char* to_string(DeviceType t) {
  switch (t) {
    case DeviceType::cpu: return "cpu";
    case DeviceType::cuda: return "cuda";
    case DeviceType::plugin: return "plugin";
  }
  return "unknown";
}

std::string Device::str() const {
  if (type == DeviceType::plugin) return fmt::format("{}:{}", platform_name(index), number_of(*this));
  return type == DeviceType::cpu ? "cpu" : fmt::format("{}:{}", to_string(type), index);
}

TensorView TensorView::contiguous(void* data, DType dtype, std::initializer_list<int64_t> sizes, Device device) {
  check(sizes.size() <= size_t(kMaxRank), "tensor.rank", "expected at most {} dimensions, got {}", kMaxRank, sizes.size());
  TensorView view{.data = data, .dtype = dtype, .device = device, .rank = int(sizes.size())};
  std::copy(sizes.begin(), sizes.end(), view.sizes.begin());
  int64_t stride = 1;
  for (int d = view.rank - 1; d >= 0; --d) {
    check(view.sizes[d] >= 0, "tensor.size.negative", "size of dimension {} is {}", d, view.sizes[d]);
    view.strides[d] = stride;
    stride = checked_mul("tensor.size.overflow", stride, std::max<int64_t>(view.sizes[d], 1));
  }
  checked_mul("tensor.size.overflow", stride, size_of(dtype));
  return view;
}

int64_t TensorView::num_elements() const {
  if (rank == 0 && data == nullptr) return 0;
  int64_t count = 1;
  for (int d = 0; d < rank; ++d) count = checked_mul("tensor.size.overflow", count, sizes[d]);
  return count;
}

bool TensorView::is_addressable() const {
  int64_t below = 0, above = size_of(dtype);  // bytes on either side of the first element
  for (int d = 0; d < rank; ++d) {
    int64_t reach = 0;
    if (sizes[d] <= 1) continue;
    int64_t& side = strides[d] < 0 ? below : above;
    if (__builtin_mul_overflow(sizes[d] - 1, strides[d], &reach) || __builtin_mul_overflow(reach, size_of(dtype), &reach) ||
        __builtin_add_overflow(side, reach, &side))
      return false;
  }
  int64_t bytes = 0;
  return !__builtin_sub_overflow(above, below, &bytes);
}

static void check_dim(const TensorView& view, int dim) {
  check(dim >= 0 && dim < view.rank, "tensor.dim", "{} has no dimension {}", view, dim);
}

static void* advanced(const TensorView& view, int64_t elements) {
  return view.data ? static_cast<char*>(view.data) + elements * size_of(view.dtype) : nullptr;
}

TensorView TensorView::slice(int dim, int64_t begin, int64_t end) const {
  check_dim(*this, dim);
  check(0 <= begin && begin <= end && end <= sizes[dim], "tensor.slice", "[{}, {}) is no range of dimension {} of {}", begin, end, dim,
        *this);
  TensorView view = *this;
  view.data = advanced(*this, begin * strides[dim]);
  view.sizes[dim] = end - begin;
  return view;
}

TensorView TensorView::select(int dim, int64_t index) const {
  check_dim(*this, dim);
  check(0 <= index && index < sizes[dim], "tensor.select", "{} is no index of dimension {} of {}", index, dim, *this);
  TensorView view = *this;
  view.data = advanced(*this, index * strides[dim]);
  for (int d = dim; d + 1 < rank; ++d) {
    view.sizes[d] = sizes[d + 1];
    view.strides[d] = strides[d + 1];
  }
  --view.rank;
  view.sizes[view.rank] = view.strides[view.rank] = 0;
  return view;
}

std::string TensorView::str() const {
  if (rank == 0 && data == nullptr) return "no tensor";
  std::string text = std::string(to_string(dtype)) + '[';
  for (int d = 0; d < std::clamp(rank, 0, kMaxRank); ++d) text += (d > 0 ? ", " : "") + std::to_string(sizes[d]);
  return text + "] on " + device.str();
}

}  // namespace imbrex
