// Plans on a real driver: a step that is taken back, and captures that are refused or end with their tensors.
#include <cstring>

#include "attention/fake_backend.h"
#include "cuda/gpu.h"
#include "expect_error.h"
#include "imbrex/select.h"
#include "mixed_step.h"

namespace imbrex::cuda {
namespace {

using imbrex::test::MixedStep;

// A backend that takes no step.
struct RefusingBackend final : FakeBackend {
  struct Refusing final : imbrex::Plan {
    void update(const Batch&, Stream) override { throw Error("test.refused", "no step"); }
    void write_kv(const KvCache&, const TensorView&, const TensorView&, Stream) const override {}
    void run(const Inputs&, const Outputs&, Stream) const override {}
    std::string str() const override { return "refusing"; }
  };
  RefusingBackend() : FakeBackend("refusing", {}) {}
  std::unique_ptr<imbrex::Plan> plan(const AttentionSpec&, const DeviceInfo&, const PlanOptions&) const override {
    return std::make_unique<Refusing>();
  }
};

class DevicePlanBounds : public test::Gpu {
 protected:
  // The tensors of a layer on the GPU; the batch's arrays stay on the host.
  struct OnGpu {
    MixedStep step;
    DeviceBuffer q, k, v, new_k, new_v, out, lse;

    OnGpu(const DevicePlanBounds& gpu, const AttentionSpec& spec, const imbrex::test::Requests& requests, unsigned seed)
        : step(spec, requests, seed),
          q(gpu.upload(step.q)),
          k(gpu.upload(step.k)),
          v(gpu.upload(step.v)),
          new_k(gpu.upload(step.new_k)),
          new_v(gpu.upload(step.new_v)),
          out(gpu.upload(step.out)),
          lse(gpu.upload(step.lse)) {
      step.in.q = test::on_device(step.in.q, q);
      step.in.kv.k = test::on_device(step.in.kv.k, k), step.in.kv.v = test::on_device(step.in.kv.v, v);
      step.new_keys = test::on_device(step.new_keys, new_k), step.new_values = test::on_device(step.new_values, new_v);
      step.outputs = {test::on_device(step.outputs.out, out), test::on_device(step.outputs.lse, lse)};
    }
    OnGpu(const OnGpu&) = delete;
  };
  static PlanOptions options() { return {.limits = {.max_num_reqs = 16, .max_num_tokens = 100, .max_seq_len = 4000}, .threads = {}}; }
  std::vector<float> run(const imbrex::Plan& plan, OnGpu& g) const {
    fill_bytes(g.out.address(), 0xff, g.out.bytes(), stream.get());
    plan.run(g.step.in, g.step.outputs, stream.get());
    return download<float>(g.out);
  }
  const Backend& backend = *find_backend("cuda_sm80");
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_F(DevicePlanBounds, AStepThatIsTakenBackIsTheOneBefore) {
  const RefusingBackend refusing;
  for (const int block_size : {4, 0}) {
    const AttentionSpec spec = imbrex::test::mixed_spec(block_size);
    if (!backend.unsupported(spec, device).empty()) GTEST_SKIP() << "does not run here";
    OnGpu decodes(*this, spec, {{1, 3000}, {1, 40}, {1, 700}}, 1), mixed(*this, spec, {{1, 2000}, {1, 9}, {30, 30}}, 2),
        later(*this, spec, {{1, 50}, {1, 1200}}, 3);
    const auto plan = plan_by_phase(refusing, backend, spec, device, options());
    plan->update(decodes.step.batch, stream.get());
    const std::vector<float> before = run(*plan, decodes);
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(imbrex::test::error_code([&] { plan->update(mixed.step.batch, stream.get()); }), "test.refused");
      EXPECT_TRUE(same_bits(run(*plan, decodes), before)) << i;
    }
    plan->update(later.step.batch, stream.get());
    const auto fresh = backend.plan(spec, device, options());
    fresh->update(later.step.batch, stream.get());
    EXPECT_TRUE(same_bits(run(*plan, later), run(*fresh, later)));
  }
}

TEST_F(DevicePlanBounds, APlanOfTwoPhasesIsNoPartOfAGraph) {
  const AttentionSpec spec = imbrex::test::mixed_spec(4);
  if (!backend.unsupported(spec, device).empty()) GTEST_SKIP() << "does not run here";
  OnGpu g(*this, spec, {{1, 30}, {1, 13}, {5, 9}}, 1);
  const auto plan = plan_by_phase(backend, backend, spec, device, options());
  EXPECT_FALSE(plan->capturable());
  plan->update(g.step.batch, stream.get());
  CUgraph graph = nullptr;
  check_cuda(need_driver().cuStreamBeginCapture_v2(stream.get(), kCaptureThreadLocal), "capture");
  EXPECT_EQ(imbrex::test::error_code([&] { plan->write_kv(g.step.in.kv, g.step.new_keys, g.step.new_values, stream.get()); }),
            "phase_plan.captured");
  EXPECT_EQ(imbrex::test::error_code([&] { plan->run(g.step.in, g.step.outputs, stream.get()); }), "phase_plan.captured");
  check_cuda(need_driver().cuStreamEndCapture(stream.get(), &graph), "end the capture");
  check_cuda(need_driver().cuGraphDestroy(graph), "destroy");
  EXPECT_EQ(imbrex::test::error_code([&] { run(*plan, g); }), "nothing thrown");
}

TEST_F(DevicePlanBounds, CapturedWritesEndWithTheTensorsOfTheCapture) {
  const AttentionSpec spec = imbrex::test::mixed_spec(4);
  if (!backend.unsupported(spec, device).empty()) GTEST_SKIP() << "does not run here";
  OnGpu small(*this, spec, {{2, 2}}, 1), large(*this, spec, {{12, 12}}, 2);
  const auto plan = backend.plan(spec, device, options());
  EXPECT_TRUE(plan->capturable());
  plan->update(small.step.batch, stream.get());
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  check_cuda(need_driver().cuStreamBeginCapture_v2(stream.get(), kCaptureThreadLocal), "capture");
  plan->write_kv(large.step.in.kv, small.step.new_keys, small.step.new_values, stream.get());  // of two tokens
  check_cuda(need_driver().cuStreamEndCapture(stream.get(), &graph), "end the capture");
  check_cuda(need_driver().cuGraphInstantiateWithFlags(&exec, graph, 0), "instantiate");
  plan->update(large.step.batch, stream.get());  // of twelve
  check_cuda(need_driver().cuGraphLaunch(exec, stream.get()), "replay");
  const std::vector<float> k = download<float>(large.k);
  const long rows = long(2 * spec.num_kv_heads * spec.head_dim_qk);
  EXPECT_TRUE(std::equal(k.begin(), k.begin() + rows, small.step.new_k.begin()));
  EXPECT_TRUE(std::equal(k.begin() + rows, k.end(), large.step.k.begin() + rows));
  check_cuda(need_driver().cuGraphExecDestroy(exec), "destroy");
  check_cuda(need_driver().cuGraphDestroy(graph), "destroy");
}

}  // namespace
}  // namespace imbrex::cuda
