#pragma once
// Plans of layers with states in slots, of backends from outside: what does not depend on the family.
#include <utility>

#include "api/outside.h"
#include "family/state_step.h"

namespace imbrex::api {

// That of a family derives from it and hands on run().
template <class OfFamily>
class OutsideStatePlan : public OutsidePlan<OfFamily> {
 public:
  using OutsidePlan<OfFamily>::OutsidePlan;

  void update(const Batch& batch, Stream stream) override {
    read_batch(StateDrafts(this->spec_), this->limits_, batch, this->validate_, spare_);
    check(!batch.pad_slot, "backend.pad_slot", "expected no pad_slot for {}, whose batches have none", this->functions_->name_text);
    using Fields = decltype(fields_of(this->spec_));
    // Both came with one version, before which a backend would read the slots that it writes.
    check(batch.source_slots.empty() || this->functions_->spec_size > offsetof(Fields, tree_drafts), "backend.source_slots",
          "expected no source_slots for {}, which was compiled for a version without them", this->functions_->name_text);
    const auto list = [](std::span<const int32_t> of) { return of.empty() ? nullptr : of.data(); };
    const imbrex_batch b{.struct_size = sizeof b,
                         .num_reqs = batch.num_reqs(),
                         .query_start_loc = batch.query_start_loc.data(),
                         .seq_lens = batch.seq_lens.data(),
                         .state_slots = list(batch.state_slots),
                         .num_drafts = list(batch.num_drafts),
                         .accepted_drafts = list(batch.accepted_drafts),
                         .source_slots = list(batch.source_slots),
                         .draft_parents = list(batch.draft_parents)};
    this->functions_->must(this->functions_->update(this->plan_, &b, stream), "update");
    std::swap(now_, spare_);
  }

 protected:
  const StateStep& step() const { return now_; }
  // A step without tokens is not handed on, but for devices where a graph may want the call for later steps.
  bool is_idle() const { return now_.num_tokens == 0 && this->device_.type == DeviceType::cpu; }

 private:
  StateStep now_, spare_;
};

}  // namespace imbrex::api
