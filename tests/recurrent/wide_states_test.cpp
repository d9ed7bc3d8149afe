// Slots of states that are further apart than 32 bits can say are computed as those beside each other.
#include "wide_states.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "imbrex/backend.h"
#include "imbrex/recurrent.h"
#include "sanitizers.h"
#include "state_parts.h"

namespace imbrex {
namespace {

TEST(Recurrent, SlotsMayBeFarApart) {
  if (test::kEmulated) GTEST_SKIP() << "the emulator reserves no such address space";
  const test::WideStates wide;
  ASSERT_TRUE(wide.reserved());
  RecurrentSpec gdn{.num_k_heads = 2, .num_v_heads = 4, .head_dim_k = 128, .head_dim_v = 128, .gate = RecurrentGate::log, .delta = true};
  gdn.qk_norm = true;
  RecurrentSpec channels = gdn, turned = gdn, mamba2 = gdn, mamba1 = gdn;
  channels.channel_gate = true;
  turned.layout = gdn.layout == StateLayout::k_first ? StateLayout::v_first : StateLayout::k_first;
  mamba2.delta = mamba2.qk_norm = false;
  mamba1 = mamba2;
  mamba1.num_k_heads = 1, mamba1.num_v_heads = 64, mamba1.head_dim_k = 16, mamba1.head_dim_v = 1;
  int run = 0;
  for (RecurrentSpec spec : {gdn, channels, turned, mamba2, mamba1})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      spec.dtype = dtype;
      const int64_t tokens = test::WideStep::kTokens, keys = int64_t(spec.num_k_heads) * spec.head_dim_k,
                    values = int64_t(spec.num_v_heads) * spec.head_dim_v, of_slot = values * spec.head_dim_k;
      const std::vector<float> before = test::random_floats(size_t(test::WideStates::kSlots * of_slot), 3);
      // Numbers of 16 bits are those of floats, two in each.
      std::vector<float> q = test::random_floats(size_t(tokens * keys), 1), k = test::random_floats(q.size(), 2),
                         v = test::random_floats(size_t(tokens * values), 4);
      if (dtype == DType::bf16)
        for (std::vector<float>* x : {&q, &k, &v})
          for (float& f : *x) f = 0.0078125f * float(int(f * 100));  // both halves are small numbers
      std::vector<float> gate = test::random_floats(size_t(tokens * spec.num_v_heads * (spec.channel_gate ? spec.head_dim_k : 1)), 5),
                         beta = test::random_floats(size_t(tokens * spec.num_v_heads), 6);
      for (float& g : gate) g -= 1;
      for (float& b : beta) b = (b + 1) / 2;
      for (const BackendOf<RecurrentFamily>* backend : backends<RecurrentFamily>()) {
        const DeviceInfo device = probe_cpu();
        if (!backend->unsupported(spec, device).empty()) continue;
        SCOPED_TRACE(spec.str() + " " + std::string(backend->name()));
        const auto plan = backend->plan(spec, device, {.limits = {.max_num_reqs = 4, .max_num_tokens = 128, .max_seq_len = 256}});
        const test::WideStep step;
        plan->update(step.batch);
        RecurrentInputs in;
        in.q = TensorView::contiguous(q.data(), dtype, {tokens, spec.num_k_heads, spec.head_dim_k});
        in.k = TensorView::contiguous(k.data(), dtype, {tokens, spec.num_k_heads, spec.head_dim_k});
        in.v = TensorView::contiguous(v.data(), dtype, {tokens, spec.num_v_heads, spec.head_dim_v});
        in.gate = TensorView::contiguous(gate.data(), DType::f32, {tokens, spec.num_v_heads});
        if (spec.channel_gate) in.gate = TensorView::contiguous(gate.data(), DType::f32, {tokens, spec.num_v_heads, spec.head_dim_k});
        if (spec.delta) in.beta = TensorView::contiguous(beta.data(), DType::f32, {tokens, spec.num_v_heads});
        const bool k_first = spec.layout == StateLayout::k_first;
        const auto run_with = [&](const TensorView& states) {
          std::vector<float> out(size_t(tokens * values), -7.f);
          in.state = states;
          plan->run(in, {TensorView::contiguous(out.data(), dtype, {tokens, spec.num_v_heads, spec.head_dim_v})});
          return out;
        };
        std::vector<float> near = before;
        const TensorView beside =
            TensorView::contiguous(near.data(), DType::f32,
                                   {test::WideStates::kSlots, 1, spec.num_v_heads, k_first ? spec.head_dim_k : spec.head_dim_v,
                                    k_first ? spec.head_dim_v : spec.head_dim_k});
        const std::vector<float> expected = run_with(beside), out = run_with(wide.copy_of(beside, before));
        EXPECT_EQ(std::memcmp(out.data(), expected.data(), size_t(tokens * values) * size_of(dtype)), 0);
        EXPECT_EQ(wide.numbers(size_t(of_slot)), near);
        EXPECT_NE(near, before);
        ++run;
      }
    }
  EXPECT_GE(run, 10);
}

}  // namespace
}  // namespace imbrex
