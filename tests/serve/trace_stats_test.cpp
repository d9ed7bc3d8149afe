// Percentiles by nearest rank, and the numbers of a trace small enough to count by hand.
#include "serve/trace_stats.h"

#include <gtest/gtest.h>

namespace imbrex::serve {
namespace {

TEST(Percentiles, AreNearestRank) {
  const Percentiles p = percentiles({15, 50, 20, 40, 35});
  EXPECT_EQ(p.count, 5);
  EXPECT_EQ(p.min, 15);
  EXPECT_EQ(p.p25, 20);
  EXPECT_EQ(p.p50, 35);
  EXPECT_EQ(p.p75, 40);
  EXPECT_EQ(p.p90, 50);
  EXPECT_EQ(p.max, 50);
  EXPECT_EQ(p.mean, 32);
  EXPECT_EQ(percentiles({}), Percentiles{});
  EXPECT_EQ(percentiles({7}).p99, 7);
  std::vector<double> hundred;
  for (int i = 100; i >= 1; --i) hundred.push_back(i);
  EXPECT_EQ(percentiles(hundred).p99, 99);
  EXPECT_EQ(percentiles(hundred).p90, 90);
}

TEST(TraceStats, CountsByHand) {
  Trace trace;
  trace.prefix_block = 512;
  trace.requests = {{.arrival_s = 1, .input_length = 600, .output_length = 4, .prefix_ids = {1, 2}},
                    {.arrival_s = 2, .input_length = 1025, .output_length = 6, .prefix_ids = {1, 3, 4}},
                    {.arrival_s = 5, .input_length = 512, .output_length = 2, .prefix_ids = {1}}};
  const TraceStats s = trace_stats(trace);
  EXPECT_EQ(s.requests, 3);
  EXPECT_EQ(s.input_tokens, 2137);
  EXPECT_EQ(s.output_tokens, 12);
  EXPECT_EQ(s.input.p50, 600);
  EXPECT_EQ(s.output.mean, 4);
  EXPECT_EQ(s.gap.count, 2);
  EXPECT_EQ(s.gap.max, 3);
  EXPECT_EQ(s.span_s, 4);
  EXPECT_EQ(s.rate, 0.75);
  EXPECT_EQ(s.prefix_blocks, 6);
  EXPECT_EQ(s.distinct_prefix_blocks, 4);
  EXPECT_DOUBLE_EQ(s.hit_rate(), 2.0 / 6);
}

TEST(TraceStats, OfNothingAndOfOne) {
  EXPECT_EQ(trace_stats({}).requests, 0);
  Trace one;
  one.requests = {{.arrival_s = 3, .input_length = 2, .output_length = 1, .prefix_ids = {}}};
  EXPECT_EQ(trace_stats(one).rate, 0);
  EXPECT_EQ(trace_stats(one).gap.count, 0);
  EXPECT_EQ(trace_stats(one).hit_rate(), 0);
}

}  // namespace
}  // namespace imbrex::serve
