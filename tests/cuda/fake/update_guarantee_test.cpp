// Failed updates of plans for GPUs: a driver's call or an allocation that fails, wherever it is, leaves the plan at the step before, also
// when it is one of two phases. On the fake driver.
#include "update_guarantee.h"

#include "allocations.h"
#include "cuda/driver/memory.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "imbrex/select.h"

namespace imbrex::cuda {
namespace {

using fake::FailCall;
using imbrex::test::fail_everywhere, imbrex::test::FailAllocation, imbrex::test::MixedStep, imbrex::test::Requests;
constexpr Device kDevice{DeviceType::cuda, 0};

// Ordered by phase, since a GPU's plan of two phases asks for that.
const Requests kFew{{1, 30}, {0, 0}, {1, 5}, {3, 9}, {6, 6}};
const Requests kMany{{1, 1300}, {1, 40}, {0, 17}, {2, 700}, {2, 2}, {9, 9}};  // the first one is split

class CudaUpdateGuarantee : public testing::TestWithParam<bool> {
 protected:
  ~CudaUpdateGuarantee() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }
  std::unique_ptr<imbrex::Plan> plan(const AttentionSpec& spec, bool on_device = false) const {
    const Backend& backend = *find_backend("cuda_sm80");
    const DeviceInfo device = probe_cuda().at(0);
    const PlanOptions options{
        .limits = {.max_num_reqs = 16, .max_num_tokens = 100, .max_seq_len = 4000}, .threads = {}, .on_device = on_device};
    return GetParam() ? plan_by_phase(backend, backend, spec, device, options) : backend.plan(spec, device, options);
  }
  // Makes the driver wait: what a stream is given happens as late as it may.
  std::vector<float> run(const imbrex::Plan& p, MixedStep& step) const {
    std::fill(step.out.begin(), step.out.end(), -7.f);
    std::fill(step.lse.begin(), step.lse.end(), -7.f);
    p.run(step.in, step.outputs, stream.get());
    stream.synchronize();
    std::vector<float> results = step.out;
    results.insert(results.end(), step.lse.begin(), step.lse.end());
    fake::state().launches.clear();
    return results;
  }
  template <class Fault>
  long places(bool may_lose = false) {
    long count = 0;
    for (const int block_size : {4, 0})
      for (const bool device_arrays : {false, true}) {
        const AttentionSpec spec = imbrex::test::mixed_spec(block_size, !device_arrays);
        fake::run_on_host(spec);
        MixedStep few(spec, kFew, 1, kDevice), many(spec, kMany, 2, kDevice), nobody(spec, {}, 3, kDevice);
        if (device_arrays)
          for (MixedStep* step : {&few, &many})
            for (TensorView* t : {&step->batch.block_table, &step->batch.slot_mapping, &step->batch.kv_start_loc}) t->device = kDevice;
        const auto make = [&] { return plan(spec); };
        const auto compute = [&](const imbrex::Plan& p, MixedStep& step) { return run(p, step); };
        for (const auto& [first, second] : {std::pair(&few, &many), std::pair(&many, &few), std::pair(&nobody, &many)})
          count += fail_everywhere<Fault>(make, *first, *second, compute, stream.get(), may_lose);
      }
    return count;
  }
  ContextPtr context = Context::of_device(0);
  CurrentContext current{*context};
  OwnedStream stream{context};
};

TEST_P(CudaUpdateGuarantee, HoldsAtEveryCallOfTheDriver) { EXPECT_GE(places<FailCall<false>>(), 60); }
TEST_P(CudaUpdateGuarantee, LeavesTheStepBeforeOrNoneWhenTheDriverGoesOnFailing) { EXPECT_GE(places<FailCall<true>>(true), 60); }
TEST_P(CudaUpdateGuarantee, HoldsAtEveryAllocation) { EXPECT_GE(places<FailAllocation>(), 60); }

// Lists that were made on the device cannot be sent again: either nothing of them was touched, or the plan says that it has none.
TEST_P(CudaUpdateGuarantee, OfAStepThatTheDeviceMade) {
  if (GetParam()) GTEST_SKIP() << "a plan of two phases needs the lengths on the host";
  const AttentionSpec spec = imbrex::test::mixed_spec(4);
  fake::run_on_host(spec);
  MixedStep few(spec, kFew, 1, kDevice), many(spec, kMany, 2, kDevice);
  const auto on_device = [](TensorView t) {
    t.device = kDevice;
    return t;
  };
  const auto row = [](std::vector<int32_t>& values) {
    return TensorView::contiguous(values.data(), DType::i32, {int64_t(values.size())}, kDevice);
  };
  const DeviceBatch lengths{.query_start_loc = row(few.starts),
                            .seq_lens = row(few.lens),
                            .block_table = on_device(few.batch.block_table),
                            .slot_mapping = on_device(few.batch.slot_mapping),
                            .max_num_tokens = few.starts.back()};
  int kept = 0, lost = 0;
  for (long number = 1;; ++number) {
    const auto p = plan(spec, true);
    p->update_on_device(lengths, stream.get());
    const std::vector<float> before = run(*p, few);
    {
      const FailCall<false> fault(number);
      bool updated = false;
      try {
        p->update(many.batch, stream.get());
        updated = true;
      } catch (const Error&) {
      }
      if (!fault.has_failed()) break;
      if (updated) continue;  // what has failed was not needed
    }
    try {
      EXPECT_TRUE(run(*p, few) == before) << number;
      ++kept;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), "plan.no_step");
      ++lost;
    }
    p->update_on_device(lengths, stream.get());
    EXPECT_TRUE(run(*p, few) == before) << number;
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(lost, 0);
}

INSTANTIATE_TEST_SUITE_P(Plans, CudaUpdateGuarantee, testing::Bool(), [](const auto& info) { return info.param ? "ByPhase" : "One"; });

}  // namespace
}  // namespace imbrex::cuda
