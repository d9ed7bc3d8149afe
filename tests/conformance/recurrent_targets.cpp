// See recurrent_targets.h.
#include "recurrent_targets.h"

namespace imbrex::test {

const std::vector<RecurrentTarget>& recurrent_targets() {
  static const std::vector<RecurrentTarget> all = [] {
    std::vector<RecurrentTarget> found;
    const RecurrentSpec spec = recurrent_layer("gdn");
    for_each_target<RecurrentFamily>(
        [&](const auto& backend, const DeviceInfo& device) {
          if (!backend.unsupported(spec, device).empty()) return std::string();
          const std::vector<KernelChoice> choices = backend.kernel_choices(spec, device);
          return choices.empty() ? std::string("one") : choices.front().kernel;
        },
        [&](const auto* backend, const DeviceInfo& device) {
          found.push_back({backend, device});
        });
    return found;
  }();
  return all;
}

}  // namespace imbrex::test
