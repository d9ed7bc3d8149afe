// Slots of states that are further apart than 32 bits can say are computed as those beside each other.
#include "wide_states.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "imbrex/backend.h"
#include "imbrex/short_conv.h"
#include "sanitizers.h"
#include "state_parts.h"

namespace imbrex {
namespace {

TEST(ShortConv, SlotsMayBeFarApart) {
  if (test::kEmulated) GTEST_SKIP() << "the emulator reserves no such address space";
  const test::WideStates wide;
  ASSERT_TRUE(wide.reserved());
  const ShortConvSpec spec{.dim = 72, .width = 4, .dtype = DType::f32, .form = ShortConvForm::plain};
  const int64_t tokens = test::WideStep::kTokens, dim = spec.dim, of_slot = spec.state_rows() * dim;
  std::vector<float> input = test::random_floats(size_t(tokens * dim), 1), weight = test::random_floats(size_t(dim * spec.width), 2);
  const std::vector<float> before = test::random_floats(size_t(test::WideStates::kSlots * of_slot), 3);
  int run = 0;
  for (const BackendOf<ShortConvFamily>* backend : backends<ShortConvFamily>()) {
    const DeviceInfo device = probe_cpu();
    if (!backend->unsupported(spec, device).empty()) continue;
    SCOPED_TRACE(std::string(backend->name()));
    const auto plan = backend->plan(spec, device, {.limits = {.max_num_reqs = 4, .max_num_tokens = 128, .max_seq_len = 256}});
    const test::WideStep step;
    plan->update(step.batch);
    const auto run_with = [&](const TensorView& states) {
      std::vector<float> out(size_t(tokens * dim), -7.f);
      plan->run({.input = TensorView::contiguous(input.data(), DType::f32, {tokens, dim}),
                 .weight = TensorView::contiguous(weight.data(), DType::f32, {dim, spec.width}),
                 .bias = {},
                 .state = states},
                {TensorView::contiguous(out.data(), DType::f32, {tokens, dim})});
      return out;
    };
    std::vector<float> near = before;
    const TensorView beside = TensorView::contiguous(near.data(), DType::f32, {test::WideStates::kSlots, spec.state_rows(), dim});
    EXPECT_EQ(run_with(wide.copy_of(beside, before)), run_with(beside));
    EXPECT_EQ(wide.numbers(size_t(of_slot)), near);
    EXPECT_NE(near, before);
    ++run;
  }
  EXPECT_GE(run, 2);
}

}  // namespace
}  // namespace imbrex
