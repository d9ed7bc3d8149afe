// See host_tensor.h.
#include "conformance/host_tensor.h"

#include <cstring>

#include "core/check.h"
#include "core/float_types.h"

namespace imbrex {

HostTensor HostTensor::make(DType dtype, std::vector<int64_t> sizes) {
  HostTensor t{.dtype = dtype, .sizes = std::move(sizes), .bytes = {}};
  int64_t count = 1;
  for (int64_t size : t.sizes) count = checked_mul("case.size.overflow", count, size);
  t.bytes.resize(size_t(checked_mul("case.size.overflow", count, size_of(dtype))));
  return t;
}

int64_t HostTensor::num_elements() const { return int64_t(bytes.size()) / size_of(dtype); }
double HostTensor::get(int64_t index) const { return load_as_double(bytes.data(), dtype, index); }

void HostTensor::set(int64_t index, double value) {
  if (dtype == DType::u8) {
    bytes[size_t(index)] = char(value);
  } else {
    store_from_double(bytes.data(), dtype, index, value);
  }
}

void HostTensor::set_row(int64_t first, std::span<const double> values) { store_from_doubles(bytes.data(), dtype, first, 1, values); }

TensorView HostTensor::view() const {
  TensorView t;
  if (empty()) return t;
  t.data = const_cast<char*>(bytes.data());
  t.dtype = dtype;
  t.rank = int(sizes.size());
  int64_t stride = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    t.sizes[d] = sizes[d];
    t.strides[d] = stride;
    stride *= sizes[d];
  }
  return t;
}

HostTensor tensor_of(const std::vector<int32_t>& values) {
  HostTensor t = HostTensor::make(DType::i32, {int64_t(values.size())});
  if (!values.empty()) std::memcpy(t.bytes.data(), values.data(), t.bytes.size());
  return t;
}

HostTensor tensor_of(const std::vector<float>& values, std::vector<int64_t> sizes) {
  HostTensor t = HostTensor::make(DType::f32, std::move(sizes));
  for (size_t i = 0; i < values.size(); ++i) t.set(int64_t(i), double(values[i]));
  return t;
}

}  // namespace imbrex
