#pragma once
// The plan that all CPU backends share: cuts a step once, then feeds one kernel table from the work list in every layer.
#include <memory>
#include <vector>

#include "attention/plan_checks.h"
#include "cpu/params.h"
#include "imbrex/backend.h"
#include "imbrex/schedule.h"

namespace imbrex::cpu {

// Kernel tables, one file each in kernels/; null where this build has no such kernels.
extern const Kernels kernels_generic, kernels_avx2, kernels_avx512, kernels_amx_emulated, kernels_amx;

class Plan final : public imbrex::Plan {
 public:
  Plan(std::string_view backend, const Kernels&, const AttentionSpec&, const PlanOptions&);
  void update(const Batch&, Stream) override;
  void write_kv(const KvCache&, const TensorView& k, const TensorView& v, Stream) const override;
  void run(const Inputs&, const Outputs&, Stream) const override;
  std::string str() const override;

 private:
  AttentionParams params(const Inputs&, const Outputs&) const;

  std::string backend_;
  const Kernels& kernels_;
  AttentionSpec spec_;
  PlanOptions options_;
  SchedulePolicy policy_;
  Schedule schedule_;
  int num_tokens_ = 0;
  BatchReach reach_;  // of the batch, where it is validated

  std::vector<int> query_start_, seq_lens_;
  std::vector<long> block_start_, custom_start_;
  TensorView block_ids_, slot_mapping_, custom_mask_;

  // Written by run(); sized here or in update().
  mutable std::vector<float> bias_by_distance_;
  mutable std::vector<float> partial_out_, partial_state_;
  long scratch_bytes_ = 0;                  // of one worker
  std::unique_ptr<char[]> scratch_memory_;  // not touched before it is needed
  char* scratch_ = nullptr;                 // aligned to a page
};

}  // namespace imbrex::cpu
