#pragma once
// Which backends of the attention family exist, and which one runs a spec on a device, with every reason. family.h has the same for any
// family.
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "imbrex/backend.h"

namespace imbrex {

using Candidate = CandidateOf<AttentionFamily>;
using Selection = SelectionOf<AttentionFamily>;

inline std::vector<const Backend*> backends() { return backends<AttentionFamily>(); }
inline const Backend* find_backend(std::string_view name) { return find_backend<AttentionFamily>(name); }
inline void register_backend(std::shared_ptr<const Backend> backend) { register_backend<AttentionFamily>(std::move(backend)); }
inline void unregister_backend(std::string_view name) { unregister_backend<AttentionFamily>(name); }

inline Selection select(const AttentionSpec& spec, const DeviceInfo& device, const SelectOptions& options = {}) {
  return select<AttentionFamily>(spec, device, options);
}

// Plan that sends requests with at most `decode_max_q` query tokens to one backend and the others to another. An update is taken by both or
// by none. On a GPU the requests of a phase have to be next to each other (Error phase_plan.interleaved), and the plan is no part of a
// graph: Plan::capturable() is false, and write_kv() and run() refuse a stream that is being captured (Error phase_plan.captured).
std::unique_ptr<Plan> plan_by_phase(const Backend& prefill, const Backend& decode, const AttentionSpec&, const DeviceInfo&,
                                    const PlanOptions&, int decode_max_q = 1);

}  // namespace imbrex
