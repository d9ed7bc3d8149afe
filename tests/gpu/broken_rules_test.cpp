// Rules that kernels find broken: which requests are told, once, on any device that can be opened.
#include "gpu/broken_rules.h"

#include <gtest/gtest.h>

#include <span>

#include "gpu/host_memory.h"

namespace imbrex::gpu {
namespace {

using test::HostMemory;

TEST(BrokenRules, AreToldOnceWithTheLastRequest) {
  const auto device = std::make_shared<const HostMemory>();
  const Rule own[] = {{"batch.state.slot", "a slot"}};
  const BrokenRules rules(device, rules_of_lengths({.max_num_tokens = 90, .max_seq_len = 50, .min_query_len = 2}, own));
  EXPECT_TRUE(rules.take(nullptr).empty());
  rules.last_requests()[1] = 4;
  rules.last_requests()[2] = 1;
  rules.last_requests()[kNumLengthRules] = 7;
  const int waits = device->waits;
  const std::vector<Reason> reasons = rules.take(nullptr);
  EXPECT_EQ(device->waits, waits + 1);
  ASSERT_EQ(reasons.size(), 3u);
  EXPECT_EQ(reasons[0].str(),
            "batch.num_tokens.limit: wanted query tokens within the batch's max_num_tokens, got something else in request 3");
  EXPECT_EQ(reasons[1].wanted, "no query tokens of a request, or 2 to 90");
  EXPECT_EQ(reasons[2].str(), "batch.state.slot: wanted a slot, got something else in request 6");
  EXPECT_TRUE(rules.take(nullptr).empty());
}

}  // namespace
}  // namespace imbrex::gpu
