#pragma once
// In which order the regimes of a step are launched, and which launches may run beside each other.
#include <array>
#include <cstdint>

#include "gpu/cut.h"

namespace imbrex::gpu {

// The work of a regime's launch.
struct RegimeTasks {
  int64_t tasks = 0;   // 0: there is no launch
  bool folds = false;  // its kernel folds runs of pieces in memory that regimes share
};

struct RegimeLaunch {
  Regime regime;
  int64_t tasks;
  bool beside;      // it may compute while the launch in front of it does
  bool next_waits;  // the launch behind it waits for its end
  bool branches;    // in a graph it need not wait for the launch in front of it, and begins a branch that the ones behind may go on with
};

class LaunchOrder {
 public:
  const RegimeLaunch* begin() const { return launches_.data(); }
  const RegimeLaunch* end() const { return launches_.data() + count_; }

 private:
  friend LaunchOrder launch_order(const std::array<RegimeTasks, kNumRegimes>&, bool, bool, bool);
  std::array<RegimeLaunch, kNumRegimes> launches_{};
  size_t count_ = 0;
};

// `captured`: into a graph, which serves any step. `on_device`: only the device knows how long the lists are. In both cases there may be
// less work than tasks. `drafts`: no request has more query tokens than drafts have.
//
// Outside of graphs the kernels run beside each other, and long items begin first. In a graph most launches are idle, and they are
// branches, of which the first begins soonest: decode, or what drafts have. Those that fold in the same memory
// are one branch, in which each begins before the one in front has ended, and waits for it then. One that begins while another reads keys
// by TMA delays that by some 4 us on an H100, whatever it does itself: so but for drafts the launches for the longest queries come last.
LaunchOrder launch_order(const std::array<RegimeTasks, kNumRegimes>&, bool captured, bool on_device, bool drafts);

}  // namespace imbrex::gpu
