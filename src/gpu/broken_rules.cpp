// See broken_rules.h.
#include "gpu/broken_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace imbrex::gpu {

std::vector<Rule> rules_of_lengths(const PlanLimits& limits, std::span<const Rule> and_these) {
  const std::string few = fmt::format("no query tokens of a request, or {} to {}", std::max(limits.min_query_len, 1),
                                      limits.max_query_len > 0 ? limits.max_query_len : limits.max_num_tokens);
  std::vector<Rule> rules{{"batch.query_start_loc.monotone", "starts that begin with 0 and do not fall"},
                          {"batch.num_tokens.limit", "query tokens within the batch's max_num_tokens"},
                          {"batch.query_len.limit", few},
                          {"batch.seq_len.limit", fmt::format("0 to {} keys", limits.max_seq_len)},
                          {"batch.seq_len.shorter_than_query", "as many keys as query tokens, or more"}};
  rules.insert(rules.end(), and_these.begin(), and_these.end());
  return rules;
}

BrokenRules::BrokenRules(OpenDevicePtr device, std::vector<Rule> rules)
    : device_(std::move(device)), rules_(std::move(rules)), memory_(device_->allocate(bytes())) {
  const std::shared_ptr<void> stream = device_->make_stream();
  device_->fill(memory_.get(), 0, bytes(), stream.get());
  device_->synchronize(stream.get());
}

std::vector<Reason> BrokenRules::take(Stream stream) const {
  std::vector<int> last(rules_.size());
  device_->download(last.data(), memory_.get(), bytes(), stream);
  device_->fill(memory_.get(), 0, bytes(), stream);
  device_->synchronize(stream);
  std::vector<Reason> reasons;
  for (size_t rule = 0; rule < rules_.size(); ++rule)
    if (last[rule] > 0)
      reasons.push_back({rules_[rule].code, rules_[rule].wanted, fmt::format("something else in request {}", last[rule] - 1)});
  return reasons;
}

}  // namespace imbrex::gpu
