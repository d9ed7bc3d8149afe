#pragma once
// Plans made on the device: what the host can check of a batch whose lengths lie there, the kernel that makes the lists, and what that
// kernel found wrong.
#include <memory>
#include <string_view>
#include <vector>

#include "attention/device_batch.h"
#include "cuda/driver/memory.h"
#include "cuda/driver/module.h"
#include "cuda/params.h"
#include "gpu/broken_rules.h"
#include "imbrex/attention.h"

namespace imbrex::cuda {

KernelKey plan_batch_key(std::string_view arch);

class DevicePlan {
 public:
  // most_items: of the lists of one regime.
  DevicePlan(const ContextPtr&, std::string_view arch, const AttentionSpec&, const PlanLimits&, int64_t most_items);

  // As arrays_of() of attention/device_batch.h. Errors batch.*, update.device.
  Batch arrays_of(const DeviceBatch& batch) const { return imbrex::arrays_of(batch, spec_, limits_, device_, zeros_); }
  // All but the plan's arrays.
  PlanBatchParams params(const DeviceBatch&) const;
  // The context must be current.
  void launch(const PlanBatchParams&, CUstream) const;
  // Why requests were left out by the launches since the last call; waits for the stream.
  std::vector<Reason> problems(Stream stream) const { return broken_.take(stream); }

 private:
  AttentionSpec spec_;
  PlanLimits limits_;
  Device device_;
  std::shared_ptr<const Module> module_;
  Kernel kernel_;
  DeviceBuffer item_start_, items_;
  gpu::BrokenRules broken_;
  std::vector<int32_t> zeros_;  // [max_num_reqs + 1]
};

}  // namespace imbrex::cuda
