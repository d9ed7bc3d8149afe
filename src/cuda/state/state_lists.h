#pragma once
// A step of layers that keep a state of each request in a slot, as their plans for GPUs have it: the list of requests in device memory, at
// addresses that never change, sent by the host or made there from lengths on the device.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/driver/memory.h"
#include "cuda/driver/module.h"
#include "cuda/plan/plan_arrays.h"
#include "cuda/state_params.h"
#include "family/state_step.h"
#include "gpu/broken_rules.h"
#include "imbrex/plan.h"

namespace imbrex::cuda {

KernelKey plan_state_batch_key(std::string_view arch);

class StateLists {
 public:
  // Error backend.on_device.
  StateLists(const ContextPtr&, const DeviceInfo&, const PlanOptions&, std::string_view arch, const StateDrafts& of_layer);

  // As BasicPlan's. The context has to be current.
  void update(const Batch&, Stream);
  void update_on_device(const DeviceBatch&, Stream);
  std::vector<Reason> device_problems(Stream);

  // The step. Its requests are known to the host unless they are on_device(), when its tokens are the most that there may be.
  const StateStep& step() const { return now_.step; }
  bool on_device() const { return now_.on_device; }
  // In the list, those that are padding too. Of a step that is not on_device().
  int64_t num_requests() const { return num_requests(now_.step); }
  void check_has_step(std::string_view plan) const;  // Error plan.no_step
  std::string str(std::string_view plan) const;      // "cuda_sm80 (sm_90a): 5 tokens of 2 requests"

  // For kernels.
  const StateRequest* requests() const { return memory_->device(requests_); }                  // [num_reqs + 1]
  int* parent_rows() const { return drafts_.tree ? memory_->device(parent_rows_) : nullptr; }  // [max_num_tokens]; null: no trees
  const StateCounts* counts() const { return memory_->device(counts_); }
  int* taken() const { return &memory_->device(counts_)->taken; }
  int* broken() const { return broken_ != nullptr ? broken_->last_requests() : nullptr; }  // null: nobody asks
  // Copies end before a kernel behind them begins; a kernel that made the lists may not have ended.
  bool are_there() const { return plan_module_ == nullptr; }
  // A graph was captured whose state has so many slots: update() refuses other slots from here on, and padding where the graph has no
  // launch for it.
  void captured(int64_t num_slots) const {
    captured_slots_ = std::min(captured_slots_, num_slots);
    captured_without_padding_ = captured_without_padding_ || !now_.has_pad_slot;
  }
  // Zeros for the outputs of requests that are padding: out [tokens, ..], of two or three dimensions. In a graph (`captured`) for all its
  // steps, if the one that it is captured with has a pad_slot.
  void zero_padding(const TensorView& out, bool captured, CUstream) const;

  static StateCounts counts_of(const StateStep& step) {
    return {.num_tokens = step.num_tokens, .num_reqs = int(num_requests(step)), .taken = 0, .padding = 0};
  }

 private:
  struct Step {
    StateStep step;
    bool on_device = false;  // the host knows no more than how many tokens there may be
    bool has_pad_slot = false;
  };
  static int64_t num_requests(const StateStep& step) { return int64_t(step.requests.size() + step.padding.size()); }
  void check_captured(const StateStep&) const;
  void check_parents(const TensorView&, int64_t num_tokens) const;
  void put(const StateStep&);
  void load_padding();

  DeviceInfo device_;
  PlanOptions options_;
  StateDrafts drafts_;
  ArrayOf<StateCounts> counts_;
  ArrayOf<StateRequest> requests_;
  ArrayOf<int> parent_rows_;  // of layers with trees of drafts
  std::unique_ptr<PlanArrays> memory_;
  std::string arch_;
  ContextPtr context_;
  std::shared_ptr<const Module> plan_module_;  // null: PlanOptions::on_device was not asked for
  Kernel plan_kernel_;
  std::shared_ptr<const Module> padding_module_;  // loaded by the first step that has a pad_slot
  Kernel padding_kernel_;
  std::unique_ptr<gpu::BrokenRules> broken_;  // null likewise
  Step now_, spare_;
  bool has_step_ = true;
  mutable int64_t captured_slots_ = INT64_MAX;  // of the smallest state that a captured graph was given
  mutable bool captured_without_padding_ = false;
};

}  // namespace imbrex::cuda
