// `imbrex select` as its users run it: what it chooses, why, and with which kernels; and the kernels that `bench` prints.
#include "cli/program.h"

#include <nlohmann/json.hpp>

namespace imbrex::test {
namespace {

TEST_F(Cli, SelectExplains) {
  const Ran ran = run("select --model gpt-oss-20b --json");
  ASSERT_EQ(ran.code, 0) << ran.err;
  const auto j = nlohmann::json::parse(ran.out);
  EXPECT_EQ(j["kinds"].size(), 2u);
  for (const auto& kind : j["kinds"]) {
    EXPECT_TRUE(kind["backend"].is_string());
    EXPECT_FALSE(kind["candidates"].empty());
  }
  EXPECT_TRUE(contains(run("select --heads 64/8 --head-dim 80 --device 'avx512,32 threads'").out, "32 threads"));
}

// The sizes are those of the kernels' constants: other models and devices give others.
TEST_F(Cli, SelectPrintsKernelsAndTheirSizes) {
  const std::string select = "select --model llama-3.1-8b --device h200";
  EXPECT_FALSE(contains(run(select).out, "tile_rows"));
  const Ran ran = run(select + " -v");
  ASSERT_EQ(ran.code, 0) << ran.err;
  for (const char* part : {"\n  decode (1 to ", "attention_sm90_decode with tile_rows 16, tile_keys 64", "\n  verify (",
                           " queries or more): attention_sm90 with tile_rows 128, tile_keys 128", "piece_keys", "most_in_run"})
    EXPECT_TRUE(contains(ran.out, part)) << part << "\n" << ran.out;
  const auto kernels = nlohmann::json::parse(run(select + " --json").out)["kinds"][0]["kernels"];
  ASSERT_EQ(kernels.size(), 3u);
  int next = 1;  // the requests of all kernels together are all there can be, each of one
  for (const auto& kernel : kernels) {
    EXPECT_EQ(kernel["least_queries"], next);
    EXPECT_GT(kernel["sizes"]["stages"], 0);
    if (kernel.contains("most_queries")) next = int(kernel["most_queries"]) + 1;
  }
  EXPECT_FALSE(kernels[2].contains("most_queries"));

  const Ran conv = run("select --model lfm2-1.2b --device 'avx512,2 threads' -v");
  EXPECT_TRUE(contains(conv.out, "all: avx512 with tile_channels 2048, tile_tokens 512")) << conv.out;
  EXPECT_TRUE(contains(conv.out, "all: avx512 with tile_rows")) << conv.out;
  EXPECT_TRUE(contains(run("select --model lfm2-1.2b --device a100 -v").out, "all: short_conv_aligned with tile_channels 256"));
  // Nothing to print where nothing runs, and for the reference, which chooses nothing.
  EXPECT_EQ(nlohmann::json::parse(run("select --model llama-3.1-8b --backend reference --json").out)["kinds"][0]["kernels"].size(), 0u);
}

TEST_F(Cli, BenchPrintsKernelsAndTheirSizes) {
  const std::string bench = "bench q4 --heads 4/2 --head-dim 64 --backend cpu_generic --no-ceilings --min-time 0 --max-time 0.01";
  EXPECT_TRUE(contains(run(bench + " -v").out, "q4, cpu_generic\n  all: ")) << run(bench + " -v").out;
  EXPECT_FALSE(contains(run(bench).out, "tile_rows"));
  const auto j = nlohmann::json::parse(run(bench + " --json").out);
  EXPECT_EQ(j[0]["kernels"][0]["sizes"]["tile_keys"], 128);
}

TEST_F(Cli, SelectKnowsLayersOfEveryFamily) {
  const std::string select = "select --model lfm2-1.2b --device 'amx,2 threads'";
  const Ran ran = run(select);
  ASSERT_EQ(ran.code, 0) << ran.err;
  for (const char* part : {"layers 0-1, 3-4, 6-7, 9, 11, 13, 15: short_conv d2048 w3 bf16\ncpu_avx512 (first of 3 that run it)",
                           "layers 2, 5, 8, 10, 12, 14: decoder q32/kv8 d64 bf16 block16 causal\ncpu_amx (first of 4 that run it)"})
    EXPECT_TRUE(contains(ran.out, part)) << part << "\n" << ran.out;
  const auto j = nlohmann::json::parse(run(select + " --json").out);
  ASSERT_EQ(j["kinds"].size(), 2u);
  EXPECT_EQ(j["kinds"][0]["family"], "short_conv");
  EXPECT_EQ(j["kinds"][0]["layers"].size(), 10u);
  EXPECT_EQ(j["kinds"][0]["candidates"].size(), 4u);
  EXPECT_EQ(j["kinds"][1]["family"], "attention");

  // A name that one family has leaves the other to its order; a name that none has is an error.
  for (const Ran& forced : {run(select + " --backend cpu_amx"), run(select, "IMBREX_BACKEND=cpu_amx")}) {
    EXPECT_EQ(forced.code, 0) << forced.err;
    EXPECT_TRUE(contains(forced.out, "cpu_avx512 (first of 3 that run it; cpu_amx, forced")) << forced.out;
    EXPECT_TRUE(contains(forced.out, "is of the family attention)")) << forced.out;
    EXPECT_TRUE(contains(forced.out, "\ncpu_amx (forced")) << forced.out;
  }
  const Ran nobody = run(select + " --backend no_such");
  EXPECT_EQ(nobody.code, 3);
  EXPECT_TRUE(contains(nobody.err, "[select.forced]")) << nobody.err;
}

TEST_F(Cli, SelectRefusesLaterFamiliesByName) {
  const Ran ran = run("select --model deepseek-v4-flash --device h200");
  EXPECT_EQ(ran.code, 3);
  for (const char* part : {"deepseek-v4-flash", "H200", "sparse", "model.family.later", "device.type", "reference"}) {
    EXPECT_TRUE(contains(ran.out, part)) << part << "\n" << ran.out;
  }
  const auto j = nlohmann::json::parse(run("select --model deepseek-v4-flash --device h200 --json").out);
  EXPECT_TRUE(j["backend"].is_null());
  EXPECT_FALSE(j["candidates"].empty());
}

// Both ways of latent attention.
TEST_F(Cli, SelectExplainsLatentAttention) {
  const Ran ran = run("select --model deepseek-v3 --device 'avx512,8 threads' -v");
  EXPECT_EQ(ran.code, 0) << ran.err;
  for (const char* part :
       {"layers 0-60: mla q128 latent512 nope128 rope64 v128", "cpu_avx512 (first of 3 that run it)", "in latent space by cpu_avx512",
        "with expanded keys (first of 3 that run it) by cpu_avx512", "workspace_keys 1664"})
    EXPECT_TRUE(contains(ran.out, part)) << part << "\n" << ran.out;
  EXPECT_TRUE(contains(run("select --model kimi-k2 --device 'amx,8 threads' --backend AMX_MLA").out, "cpu_amx (forced"));
  const Ran gpu = run("select --model deepseek-v3 --device h200 -v");
  EXPECT_EQ(gpu.code, 0) << gpu.err;
  for (const char* part : {"cuda_sm90 (first of 2 that run it)", "in latent space by cuda_sm90, decode (1 query): attention_sm90_latent",
                           "by cuda_sm90, prefill (33 queries or more): attention_sm90 with", "workspace_keys 8192"})
    EXPECT_TRUE(contains(gpu.out, part)) << part << "\n" << gpu.out;
}

// Recurrent layers among those of attention, with notes of what is left out.
TEST_F(Cli, SelectExplainsRecurrentLayers) {
  const std::string select = "select --model kimi-linear-48b-a3b --device 'avx512,8 threads'";
  const Ran ran = run(select);
  EXPECT_EQ(ran.code, 0) << ran.err;
  for (const char* part : {"layers 0-2, 4-6, 8-10, 12-14, 16-18, 20-22, 24-25: recurrent q32 v32 k128 v128 softplus channel_gate delta",
                           "layers 3, 7, 11, 15, 19, 23, 26: mla q32", "cpu_avx512 (first of 3 that run it)"})
    EXPECT_TRUE(contains(ran.out, part)) << part << "\n" << ran.out;
  for (const char* part :
       {"norm_eps=1e-05 conv_qkv bf16 state f32 v_first\ncpu_avx512 (first of 3", "\ncache\n",
        "state group recurrent    20 layers  43417600 B/request\n", "KV group full          7 layers      8064 B/token\n"})
    EXPECT_TRUE(contains(ran.out, part)) << part << "\n" << ran.out;
  const auto j = nlohmann::json::parse(run(select + " --json --backend GDN_ATTN").out);
  ASSERT_EQ(j["cache_groups"].size(), 2u);
  EXPECT_EQ(j["cache_groups"][0]["bytes_per_request"], 20 * (3 * 12288 * 2 + 32 * 128 * 128 * 4));
  EXPECT_EQ(j["cache_groups"][1]["bytes_per_token"], 8064);
  EXPECT_EQ(j["cache_groups"][1]["layers"], (std::vector<int>{3, 7, 11, 15, 19, 23, 26}));
  ASSERT_EQ(j["kinds"].size(), 2u);
  EXPECT_EQ(j["kinds"][0]["family"], "recurrent");
  EXPECT_TRUE(contains(j["kinds"][0]["rule"], "GDN_ATTN")) << j["kinds"][0]["rule"];
  EXPECT_EQ(j["kinds"][0]["candidates"].size(), 4u);
  EXPECT_EQ(j["kinds"][0]["kernels"].back()["requests"], "convolution") << "it is run by the same backend";
  EXPECT_GE(j["notes"].size(), 1u);
}

// Few layers of each kind of a published model, states beside pages.
TEST_F(Cli, RunReplaysRecurrentLayers) {
  const Ran ran = run("run --model nemotron-3-nano-30b-a3b --layers 6 --trace " IMBREX_DATA
                      "/sample_trace.jsonl --num-requests 1 --verify 0.2% --verify-last 100% --kv-memory 256MiB --no-ceilings --json " +
                      path("r.json"));
  EXPECT_EQ(ran.code, 0) << ran.err;
  for (const char* part : {"6 of 52 layers", "state slots", "3  recurrent q8 v64 k128 v64", " conv_vkq conv_bias ", "all within the bound",
                           " states recomputed"})
    EXPECT_TRUE(contains(ran.out, part)) << part << "\n" << ran.out;
  const auto j = nlohmann::json::parse(read(path("r.json")));
  EXPECT_GT(j["verify"]["outputs"], 10);
}

// Layers that a kernel for latents would take but for one thing are told that one thing.
TEST_F(Cli, SelectSaysWhatKeepsLatentsFromTheirKernel) {
  const std::string layer = "select --heads 128/1 --head-dim 576/512 --block-size 64 --device h200";
  const Ran apart = run(layer + " --kv-format latent_rope"), e5m2 = run(layer + " --kv-format latent --kv-dtype fp8_e5m2");
  EXPECT_TRUE(contains(apart.out, "spec.kv_format: wanted strided, latent or fp8_ds_mla, got latent_rope")) << apart.out;
  EXPECT_TRUE(contains(e5m2.out, "spec.kv_dtype: wanted bf16, as the queries, or fp8_e4m3, got fp8_e5m2")) << e5m2.out;
  for (const Ran* ran : {&apart, &e5m2}) {
    EXPECT_TRUE(contains(ran->out, "cuda_sm80 (the only one that runs it)")) << ran->out;
    EXPECT_FALSE(contains(ran->out, "spec.head_dim_qk")) << ran->out;
  }
}

TEST_F(Cli, EnvironmentForcesABackend) {
  const Ran ran = run("select", "IMBREX_BACKEND=reference");
  EXPECT_EQ(ran.code, 0);
  EXPECT_TRUE(contains(ran.out, "forced by IMBREX_BACKEND")) << ran.out;
}

// Values that are a part of the keys: selected, timed and checked as any other layer is.
TEST_F(Cli, LatentLayersAreSelectedAndTimed) {
  const std::string layer = " --heads 16/1 --head-dim 576/512 --kv-format latent --block-size 64";
  const Ran chosen = run("select --device h200" + layer);
  EXPECT_EQ(chosen.code, 0) << chosen.err;
  EXPECT_TRUE(contains(chosen.out, "latent causal\ncuda_sm90 (")) << chosen.out;
  const Ran bench = run("bench q1s300 q3 --no-ceilings --min-time 0 --max-time 0.01 --json" + layer);
  EXPECT_EQ(bench.code, 0) << bench.err;
  const auto rows = nlohmann::json::parse(bench.out);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["kv_bytes"], 300 * 576 * 2);
  EXPECT_LE(rows[0]["check_error"], rows[0]["check_allowed"]);
  const Ran wide = run("select --heads 16/1 --head-dim 64/128 --kv-format latent");
  EXPECT_EQ(wide.code, 2);
  EXPECT_TRUE(contains(wide.err, "[spec.head_dim_v.latent]")) << wide.err;
  EXPECT_TRUE(contains(run("completion bash").out, "strided amx_packed latent"));
}

}  // namespace
}  // namespace imbrex::test
