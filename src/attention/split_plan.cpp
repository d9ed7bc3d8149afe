// See split_plan.h.
#include "attention/split_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "attention/batch_part.h"
#include "attention/plan_checks.h"
#include "core/stream_capture.h"

namespace imbrex {
namespace {

class SplitPlan final : public StepPlan {
 public:
  using MemberOf = std::function<size_t(const Batch&, int request)>;
  SplitPlan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options, std::string rule,
            std::vector<PlanMember> members, MemberOf member_of)
      : spec_(spec),
        device_(device.device),
        options_(options),
        rule_(std::move(rule)),
        members_(std::move(members)),
        member_of_(std::move(member_of)),
        order_(members_.size()),
        scratch_rows_(device.device.type == DeviceType::cpu ? options.limits.max_num_tokens : 0),
        q_rows_(scratch_rows_, int64_t(spec.num_q_heads) * spec.head_dim_qk * sizeof(float)),
        k_rows_(scratch_rows_, int64_t(spec.num_kv_heads) * spec.head_dim_qk * sizeof(float)),
        v_rows_(scratch_rows_, int64_t(spec.num_kv_heads) * spec.head_dim_v * sizeof(float)),
        out_rows_(scratch_rows_, int64_t(spec.num_q_heads) * spec.head_dim_v * sizeof(float)),
        lse_rows_(scratch_rows_, int64_t(spec.num_q_heads) * sizeof(float)) {
    std::iota(order_.begin(), order_.end(), size_t(0));
    std::stable_partition(order_.begin(), order_.end(), [&](size_t i) { return members_[i].plan->can_revert(); });
    steps_.now().parts.resize(members_.size()), steps_.spare().parts.resize(members_.size());
  }

  void prepare(const Batch& batch, Stream stream) override {
    if (options_.validate) validate(batch, spec_, options_.limits, -1);
    check(batch.num_tokens() <= options_.limits.max_num_tokens, "update.limits", "expected at most {} tokens, got {}",
          options_.limits.max_num_tokens, batch.num_tokens());
    Step& next = steps_.spare();
    for (size_t i : order_) {
      BatchPart& part = next.parts[i];
      take_part(batch, part, [&](int r) { return member_of_(batch, r) == i; });
      check(part.ranges.size() < 2 || device_.type == DeviceType::cpu, "phase_plan.interleaved",
            "{} tokens next to each other on {}, got {} separate runs: order the batch by phase", members_[i].name, device_.str(),
            part.ranges.size());
    }
    for (size_t i : order_)
      if (!next.parts[i].ranges.empty()) members_[i].plan->prepare(batch_of(batch, next.parts[i]), stream);
    next.slots = batch.slot_mapping;
    next.num_tokens = batch.num_tokens();
    next.reach = reach_of(batch, spec_, options_.validate);
  }

  // A plan whose commit cannot be reverted is updated last: when it fails, the others are reverted.
  void commit(Stream stream) override {
    committed_.clear();
    for (size_t i : order_)
      if (!steps_.spare().parts[i].ranges.empty()) committed_.push_back(members_[i].plan.get());
    commit_together(committed_, stream);
    steps_.flip();
  }
  void revert(Stream stream) noexcept override {
    for (size_t i : order_)
      if (!steps_.now().parts[i].ranges.empty()) members_[i].plan->revert(stream);
    steps_.flip();
  }
  bool can_revert() const noexcept override {
    return std::all_of(members_.begin(), members_.end(), [](const PlanMember& m) { return m.plan->can_revert(); });
  }
  bool has_step() const noexcept override {
    for (size_t i : order_)
      if (!steps_.now().parts[i].ranges.empty() && !members_[i].plan->has_step()) return false;
    return true;
  }

  void write_kv(const KvCache& kv, const TensorView& k, const TensorView& v, Stream stream) const override {
    const Step& step = steps_.now();
    check_step(*this);
    check_capture(stream);
    check_write(spec_, device_, kv, k, v, step.slots, step.num_tokens, step.reach);
    for (size_t i : order_) {
      const BatchPart& part = step.parts[i];
      if (part.ranges.empty()) continue;
      members_[i].plan->write_kv(kv, tokens_of(part, k, k_rows_), tokens_of(part, v, v_rows_), stream);
    }
  }

