// The short convolution's plan for GPUs through the C ABI, on the fake driver: lengths on the device, a caller's workspace, and what a
// step's requests did wrong.
#include <cstring>

#include "api/handles.h"
#include "cuda/fake/short_conv_texts.h"

namespace imbrex::test {
namespace {

namespace fake = cuda::fake;

class CShortConvOnAGpu : public testing::Test {
 protected:
  CShortConvOnAGpu() { fake::use_short_conv_text(short_conv_variants()[0]); }
  ~CShortConvOnAGpu() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }
  PlanHandle plan_with(const imbrex_plan_options& options) const {
    return make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(selection.get(), &options, out); });
  }
  static constexpr int kDim = 16;
  static constexpr imbrex_dl_type kBf16{4, 16, 1};
  const DeviceHandle device = make_handle<DeviceHandle>([](auto** out) { return imbrex_device_create("cuda:0", out); });
  const SpecHandle spec = make_handle<SpecHandle>([](auto** out) {
    imbrex_short_conv_fields fields = init(imbrex_short_conv_fields_init);
    fields.dim = kDim;
    return imbrex_spec_create_short_conv(&fields, out);
  });
  const SelectionHandle selection = select_for(spec.get(), device.get());
  imbrex_plan_options options = init(imbrex_plan_options_init);
};

TEST_F(CShortConvOnAGpu, PlansFromLengthsOnTheDevice) {
  ASSERT_NE(selection, nullptr) << imbrex_last_error();
  options.on_device = 1, options.max_num_reqs = 3, options.max_num_tokens = 8;
  const PlanHandle plan = plan_with(options);
  ASSERT_NE(plan, nullptr) << imbrex_last_error();
  EXPECT_EQ(imbrex_plan_capturable(plan.get()), 1);

  // Host memory is as good as any to the fake driver.
  HostTensor<int> starts({4}, kInt), lens({3}, kInt), slots({3}, kInt);
  starts.data = {0, 2, 3, 6}, lens.data = {2, 8, 3}, slots.data = {1, 0, 1};
  HostTensor<uint16_t> bcx({8, 3 * kDim}, kBf16, 0x3f80), weight({kDim, 3}, kBf16, 0x3f80), state({2, 2, kDim}, kBf16, 0x3f80),
      out({8, kDim}, kBf16, 0x1111);
  for (imbrex_tensor* t : {&starts.view, &lens.view, &slots.view, &bcx.view, &weight.view, &state.view, &out.view}) t->device = {2, 0};
  imbrex_device_batch batch = init(imbrex_device_batch_init);
  batch.query_start_loc = &starts.view, batch.seq_lens = &lens.view, batch.state_slots = &slots.view;
  ASSERT_EQ(imbrex_plan_update_on_device(plan.get(), &batch, nullptr), IMBREX_OK) << imbrex_last_error();
  EXPECT_STREQ(imbrex_plan_str(plan.get()), "cuda_sm80 (sm_90a): planned on the device, for at most 8 tokens");
  imbrex_short_conv_inputs inputs = init(imbrex_short_conv_inputs_init);
  inputs.bcx = &bcx.view, inputs.weight = &weight.view, inputs.state = &state.view;
  imbrex_short_conv_outputs outputs = init(imbrex_short_conv_outputs_init);
  outputs.out = &out.view;
  ASSERT_EQ(imbrex_plan_run_short_conv(plan.get(), &inputs, &outputs, nullptr), IMBREX_OK) << imbrex_last_error();
  slots.data.resize(2), lens.shape = {2};  // of two requests there are three starts
  batch.state_slots = nullptr;
  EXPECT_EQ(imbrex_plan_update_on_device(plan.get(), &batch, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "batch.lengths");
  if (!fake::has_short_conv_texts()) return;

  int32_t count = 0;
  ASSERT_EQ(imbrex_plan_device_problems(plan.get(), nullptr, &count), IMBREX_OK) << imbrex_last_error();
  ASSERT_EQ(count, 1);
  imbrex_reason reason{};
  ASSERT_EQ(imbrex_plan_device_problem(plan.get(), 0, &reason), IMBREX_OK);
  EXPECT_STREQ(reason.code, "batch.state.shared");
  // The request in the middle is the only one that has a slot of its own: 1 + 1 + 1.
  for (size_t t = 0; t < 8; ++t) EXPECT_EQ(out.data[t * kDim], t == 2 ? 0x4040 : 0x1111) << t;
}

TEST_F(CShortConvOnAGpu, NeedsNoScratch) {
  std::vector<char> memory(64);
  for (const bool on_device : {false, true}) {
    options.on_device = on_device, options.workspace = nullptr;
    int64_t bytes = -1;
    ASSERT_EQ(imbrex_selection_workspace_bytes(selection.get(), &options, &bytes), IMBREX_OK) << imbrex_last_error();
    EXPECT_EQ(bytes, 0);
    const WorkspaceHandle own = make_handle<WorkspaceHandle>([&](auto** out) { return imbrex_workspace_create(device.get(), out); });
    const WorkspaceHandle given = make_handle<WorkspaceHandle>(
        [&](auto** out) { return imbrex_workspace_create_in(device.get(), memory.data(), int64_t(memory.size()), out); });
    for (const WorkspaceHandle* workspace : {&own, &given}) {
      const int64_t before = imbrex_workspace_bytes(workspace->get());
      options.workspace = workspace->get();
      EXPECT_NE(plan_with(options), nullptr) << imbrex_last_error();
      EXPECT_EQ(imbrex_workspace_bytes(workspace->get()), before);
    }
    const DeviceHandle other = make_handle<DeviceHandle>([](auto** out) { return imbrex_device_create("cuda:1", out); });
    const WorkspaceHandle there = make_handle<WorkspaceHandle>([&](auto** out) { return imbrex_workspace_create(other.get(), out); });
    options.workspace = there.get();
    EXPECT_EQ(plan_with(options), nullptr);
    EXPECT_EQ(last_code(), "backend.workspace");
  }
}

}  // namespace
}  // namespace imbrex::test
