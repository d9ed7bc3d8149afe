// No batch or tensor that the host sees makes a plan for GPUs read or write outside the tensors it is given, eagerly, by phase or in a
// graph. On the fake driver.
#include <functional>

#include "cuda/driver/memory.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "expect_error.h"
#include "imbrex/select.h"
#include "mixed_step.h"

namespace imbrex::cuda {
namespace {

using imbrex::test::MixedStep, imbrex::test::mixed_spec, imbrex::test::Requests;
constexpr const char* kAccepted = "nothing thrown";
constexpr Device kCuda0{DeviceType::cuda, 0};
const Requests kOrdered{{1, 30}, {1, 13}, {0, 7}, {5, 9}};

class CudaPlanBounds : public testing::TestWithParam<bool> {
 protected:
  ~CudaPlanBounds() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }
  std::unique_ptr<imbrex::Plan> plan(const AttentionSpec& spec, PlanOptions options = {.limits = kLimits, .threads = {}}) const {
    fake::run_on_host(spec);
    const Backend& backend = *find_backend("cuda_sm80");
    const DeviceInfo device = probe_cuda().at(0);
    return GetParam() ? plan_by_phase(backend, backend, spec, device, options) : backend.plan(spec, device, options);
  }
  std::string run_code(const MixedStep& step, const PlanOptions& options = {.limits = kLimits, .threads = {}}) const {
    const auto p = plan(step.spec, options);
    p->update(step.batch);
    fake::state().launches.clear();
    const std::string code = imbrex::test::error_code([&] { p->run(step.in, step.outputs); });
    EXPECT_EQ(fake::state().launches.empty(), code != kAccepted) << code;
    return code;
  }
  static constexpr PlanLimits kLimits{.max_num_reqs = 16, .max_num_tokens = 100, .max_seq_len = 4000};
};

TEST_P(CudaPlanBounds, RaggedKeysLieInTheRowsOfKAndV) {
  const auto spoiled = [](const std::function<void(MixedStep&)>& spoil) {
    auto step = std::make_unique<MixedStep>(mixed_spec(0), kOrdered, 1, kCuda0);
    spoil(*step);
    return step;
  };
  EXPECT_EQ(run_code(*spoiled([](MixedStep&) {})), kAccepted);
  for (const bool validate : {true, false}) {
    const PlanOptions options{.limits = kLimits, .threads = {}, .validate = validate};
    EXPECT_EQ(run_code(*spoiled([](MixedStep& s) { --s.in.kv.k.sizes[0], --s.in.kv.v.sizes[0]; }), options), "run.kv_rows");
    for (const int32_t far : {1, INT32_MAX - 100})
      EXPECT_EQ(run_code(*spoiled([&](MixedStep& s) {
                  for (int32_t& start : s.key_starts) start += far;
                }),
                         options),
                "run.kv_rows");
  }
}

TEST_P(CudaPlanBounds, BlocksAndSlotsLieInTheCache) {
  for (const size_t row : {size_t(0), size_t(3)}) {  // of a decode, of a prefill
    MixedStep step(mixed_spec(4), kOrdered, 1, kCuda0);
    step.table[row * size_t(step.batch.block_table.stride(0))] = step.num_blocks;
    EXPECT_EQ(run_code(step), "run.block_id");
  }
  for (const size_t token : {size_t(0), size_t(6)}) {
    MixedStep step(mixed_spec(4), kOrdered, 1, kCuda0);
    step.slots[token] = int64_t(step.num_blocks) * 4;
    const auto p = plan(step.spec);
    p->update(step.batch);
    fake::state().launches.clear();
    EXPECT_EQ(imbrex::test::error_code([&] { p->write_kv(step.in.kv, step.new_keys, step.new_values); }), "write_kv.slot");
    EXPECT_TRUE(fake::state().launches.empty());
  }
}

TEST_P(CudaPlanBounds, LimitsAreSizes) {
  const auto code = [&](PlanLimits limits) {
    return imbrex::test::error_code([&] { plan(mixed_spec(4), {.limits = limits, .threads = {}}); });
  };
  PlanLimits limits = kLimits;
  EXPECT_EQ(code(limits), kAccepted);
  limits.max_num_reqs = -1;
  EXPECT_EQ(code(limits), "limits.max_num_reqs");
  limits = kLimits, limits.max_num_tokens = INT32_MAX;
  EXPECT_EQ(code(limits), "limits.max_num_tokens");
  limits = kLimits, limits.max_seq_len = -5;
  EXPECT_EQ(code(limits), "limits.max_seq_len");
}

// A plan of one backend may be captured; one of two phases says that it may not, and refuses.
TEST_P(CudaPlanBounds, CapturesWorkOrAreRefused) {
  const ContextPtr context = Context::of_device(0);
  const CurrentContext current(*context);
  const OwnedStream stream(context);
  MixedStep step(mixed_spec(4), kOrdered, 1, kCuda0);
  const auto p = plan(step.spec);
  EXPECT_EQ(p->capturable(), !GetParam());
  p->update(step.batch, stream.get());
  CUgraph graph = nullptr;
  need_driver().cuStreamBeginCapture_v2(stream.get(), kCaptureThreadLocal);
  const char* const code = GetParam() ? "phase_plan.captured" : kAccepted;
  EXPECT_EQ(imbrex::test::error_code([&] { p->write_kv(step.in.kv, step.new_keys, step.new_values, stream.get()); }), code);
  EXPECT_EQ(imbrex::test::error_code([&] { p->run(step.in, step.outputs, stream.get()); }), code);
  EXPECT_EQ(imbrex::test::error_code([&] { p->update(step.batch, stream.get()); }), "update.captured");
  need_driver().cuStreamEndCapture(stream.get(), &graph);
  need_driver().cuGraphDestroy(graph);
  EXPECT_EQ(imbrex::test::error_code([&] { p->run(step.in, step.outputs, stream.get()); }), kAccepted);
  const PlanOptions on_demand{.limits = kLimits, .threads = {}, .load_on_demand = true};
  EXPECT_FALSE(plan(step.spec, on_demand)->capturable());
}

INSTANTIATE_TEST_SUITE_P(Plans, CudaPlanBounds, testing::Bool(), [](const auto& info) { return info.param ? "ByPhase" : "One"; });

// A graph reads the cache it was captured with, so later host tables, slots and ragged keys have to lie in that one.
TEST(CudaCapturedCache, HoldsLaterBatches) {
  const ContextPtr context = Context::of_device(0);
  const CurrentContext current(*context);
  const OwnedStream stream(context);
  for (const int block_size : {4, 0}) {
    const AttentionSpec spec = mixed_spec(block_size);
    fake::run_on_host(spec);
    const auto plan =
        find_backend("cuda_sm80")
            ->plan(spec, probe_cuda().at(0), {.limits = {.max_num_reqs = 4, .max_num_tokens = 16, .max_seq_len = 64}, .threads = {}});
    MixedStep small(spec, {{2, 8}}, 1, kCuda0), large(spec, {{1, 9}}, 2, kCuda0), spoiled(spec, {{2, 8}}, 3, kCuda0);
    plan->update(large.batch, stream.get());
    plan->run(large.in, large.outputs, stream.get());  // eagerly, whatever the cache is
    plan->update(small.batch, stream.get());
    CUgraph graph = nullptr;
    need_driver().cuStreamBeginCapture_v2(stream.get(), kCaptureThreadLocal);
    plan->run(small.in, small.outputs, stream.get());
    need_driver().cuStreamEndCapture(stream.get(), &graph);
    need_driver().cuGraphDestroy(graph);
    const auto code = [&](const MixedStep& step) { return imbrex::test::error_code([&] { plan->update(step.batch, stream.get()); }); };
    EXPECT_EQ(code(small), kAccepted);
    EXPECT_EQ(code(large), "update.captured_cache");
    spoiled.slots[1] = 8;  // of blocks 0 and 1, with 4 tokens each
    EXPECT_EQ(code(spoiled), block_size > 0 ? "update.captured_cache" : kAccepted);
    stream.synchronize();
  }
  fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear();
}

// A graph that was captured with tensors of few tokens writes those of a longer step as far as they reach, and no further.
TEST(CudaCapturedWrites, EndWithTheTensorsOfTheCapture) {
  const ContextPtr context = Context::of_device(0);
  const CurrentContext current(*context);
  const OwnedStream stream(context);
  const AttentionSpec spec = mixed_spec(4);
  fake::run_on_host(spec);
  const auto plan =
      find_backend("cuda_sm80")
          ->plan(spec, probe_cuda().at(0), {.limits = {.max_num_reqs = 4, .max_num_tokens = 16, .max_seq_len = 64}, .threads = {}});
  MixedStep small(spec, {{2, 2}}, 1, kCuda0), large(spec, {{12, 12}}, 2, kCuda0);
  plan->update(small.batch, stream.get());
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  need_driver().cuStreamBeginCapture_v2(stream.get(), kCaptureThreadLocal);
  plan->write_kv(large.in.kv, small.new_keys, small.new_values, stream.get());  // of two tokens
  need_driver().cuStreamEndCapture(stream.get(), &graph);
  need_driver().cuGraphInstantiateWithFlags(&exec, graph, 0);
  const std::vector<float> before = large.k;
  plan->update(large.batch, stream.get());  // of twelve
  need_driver().cuGraphLaunch(exec, stream.get());
  stream.synchronize();
  const size_t row = size_t(spec.num_kv_heads) * size_t(spec.head_dim_qk);
  EXPECT_TRUE(std::equal(small.new_k.begin(), small.new_k.begin() + long(2 * row), large.k.begin()));
  EXPECT_TRUE(std::equal(before.begin() + long(2 * row), before.end(), large.k.begin() + long(2 * row)));
  need_driver().cuGraphExecDestroy(exec);
  need_driver().cuGraphDestroy(graph);
  fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear();
}

}  // namespace
}  // namespace imbrex::cuda
