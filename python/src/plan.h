#pragma once
// Plans, caches and merges for Python.
#include <nanobind/nanobind.h>

#include <memory>

#include "imbrex/workspace.h"

namespace imbrex::python {

// What Python holds of a workspace. Plans of every family take one.
struct PyWorkspace {
  std::shared_ptr<Workspace> shared;
};

void bind_plan(nanobind::module_&);

}  // namespace imbrex::python
