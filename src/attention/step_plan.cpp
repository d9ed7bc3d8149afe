// See step_plan.h.
#include "attention/step_plan.h"

#include "core/check.h"

namespace imbrex {
namespace {

class UpdateOnly final : public StepPlan {
 public:
  explicit UpdateOnly(std::unique_ptr<AttentionPlan> plan) : plan_(std::move(plan)) {}
  void prepare(const Batch& batch, Stream) override { batch_ = batch; }
  void commit(Stream stream) override {
    plan_->update(batch_, stream);
    has_step_ = true;
  }
  void revert(Stream) noexcept override { has_step_ = false; }
  bool can_revert() const noexcept override { return false; }
  bool has_step() const noexcept override { return has_step_; }

  void update_on_device(const DeviceBatch& batch, Stream stream) override {
    plan_->update_on_device(batch, stream);
    has_step_ = true;
  }
  std::vector<Reason> device_problems(Stream stream) override { return plan_->device_problems(stream); }
  void write_kv(const KvCache& kv, const TensorView& k, const TensorView& v, Stream stream) const override {
    check_step(*this);
    plan_->write_kv(kv, k, v, stream);
  }
  void run(const AttentionInputs& inputs, const AttentionOutputs& outputs, Stream stream) const override {
    check_step(*this);
    plan_->run(inputs, outputs, stream);
  }
  bool capturable() const override { return plan_->capturable(); }
  std::string str() const override { return plan_->str(); }

 private:
  std::unique_ptr<AttentionPlan> plan_;
  Batch batch_;
  bool has_step_ = true;
};

}  // namespace

void check_step(const StepPlan& plan) {
  if (!plan.has_step())
    fail("plan.no_step", "expected a step to compute: the last update of {} failed, and the step before could not be kept", plan.str());
}

void commit_together(std::span<StepPlan* const> plans, Stream stream) {
  size_t done = 0;
  try {
    for (; done < plans.size(); ++done) plans[done]->commit(stream);
  } catch (...) {
    while (done-- > 0) plans[done]->revert(stream);
    throw;
  }
}

std::unique_ptr<StepPlan> step_plan(std::unique_ptr<AttentionPlan> plan) {
  if (auto* const steps = dynamic_cast<StepPlan*>(plan.get())) {
    std::unique_ptr<StepPlan> same(steps);
    static_cast<void>(plan.release());
    return same;
  }
  return std::make_unique<UpdateOnly>(std::move(plan));
}

}  // namespace imbrex
