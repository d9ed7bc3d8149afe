// Recurrent layers with the convolution in front on the fake driver: one call has the bits of both parts, from the host's lengths, from the
// device's and in a graph, and computes in the workspace that it says it needs.
#include "cuda/fake/recurrent_calls.h"
#include "cuda/lanes/short_conv_variants.h"
#include "expect_error.h"
#include "recurrent/conv_plan.h"

namespace imbrex::cuda {
namespace {

using imbrex::test::error_code;

class ConvolvedCalls : public RecurrentCalls {
 protected:
  static constexpr int kChannels = 2 * 2 * 64 + 4 * 64, kTaps = 4, kConvRows = 3 + 2;
  static constexpr size_t kConvBytes = size_t(2) * kConvRows * kChannels * 2;

  ConvolvedCalls() {
    use_texts();
    std::mt19937 random(9);
    for (const TensorView* t : {&input, &weight, &conv_state})
      for (int64_t i = 0; i < t->num_elements(); ++i) store_from_float(t->data, t->dtype, i, float(int32_t(random())) * 0x1p-30f);
    first_conv_state.assign(conv_state.as<char>(), conv_state.as<char>() + kConvBytes);
    input.sizes[1] = kChannels;  // a part of wider rows
    convolved.conv = RecurrentConv::qkv;
  }
  static void use_texts() {
    for (const imbrex::test::ShortConvVariant& variant : imbrex::test::short_conv_variants())
      if (std::string_view(variant.name) == "conv_silu") fake::put_into_cache(variant.key());
    fake::state().param_sizes["short_conv_aligned"] = fake::state().param_sizes["short_conv_unaligned"] = {sizeof(ShortConvParams)};
#ifdef IMBREX_LANES
    fake::state().on_launch = [others = fake::state().on_launch](const fake::Launch& launch) {
      if (launch.entry.starts_with("short_conv")) return fake::run_text(launch.entry + "_conv_silu", launch, launch.grid_x);
      others(launch);
    };
#endif
  }
  RecurrentInputs with_conv() const {
    RecurrentInputs all = in;
    all.q = all.k = all.v = {};
    all.input = input, all.conv_weight = weight, all.conv_state = conv_state;
    return all;
  }
  std::string bits_of(DeviceStream& stream, const auto& run) {
    begin();
    std::memcpy(conv_state.data, first_conv_state.data(), kConvBytes);
    run();
    stream.synchronize();
    return states() + outputs() + std::string(conv_state.as<char>(), kConvBytes);
  }
  // The parts one after the other.
  std::string expected(DeviceStream& stream) {
    const auto conv = find_backend<ShortConvFamily>("cuda_sm80")->plan(conv_of(convolved), device, {.limits = limits});
    const auto recurrence = plan(spec, {.limits = limits});
    conv->update(batch, stream.get()), recurrence->update(batch, stream.get());
    const TensorView rows = tensor(DType::bf16, {6, kChannels});
    RecurrentInputs parts = in;
    const auto part = [&](int64_t first, int64_t heads) {
      TensorView t = TensorView::contiguous(rows.as<char>() + first * 2, DType::bf16, {6, heads, 64}, kGpu);
      return t.strides[0] = kChannels, t;
    };
    parts.q = part(0, 2), parts.k = part(128, 2), parts.v = part(256, 4);
    return bits_of(stream, [&] {
      conv->run({.input = input, .weight = weight, .bias = {}, .state = conv_state}, {.out = rows}, stream.get());
      recurrence->run(parts, out, stream.get());
    });
  }

  RecurrentSpec convolved = spec;
  TensorView input = tensor(DType::bf16, {6, kChannels + 24}), weight = tensor(DType::bf16, {kChannels, kTaps}),
             conv_state = tensor(DType::bf16, {2, kConvRows, kChannels});
  std::string first_conv_state;
};

TEST_F(ConvolvedCalls, HaveTheBitsOfTheirParts) {
  if (!fake::has_texts()) GTEST_SKIP();
  const auto stream = open_stream(device);
  const std::string bits = expected(*stream);
  const auto host = plan(convolved, {.limits = limits});
  host->update(batch, stream->get());
  EXPECT_TRUE(bits_of(*stream, [&] { host->run(with_conv(), out, stream->get()); }) == bits);
  ASSERT_TRUE(host->capturable());
  const DeviceGraph graph = stream->capture([&] { host->run(with_conv(), out, stream->get()); });
  EXPECT_TRUE(bits_of(*stream, [&] { stream->replay(graph); }) == bits);
  const auto from_device = plan(convolved, {.limits = limits, .on_device = true});
  from_device->update_on_device(on_device, stream->get());
  EXPECT_TRUE(bits_of(*stream, [&] { from_device->run(with_conv(), out, stream->get()); }) == bits);
  EXPECT_TRUE(from_device->device_problems(stream->get()).empty());
}

TEST_F(ConvolvedCalls, ComputeInTheWorkspaceThatTheyAskFor) {
  const int64_t rows = int64_t(limits.max_num_tokens) * kChannels * 2, front = backend.workspace_bytes(spec, device, {.limits = limits});
  const int64_t bytes = backend.workspace_bytes(convolved, device, {.limits = limits});
  EXPECT_GT(front, 0);
  EXPECT_EQ(bytes, (front + 255) / 256 * 256 + rows);
  std::vector<std::max_align_t> memory(size_t(bytes) / sizeof(std::max_align_t) + 1);
  const auto code = [&](int64_t lent) {
    return error_code([&] { plan(convolved, {.limits = limits, .workspace = make_workspace(device, memory.data(), lent)}); });
  };
  EXPECT_EQ(code(bytes), kFine);
  EXPECT_EQ(code(bytes - 1), "workspace.room");
}

}  // namespace
}  // namespace imbrex::cuda
