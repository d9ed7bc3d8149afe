#pragma once
// The short convolution for Python.
#include <nanobind/nanobind.h>

namespace imbrex::python {

void bind_short_conv(nanobind::module_&);

}  // namespace imbrex::python
