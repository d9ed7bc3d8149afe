// Tests of the replay's report: what it says, that its JSON is JSON, and that its page stands alone.
#include "serve/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

namespace imbrex::serve {
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

Percentiles around(double value) {
  return {100, value * 0.4, value * 1.2, value * 0.8, value, value * 1.4, value * 2.2, value * 3, value * 5, value * 9};
}

ReplayResult sample() {
  ReplayResult r;
  r.model = "gpt-oss-20b";
  r.family = "gpt_oss";
  r.trace = "conversation.jsonl";
  r.trace_format = "mooncake";
  r.device = "Intel(R) Xeon(R) Processor (avx512, 2 threads)";
  r.notes = {"kv_format strided: no packed backend here", "a <script> in a note"};
  r.num_layers = 4;
  r.model_layers = 24;
  r.seed = 1;
  r.num_threads = 2;
  r.max_num_batched_tokens = 2048;
  r.max_num_seqs = 128;
  r.block_size = 16;
  r.q_dtype = r.kv_dtype = "bf16";
  r.kv_format = "strided";
  r.pacing = "arrival";
  for (const int i : {0, 1}) {
    ReplayKind k;
    k.spec = i ? "decoder q64/kv8 d64 bf16 block16 causal sinks" : "decoder q64/kv8 d64 bf16 block16 causal window 128 sinks";
    k.group = i ? "full" : "window 128";
    k.layers = i ? std::vector<int>{1, 3} : std::vector<int>{0, 2};
    k.backend = "cpu_avx512";
    k.rule = "first of 3 that run it";
    k.selection = "cpu_avx512 (first of 3 that run it)\n  cpu_amx      refuses    AMX tiles\n";
    k.plan = "cpu_avx512: 264 work items, 12 merges";
    k.run_s = i ? 30 : 4;
    r.kinds.push_back(k);
    r.groups.push_back({k.group, 2, 20000, int64_t(2) << 30, i ? 0.6 : 0.02, i ? 0.95 : 0.04, i ? 1234 : 0, 0});
  }
  r.kv_bytes = int64_t(4) << 30;
  r.padding_bytes = 4096;
  r.rest_bytes = int64_t(64) << 20;
  r.unfilled_share = 0.0123;
  r.complete = true;
  r.requests = r.finished_requests = 200;
  r.steps = 4321;
  r.preemptions = 3;
  r.prompt_tokens = 2'400'000;
  r.prefix_hit_tokens = 800'000;
  r.prefill_tokens = 1'600'000;
  r.decode_tokens = 68'000;
  r.output_tokens = 68'200;
  r.wall_s = 74;
  r.clock_s = 62;
  r.idle_s = 5;
  r.times = {0.4, 0.1, 2.1, 34, 11, 6};
  r.ttft = around(0.8);
  r.tpot = around(0.02);
  r.e2e = around(6);
  r.queue = around(0.1);
  r.step = around(0.014);
  r.batch = around(12);
  r.decode_steps = {3000, 36000, 10, 9e11, 2.2e11};
  r.prefill_steps = {1321, 1'632'000, 24, 6.1e12, 1.5e11};
  r.digest = 0x0123456789abcdef;
  r.verify_fraction = 0.01;
  r.verified_outputs = 5120;
  r.verified_values = 327680;
  r.verify_max_error = 0.0031;
  r.verify_max_ratio = 0.42;
  for (int i = 0; i < 120; ++i) {
    const double x = i / 120.0, wave = 1 + std::sin(9 * x) * 0.5;
    ReplayPoint p;
    p.clock_s = 62 * (i + 1) / 120.0;
    p.steps = 36;
    p.step_s = 0.3 + 0.1 * wave;
    p.attention_s = p.step_s * 0.9;
    p.prefill_tokens = int64_t(13000 * wave);
    p.decode_tokens = int64_t(500 * (2 - wave) + 100);
    p.running = 12 * wave;
    p.waiting = x < 0.4 ? 3 * wave : 0;
    p.occupancy = {0.02 * wave, std::min(0.95, x * 1.4)};
    r.series.push_back(p);
  }
  return r;
}

ReportContext context() {
  return {
      "0.1.0", "imbrex run --model gpt-oss-20b --trace conversation.jsonl --layers 4", "2026-11-20 18:00 UTC", {2, 28e9, 52e9, 290e9, 0}};
}

TEST(Report, TextHasTheMainNumbers) {
  const std::string text = report_text(sample(), context());
  for (const char* part : {"gpt-oss-20b", "200 of 200 requests", "33.3 %", "1196.5", "78.6 %", "cpu_avx512", "first of 3 that run it",
                           "5120 outputs recomputed", "0123456789abcdef", "95.0 %",
                           "lost: 4.00 KiB to padding, 64.0 MiB to a rest that no block fits (1.54 % of all); 1.23 % of what requests"}) {
    EXPECT_TRUE(contains(text, part)) << part << "\n" << text;
  }
  EXPECT_FALSE(contains(text, "stopped early"));
  ReplayResult stopped = sample();
  stopped.complete = false;
  stopped.stopped = "time limit";
  stopped.verified_outputs = 0;
  EXPECT_TRUE(contains(report_text(stopped, {}), "stopped early: time limit"));
  EXPECT_TRUE(contains(report_text(stopped, {}), "nothing was verified"));
}

TEST(Report, AGpusFiguresAreInTera) {
  ReplayResult r = sample();
  r.prefill_steps = {100, 200'000, 0.5, 2.5e14, 1e11};
  ReportContext gpu = context();
  gpu.ceilings = {.dram_read = 4.8e12, .tensor = 1e15};
  const std::string text = report_text(r, gpu);
  for (const char* part : {"TFLOP/s", "TB/s", "500.0", "50.0 %", "data sheet", "1000.0"}) EXPECT_TRUE(contains(text, part)) << text;
  EXPECT_EQ(nlohmann::json::parse(report_json(r, gpu))["ceilings"]["flop_per_s"], 1e15);
}

TEST(Report, EmptyResultPrints) {
  EXPECT_FALSE(report_text({}, {}).empty());
  EXPECT_TRUE(nlohmann::json::accept(report_json({}, {})));
  EXPECT_FALSE(report_html({}, {}).empty());
}

TEST(Report, JsonHoldsTheResult) {
  const auto j = nlohmann::json::parse(report_json(sample(), context()));
  EXPECT_EQ(j["model"]["name"], "gpt-oss-20b");
  EXPECT_EQ(j["requests"]["finished"], 200);
  EXPECT_EQ(j["series"]["clock_s"].size(), 120u);
  EXPECT_EQ(j["series"]["occupancy"].size(), 2u);
  EXPECT_EQ(j["series"]["occupancy"][1].size(), 120u);
  EXPECT_DOUBLE_EQ(j["throughput"]["output_tokens_per_s"].get<double>(), 68200 / 57.0);
  EXPECT_EQ(j["ceilings"]["flop_per_s"], 290e9);
  EXPECT_EQ(j["waste"]["padding_bytes"], 4096);
  EXPECT_DOUBLE_EQ(j["waste"]["share"].get<double>(), (4096. + (64 << 20)) / (4096. * 1048576 + (64 << 20)));
}

TEST(Report, PageStandsAlone) {
  const std::string html = report_html(sample(), context());
  EXPECT_FALSE(contains(html, "http://") || contains(html, "https://") || contains(html, "src=") || contains(html, "@import"));
  EXPECT_FALSE(contains(html, "/*REPORT*/"));
  EXPECT_FALSE(contains(html, "a <script> in a note"));
  EXPECT_TRUE(contains(html, "a \\u003cscript> in a note"));
  const size_t begin = html.find("const R = ") + 10;
  EXPECT_TRUE(nlohmann::json::accept(html.substr(begin, html.find(";\n", begin) - begin)));
  if (const char* path = std::getenv("IMBREX_TEST_REPORT")) std::ofstream(path) << html;  // to be looked at in a browser
}

}  // namespace
}  // namespace imbrex::serve
