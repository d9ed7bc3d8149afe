// plan_batch.cu on a GPU: the lists of the host's schedule(), bit for bit, with any number of threads; and what it costs.
#include "cuda/plan/device_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "cuda/gpu.h"
#include "cuda/plan_batch_problem.h"
#include "imbrex/select.h"

namespace imbrex::cuda {
namespace {

using test::PlanBatchProblem;

class DevicePlanBatch : public test::Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (IsSkipped()) return;
    module = Module::load(context, plan_batch_key(arch_of(device)));
    kernel = module->kernel("plan_batch");
  }
  void run_and_expect(const PlanBatchProblem& problem, unsigned threads) {
    const DeviceBuffer memory = upload(problem.image());
    kernel.launch({.threads = threads}, stream.get(), problem.params(memory.as<char>()));
    problem.expect(download<char>(memory));
  }
  std::shared_ptr<const Module> module;
  Kernel kernel;
};

TEST_F(DevicePlanBatch, MakesTheListsOfTheHost) {
  for (unsigned seed = 0; seed < 400 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    run_and_expect(PlanBatchProblem(seed, seed % 10 == 0 ? 5000 : 300, false), 128 << seed % 4);
  }
}

TEST_F(DevicePlanBatch, LeavesOutRequestsThatBreakRules) {
  for (unsigned seed = 0; seed < 400 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    run_and_expect(PlanBatchProblem(seed, seed % 10 == 0 ? 5000 : 100, true), 128 << seed % 4);
  }
}

// Requests of a decode step, each in many pieces: the time of a launch, from a row of them. The best of several rows counts, since other
// processes may use the GPU meanwhile.
TEST_F(DevicePlanBatch, Cost) {
  const AttentionSpec spec{.num_q_heads = 32, .num_kv_heads = 8, .head_dim_qk = 128, .head_dim_v = 128};
  for (const auto& [reqs, most_us] : {std::pair{1, 20.f}, {16, 20.f}, {256, 30.f}, {4096, 400.f}}) {
    const PlanLimits limits{.max_num_reqs = reqs, .max_num_tokens = reqs, .max_seq_len = 16384, .max_query_len = 1};
    const auto plan = find_backend("cuda_sm80")->plan(spec, device, {.limits = limits, .threads = {}, .on_device = true});
    std::vector<int32_t> starts(size_t(reqs) + 1), lens(static_cast<size_t>(reqs));
    std::iota(starts.begin(), starts.end(), 0);
    for (size_t r = 0; r < lens.size(); ++r) lens[r] = int32_t(4096 + r * 37 % 8192);
    const DeviceBuffer s = upload(starts), l = upload(lens);
    const Device gpu = device.device;
    const DeviceBatch batch{.query_start_loc = TensorView::contiguous(s.as(), DType::i32, {reqs + 1}, gpu),
                            .seq_lens = TensorView::contiguous(l.as(), DType::i32, {reqs}, gpu),
                            .block_table = TensorView::contiguous(s.as(), DType::i32, {reqs, 1024}, gpu)};
    const Event begin(context, true), end(context, true);
    constexpr int kRounds = 8, kTimes = 100;
    plan->update_on_device(batch, stream.get());
    float us = std::numeric_limits<float>::infinity();
    for (int round = 0; round < kRounds; ++round) {
      begin.record(stream.get());
      for (int i = 0; i < kTimes; ++i) plan->update_on_device(batch, stream.get());
      end.record(stream.get());
      stream.synchronize();
      us = std::min(us, elapsed_ms(begin, end) * 1e3f / kTimes);
    }
    RecordProperty("requests_" + std::to_string(reqs) + "_ns", int(us * 1e3f));
    EXPECT_LT(us, most_us) << reqs << " requests";
    EXPECT_TRUE(plan->device_problems(stream.get()).empty());
  }
}

}  // namespace
}  // namespace imbrex::cuda
