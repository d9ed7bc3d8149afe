// Parts of a step, one after the other, leave the outputs and states of the whole step. Where a cut goes through a request, bits may follow
// from how many tokens a step has of it.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "imbrex/backend.h"
#include "imbrex/recurrent.h"
#include "state_parts.h"

namespace imbrex {
namespace {

TEST(Recurrent, PartsOfAStepLeaveTheSame) {
  const RecurrentSpec spec{.num_k_heads = 1,
                           .num_v_heads = 2,
                           .head_dim_k = 16,
                           .head_dim_v = 16,
                           .gate = RecurrentGate::log,
                           .delta = true,
                           .qk_norm = true,
                           .dtype = DType::f32,
                           .num_drafts = 4,
                           .tree_drafts = true};
  std::vector<float> q = test::random_floats(18 * 16, 1), k = test::random_floats(18 * 16, 2), v = test::random_floats(18 * 32, 3);
  std::vector<float> gate = test::random_floats(18 * 2, 4), beta = test::random_floats(18 * 2, 5);
  for (float& g : gate) g -= 1;
  for (float& b : beta) b = (b + 1) / 2;
  int run = 0;
  for (const BackendOf<RecurrentFamily>* backend : backends<RecurrentFamily>()) {
    const DeviceInfo device = probe_cpu();
    if (!backend->unsupported(spec, device).empty()) continue;
    SCOPED_TRACE(std::string(backend->name()));
    const auto plan = backend->plan(spec, device, {.limits = {.max_num_reqs = 8, .max_num_tokens = 32, .max_seq_len = 64}});
    std::vector<std::vector<int32_t>> cuts{{4}, {5}, {11}, {4, 5, 11}};
    if (plan->step_tokens() == 1) cuts.insert(cuts.end(), {{2}, {8}, {14}, {1, 7, 12}});
    test::expect_same_in_parts(cuts, 10 * 5 * 2 * 256, 18 * 32,
                               [&](const Batch& batch, int first, std::vector<float>& state, std::vector<float>& out) {
                                 const int64_t tokens = batch.num_tokens();
                                 plan->update(batch);
                                 const auto rows = [&](std::vector<float>& x, std::initializer_list<int64_t> sizes) {
                                   TensorView t = TensorView::contiguous(nullptr, DType::f32, sizes);
                                   t.data = x.data() + first * t.stride(0);
                                   return t;
                                 };
                                 RecurrentInputs in;
                                 in.q = rows(q, {tokens, 1, 16}), in.k = rows(k, {tokens, 1, 16}), in.v = rows(v, {tokens, 2, 16});
                                 in.gate = rows(gate, {tokens, 2}), in.beta = rows(beta, {tokens, 2});
                                 in.state = TensorView::contiguous(state.data(), DType::f32, {10, 5, 2, 16, 16});
                                 plan->run(in, {rows(out, {tokens, 2, 16})});
                               });
    ++run;
  }
  EXPECT_GE(run, 2);
}

}  // namespace
}  // namespace imbrex
