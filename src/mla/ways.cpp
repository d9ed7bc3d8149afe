// See ways.h.
#include "mla/ways.h"

#include <fmt/format.h>

#include <algorithm>

#include "attention/draft_tree.h"

namespace imbrex {

std::string DecidedWay::str() const {
  if (fixed) return {};
  return fmt::format(", request {} of {} queries and {} keys is {}", request, q_len, seq_len, cost.str());
}

void decide_ways(const MlaSpec& spec, const WayRules& rules, const Batch& batch, MlaWays& ways) {
  ways.expand.assign(size_t(batch.num_reqs()), 0);
  ways.largest[0] = ways.largest[1] = {};
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int q_len = batch.query_len(r), seq_len = batch.seq_lens[r];
    if (q_len == 0) continue;
    const bool may_expand = rules.may_expand && (!spec.mask.tree || is_chain(batch, r));
    DecidedWay decided{.request = r, .q_len = q_len, .seq_len = seq_len, .cost = {}, .fixed = !may_expand || rules.expand.has_value()};
    if (!decided.fixed) decided.cost = cost_of(spec, rules.rates, q_len, seq_len);
    const bool expand = may_expand && (rules.expand ? *rules.expand : decided.cost.expand());
    ways.expand[size_t(r)] = expand;
    DecidedWay& largest = ways.largest[size_t(expand)];
    if (int64_t(q_len) * seq_len > int64_t(largest.q_len) * largest.seq_len) largest = decided;
  }
}

// What expanding saves is linear in the number of keys, so that it is largest at an end of these. Of queries it is a parabola, convex where
// attention in latent space has more operations, as it does in all known models: powers of two are tried beside the ends, for others.
bool ever_expands(const MlaSpec& spec, const WayRules& rules, const PlanLimits& limits) {
  if (!rules.may_expand || rules.expand) return rules.may_expand && *rules.expand;
  const int64_t all = std::min(limits.max_num_tokens, limits.max_seq_len);
  const int64_t most = limits.max_query_len > 0 ? std::min<int64_t>(limits.max_query_len, all) : all;
  for (int64_t power = 1; power < 2 * most; power *= 2) {
    const int64_t q_len = std::min(power, most);
    for (const int64_t seq_len : {q_len, int64_t(limits.max_seq_len)})
      if (cost_of(spec, rules.rates, q_len, seq_len).expand()) return true;
  }
  return false;
}

}  // namespace imbrex
