// `imbrex run` with drafts, images and a system prompt, and `imbrex bench` with --halves and with --packed-mask, as a user types them.
#include "cli/program.h"

#include <nlohmann/json.hpp>

namespace imbrex::test {
namespace {

TEST_F(Cli, RunReplaysDraftsImagesAndASystemPrompt) {
  const std::string common = "run --model lfm2-350m --layers 3 --num-requests 4 --shrink 8 --trace '" IMBREX_DATA
                             "/sample_trace.jsonl' --no-ceilings --verify 2% --kv-memory 64MiB --json " +
                             path("r.json") + " ";
  const auto digest = [&] { return nlohmann::json::parse(read(path("r.json")))["digest"]["outputs"]; };
  Ran ran = run(common);
  ASSERT_EQ(ran.code, 0) << ran.err;
  const auto plain = digest();
  ran = run(common + "--spec-tokens 5 --spec-tree");
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_TRUE(contains(ran.out, "causal tree") && contains(ran.out, "drafts that were kept")) << ran.out;
  EXPECT_EQ(digest(), plain);
  ran = run(common + "--image-every 64 --image-tokens 40");
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_TRUE(contains(ran.out, "with an image of 40 tokens in every 64") && contains(ran.out, "positions")) << ran.out;
  EXPECT_NE(digest(), plain);
  ran = run(common + "--shared-system-prompt 200");
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_TRUE(contains(ran.out, "behind a system prompt of 200 tokens")) << ran.out;
  EXPECT_NE(digest(), plain);
  EXPECT_TRUE(contains(run(common + "--image-every 64 --image-tokens 65").err, "[trace.images]"));
  EXPECT_TRUE(contains(run(common + "--image-every 64 --image-tokens 9 --spec-tokens 2 --spec-tree").err, "[replay.drafts.tree]"));
}

TEST_F(Cli, BenchTimesHalvesOfABatch) {
  const std::string common = "bench 4q1s300 q70 --halves --heads 4/2 --head-dim 64 --min-time 0.01 --max-time 0.02 ";
  const Ran ran = run(common);
  ASSERT_EQ(ran.code, 0) << ran.err;
  for (const char* part : {"two streams", "35 (a request)", "equal"}) EXPECT_TRUE(contains(ran.out, part)) << part << "\n" << ran.out;
  const Ran json = run(common + "--cut 3 --json");
  ASSERT_EQ(json.code, 0) << json.err;
  const auto j = nlohmann::json::parse(json.out);
  ASSERT_EQ(j.size(), 2u);
  EXPECT_EQ(j[0]["cut"], 3);
  EXPECT_EQ(j[0]["different"], 0);
  EXPECT_GT(j[1]["together"]["median_s"].get<double>(), 0);
  EXPECT_EQ(run("bench q1s9 --halves").code, 2);
  EXPECT_TRUE(contains(run("bench --zoo --halves").err, "[usage]"));
  EXPECT_TRUE(contains(run("bench q9 --family short_conv --halves").err, "[cli.family]"));
}

// Bits hide what bytes hide: outputs differ from the reference by the same, of the same seed, the halves of a batch included.
TEST_F(Cli, BenchTimesCustomMasksOfBits) {
  const std::string common = "bench 2q3s41,q21 --heads 4/2 --head-dim 32 --custom-mask --no-ceilings --min-time 0 --max-time 0.01 --json ";
  const Ran bytes = run(common), bits = run(common + "--packed-mask");
  ASSERT_EQ(bytes.code, 0) << bytes.err;
  ASSERT_EQ(bits.code, 0) << bits.err;
  const auto a = nlohmann::json::parse(bytes.out), b = nlohmann::json::parse(bits.out);
  ASSERT_EQ(b.size(), 1u);
  EXPECT_GT(b[0]["check_allowed"].get<double>(), 0);
  EXPECT_EQ(a[0]["check_error"], b[0]["check_error"]);
  EXPECT_EQ(run(common + "--packed-mask --bidirectional").code, 0);
  const Ran halves = run("bench 4q3s41 --halves --heads 4/2 --head-dim 32 --custom-mask --packed-mask --min-time 0 --max-time 0.01 --json");
  ASSERT_EQ(halves.code, 0) << halves.err;
  EXPECT_EQ(nlohmann::json::parse(halves.out)[0]["different"], 0);
  EXPECT_TRUE(contains(run("bench q9 --heads 4/2 --head-dim 32 --packed-mask").err, "[bench.packed_mask]"));
  EXPECT_TRUE(contains(run("bench --zoo --packed-mask").err, "[usage]"));
  EXPECT_TRUE(contains(run("bench q9 --family mla --packed-mask").err, "[cli.family]"));
}

}  // namespace
}  // namespace imbrex::test
