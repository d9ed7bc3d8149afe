#pragma once
// The plan that all CUDA backends for softmax attention share: it cuts a step once, sends the lists to the device, and in every layer
// launches the kernels of the backend's table. The parameters of a launch are fixed when the plan is made, or are run()'s own arguments, so
// that a captured graph replays any batch within the limits.
#include <array>
#include <memory>
#include <string_view>
#include <vector>

#include "attention/draft_tree.h"
#include "attention/key_source.h"
#include "attention/plan_checks.h"
#include "attention/shared_keys.h"
#include "attention/shared_prefixes.h"
#include "attention/step_plan.h"
#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/flat_kv.h"
#include "cuda/attention/write_kv.h"
#include "cuda/params.h"
#include "cuda/plan/device_plan.h"
#include "cuda/plan/plan_arrays.h"
#include "cuda/plan/plan_outline.h"
#include "cuda/plan/plan_tables.h"
#include "gpu/device_workspace.h"
#include "imbrex/attention.h"

namespace imbrex::cuda {

class Plan final : public StepPlan {
 public:
  Plan(const AttentionKernels&, const AttentionSpec&, const DeviceInfo&, const PlanOptions&);
  // Host arrays of the batch are copied before the call returns, device arrays are read in place. Between a capture and the last replay of
  // its graph device arrays must keep their addresses: Error update.moved.
  void prepare(const Batch&, Stream) override;  // plan_update.cpp, with the next two
  void commit(Stream) override;
  void revert(Stream) noexcept override;
  bool has_step() const noexcept override { return has_step_; }
  // Where the device has the lengths of the plan's step, at addresses that never change: the numbers of its query tokens and requests, and
  // arrays of these. A request that an update_on_device() has left out has a seq_len below 0.
  struct Lengths {
    const int *num_tokens, *num_reqs, *query_start, *seq_lens;
  };
  Lengths lengths() const;  // device_plan.cpp
  // From now on kernels in front of run() on its stream write the keys, those of earlier tokens too: no launch reads any of them early.
  void keys_come_late() { keys_come_late_ = true; }
  void update_on_device(const DeviceBatch&, Stream) override;  // device_plan.cpp, with the next one
  std::vector<Reason> device_problems(Stream) override;
  void write_kv(const KvCache&, const TensorView& k, const TensorView& v, Stream) const override;  // plan_run.cpp, with the next one
  void run(const AttentionInputs&, const AttentionOutputs&, Stream) const override;
  bool capturable() const override { return !options_.load_on_demand; }
  std::string str() const override;

 private:
  // A specialisation of a kernel. Its key is made with the plan; it is loaded then, or when it is first needed.
  struct Specialised {
    KernelKey key;
    std::string entry;
    unsigned threads = 0, cluster = 1;
    std::shared_ptr<const Module> module;  // null: not loaded
    Kernel kernel;
    unsigned grid = 0;      // thread blocks that the device holds at a time
    bool one_each = false;  // one for each multiprocessor, though it could hold more: run_sums has room for these
  };
  using ByOutput = std::array<Specialised, kMostOutputs>;  // in the order of AttentionSpec::out_dtypes
  struct RegimePlan : PlanOutline::OfRegime {
    long l2_keys = 0;  // keys_in_l2()
    ArrayOf<WorkItem> work;
    ArrayOf<MergeItem> merges;
    ArrayOf<SharedToken> shared_tokens;  // with the next one: room for none, unless items may be shared
    ArrayOf<int> merge_parts;
    ArrayOf<ItemDetails> item_details;  // with the next one; room for none, unless the layer has a mask_mod
    ArrayOf<KeyStretch> stretches;
    ArrayOf<PlanCounts> counts;
    ArrayOf<PlanCounts> of_launches;                          // of in_graph, where there are several: what each has to do
    mutable ByOutput kernels;                                 // of many tasks
    mutable ByOutput without_maps;                            // where kernel.maps fails; always loaded on demand
    mutable ByOutput over_flat;                               // what flat_kernel names
    mutable std::array<ByOutput, kFewTasksTables> few_tasks;  // what few_tasks_kernels name
    bool mapless_joins = false;                               // joins_pieces of without_maps
    size_t arrivals = 0;                                      // where the regime's counters of pieces begin, in counters_

    // Which kernels a launch has: few_tasks[i] for i from 0 on, or, with this number, `kernels`.
    static constexpr int kManyTasks = -1;
    std::vector<int> in_graph{kManyTasks};  // of a graph, in their order: a step runs those for the fewest tasks that take it
    bool in_branches = false;               // of the graph, or each behind the one in front
    bool chooses_in_graph() const { return in_graph.size() > 1; }  // when it is replayed

