// The replay on a GPU of a model that keeps states too: slots and states in device memory, and layers whose plans no graph may hold between
// those that are replayed. On the fake driver, with the reference as a GPU's backend of short convolutions.
#include <gtest/gtest.h>

#include "cuda/driver/driver.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "serve/replay.h"
#include "serve/tiny_model.h"

namespace imbrex::serve {
namespace {

namespace fake = cuda::fake;

// Waits for what the stream was given before, and computes in the device's memory, which is the host's here.
class WaitingConv final : public BackendOf<ShortConvFamily> {
 public:
  std::string_view name() const override { return "waiting_conv"; }
  std::string_view description() const override { return "the reference, on a fake GPU"; }
  std::vector<Reason> unsupported(const ShortConvSpec&, const DeviceInfo& device) const override {
    if (device.device.type == DeviceType::cuda) return {};
    return {{"device.type", "cuda", to_string(device.device.type)}};
  }
  std::unique_ptr<ShortConvPlan> plan(const ShortConvSpec& spec, const DeviceInfo&, const PlanOptions& options) const override {
    auto made = std::make_unique<WaitingPlan>();
    PlanOptions on_host = options;
    on_host.workspace = nullptr;
    made->inner = find_backend<ShortConvFamily>("reference")->plan(spec, describe_device("cpu"), on_host);
    return made;
  }

 private:
  struct WaitingPlan final : ShortConvPlan {
    std::unique_ptr<ShortConvPlan> inner;
    void update(const Batch& batch, Stream stream) override { inner->update(batch, stream); }
    void run(const ShortConvInputs& in, const ShortConvOutputs& out, Stream stream) const override {
      cuda::check_cuda(cuda::need_driver().cuStreamSynchronize(static_cast<cuda::CUstream>(stream)), "wait");
      const auto host = [](TensorView t) {
        EXPECT_TRUE(t.empty() || t.device == (Device{DeviceType::cuda, 0}));
        t.device = {};
        return t;
      };
      inner->run({.input = host(in.input), .weight = host(in.weight), .bias = host(in.bias), .state = host(in.state)},
                 {.out = host(out.out)});
    }
    std::string str() const override { return "waiting"; }
  };
};

TEST(GpuHybridReplay, EveryOutputIsThatOfTheReference) {
  register_backend<ShortConvFamily>(std::make_shared<WaitingConv>());
  const ModelSpec model = tiny_hybrid_model("caabwca", 16);
  for (const ModelLayer& layer : model.layers)
    if (const auto* spec = std::get_if<AttentionSpec>(&layer.spec)) fake::run_on_host(*spec);
  const Trace trace = tree_trace(10, 16, 90, 40, 2);
  ReplayOptions options;
  options.device = "cuda:0";
  options.select.forced = "cuda_sm90";  // which only attention has
  options.max_num_batched_tokens = 64;
  options.max_num_seqs = 8;
  options.block_size = 16;
  options.num_threads = 1;
  options.pacing = Pacing::saturate;
  options.verify_fraction = 1;
  options.num_blocks = 10;
  const ReplayResult r = replay(model, trace, options);
  options.num_blocks = 100;
  const Trace alike = tree_trace(12, 16, 90, 6, 3);
  const ReplayResult shared = replay(model, alike, options);
  unregister_backend<ShortConvFamily>("waiting_conv");
  fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear();
  EXPECT_TRUE(r.complete);
  EXPECT_GT(r.preemptions, 0);
  EXPECT_GT(r.decode_steps.steps, 0);
  EXPECT_EQ(r.kinds[0].backend, "waiting_conv");
  EXPECT_EQ(r.kinds[1].backend, "cuda_sm90");
  EXPECT_EQ(r.verified_outputs, (r.prefill_tokens + r.decode_tokens) * (3 + 4 * 2));
  options.device = "cpu";
  options.select.forced = "reference";
  EXPECT_GT(shared.prefix_hit_tokens, 0);
  EXPECT_GT(shared.kept_states, 0) << "copied in the device's memory";
  EXPECT_EQ(shared.digest, replay(model, alike, options).digest);
  options.num_blocks = 10;
  const ReplayResult cpu = replay(model, trace, options);
  EXPECT_EQ(r.digest, cpu.digest);
  EXPECT_EQ(r.decode_digest, cpu.decode_digest);
}

// Trees of drafts: decode steps are graphs all the same, and the keys of kept paths are written once more behind them. `sm80` is a backend
// of short convolutions too, whose kernels do not run on the host.
TEST(GpuHybridReplay, TreesOfDrafts) {
  register_backend<ShortConvFamily>(std::make_shared<WaitingConv>());
  const Trace trace = tree_trace(8, 16, 60, 30, 2);
  for (const auto& [layers, backend] : {std::pair("caaw", "cuda_sm90"), std::pair("aaw", "cuda_sm80")}) {
    SCOPED_TRACE(backend);
    const ModelSpec model = tiny_hybrid_model(layers, 16);
    ReplayOptions options = small_options();
    options.drafts = {.tokens = 5, .tree = true};
    options.select.forced = "reference";
    const ReplayResult cpu = replay(model, trace, options);
    for (const ModelLayer& layer : model.layers) {
      if (!std::holds_alternative<AttentionSpec>(layer.spec)) continue;
      AttentionSpec spec = std::get<AttentionSpec>(layer.spec);
      spec.mask.tree = true;
      fake::run_on_host(spec);
    }
    options.device = "cuda:0";
    options.select.forced = backend;
    const ReplayResult r = replay(model, trace, options);
    EXPECT_EQ(r.kinds.back().backend, backend);
    EXPECT_GT(r.kept_drafts, 0);
    EXPECT_GT(r.decode_steps.steps, 0);
    EXPECT_EQ(r.verified_outputs, cpu.verified_outputs);
    EXPECT_EQ(r.digest, cpu.digest);
    EXPECT_EQ(r.decode_digest, cpu.decode_digest);
  }
  unregister_backend<ShortConvFamily>("waiting_conv");
  fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear();
}

}  // namespace
}  // namespace imbrex::serve
