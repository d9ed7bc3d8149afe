// What a plan does whose backend has nothing of its own to say.
#include "core/check.h"
#include "imbrex/backend.h"

namespace imbrex {

void Plan::update_on_device(const DeviceBatch&, Stream) {
  fail("update.on_device", "expected a plan that reads lengths on a device, got {}, which needs them on the host", str());
}

std::vector<Reason> Plan::device_problems(Stream) { return {}; }

}  // namespace imbrex
