#pragma once
// The order of a step's requests, and parts of batches, for Python.
#include <nanobind/nanobind.h>

namespace imbrex::python {

void bind_batches(nanobind::module_&);

}  // namespace imbrex::python
