#pragma once
// The plan that all CPU backends share: cuts a step once, then feeds one kernel table from the work list in every layer.
#include <memory>
#include <optional>
#include <vector>

#include "attention/key_source.h"
#include "attention/plan_checks.h"
#include "attention/shared_keys.h"
#include "attention/step_plan.h"
#include "core/scratch_of_plans.h"
#include "cpu/kv_sides.h"
#include "cpu/mask_tiles.h"
#include "cpu/params.h"
#include "cpu/tree_tails.h"
#include "imbrex/attention.h"
#include "imbrex/schedule.h"

namespace imbrex::cpu {

// Kernel tables, one file each in kernels/. Builds for other architectures than x86-64 have the first one only.
extern const Kernels kernels_generic, kernels_avx2, kernels_avx512, kernels_avx512_bf16, kernels_amx_emulated, kernels_amx;

// What kernels are told of a spec when they are asked for split_keys and scratch_bytes.
AttentionParams shape_of(const AttentionSpec&, const Kernels&);

class Plan final : public StepPlan {
 public:
  Plan(std::string_view backend, const Kernels&, const AttentionSpec&, const PlanOptions&);
  void prepare(const Batch&, Stream) override;
  void commit(Stream) noexcept override { steps_.flip(); }
  void revert(Stream) noexcept override { steps_.flip(); }
  void write_kv(const KvCache&, const TensorView& k, const TensorView& v, Stream) const override;
  void run(const AttentionInputs&, const AttentionOutputs&, Stream) const override;
  std::string str() const override;

 private:
  // A step: the batch's work list and its arrays.
  struct Step {
    Schedule schedule;
    BatchReach reach;
    int num_tokens = 0, longest_item = 0;  // in query tokens
    std::vector<int> query_start, seq_lens, positions;
    KeySource keys;
    std::vector<long> custom_start;
    TensorView slot_mapping, custom_mask;
    std::vector<uint8_t> mask_bytes;  // of a packed mask
    TreeTails trees;
    MaskTiles mask_tiles;
  };
  AttentionParams params(const AttentionInputs&, const AttentionOutputs&) const;
  void set_score_mod(std::span<const NamedTensor>, AttentionParams&) const;
  int heads_together(const AttentionParams&) const;

  std::string backend_;
  const Kernels& kernels_;
  AttentionSpec spec_;
  PlanOptions options_;
  mutable KvSides sides_;
  SchedulePolicy policy_;
  TwoSteps<Step> steps_;
  ShareScratch share_scratch_;

  // Written by run(); sized here or in prepare().
  mutable std::vector<float> bias_by_distance_;
  mutable std::optional<BoundExpression> score_mod_;  // with the tensors of the last call, which layers mostly share
  mutable std::vector<TensorView> score_tensors_;
  mutable std::vector<float> partial_out_, partial_state_;
  long scratch_bytes_ = 0;                  // of one worker
  std::shared_ptr<SharedScratch> scratch_;  // of all workers, and where they begin at a page
};

}  // namespace imbrex::cpu
