#pragma once
// Latent attention for Python.
#include <nanobind/nanobind.h>

namespace imbrex::python {

void bind_mla(nanobind::module_&);

}  // namespace imbrex::python
