#pragma once
// The workspace of devices whose plans keep their scratch: it holds nothing.
#include <memory>

#include "imbrex/workspace.h"

namespace imbrex {

std::shared_ptr<Workspace> scratch_of_plans(const Device&);

}  // namespace imbrex