    bool takes(int i, int64_t tasks) const { return i == kManyTasks || tasks <= most_tasks(i); }
    int kernels_for(int64_t tasks) const {
      int fastest = kManyTasks;
      for (size_t i = 0; i < few_tasks_kernels.size(); ++i)
        if (few_tasks_kernels[i].entry != nullptr && takes(int(i), tasks)) fastest = int(i);
      return fastest;
    }
    int64_t most_tasks(int i) const { return few_tasks_kernels[size_t(i)].most_tasks; }
    ByOutput& at(int i) const { return i == kManyTasks ? kernels : few_tasks[size_t(i)]; }
  };
  // The addresses of the batch's arrays for kernels: the plan's copies, or the caller's arrays on the device. An array that a batch does
  // not have keeps its last address.
  struct BatchArrays {
    const int* block_ids = nullptr;
    const unsigned char* custom_mask = nullptr;
    bool mask_is_packed = false;
    TensorView slots;
    bool has_slots = false;
  };
  // A step: what the host knows of the batch, and its cut.
  struct Step {
    std::array<Schedule, kNumRegimes> schedules;
    BatchArrays arrays;
    BatchReach reach;
    int num_tokens = 0;      // at most, where the lengths are on the device
    bool on_device = false;  // where the lists were made: the host does not know how long they are
    FlatStep flat;
    KeySource keys;         // of the last batch whose starts were on the host
    TensorView key_starts;  // i32 on the device, to be widened to the plan's array; empty: the host has sent them
    int num_reqs = 0;
  };
  struct Arrays {
    ArrayOf<int> query_start, seq_lens, positions, shared_positions, tree_first, block_ids, flat_first_keys, flat_requests;
    ArrayOf<long> block_start, custom_start, flat_start, slots;
    ArrayOf<unsigned char> custom_mask;
    ArrayOf<unsigned long> tree_seen;
    ArrayOf<FlatCounts> flat_counts;
    ArrayOf<ExpressionTensorData> mask_tensors;
    ArrayOf<char> mask_elements;  // of these
  };

  void name_kernels();
  void choose_for_graphs(RegimePlan&) const;
  void load(Specialised&) const;
  const Specialised& loaded(Specialised&, bool captured) const;
  const Specialised& loaded(ByOutput&, DType out, bool captured) const;
  void lay_out(int64_t prefix_parts);
  BatchArrays place(const Batch&, bool captured) const;
  void check_captured_cache(const BatchReach&) const;
  void share(const Batch&, Step&, int& rows);
  bool share_prefixes(const Batch&, Step&, int& rows);
  void cut_seen(const Batch&, const RegimePlan&, const SchedulePolicy&, Schedule&) const;
  void put_lists(const Batch&, const Step&);
  void put_trees(const Batch&);
  void put_key_starts(const Batch&, const Step&);
  void put_block_ids(const Batch&, const Step&);
  // What kernels make of the arrays that are sent: key starts and the bits of a mask_mod.
  void derive_arrays(const Step&, CUstream) const;
  void restore_derived(CUstream) noexcept;
  AttentionParams batch_params(void* mask_memory) const;
  void pack_mask_mod(int64_t items, CUstream) const;
  // `kv`: of the inputs, with a view of its values.
  AttentionParams params(const AttentionInputs&, const KvCache& kv, const AttentionOutputs&, const gpu::ScratchMemory& scratch) const;
  template <class InFront>
  bool run_over_flat(const TensorView& q, const KvCache&, const AttentionParams&, DType out, const gpu::ScratchMemory& scratch, CUstream,
                     bool captured, const InFront& in_front) const;
  template <class... Maps>
  void launch(const Specialised&, int64_t tasks, CUstream, const AttentionParams&, const Maps&...) const;

  const AttentionKernels& table_;
  AttentionSpec spec_;
  DeviceInfo device_;
  PlanOptions options_;
  std::string arch_;
  ContextPtr context_;
  std::array<RegimePlan, kNumRegimes> regimes_;
  mutable ByOutput merge_;
  mutable Specialised pack_mask_;      // entry empty: not needed
  std::unique_ptr<WriteKv> write_kv_;  // null: no blocks
  std::unique_ptr<PlanTables> tables_;
  std::unique_ptr<FlatKv> flat_;  // null: no need
  Arrays arrays_;
  std::unique_ptr<PlanArrays> memory_;
  std::vector<TreeNode> nodes_;    // of a batch, while an update puts them down
  std::vector<long> mask_starts_;  // of prepare()
  DeviceBuffer counters_;          // a task of each regime, then arrivals
  PackedMask mask_;
  DeviceBuffer step_mask_;    // what mask_ of a mask_mod lies in
  int64_t partial_rows_ = 0;  // the most that a batch within the limits has
  Scratch scratch_;
  std::shared_ptr<gpu::DeviceWorkspace> workspace_;  // what scratch_ lies in
  std::unique_ptr<DevicePlan> device_plan_;          // null: PlanOptions::on_device was not asked for
  bool several_kernels_ = false;                     // for attention in a graph: most have no work then
  bool programmatic_ = false;                        // launches may begin before the ones in front of them have ended
  bool keys_come_late_ = false;                      // see keys_come_late()

  bool may_share_ = false, shares_prefixes_ = false;  // as in PlanOutline
  ShareScratch share_scratch_;
  PrefixScratch prefix_scratch_;
  TwoSteps<Step> steps_;
  bool has_step_ = true;
  mutable std::vector<std::shared_ptr<const gpu::ScratchMemory>> captured_scratch_;  // which graphs write to
  mutable bool captured_run_ = false, captured_write_ = false;                       // a graph reads the addresses of Step::arrays
  mutable int captured_flat_blocks_ = INT32_MAX;                                     // what all graphs have room for
  mutable int64_t captured_entries_ = int64_t(1) << 32;  // blocks, or ragged rows, of the smallest cache in a graph
};

}  // namespace imbrex::cuda
