// The generator: same bytes everywhere, traces that read back, real sharing, and options out of range.
#include "serve/trace_gen.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>

#include "expect_error.h"
#include "imbrex/error.h"
#include "serve/trace_stats.h"

namespace imbrex::serve {
namespace {

TEST(TraceGen, MakesTheShippedSampleToTheByte) {
  std::ifstream file(IMBREX_DATA "/sample_trace.jsonl", std::ios::binary);
  ASSERT_TRUE(file.is_open());
  std::stringstream shipped;
  shipped << file.rdbuf();
  EXPECT_EQ(to_mooncake_jsonl(generate_trace(sample_trace_options())), shipped.str());
}

TEST(TraceGen, ReadsBackAsWritten) {
  TraceGenOptions options;
  options.num_requests = 500;
  const Trace made = generate_trace(options);
  const std::string text = to_mooncake_jsonl(made);
  const Trace read = parse_trace(text, "made");
  EXPECT_EQ(read.format, "mooncake");
  EXPECT_EQ(to_mooncake_jsonl(read), text);
  options.seed = 2;
  EXPECT_NE(to_mooncake_jsonl(generate_trace(options)), text);
}

TEST(TraceGen, FollowsItsOptions) {
  TraceGenOptions options;
  options.num_requests = 4000;
  options.rate = 5;
  options.num_system_prompts = 0;
  options.mean_turns = 1;
  const TraceStats s = trace_stats(generate_trace(options));
  EXPECT_EQ(s.requests, 4000);
  EXPECT_NEAR(s.rate, 5, 0.5);
  EXPECT_NEAR(s.input.p50, options.message_median, 20);
  EXPECT_NEAR(s.output.p50, options.output_median, 10);
  EXPECT_EQ(s.hit_rate(), 0);  // nothing to share
  EXPECT_NEAR(s.gap.p50, std::log(2.0) / 5, 0.02);
}

TEST(TraceGen, SharesSystemPromptsAndConversations) {
  TraceGenOptions options;
  options.num_requests = 2000;
  options.mean_turns = 1;
  options.num_system_prompts = 3;
  options.system_length = 2048;
  const Trace systems = generate_trace(options);
  std::set<uint64_t> first_ids;
  for (const TraceRequest& r : systems.requests) first_ids.insert(r.prefix_ids[0]);
  EXPECT_EQ(first_ids.size(), 3u);
  EXPECT_GT(trace_stats(systems).hit_rate(), 0.4);
  options.num_system_prompts = 0;
  options.mean_turns = 5;
  options.message_median = 800;
  EXPECT_GT(trace_stats(generate_trace(options)).hit_rate(), 0.4);
}

TEST(TraceGen, StaysWithinItsLengths) {
  TraceGenOptions options;
  options.min_input = 300, options.max_input = 900, options.min_output = 7, options.max_output = 9, options.output_median = 8;
  const TraceStats s = trace_stats(generate_trace(options));
  EXPECT_GE(s.input.min, 300);
  EXPECT_LE(s.input.max, 900);
  EXPECT_EQ(s.output.min, 7);
  EXPECT_EQ(s.output.max, 9);
}

TEST(TraceGen, RefusesOptionsOutOfRange) {
  const auto code = [](auto change) {
    TraceGenOptions options;
    change(options);
    return test::error_code([&] { generate_trace(options); });
  };
  EXPECT_EQ(code([](auto& o) { o.num_requests = 0; }), "trace_gen.num_requests");
  EXPECT_EQ(code([](auto& o) { o.rate = 0; }), "trace_gen.rate");
  EXPECT_EQ(code([](auto& o) { o.rate = std::numeric_limits<double>::quiet_NaN(); }), "trace_gen.rate");
  EXPECT_EQ(code([](auto& o) { o.num_system_prompts = -1; }), "trace_gen.num_system_prompts");
  EXPECT_EQ(code([](auto& o) { o.system_length = -1; }), "trace_gen.system_length");
  EXPECT_EQ(code([](auto& o) { o.mean_turns = 0.5; }), "trace_gen.mean_turns");
  EXPECT_EQ(code([](auto& o) { o.think_s = -1; }), "trace_gen.think_s");
  EXPECT_EQ(code([](auto& o) { o.message_median = 0; }), "trace_gen.median");
  EXPECT_EQ(code([](auto& o) { o.output_sigma = 9; }), "trace_gen.sigma");
  EXPECT_EQ(code([](auto& o) { o.min_input = 10, o.max_input = 9; }), "trace_gen.range");
  EXPECT_EQ(code([](auto& o) { o.min_output = 0; }), "trace_gen.range");
  EXPECT_EQ(code([](auto&) {}), "nothing thrown");
}

}  // namespace
}  // namespace imbrex::serve
