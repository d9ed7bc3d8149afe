#pragma once
// Tables that a plan computes on the device from arrays there: T5's bias for each distance, and the first block of each request's keys.
#include <memory>
#include <string_view>

#include "cuda/driver/memory.h"
#include "cuda/driver/module.h"
#include "imbrex/spec.h"

namespace imbrex::cuda {

KernelKey plan_tables_key(std::string_view arch);

class PlanTables {
 public:
  PlanTables(const ContextPtr&, std::string_view arch, const AttentionSpec&);

  // from: i32 [count] on the device. The context must be current, here and below.
  void widen_starts(const TensorView& from, long* to, int count, CUstream) const;
  // Makes the table of biases by distance, for specs with relative_buckets; check_run() has checked `relative_bias`.
  void expand_bias(const TensorView& relative_bias, CUstream) const;
  const float* bias_by_distance() const { return bias_.as<const float>(); }  // [num_q_heads, 2 * bias_reach() + 1]; null without buckets
  int bias_reach() const { return width_ / 2; }

 private:
  std::shared_ptr<const Module> module_;
  Kernel widen_, expand_;
  int num_heads_ = 0, width_ = 0;
  DeviceBuffer buckets_, bias_;
};

}  // namespace imbrex::cuda
