#pragma once
// Recurrent layers for Python.
#include <nanobind/nanobind.h>

namespace imbrex::python {

void bind_recurrent(nanobind::module_&);

}  // namespace imbrex::python
