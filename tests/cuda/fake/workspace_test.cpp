// Scratch that plans share: how much there is of it, who is refused, and what a failure leaves. What they compute with it is in
// plan_graph_test.cpp. On the fake driver.
#include "imbrex/workspace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/fake/fake_driver.h"
#include "cuda/workspace.h"
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

TEST(Workspace, WhoHasTakenMemoryKeepsIt) {
  CudaWorkspace workspace(Context::of_device(0));
  workspace.reserve(100);
  const std::weak_ptr<const DeviceBuffer> first = workspace.memory();
  const auto taken = workspace.memory();
  workspace.reserve(50);
  EXPECT_EQ(workspace.memory(), taken) << "enough is not made again";
  workspace.reserve(200);
  EXPECT_EQ(workspace.bytes(), 200);
  EXPECT_EQ(taken->bytes(), 100u);
  const std::weak_ptr<const DeviceBuffer> second = workspace.memory();
  workspace.reserve(300);
  EXPECT_TRUE(second.expired()) << "nobody had taken it";
  EXPECT_FALSE(first.expired());
}

TEST(Workspace, AFailureLeavesWhatThereWas) {
  CudaWorkspace workspace(Context::of_device(0));
  workspace.reserve(100);
  const auto before = workspace.memory();
  EXPECT_EQ(imbrex::test::error_code([&] { workspace.reserve(size_t(1) << 40); }), "cuda.memory");
  EXPECT_EQ(workspace.memory(), before);
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
