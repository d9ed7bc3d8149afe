// plan_by_phase(): a composite plan that sends short queries (decode) to one backend and the others (prefill) to another.
#include <fmt/format.h>

#include <algorithm>

#include "attention/split_plan.h"
#include "core/check.h"
#include "family/begin_plan.h"
#include "imbrex/select.h"

namespace imbrex {

std::unique_ptr<AttentionPlan> plan_by_phase(const BackendOf<AttentionFamily>& prefill, const BackendOf<AttentionFamily>& decode,
                                             const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options,
                                             int decode_max_q) {
  spec.validate();
  check_options(options);
  check(decode_max_q >= 1, "phase_plan.decode_max_q", "at least 1 query token, got {}", decode_max_q);
  const PlanOptions of_prefill = member_options(device, options);
  PlanOptions of_decode = of_prefill;
  PlanLimits& limits = of_decode.limits;
  limits.max_query_len = limits.max_query_len > 0 ? std::min(limits.max_query_len, decode_max_q) : decode_max_q;
  limits.min_query_len = std::min(limits.min_query_len, limits.max_query_len);
  std::vector<PlanMember> members(2);
  members[1] = {"prefill", step_plan(prefill.plan(spec, device, of_prefill))};
  members[0] = {"decode", step_plan(decode.plan(spec, device, of_decode))};
  return make_split_plan(spec, device, options, fmt::format("by phase, decode is up to {} query tokens", decode_max_q), std::move(members),
                         [decode_max_q](const Batch& batch, int r) { return size_t(batch.query_len(r) <= decode_max_q ? 0 : 1); });
}

}  // namespace imbrex
