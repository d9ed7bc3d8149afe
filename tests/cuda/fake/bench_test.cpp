// The bench on a GPU: what it checks and times, and how calls rotate over caches. On the fake driver, whose marks are 1.5 ms apart.
#include "serve/bench_halves.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "cuda/params.h"
#include "expect_error.h"
#include "imbrex/select.h"
#include "serve/mla_bench.h"

namespace imbrex::serve {
namespace {

namespace fake = cuda::fake;

class GpuBench : public testing::Test {
 protected:
  ~GpuBench() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }
  BenchResult run(const AttentionSpec& spec, const std::vector<BenchRequest>& requests) {
    fake::run_on_host(spec);
    if (spoil) {
      const auto kernel = fake::state().on_launch;
      fake::state().on_launch = [kernel](const fake::Launch& launch) {
        if (launch.entry != "copy_kv") kernel(launch);
      };
    }
    fake::state().launches.clear();
    return bench(*find_backend("cuda_sm80"), spec, probe_cuda().at(0), requests, options);
  }
  // The parameters of attention in all launches that were not captured.
  std::vector<cuda::AttentionParams> attention() const {
    std::vector<cuda::AttentionParams> all;
    for (const fake::Launch& launch : fake::state().launches) {
      if (launch.entry == "attention_sm80") std::memcpy(&all.emplace_back(), launch.all_params.at(0).data(), sizeof(cuda::AttentionParams));
    }
    return all;
  }
  AttentionSpec spec{.num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 16, .head_dim_v = 8};
  BenchOptions options;
  bool spoil = false;
};

TEST_F(GpuBench, ShortCallsAreTimedInAGraph) {
  options.kv_copies = 3;
  const BenchResult r = run(spec, {{1, 40}, {1, 33}});
  EXPECT_TRUE(r.captured);
  EXPECT_EQ(r.kv_copies, 3);
  EXPECT_EQ(r.samples, 4);  // of 80 ms: 13 calls, rounded down to 12
  EXPECT_NEAR(r.median_s, double(1.5f) * 1e-3 / 12, 1e-9);
  EXPECT_EQ(attention().size(), 4u) << "eagerly: one to be checked, two warm ones, one to know the time";
  EXPECT_GT(r.check_allowed, 0);
  EXPECT_LE(r.check_error, r.check_allowed);
  EXPECT_EQ(r.kv_bytes, 73 * 2 * 24 * 2.);
}

TEST_F(GpuBench, LongCallsBackToBack) {
  options.kv_copies = 2;
  const BenchResult r = run(spec, {{20, 40}, {1, 33}});
  EXPECT_FALSE(r.captured);
  EXPECT_EQ(r.samples, 80);  // of 120 ms
  EXPECT_NEAR(r.median_s, double(1.5f) * 1e-3, 1e-9);
  std::set<const char*> caches;
  for (const cuda::AttentionParams& p : attention()) caches.insert(p.k.data);
  EXPECT_EQ(caches.size(), 2u);
}

TEST_F(GpuBench, SmallCachesAreManySoThatKeysAreNotInL2) {
  const BenchResult r = run(spec, {{1, 40}});
  EXPECT_EQ(r.kv_copies, 64);
  fake::state().free_bytes = size_t(10 * r.cache_bytes);
  EXPECT_EQ(run(spec, {{1, 40}}).kv_copies, 9);
  fake::state().free_bytes = size_t(100) << 20;
}

TEST_F(GpuBench, EverySortOfTensorGetsThere) {
  options.kv_copies = 1;
  std::vector<AttentionSpec> specs(5, spec);
  specs[0].kv_dtype = DType::fp8_e4m3;
  specs[1].block_size = 0;
  specs[2].score = {.alibi = true, .sinks = true};
  specs[3].mask.custom = true;
  specs[4].score = {.relative_buckets = 8, .relative_max_distance = 64};
  for (const AttentionSpec& s : specs) {
    const BenchResult r = run(s, {{3, 40}, {1, 20}});
    EXPECT_GT(r.check_allowed, 0) << s.str();
  }
}

// A custom mask is given as bits, of requests whose bits end within a byte, and outputs are compared under it.
TEST_F(GpuBench, ACustomMaskMayBePacked) {
  options.kv_copies = 1, options.packed_mask = true;
  spec.mask.custom = true;
  EXPECT_GT(run(spec, {{3, 41}, {1, 21}, {5, 5}}).check_allowed, 0);
  for (const cuda::AttentionParams& p : attention()) EXPECT_TRUE(p.mask_is_packed);
  spec.mask.custom = false;
  EXPECT_EQ(test::error_code([&] { run(spec, {{1, 40}}); }), "bench.packed_mask");
}

TEST_F(GpuBench, RequestsMayBeginWithTheSameBlocks) {
  options.kv_copies = 1;
  const std::vector<BenchRequest> requests{{1, 1300}, {1, 1311}, {1, 1291}, {1, 30}};
  const BenchResult apart = run(spec, requests);
  options.common_keys = 1200;
  const BenchResult together = run(spec, requests);
  EXPECT_GT(together.check_allowed, 0);
  constexpr int kSaved = (2 * 1200 + 16) * 2 * 24 * 2, kAligned = 2048;  // two prompts, and the whole block of the short request
  EXPECT_NEAR(double(apart.cache_bytes - together.cache_bytes), kSaved, kAligned);
  EXPECT_EQ(apart.plan.find("shared by requests"), std::string::npos) << apart.plan;
  EXPECT_NE(together.plan.find("shared by requests"), std::string::npos) << together.plan;
  options.balanced = true;
  const BenchResult by_load = run(spec, requests);
  EXPECT_GT(by_load.check_allowed, 0);
  EXPECT_NE(by_load.plan, together.plan);
  spec.block_size = 0;
  EXPECT_EQ(test::error_code([&] { run(spec, requests); }), "bench.common_keys");
}

// Latent attention's likewise, in latent space.
TEST_F(GpuBench, RequestsOfLatentAttentionMayToo) {
  const MlaSpec mla{.num_heads = 8, .kv_lora_rank = 256, .qk_nope_dim = 64, .qk_rope_dim = 16, .v_dim = 64, .absorbed = true};
  fake::run_on_host(mla.latent_spec());
  const std::vector<BenchRequest> requests{{1, 1300}, {1, 1311}, {2, 1292}, {1, 30}};
  MlaBenchOptions of_mla;
  of_mla.copies = 1, of_mla.balanced = true;
  const auto run_mla = [&] { return bench(*find_backend<MlaFamily>("cuda_sm90"), mla, probe_cuda().at(0), requests, of_mla); };
  const MlaBenchResult apart = run_mla();
  EXPECT_EQ(apart.plan.find("shared by requests"), std::string::npos) << apart.plan;
  of_mla.common_keys = 1200;
  const MlaBenchResult together = run_mla();
  EXPECT_GT(together.check_allowed, 0);
  EXPECT_NE(together.plan.find("shared by requests"), std::string::npos) << together.plan;
  EXPECT_EQ(apart.copy_bytes - together.copy_bytes, (2 * 1200 + 16) * 272 * 2);
}

TEST_F(GpuBench, NothingIsTimedThatIsWrong) {
  options.kv_copies = 1;
  spoil = true;
  EXPECT_EQ(test::error_code([&] { run(spec, {{1, 40}}); }), "bench.check");
}

// The halves of a batch are given to two streams, from a graph of each where calls are short.
TEST_F(GpuBench, HalvesRunOnTwoStreams) {
  fake::run_on_host(spec);
  options.kv_copies = 2;
  const auto halves = [&](const std::vector<BenchRequest>& requests) {
    fake::state().launches.clear();
    return bench_halves(*find_backend("cuda_sm80"), spec, probe_cuda().at(0), requests, options);
  };
  const HalvesResult r = halves({{1, 40}, {1, 33}, {1, 20}, {1, 20}});
  EXPECT_EQ(r.cut, 2);
  EXPECT_TRUE(r.captured);
  EXPECT_EQ(r.different, 0);
  for (const Timing& time : {r.whole, r.in_turn, r.together}) EXPECT_GT(time.median_s, 0);
  const HalvesResult prompt = halves({{40, 50}});
  EXPECT_FALSE(prompt.captured);
  EXPECT_TRUE(prompt.through_request);
  std::set<cuda::CUstream> streams;
  for (const fake::Launch& launch : fake::state().launches)
    if (launch.entry == "attention_sm80") streams.insert(launch.stream);
  EXPECT_EQ(streams.size(), 4u) << "whole, both in turn, and one of each half";
}

}  // namespace
}  // namespace imbrex::serve
