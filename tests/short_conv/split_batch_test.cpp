// Parts of a step, one after the other, leave the outputs and states of the whole step: between requests and through them.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "imbrex/backend.h"
#include "imbrex/short_conv.h"
#include "state_parts.h"

namespace imbrex {
namespace {

TEST(ShortConv, PartsOfAStepLeaveTheSame) {
  const ShortConvSpec spec{.dim = 24, .width = 4, .dtype = DType::f32, .num_drafts = 4, .form = ShortConvForm::plain, .tree_drafts = true};
  const size_t dim = size_t(spec.dim), rows = size_t(spec.state_rows());
  std::vector<float> input = test::random_floats(18 * dim, 1), weight = test::random_floats(dim * 4, 2);
  int run = 0;
  for (const BackendOf<ShortConvFamily>* backend : backends<ShortConvFamily>()) {
    const DeviceInfo device = probe_cpu();
    if (!backend->unsupported(spec, device).empty()) continue;
    SCOPED_TRACE(std::string(backend->name()));
    const auto plan = backend->plan(spec, device, {.limits = {.max_num_reqs = 8, .max_num_tokens = 32, .max_seq_len = 64}});
    test::expect_same_in_parts({{5}, {11}, {5, 11}, {2}, {8}, {6, 7}, {14}, {1, 3, 7, 12}}, 10 * rows * dim, 18 * dim,
                               [&](const Batch& batch, int first, std::vector<float>& state, std::vector<float>& out) {
                                 const int64_t tokens = batch.num_tokens(), width = spec.dim;
                                 plan->update(batch);
                                 const ShortConvInputs in{
                                     .input = TensorView::contiguous(input.data() + first * width, DType::f32, {tokens, width}),
                                     .weight = TensorView::contiguous(weight.data(), DType::f32, {width, 4}),
                                     .bias = {},
                                     .state = TensorView::contiguous(state.data(), DType::f32, {10, int64_t(rows), width})};
                                 plan->run(in, {TensorView::contiguous(out.data() + first * width, DType::f32, {tokens, width})});
                               });
    ++run;
  }
  EXPECT_GE(run, 2);
}

}  // namespace
}  // namespace imbrex
