// Host side of plan_tables.cu.
#include "cuda/plan/plan_tables.h"

#include <algorithm>
#include <vector>

#include "attention/position_bias.h"
#include "cuda/params.h"

namespace imbrex::cuda {
namespace {

unsigned blocks_for(int count) { return unsigned(std::max(1, (count + kPlanTableThreads - 1) / kPlanTableThreads)); }

}  // namespace

KernelKey plan_tables_key(std::string_view arch) { return {"plan_tables.cu", std::string(arch), {}}; }

PlanTables::PlanTables(const ContextPtr& context, std::string_view arch, const AttentionSpec& spec)
    : module_(Module::load(context, plan_tables_key(arch))) {
  widen_ = module_->kernel("widen_starts");
  if (spec.score.relative_buckets == 0) return;
  expand_ = module_->kernel("expand_bias");
  num_heads_ = spec.num_q_heads;
  width_ = relative_bias_width(spec.score);
  std::vector<int> buckets(static_cast<size_t>(width_));
  for (int i = 0; i < width_; ++i) buckets[size_t(i)] = relative_bucket(spec.score, i - width_ / 2);
  buckets_ = copy_of(context, buckets.data(), buckets.size() * sizeof(int));
  bias_ = DeviceBuffer(context, buckets.size() * size_t(num_heads_) * sizeof(float));
}

void PlanTables::widen_starts(const TensorView& from, long* to, int count, CUstream stream) const {
  if (count == 0) return;
  widen_.launch({.grid_x = blocks_for(count), .threads = kPlanTableThreads}, stream, from.as<const int>(), to, count);
}

void PlanTables::expand_bias(const TensorView& bias, CUstream stream) const {
  const ExpandBiasParams params{.bias = bias.as<const float>(),
                                .bucket_stride = bias.stride(0),
                                .head_stride = bias.stride(1),
                                .buckets = buckets_.as<const int>(),
                                .bias_by_distance = bias_.as<float>(),
                                .width = width_};
  expand_.launch({.grid_x = blocks_for(width_), .grid_y = unsigned(num_heads_), .threads = kPlanTableThreads}, stream, params);
}

}  // namespace imbrex::cuda
