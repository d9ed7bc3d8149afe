// See launch_order.h.
#include "gpu/launch_order.h"

namespace imbrex::gpu {

LaunchOrder launch_order(const std::array<RegimeTasks, kNumRegimes>& work, bool captured, bool on_device) {
  constexpr std::array kEager = {kPrefill, kVerify, kDecode}, kCaptured = {kDecode, kVerify, kPrefill};
  const bool any = captured || on_device;
  LaunchOrder order;
  bool sums_in_use = false;  // by a launch in front
  for (const Regime regime : captured ? kCaptured : kEager) {
    const auto& [tasks, folds] = work[regime];
    if (tasks == 0) continue;
    const bool beside = !any && order.count_ > 0 && !(folds && sums_in_use);
    order.launches_[order.count_++] = {.regime = regime, .tasks = tasks, .beside = beside, .next_waits = any};
    sums_in_use = sums_in_use || folds;
  }
  if (order.count_ > 0) order.launches_[order.count_ - 1].next_waits = true;
  return order;
}

}  // namespace imbrex::gpu
