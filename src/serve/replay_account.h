#pragma once
// The accounts of a replay: useful work of a step, time series, digests of outputs, parts of the result.
#include <cstdint>
#include <span>
#include <vector>

#include "imbrex/layer_spec.h"
#include "serve/replay.h"
#include "serve/scheduler.h"
#include "serve/step_plan.h"

namespace imbrex::serve {

// The useful work of one layer in a step, which does not depend on the backend, except that plans of latent attention choose between two
// ways of computing a request.
struct LayerWork {
  double flops = 0;             // attention: 2 * (head_dim_qk + head_dim_v) per q head and visible key
  double bytes = 0;             // attention: of every request's visible keys and values, once; else of inputs, outputs and states
  double kv_written_bytes = 0;  // of new keys and values
};
LayerWork layer_work(const AttentionSpec&, const StepPlan&);
LayerWork layer_work(const ShortConvSpec&, const StepPlan&);
// Of each request by the way that the plan, whose step it is, chose. In latent space: 2 * (latent_dim + kv_lora_rank) per head and visible
// key, and the products of every query and output with kv_b_proj. Expanded: 2 * (qk_dim + v_dim), and the products of every key that is
// seen, once.
LayerWork layer_work(const MlaSpec&, const StepPlan&, const MlaPlan&);
LayerWork layer_work(const RecurrentSpec&, const StepPlan&);

// The bytes of caches that requests hold in a step: states, and whole blocks; shared blocks once. Of these, the bytes in last blocks that
// no token fills yet.
struct HeldBytes {
  double all = 0, unfilled = 0;
};
HeldBytes held_bytes(const ModelSpec& deployed, const Scheduler&, const StepPlan&, int block_size);

// Steps, merged two by two whenever there are more points than the limit.
class Series {
 public:
  explicit Series(int max_points) : max_points_(size_t(max_points)) {}
  void add(ReplayPoint step);  // of one step
  std::vector<ReplayPoint> points() const;

 private:
  size_t max_points_;
  int64_t steps_per_point_ = 1;
  std::vector<ReplayPoint> points_;  // sums instead of means
};

// The digest of one output row. Digests of rows are added up, so that the order of rows does not matter.
uint64_t digest_row(int request, int position, int layer, const void* row, size_t bytes);

// Parts of the result.
void add_options(const ReplayOptions&, ReplayResult&);
void add_counts(const SchedulerStats&, ReplayResult&);
void add_latencies(std::span<const RequestRecord>, ReplayResult&);

}  // namespace imbrex::serve
