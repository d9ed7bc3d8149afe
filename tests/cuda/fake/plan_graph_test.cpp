// A captured graph and eager calls give the same bits, with kernels that are host code; and what a launch is given never depends on a
// batch. On the fake driver.
#include <cstring>
#include <functional>
#include <map>

#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "cuda/graph_batches.h"
#include "cuda/params.h"
#include "imbrex/select.h"
#include "sanitizers.h"

namespace imbrex::cuda {
namespace {

constexpr int kBatches = imbrex::test::kAddressSanitizer ? 4 : 12;  // which is slow

class PlanGraph : public testing::TestWithParam<const char*> {
 protected:
  ~PlanGraph() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }
  void run(const test::GraphProblem& problem) {
    const Backend& backend = *find_backend(GetParam());
    const DeviceInfo device = probe_cuda().at(0);
    if (const auto reasons = backend.unsupported(problem.spec, device); !reasons.empty()) GTEST_SKIP() << reasons[0].str();
    fake::run_on_host(problem.spec);
    test::GraphAgainstEager(backend, device, Context::of_device(0), problem).run();
  }
  AttentionSpec spec{.num_q_heads = 4, .num_kv_heads = 1, .head_dim_qk = 64, .head_dim_v = 64};
  PlanLimits limits{.max_num_reqs = 8, .max_num_tokens = 120, .max_seq_len = 1800};
};

TEST_P(PlanGraph, HostArrays) { run({.spec = spec, .limits = limits, .batches = kBatches, .seed = 1}); }
TEST_P(PlanGraph, DeviceArrays) { run({.spec = spec, .limits = limits, .device_arrays = true, .batches = kBatches, .seed = 2}); }
TEST_P(PlanGraph, CustomMaskAndSinks) {
  spec.mask.custom = spec.score.sinks = true;
  run({.spec = spec, .limits = limits, .batches = kBatches, .seed = 3});
}
// Which keys are left out is the step's.
TEST_P(PlanGraph, Expressions) {
  spec.mask_mod = parse_expression("q // 300 == kv // 300 | kv < batch");
  spec.score_mod = parse_expression("score - 0.01 * abs(float(q - kv))");
  run({.spec = spec, .limits = limits, .batches = kBatches, .seed = 16});
}
TEST_P(PlanGraph, DecodeOnly) {
  limits.max_query_len = 1;
  run({.spec = spec, .limits = limits, .device_arrays = true, .batches = kBatches, .seed = 4});
}

TEST_P(PlanGraph, SharedScratch) { run({.spec = spec, .limits = limits, .shared_scratch = true, .batches = kBatches, .seed = 7}); }

TEST_P(PlanGraph, SharedBlocks) {
  limits.max_query_len = 40;
  constexpr int kEnough = 40;  // for some of them to share items
  run({.spec = spec, .limits = limits, .shared_blocks = true, .batches = kEnough, .seed = 11});
  if (HasFailure()) return;
  if (GetParam() == std::string_view("cuda_sm90")) {  // in verify's kernel
    run({.spec = spec, .limits = limits, .shared_blocks = true, .balanced = true, .batches = 2 * kEnough, .seed = 21});
    limits.max_query_len = 1;
    run({.spec = spec, .limits = limits, .shared_blocks = true, .balanced = true, .batches = kEnough, .seed = 22});
    limits.max_query_len = 40;
  }
  if (HasFailure()) return;
  if (GetParam() == std::string_view("cuda_sm90")) {  // latents, in a kernel of prefill's tiles
    AttentionSpec latent{.num_q_heads = 2, .num_kv_heads = 1, .head_dim_qk = 272, .head_dim_v = 256, .block_size = 16};
    latent.kv_format = KvFormat::latent;
    limits.max_query_len = 1;
    run({.spec = latent, .limits = limits, .shared_blocks = true, .balanced = true, .batches = kEnough, .seed = 23});
    limits.max_query_len = 40;
    run({.spec = latent, .limits = limits, .shared_blocks = true, .balanced = true, .batches = kEnough, .seed = 24});
  }
  if (HasFailure()) return;
  spec.num_q_heads = 2, spec.block_size = 64;  // blocks in device memory: nothing is shared
  run({.spec = spec, .limits = limits, .device_arrays = true, .shared_blocks = true, .batches = kBatches, .seed = 12});
}

// Trees of drafts, which may begin with the same blocks, planned here or on the device.
TEST_P(PlanGraph, Trees) {
  spec.mask.tree = true;
  limits.max_query_len = 12;
  constexpr int kEnough = 40;  // for some of them to share items
  run({.spec = spec, .limits = limits, .beside = true, .batches = kBatches, .seed = 25});
  run({.spec = spec, .limits = limits, .device_arrays = true, .device_lengths = true, .batches = kBatches, .seed = 26});
  if (GetParam() != std::string_view("cuda_sm90")) return;
  run({.spec = spec, .limits = limits, .shared_blocks = true, .balanced = true, .beside = true, .batches = kEnough, .seed = 27});
}

// Some steps have prefill over flat keys, others over the cache.
TEST_P(PlanGraph, FlatKeys) {
  spec.num_q_heads = 16, spec.kv_dtype = DType::fp8_e4m3, spec.block_size = 1;
  constexpr int kEnough = imbrex::test::kAddressSanitizer ? 2 * kBatches : 40;  // for some of them to have merges
  run({.spec = spec, .limits = limits, .batches = kEnough, .seed = 10});
}

// Steps of few tasks have another kernel, and what a step has is known when the graph is replayed.
class PlanGraphOfFewTasks : public PlanGraph {
 protected:
  // Replays in which a kernel has work that may be idle, by what names it.
  std::map<std::string, int> replays(const std::function<std::string(const fake::Launch&)>& name_of) {
    std::map<std::string, int> all;
    fake::run_on_host(spec);
    const auto compute = fake::state().on_launch;
    fake::state().on_launch = [&, compute](const fake::Launch& launch) {
      if (launch.entry.starts_with("attention")) {
        AttentionParams p;
        std::memcpy(&p, launch.all_params.at(0).data(), sizeof p);
        if (p.may_be_idle && p.counts->num_work > 0) ++all[name_of(launch)];
      }
      compute(launch);
    };
    test::GraphAgainstEager(*find_backend(GetParam()), probe_cuda().at(0), Context::of_device(0),
                            {.spec = spec, .limits = limits, .keys = limits.max_num_reqs * limits.max_seq_len, .batches = 5, .seed = 15})
        .run();
    return all;
  }
};
TEST_P(PlanGraphOfFewTasks, HaveAKernelOfTheirOwn) {
  spec = {.num_q_heads = 65, .num_kv_heads = 1, .head_dim_qk = 272, .head_dim_v = 256};
  spec.kv_format = KvFormat::latent;
  limits = {.max_num_reqs = 2, .max_num_tokens = 2, .max_seq_len = 48000, .max_query_len = 1};
  const auto all = replays([](const fake::Launch& launch) { return launch.entry; });
  EXPECT_EQ(all.size(), 2u);
  EXPECT_TRUE(all.contains("attention_sm90_latent") && all.contains("attention_sm90_latent_spread"));
}
TEST_P(PlanGraphOfFewTasks, HaveOneForShortSteps) {
  spec = {.num_q_heads = 65, .num_kv_heads = 1, .head_dim_qk = 272, .head_dim_v = 256};
  spec.kv_format = KvFormat::latent;
  limits = {.max_num_reqs = 8, .max_num_tokens = 8, .max_seq_len = 24000, .max_query_len = 1};  // 64 tasks of 4096 keys each
  const auto all = replays([](const fake::Launch& launch) { return launch.entry; });
  EXPECT_EQ(all.size(), 2u);
  EXPECT_TRUE(all.contains("attention_sm90_latent") && all.contains("attention_sm90_latent_spread"));
}
TEST_P(PlanGraphOfFewTasks, HaveAnotherOneWhereTheyAreTheFewest) {
  spec = {.num_q_heads = 65, .num_kv_heads = 1, .head_dim_qk = 512, .head_dim_v = 512};
  spec.kv_format = KvFormat::latent;
  limits = {.max_num_reqs = 1, .max_num_tokens = 1, .max_seq_len = 24000, .max_query_len = 1};
  const auto all = replays([](const fake::Launch& launch) {
    for (const char* dims : {"kOwnDims 128", "kOwnDims 256"})
      if (launch.module.find(dims) != std::string::npos) return std::string(dims);
    return launch.entry;
  });
  EXPECT_EQ(all.size(), 2u);
  EXPECT_TRUE(all.contains("kOwnDims 128") && all.contains("kOwnDims 256"));
}
// How many tasks a step has only the device knows, where the lists are made there.
TEST_P(PlanGraphOfFewTasks, TakeLengthsFromTheDevice) {
  spec.kv_format = KvFormat::latent;
  spec.num_kv_heads = 1;
  for (const auto& [heads, dims, keys] : {std::tuple{65, 512, 24000}, {65, 256, 24000}, {17, 512, 12000}, {40, 512, 24000}}) {
    spec.num_q_heads = heads, spec.head_dim_qk = dims == 512 ? 512 : dims + 16, spec.head_dim_v = dims;
    limits = {.max_num_reqs = 1, .max_num_tokens = 1, .max_seq_len = keys, .max_query_len = 1};
    SCOPED_TRACE(fmt::format("{} heads of {} dims", heads, dims));
    run({.spec = spec, .limits = limits, .device_arrays = true, .device_lengths = true, .keys = keys, .batches = 8, .seed = 29});
  }
}
INSTANTIATE_TEST_SUITE_P(Backends, PlanGraphOfFewTasks, testing::Values("cuda_sm90"), [](const auto& info) { return info.param; });

TEST_P(PlanGraph, LengthsOnTheDevice) {
  run({.spec = spec, .limits = limits, .device_arrays = true, .device_lengths = true, .batches = 2 * kBatches, .seed = 5});
}
TEST_P(PlanGraph, LengthsAndMaskOnTheDevice) {
  spec.mask.custom = spec.score.sinks = true;
  run({.spec = spec, .limits = limits, .device_arrays = true, .device_lengths = true, .batches = kBatches, .seed = 6});
}
INSTANTIATE_TEST_SUITE_P(Backends, PlanGraph, testing::Values("cuda_sm80", "cuda_sm90"), [](const auto& info) { return info.param; });

}  // namespace
}  // namespace imbrex::cuda
