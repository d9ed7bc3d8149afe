// See launch_order.h.
#include "gpu/launch_order.h"

#include <algorithm>

namespace imbrex::gpu {

LaunchOrder launch_order(const std::array<RegimeTasks, kNumRegimes>& work, bool captured, bool on_device, bool drafts) {
  constexpr std::array kLongestFirst = {kPrefill, kLongVerify, kVerify, kDecode},
                       kShortestFirst = {kDecode, kVerify, kLongVerify, kPrefill};
  const bool any = captured || on_device;
  const auto longest = std::find_if(kLongestFirst.begin(), kLongestFirst.end() - 1, [&](Regime one) { return work[one].tasks > 0; });
  const bool one_branch = work[kDecode].folds && work[*longest].folds;
  const std::array<Regime, kNumRegimes>& regimes = captured && (!drafts || one_branch) ? kShortestFirst : kLongestFirst;
  LaunchOrder order;
  bool sums_in_use = false;  // by a launch in front
  for (auto at = regimes.begin(); at != regimes.end(); ++at) {
    const auto& [tasks, folds] = work[*at];
    if (tasks == 0) continue;
    const bool beside = !any && order.count_ > 0 && !(folds && sums_in_use);
    const bool others_fold = std::any_of(at, regimes.end(), [&](Regime one) { return work[one].tasks > 0 && work[one].folds; });
    order.launches_[order.count_++] = {
        .regime = *at, .tasks = tasks, .beside = beside, .next_waits = any, .branches = captured && !(sums_in_use && others_fold)};
    sums_in_use = sums_in_use || folds;
  }
  if (order.count_ > 0) order.launches_[order.count_ - 1].next_waits = true;
  return order;
}

}  // namespace imbrex::gpu
