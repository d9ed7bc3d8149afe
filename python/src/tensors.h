#pragma once
// Arrays of any framework as tensors: through DLPack, without copies. Types that NumPy does not have come as unsigned integers of their
// size.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "imbrex/device.h"
#include "imbrex/expression.h"
#include "imbrex/tensor.h"

namespace imbrex::python {

namespace nb = nanobind;
using Array = nb::ndarray<nb::ro>;
using OptionalArray = std::optional<Array>;

// The address of a stream, as frameworks give it.
inline Stream stream_of(uintptr_t stream) { return reinterpret_cast<Stream>(stream); }  // NOLINT: a CUstream is a pointer

// `wanted`: what uint16 and uint8 elements stand for, where the layer has such a type. Error python.tensor for what no tensor can be.
TensorView view_of(const Array&, const char* name, DType wanted);
TensorView view_of(const OptionalArray&, const char* name, DType wanted);  // empty without an array

// Tensors of an expression by their names: of int32, float32, and uint8 for bool.
using NamedArrays = std::map<std::string, Array>;
std::vector<NamedTensor> named_views(const NamedArrays&);

// A list of int32 on the host. Error python.tensor.
std::span<const int32_t> host_numbers(const Array&, const char* name);

// An array that is to be written. Error python.read_only for one that must not be, such as those of JAX.
Array written(nb::handle, const char* name);
// The view of such an array. Error python.overlap where elements of it share an address.
TensorView written_view(const Array&, const char* name, DType wanted);
// Error python.overlap where what is written may share memory with something else of the call.
void check_apart(const TensorView& out, const char* name, const TensorView& other, const char* other_name);

// An array over memory that `owner` keeps alive, for from_dlpack() of any framework.
nb::ndarray<nb::array_api> array_of(const TensorView&, nb::handle owner);

}  // namespace imbrex::python
