// What the virtual functions of BasicPlan do where a backend does not override them.
#include "imbrex/plan.h"
#include "core/check.h"

namespace imbrex {

void BasicPlan::update_on_device(const DeviceBatch&, Stream) {
  fail("update.on_device", "expected a plan that reads lengths on a device, got {}, which needs them on the host", str());
}

std::vector<Reason> BasicPlan::device_problems(Stream) { return {}; }

}  // namespace imbrex
