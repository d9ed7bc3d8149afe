#pragma once
// Plans, caches and merges for Python.
#include <nanobind/nanobind.h>

namespace imbrex::python {

void bind_plan(nanobind::module_&);

}  // namespace imbrex::python
