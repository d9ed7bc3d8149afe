#pragma once
// Plans whose update can be taken back, so that a plan made of several others is updated as a whole or not at all.
#include <memory>
#include <span>
#include <utility>

#include "imbrex/attention.h"

namespace imbrex {

class StepPlan : public AttentionPlan {
 public:
  void update(const Batch& batch, Stream stream) final {
    prepare(batch, stream);
    commit(stream);
  }
  // Makes the next step, with everything that can be refused, and changes nothing else: run() still computes the step before. The batch
  // must not change until commit(); another prepare() may come in its place.
  virtual void prepare(const Batch&, Stream) = 0;
  // Makes the prepared step the plan's. If it fails, the plan still has the step before.
  virtual void commit(Stream) = 0;
  // Called right after a commit(): makes the step before the plan's again.
  virtual void revert(Stream) noexcept = 0;
  virtual bool can_revert() const noexcept { return true; }
  // False after a failure that could not be taken back, until an update succeeds: run() and write_kv() refuse to compute then.
  virtual bool has_step() const noexcept { return true; }
};

void check_step(const StepPlan&);  // Error plan.no_step

// Commits all of these plans or none: when one fails, those before it are reverted. Plans that cannot be reverted have to come last.
void commit_together(std::span<StepPlan* const>, Stream);

// Wraps a plan that is not a StepPlan, which has only its update(): that cannot be taken back.
std::unique_ptr<StepPlan> step_plan(std::unique_ptr<AttentionPlan>);

// The step that a plan computes, and room for the next: both keep their capacity, so that warm updates allocate nothing.
template <class Step>
class TwoSteps {
 public:
  const Step& now() const { return steps_[now_]; }
  Step& now() { return steps_[now_]; }
  Step& spare() { return steps_[1 - now_]; }
  void flip() noexcept { now_ = 1 - now_; }

 private:
  Step steps_[2];
  int now_ = 0;
};

}  // namespace imbrex
