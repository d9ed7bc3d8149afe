#pragma once
// Rules that a kernel checks where a step's lengths lie on the device: how many requests broke which is counted there, and told as reasons.
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "imbrex/batch.h"
#include "imbrex/device_platform.h"
#include "imbrex/plan.h"

namespace imbrex::gpu {

struct Rule {
  const char* code;    // as in errors.md
  std::string wanted;  // what requests that do not break it have
};

// The rules of every family's lengths, and behind them those that a family has for itself: in the order in which its kernel numbers them.
inline constexpr int kNumLengthRules = 5;
std::vector<Rule> rules_of_lengths(const PlanLimits&, std::span<const Rule> and_these);

class BrokenRules {
 public:
  BrokenRules(OpenDevicePtr, std::vector<Rule>);
  // On the device, one for each rule: the last request that broke it, plus 1. Kernels let it grow.
  int* last_requests() const { return static_cast<int*>(memory_.get()); }
  // The rules that were broken since the last call. Waits for the stream.
  std::vector<Reason> take(Stream) const;

 private:
  int64_t bytes() const { return int64_t(rules_.size() * sizeof(int)); }

  OpenDevicePtr device_;
  std::vector<Rule> rules_;
  std::shared_ptr<void> memory_;
};

}  // namespace imbrex::gpu
