// Scratch that plans share: how much there is of it, who is refused, and what a failure leaves. What they compute with it is in
// plan_graph_test.cpp. On the fake driver.
#include "imbrex/workspace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/fake/fake_driver.h"
#include "expect_error.h"
#include "imbrex/select.h"

namespace imbrex::cuda {
namespace {

const DeviceInfo& gpu() {
  static const DeviceInfo device = probe_cuda().at(0);
  return device;
}

std::unique_ptr<imbrex::Plan> plan_with(const std::shared_ptr<imbrex::Workspace>& workspace, int max_num_reqs, int num_heads = 8) {
  const AttentionSpec spec{.num_q_heads = num_heads, .num_kv_heads = 2, .head_dim_qk = 64, .head_dim_v = 64};
  const PlanLimits limits{.max_num_reqs = max_num_reqs, .max_num_tokens = 2 * max_num_reqs, .max_seq_len = 20000};
  return find_backend("cuda_sm90")
      ->plan(spec, gpu(), {.limits = limits, .threads = {}, .load_on_demand = true, .out_dtype = DType::bf16, .workspace = workspace});
}

TEST(Workspace, HasWhatTheLargestPlanNeeds) {
  const auto shared = make_workspace(gpu());
  EXPECT_EQ(shared->device(), gpu().device);
  EXPECT_EQ(shared->bytes(), 0);
  std::vector<int64_t> alone;
  std::vector<std::unique_ptr<imbrex::Plan>> plans;
  for (const auto& [reqs, heads] : {std::pair(2, 8), std::pair(40, 8), std::pair(2, 16), std::pair(10, 32)}) {
    const auto own = make_workspace(gpu());
    plan_with(own, reqs, heads);
    alone.push_back(own->bytes());
    EXPECT_GT(alone.back(), 0);
    plans.push_back(plan_with(shared, reqs, heads));
    EXPECT_EQ(shared->bytes(), *std::ranges::max_element(alone)) << reqs << " requests, " << heads << " heads";
  }
  plans.clear();
  EXPECT_EQ(shared->bytes(), *std::ranges::max_element(alone)) << "it stays for plans to come";
}

// How much scratch a plan will take is known before it is made, also for a GPU that is only described.
TEST(Workspace, ItsSizeIsAskedForBeforehand) {
  AttentionSpec masked{.num_q_heads = 8, .num_kv_heads = 2, .head_dim_qk = 64, .head_dim_v = 64};
  AttentionSpec bytes = masked;
  masked.mask.custom = true, bytes.kv_dtype = DType::fp8_e4m3;
  for (const AttentionSpec& spec :
       {AttentionSpec{.num_q_heads = 32, .num_kv_heads = 8, .head_dim_qk = 128, .head_dim_v = 128}, masked, bytes})
    for (const char* name : {"cuda_sm90", "cuda_sm80"})
      for (const int reqs : {1, 64}) {
        const auto workspace = make_workspace(gpu());
        const PlanOptions options{.limits = {.max_num_reqs = reqs, .max_num_tokens = 4096, .max_seq_len = 20000},
                                  .threads = {},
                                  .load_on_demand = true,
                                  .workspace = workspace};
        const Backend& backend = *find_backend(name);
        const int64_t asked = backend.workspace_bytes(spec, gpu(), options);
        const auto plan = backend.plan(spec, gpu(), options);
        EXPECT_EQ(asked, workspace->bytes()) << name << " " << spec.str();
        DeviceInfo described = gpu();
        described.present = false;
        EXPECT_EQ(backend.workspace_bytes(spec, described, {.limits = options.limits, .threads = {}}), asked);
      }
  EXPECT_EQ(imbrex::test::error_code([] {
              find_backend("cuda_sm90")
                  ->workspace_bytes({.num_q_heads = 1, .num_kv_heads = 1, .head_dim_qk = 128, .head_dim_v = 128}, probe_cpu(), {});
            }),
            "backend.unsupported");
}

// 128 q heads on one latent of 576 and 512 dims, as DeepSeek's layers have them when queries are absorbed.
TEST(Workspace, ALatentLayerOfManyHeadsNeedsAQuarterOfAGigabyte) {
  const DeviceInfo h200 = describe_device("h200");
  AttentionSpec latent{.num_q_heads = 128, .num_kv_heads = 1, .head_dim_qk = 576, .head_dim_v = 512, .block_size = 64};
  for (const KvFormat format : {KvFormat::strided, KvFormat::latent}) {
    latent.kv_format = format;
    const Selection chosen = select(latent, h200);
    ASSERT_NE(chosen.backend, nullptr) << chosen.str();
    EXPECT_EQ(chosen.backend->name(), format == KvFormat::latent ? "cuda_sm90" : "cuda_sm80");
    for (const int reqs : {1, 64, 256, 1024})
      for (const int tokens : {reqs, 8192}) {
        const PlanLimits limits{.max_num_reqs = reqs, .max_num_tokens = tokens, .max_seq_len = 131072};
        EXPECT_LE(chosen.backend->workspace_bytes(latent, h200, {.limits = limits, .threads = {}}), int64_t(256) << 20)
            << chosen.backend->name() << " " << reqs << " " << tokens;
      }
  }
}

TEST(Workspace, InMemoryOfTheCaller) {
  const DeviceBuffer memory(Context::of_device(0), 64 << 20);
  const auto workspace = make_workspace(gpu(), memory.as<void>(), 64 << 20);
  EXPECT_EQ(workspace->bytes(), 64 << 20);
  const auto plan = plan_with(workspace, 2);
  EXPECT_EQ(workspace->bytes(), 64 << 20);
  const auto small = make_workspace(gpu(), memory.as<void>(), 1024);
  EXPECT_EQ(imbrex::test::error_code([&] { plan_with(small, 2); }), "workspace.room");
  EXPECT_EQ(imbrex::test::error_code([&] { make_workspace(gpu(), memory.as<char>() + 8, 1024); }), "workspace.memory");
  EXPECT_EQ(imbrex::test::error_code([&] { make_workspace(gpu(), nullptr, 1024); }), "workspace.memory");
  EXPECT_EQ(imbrex::test::error_code([&] { make_workspace(gpu(), memory.as<void>(), -1); }), "workspace.memory");
}

TEST(Workspace, IsOfThePlansDevice) {
  const auto host = make_workspace(probe_cpu());
  EXPECT_EQ(host->bytes(), 0);
  EXPECT_EQ(imbrex::test::error_code([&] { plan_with(host, 2); }), "backend.workspace");
  const auto of_gpu = make_workspace(gpu());
  const AttentionSpec spec{.num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 64, .head_dim_v = 64};
  EXPECT_EQ(imbrex::test::error_code(
                [&] { find_backend("reference")->plan(spec, probe_cpu(), {.limits = {}, .threads = {}, .workspace = of_gpu}); }),
            "backend.workspace");
  EXPECT_NE(find_backend("reference")->plan(spec, probe_cpu(), {.limits = {}, .threads = {}, .workspace = host}), nullptr);
  EXPECT_EQ(imbrex::test::error_code([] { make_workspace(describe_device("h200")); }), "backend.device_absent");
  EXPECT_EQ(of_gpu->bytes(), 0);

  struct OfAUser final : imbrex::Workspace {
    Device device() const override { return gpu().device; }
    int64_t bytes() const override { return 0; }
  };
  EXPECT_EQ(imbrex::test::error_code([&] { plan_with(std::make_shared<OfAUser>(), 2); }), "backend.workspace");
}

}  // namespace
}  // namespace imbrex::cuda
