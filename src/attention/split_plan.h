#pragma once
// A composite plan: the requests of each step are shared out among plans, its members, by a rule that looks at one request at a time. It
// keeps the promises of a plan of one backend: the whole batch is checked once, before it is taken apart, and an update takes effect in all
// members or in none. A stream that captures a graph is refused, since each step gives other rows to a member.
//
// A member whose tokens are not next to each other is given copies of their rows, and its outputs are copied back: one copy of those rows a
// layer, in host memory. On other devices such a batch is refused, and the caller orders its requests.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention/step_plan.h"

namespace imbrex {

struct PlanMember {
  const char* name;  // "decode"
  std::unique_ptr<StepPlan> plan;
};

// Options for the plans of members, before they are made: batches are checked once, and one member computes after the other, so that they
// share scratch.
PlanOptions member_options(const DeviceInfo&, const PlanOptions&);

// `member_of` says which member takes a request that has tokens. `rule` is what str() begins with. Errors phase_plan.*
std::unique_ptr<AttentionPlan> make_split_plan(const AttentionSpec&, const DeviceInfo&, const PlanOptions&, std::string rule,
                                               std::vector<PlanMember>, std::function<size_t(const Batch&, int request)> member_of);

}  // namespace imbrex