  void run(const AttentionInputs& inputs, const AttentionOutputs& outputs, Stream stream) const override {
    const Step& step = steps_.now();
    check_step(*this);
    check_capture(stream);
    check_run(spec_, device_, inputs, outputs, step.num_tokens, step.reach);
    for (size_t i : order_) {
      const BatchPart& part = step.parts[i];
      if (part.ranges.empty()) continue;
      AttentionInputs part_inputs = inputs;
      part_inputs.q = tokens_of(part, inputs.q, q_rows_);
      const AttentionOutputs part_outputs{output_of(part, outputs.out, out_rows_), output_of(part, outputs.lse, lse_rows_)};
      members_[i].plan->run(part_inputs, part_outputs, stream);
      if (part.contiguous()) continue;
      for_rows(options_.threads, part.ranges, [&](int row, int token) {
        copy_row(part_outputs.out, row, outputs.out, token);
        if (!outputs.lse.empty()) copy_row(part_outputs.lse, row, outputs.lse, token);
      });
    }
  }

  std::string str() const override {
    std::string text = rule_;
    for (size_t i = 0; i < members_.size(); ++i) {
      const BatchPart& part = steps_.now().parts[i];
      text += part.ranges.empty()
                  ? fmt::format("; {}: nothing", members_[i].name)
                  : fmt::format("; {}{}: {}", members_[i].name, part.contiguous() ? "" : " (gathered)", members_[i].plan->str());
    }
    return text;
  }

 private:
  struct Step {
    std::vector<BatchPart> parts;  // of members_
    TensorView slots;
    BatchReach reach;
    int num_tokens = 0;
  };

  // A graph would repeat the rows of this step's parts, and a member that has no tokens now would be missing.
  void check_capture(Stream stream) const {
    check(!is_captured(device_, stream), "phase_plan.captured",
          "expected a stream that captures nothing: which rows are whose differs from step to step. Capture a plan of one backend");
  }

  TensorView scratch(const BatchPart& part, const TensorView& like, const RowBuffer& buffer) const {
    if (like.rank == 2) return TensorView::contiguous(buffer.data(), like.dtype, {part.num_tokens, like.size(1)});
    return TensorView::contiguous(buffer.data(), like.dtype, {part.num_tokens, like.size(1), like.size(2)});
  }

  TensorView tokens_of(const BatchPart& part, const TensorView& all, const RowBuffer& buffer) const {
    if (all.empty()) return all;  // values that are a part of the keys
    if (part.contiguous()) return all.slice(0, part.ranges[0].begin, part.ranges[0].end);
    const TensorView gathered = scratch(part, all, buffer);
    for_rows(options_.threads, part.ranges, [&](int row, int token) { copy_row(all, token, gathered, row); });
    return gathered;
  }

  TensorView output_of(const BatchPart& part, const TensorView& all, const RowBuffer& buffer) const {
    if (all.empty()) return all;
    return part.contiguous() ? all.slice(0, part.ranges[0].begin, part.ranges[0].end) : scratch(part, all, buffer);
  }

  AttentionSpec spec_;
  Device device_;
  PlanOptions options_;
  std::string rule_;
  std::vector<PlanMember> members_;
  MemberOf member_of_;
  std::vector<size_t> order_;         // in which members are updated and run
  std::vector<StepPlan*> committed_;  // of one update
  int64_t scratch_rows_;
  TwoSteps<Step> steps_;
  RowBuffer q_rows_, k_rows_, v_rows_, out_rows_, lse_rows_;  // of one part at a time
};

}  // namespace

PlanOptions member_options(const DeviceInfo& device, const PlanOptions& options) {
  PlanOptions member = options;
  member.validate = false;  // the whole batch is checked before it is taken apart
  if (device.present && member.workspace == nullptr) member.workspace = make_workspace(device);
  return member;
}

std::unique_ptr<AttentionPlan> make_split_plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options,
                                               std::string rule, std::vector<PlanMember> members,
                                               std::function<size_t(const Batch&, int request)> member_of) {
  return std::make_unique<SplitPlan>(spec, device, options, std::move(rule), std::move(members), std::move(member_of));
}

}  // namespace imbrex
