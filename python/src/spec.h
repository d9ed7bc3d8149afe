#pragma once
// The spec of a softmax-attention layer for Python.
#include <nanobind/nanobind.h>

namespace imbrex::python {

namespace nb = nanobind;

void bind_spec(nb::module_&);

}  // namespace imbrex::python
