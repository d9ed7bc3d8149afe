#pragma once
// What masks of expressions show, for Python.
#include <nanobind/nanobind.h>

namespace imbrex::python {

void bind_expressions(nanobind::module_&);

}  // namespace imbrex::python
