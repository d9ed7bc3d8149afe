// See tensors.h.
#include "tensors.h"

#include <nanobind/stl/string.h>

#include <array>
#include <string_view>

#include "core/tensor_layout.h"
#include "imbrex/error.h"

namespace imbrex::python {
namespace {

struct DlType {
  DType type;
  uint8_t code, bits;
};
constexpr std::array kTypes = {DlType{DType::f32, 2, 32},      DlType{DType::f16, 2, 16},      DlType{DType::bf16, 4, 16},
                               DlType{DType::fp8_e4m3, 10, 8}, DlType{DType::fp8_e5m2, 12, 8}, DlType{DType::u8, 1, 8},
                               DlType{DType::i32, 0, 32},      DlType{DType::i64, 0, 64}};
constexpr int kUnsigned = 1, kBool = 6;

std::optional<DType> dtype_of(const nb::dlpack::dtype& t, DType wanted) {
  if (t.lanes != 1) return std::nullopt;
  if ((t.code == kUnsigned || t.code == kBool) && t.bits == 8 * size_of(wanted)) return wanted;
  for (const DlType& known : kTypes)
    if (known.code == t.code && known.bits == t.bits) return known.type;
  return std::nullopt;
}

bool is_of_jax(nb::handle array) {
  const nb::object module = nb::getattr(array.type(), "__module__", nb::none());
  return nb::isinstance<nb::str>(module) && std::string_view(nb::borrow<nb::str>(module).c_str()).starts_with("jax");
}

}  // namespace

TensorView view_of(const Array& a, const char* name, DType wanted) {
  const std::optional<DType> type = dtype_of(a.dtype(), wanted);
  if (!type || a.ndim() > TensorView::kMaxRank) {
    throw Error("python.tensor", std::string(name) + ": expected an array of " + to_string(wanted) + " with at most 5 dimensions, got " +
                                     std::to_string(a.ndim()) + " of DLPack type " + std::to_string(a.dtype().code) + " with " +
                                     std::to_string(a.dtype().bits) + " bits");
  }
  const int device = a.device_type();
  const bool cuda = device == nb::device::cuda::value || device == nb::device::cuda_managed::value;
  if (!cuda && device != nb::device::cpu::value && device != nb::device::cuda_host::value)
    throw Error("python.tensor", std::string(name) + ": expected memory of a host or of CUDA, got DLPack device " + std::to_string(device));
  TensorView view{.data = const_cast<void*>(a.data()), .dtype = *type, .rank = int(a.ndim())};
  view.device = {cuda ? DeviceType::cuda : DeviceType::cpu, cuda ? a.device_id() : 0};
  int64_t dense = 1;
  for (size_t i = a.ndim(); i-- > 0; dense *= view.sizes[i]) {
    view.sizes[i] = int64_t(a.shape(i));
    view.strides[i] = view.sizes[i] > 1 ? a.stride(i) : dense;  // of one element it may be anything
  }
  return view;
}

TensorView view_of(const OptionalArray& a, const char* name, DType wanted) { return a ? view_of(*a, name, wanted) : TensorView{}; }

std::vector<NamedTensor> named_views(const NamedArrays& arrays) {
  std::vector<NamedTensor> named;
  for (const auto& [name, array] : arrays) named.push_back({name, view_of(array, name.c_str(), DType::u8)});
  return named;
}

Array written(nb::handle object, const char* name) {
  nb::ndarray<> array;
  if (!is_of_jax(object) && nb::try_cast(object, array)) return Array(array.handle());
  Array readable;
  if (nb::try_cast(object, readable))
    throw Error("python.read_only", std::string(name) + ": expected an array that can be written, got a read-only " +
                                        nb::cast<std::string>(nb::getattr(object.type(), "__name__")));
  throw nb::type_error(
      (std::string(name) + ": expected an array, got " + nb::cast<std::string>(nb::getattr(object.type(), "__name__"))).c_str());
}

TensorView written_view(const Array& a, const char* name, DType wanted) {
  const TensorView view = view_of(a, name, wanted);
  for (int d = 0; view.num_elements() > 0 && d < view.rank; ++d)
    if (view.size(d) > 1 && view.stride(d) == 0)
      throw Error("python.overlap", std::string(name) + ": expected memory of its own for each element, got stride 0 in dimension " +
                                        std::to_string(d) + " of " + view.str());
  return view;
}

void check_apart(const TensorView& out, const char* name, const TensorView& other, const char* other_name) {
  if (may_meet(out, other))
    throw Error("python.overlap", std::string(name) + ": expected memory of its own, got some that " + other_name + " has too");
}

nb::ndarray<nb::array_api> array_of(const TensorView& view, nb::handle owner) {
  std::array<size_t, TensorView::kMaxRank> shape{};
  for (int i = 0; i < view.rank; ++i) shape[size_t(i)] = size_t(view.sizes[size_t(i)]);
  nb::dlpack::dtype type;
  for (const DlType& known : kTypes)
    if (known.type == view.dtype) type.code = known.code, type.bits = known.bits, type.lanes = 1;
  constexpr int kExtension = 12;  // DLPack's kDLExtDev: nobody takes it for host memory
  const int types[] = {nb::device::cpu::value, nb::device::cuda::value, kExtension};
  const int device = types[size_t(view.device.type)];
  return {view.data, size_t(view.rank), shape.data(), owner, view.strides.data(), type, device, view.device.index};
}

std::span<const int32_t> host_numbers(const Array& a, const char* name) {
  const TensorView view = view_of(a, name, DType::i32);
  if (view.dtype != DType::i32 || view.rank != 1 || view.device.type != DeviceType::cpu || (view.size(0) > 1 && view.stride(0) != 1))
    throw Error("python.tensor", std::string(name) + ": expected contiguous int32 [n] on the host, got " + view.str());
  return {view.as<const int32_t>(), size_t(view.size(0))};
}

}  // namespace imbrex::python
