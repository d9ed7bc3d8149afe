#pragma once
// The nearest changes of a spec after which a real backend runs it. Used by select() for specs that nothing runs.
#include <span>
#include <string>
#include <vector>

#include "family/select_of.h"
#include "imbrex/select.h"

namespace imbrex {

// "kv_dtype bf16: cpu_amx, cpu_avx512", nearest first; single changes, and pairs only where no single one helps. A change that
// alters results says so. `slow` is no answer, and backends that refuse the device itself are not asked.
// At most kMaxProposals. Costs a few milliseconds at worst.
inline constexpr int kMaxProposals = 5;
template <>
std::vector<std::string> propose<AttentionFamily>(const AttentionSpec&, const DeviceInfo&, std::span<const Candidate>, const Backend& slow);

}  // namespace imbrex
