#pragma once
// The plan of latent attention for NVIDIA GPUs. It is composed as that of CPUs is (mla/plan.cpp): of a plan of attention in latent space,
// plans of attention to expanded keys, and products. Steps of requests in latent space can be captured into graphs; a plan whose limits let
// a request be computed with expanded keys cannot, because the number of its launches follows from the step. The same plans take lengths
// that are on the device: the plan in latent space makes its lists of them.
//
// Both ways compute a step in slices of its tokens (outline.h), so that scratch does not grow with the step.
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "attention/batch_part.h"
#include "attention/plan_checks.h"
#include "attention/step_plan.h"
#include "cuda/attention/write_kv.h"
#include "cuda/driver/memory.h"
#include "cuda/mla/outline.h"
#include "cuda/mla/rounds.h"
#include "cuda/mla/steps.h"
#include "cuda/plan/plan_arrays.h"
#include "gpu/device_workspace.h"
#include "mla/plan.h"

namespace imbrex::cuda {

class DeviceMlaPlan final : public MlaPlan {
 public:
  DeviceMlaPlan(const MlaSpec&, const DeviceInfo&, const PlanOptions&, MlaParts);
  void update(const Batch&, Stream) override;
  void update_on_device(const DeviceBatch&, Stream) override;
  std::vector<Reason> device_problems(Stream) override;
  void write_kv(const KvCache&, const TensorView& latent, const TensorView& rope, Stream) const override;
  void run(const MlaInputs&, const MlaOutputs&, Stream) const override;  // mla_plan_run.cpp
  bool expands(int request) const override { return steps_.now().ways.expands(request); }
  bool capturable() const override;
  std::string str() const override;

 private:
  // A slice in latent space, as a batch of its member.
  struct LatentSlice {
    BatchPart part;
    std::vector<int32_t> seq_lens;  // where a request is cut; else empty
    size_t first_range = 0;         // in latent_rows_
  };
  struct Step {
    int num_tokens = 0;      // at most, where the lengths are on the device
    bool on_device = false;  // where the plan in latent space has made its lists
    TensorView slots;        // on the device
    BatchReach reach;
    KeySource keys;
    MlaWays ways;
    MlaSlices latent_slices;
    std::vector<LatentSlice> latent;  // of latent_slices
    int latent_tokens = 0;
    RoundSlices round_slices;
    DeviceRounds rounds;
    const int *block_ids = nullptr, *block_starts = nullptr;  // as MlaSteps::RoundKeys has them
    std::vector<int> sent_ids;                                // of blocks of requests with expanded keys, where the host has them
  };
  using RoundPlans = std::array<std::unique_ptr<StepPlan>, kNumRoundKinds>;  // null: not needed yet
  // The scratch of a round, and the heads that are computed.
  struct Group {
    const MlaDeviceScratch& places;
    const DeviceRounds::Slice& slice;
    int first_head, num_heads;
    TensorView of(const TensorView& t) const { return t.empty() ? t : t.slice(1, first_head, first_head + num_heads); }
    TensorView weight(const TensorView& kv_b) const { return kv_b.slice(0, first_head, first_head + num_heads); }
    TensorView sinks(const TensorView& t) const { return t.empty() ? t : t.slice(0, first_head, first_head + num_heads); }
  };
  // Tensors of a call in scratch.
  struct Memory {
    std::shared_ptr<const gpu::ScratchMemory> scratch;
    CUstream stream;
    bool captured;
  };

  StepPlan& latent_plan(size_t slice);
  StepPlan& round_plan(size_t shape, size_t round, RoundKind);
  void cut_latent(const Batch&, Step&) const;
  void cut_rounds(const Batch&, Step&) const;
  void place_blocks(const Batch&, Step&) const;
  TensorView place_slots(const TensorView&, bool captured) const;
  Batch batch_of_slice(const Batch&, LatentSlice&) const;
  void prepare_members(const Batch&, Step&, Stream);
  void put(const Batch&, const Step&);
  TensorView in_scratch(const Memory&, int64_t place, DType, int64_t rows, int64_t heads, int64_t dim) const;
  void run_latent(const Step&, size_t slice, int all_rows, const MlaInputs&, const MlaOutputs&, const Memory&) const;
  void run_round(const Step&, size_t round, const Group&, const MlaInputs&, const MlaOutputs&, const Memory&) const;
  void run_part(const Step&, size_t round, RoundKind, const Group&, const KvCache& expanded, const MlaInputs&, const MlaOutputs&,
                const Memory&) const;

  MlaSpec spec_;
  AttentionSpec latent_spec_;
  DeviceInfo device_;
  PlanOptions options_;
  MlaParts parts_;
  MlaOutline outline_;
  WayRules rules_;  // may_expand: for some request within the limits
  ContextPtr context_;
  std::shared_ptr<gpu::DeviceWorkspace> workspace_;
  std::unique_ptr<MlaSteps> launches_;  // null: the spec is absorbed
  std::unique_ptr<WriteKv> write_kv_;
  ArrayOf<int> block_ids_;
  ArrayOf<TokenRows> latent_rows_, token_rows_;
  ArrayOf<KeyRows> key_rows_;
  ArrayOf<long> slots_;
  ArrayOf<int> num_tokens_;
  std::unique_ptr<PlanArrays> memory_;
  std::vector<std::unique_ptr<StepPlan>> latents_;  // of slices: as many as any step had or, where graphs hold them, may have
  size_t touched_latents_ = 0;                      // that may have a step which is not empty, or none
  std::vector<LengthsThere> lengths_;               // of latents_
  std::vector<std::vector<RoundPlans>> rounds_;     // of each shape, as many as any step had
  std::vector<StepPlan*> committed_;                // of one update
  TwoSteps<Step> steps_;
  bool has_step_ = true;
  mutable std::vector<std::shared_ptr<const gpu::ScratchMemory>> captured_scratch_;  // which graphs write to
  mutable bool captured_write_ = false;                                              // a graph reads the address of Step::slots
  mutable int64_t captured_blocks_ = int64_t{1} << 32;                               // of the smallest cache in a graph
};

}  // namespace imbrex::cuda
