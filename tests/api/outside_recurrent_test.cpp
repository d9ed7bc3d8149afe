// Backends of recurrent layers from outside: one in plain loops for lightning attention, over the family's table of cases; and one that
// fails.
#include <cmath>
#include <string>
#include <vector>

#include "api/handles.h"
#include "conformance/recurrent/judge.h"

namespace imbrex::test {
namespace {

constexpr auto unregister_recurrent = imbrex_unregister_recurrent_backend;

// Which function is to fail, and what the backend has seen.
struct OutsideLightning {
  std::string function;
  int plans = 0, updates = 0, runs = 0;
};
struct LightningPlan {
  OutsideLightning* backend;
  imbrex_recurrent_fields spec;
  std::vector<int> starts, lens, slots, drafts, accepted, sources, parents;
};

float& number(const imbrex_tensor& t, int64_t a, int64_t b, int64_t c) {
  return static_cast<float*>(t.data)[a * t.strides[0] + b * t.strides[1] + c * t.strides[2]];
}

imbrex_status run_lightning(void* plan, const imbrex_recurrent_inputs* in, const imbrex_recurrent_outputs* out, void*) {
  auto& p = *static_cast<LightningPlan*>(plan);
  if (p.backend->function == "run") return IMBREX_INTERNAL;
  ++p.backend->runs;
  const imbrex_recurrent_fields& f = p.spec;
  const double scale = f.scale != 0 ? f.scale : 1 / std::sqrt(double(f.head_dim_k));
  const bool k_first = f.layout == IMBREX_STATE_K_FIRST;
  for (size_t r = 0; r < p.lens.size(); ++r) {
    const int begin = p.starts[r], end = p.starts[r + 1];
    for (int h = 0; begin < end && h < f.num_v_heads; ++h) {
      const int key_head = h / (f.num_v_heads / f.num_k_heads);
      std::vector<double> s(size_t(f.head_dim_k) * size_t(f.head_dim_v));
      const auto state = [&](int slot, int row, auto&& visit) {
        const imbrex_tensor& t = *in->state;
        float* const head = static_cast<float*>(t.data) + slot * t.strides[0] + row * t.strides[1] + h * t.strides[2];
        for (int k = 0; k < f.head_dim_k; ++k)
          for (int v = 0; v < f.head_dim_v; ++v)
            visit(s[size_t(k * f.head_dim_v + v)], head[(k_first ? k : v) * t.strides[3] + (k_first ? v : k) * t.strides[4]]);
      };
      const auto store = [](double x, float& to) { to = float(x); };
      const auto load = [](double& x, float from) { x = from; };
      if (p.lens[r] > end - begin) state(p.sources[r], p.accepted[r], load);
      if (end - begin == p.drafts[r]) state(p.slots[r], 0, store);
      for (int t = begin; t < end; ++t) {
        const int certain = end - begin - p.drafts[r];
        if (t - begin >= certain && !p.parents.empty()) state(p.slots[r], p.parents[size_t(t)] + 1 - certain, load);
        for (double& x : s) x *= std::exp(-double(static_cast<float*>(in->rates->data)[h]));
        for (int v = 0; v < f.head_dim_v; ++v) {
          double y = 0;
          for (int k = 0; k < f.head_dim_k; ++k) {
            double& x = s[size_t(k * f.head_dim_v + v)];
            x += double(number(*in->k, t, key_head, k)) * number(*in->v, t, h, v);
            y += scale * x * number(*in->q, t, key_head, k);
          }
          number(*out->out, t, h, v) = float(y);
        }
        if (t + 1 - (end - p.drafts[r]) >= 0) state(p.slots[r], t + 1 - (end - p.drafts[r]), store);
      }
    }
  }
  return IMBREX_OK;
}

imbrex_recurrent_backend outside_lightning(OutsideLightning& state) {
  imbrex_recurrent_backend b{};
  b.struct_size = sizeof b;
  b.name = "outside_lightning", b.description = "plain loops", b.context = &state;
  b.spec_size = sizeof(imbrex_recurrent_fields), b.device_size = sizeof(imbrex_device_properties);
  b.unsupported = [](void*, const imbrex_recurrent_fields* f, const imbrex_device_properties* device, const imbrex_reasons* reasons) {
    if (device->cuda != 0) reasons->add(reasons->context, "device.type", "cpu", "another");
    if (f->gate != IMBREX_GATE_FIXED || f->channel_rates != 0 || f->delta != 0 || f->qk_norm != 0 || f->skip != 0)
      reasons->add(reasons->context, "recurrent.gate", "lightning attention", "another layer");
    if (f->dtype != IMBREX_F32 || f->state_dtype != IMBREX_F32) reasons->add(reasons->context, "recurrent.dtype", "f32", "another");
  };
  b.plan = [](void* context, const imbrex_recurrent_fields* f, const imbrex_device_properties*, const imbrex_plan_options*, void** plan) {
    auto& s = *static_cast<OutsideLightning*>(context);
    if (s.function == "plan") return imbrex_status(IMBREX_OUT_OF_MEMORY);
    *plan = new LightningPlan{&s, *f, {}, {}, {}, {}, {}, {}, {}}, ++s.plans;
    return imbrex_status(IMBREX_OK);
  };
  b.plan_free = [](void* plan) {
    --static_cast<LightningPlan*>(plan)->backend->plans;
    delete static_cast<LightningPlan*>(plan);
  };
  b.update = [](void* plan, const imbrex_batch* batch, void*) {
    auto& p = *static_cast<LightningPlan*>(plan);
    if (p.backend->function == "update") return imbrex_status(IMBREX_DEVICE);
    ++p.backend->updates;
    const int n = batch->num_reqs;
    p.starts.assign(batch->query_start_loc, batch->query_start_loc + n + 1), p.lens.assign(batch->seq_lens, batch->seq_lens + n);
    p.slots.assign(batch->state_slots, batch->state_slots + n);
    p.sources = p.slots, p.parents.clear();
    if (batch->source_slots != nullptr) p.sources.assign(batch->source_slots, batch->source_slots + n);
    if (batch->draft_parents != nullptr) p.parents.assign(batch->draft_parents, batch->draft_parents + p.starts.back());
    p.drafts.assign(size_t(n), 0), p.accepted.assign(size_t(n), 0);
    if (batch->num_drafts != nullptr) p.drafts.assign(batch->num_drafts, batch->num_drafts + n);
    if (batch->accepted_drafts != nullptr) p.accepted.assign(batch->accepted_drafts, batch->accepted_drafts + n);
    return imbrex_status(IMBREX_OK);
  };
  b.run = run_lightning;
  b.error = [](void*) { return "as it was told"; };
  return b;
}

// Every case that it can, as tests/conformance runs the backends of the library.
TEST(CApiOutsideRecurrent, MatchesTheReference) {
  OutsideLightning state;
  const imbrex_recurrent_backend given = outside_lightning(state);
  ASSERT_EQ(imbrex_register_recurrent_backend(&given), IMBREX_OK) << imbrex_last_error();
  const Registered until{"outside_lightning", unregister_recurrent};
  const BackendOf<RecurrentFamily>* const backend = find_backend<RecurrentFamily>("outside_lightning");
  ASSERT_NE(backend, nullptr);
  int run = 0;
  for (const RecurrentCase& listed : recurrent_cases()) {
    if (!listed.name.starts_with("lightning")) continue;
    RecurrentCase c = listed;
    EXPECT_EQ(backend->unsupported(c.spec, probe_cpu()).empty(), c.spec.dtype == DType::f32) << c.name;
    c.spec.dtype = DType::f32;
    const RecurrentCaseInputs inputs = make_inputs(c);
    const RecurrentJudgement judgement =
        judge(expect(inputs, c.chunk), inputs, run_case(*backend, probe_cpu(), inputs, default_options(c)));
    EXPECT_TRUE(judgement.pass()) << c.name << ": " << judgement.failure;
    ++run;
  }
  EXPECT_GE(run, 10);
  EXPECT_EQ(backend->unsupported(recurrent_layer("gdn"), probe_cpu()).size(), 2u);
  EXPECT_EQ(backend->unsupported(recurrent_layer("gdn"), probe_cpu())[0].code, "recurrent.gate");
}

struct CApiFailingRecurrent : testing::Test {
  OutsideLightning state;
  imbrex_recurrent_fields fields = init(imbrex_recurrent_fields_init);
  const int starts[3] = {0, 3, 4}, lens[2] = {3, 9};
  int slots[2] = {0, 3};

  CApiFailingRecurrent() {
    fields.num_k_heads = fields.num_v_heads = 1, fields.head_dim_k = fields.head_dim_v = 8;
    fields.gate = IMBREX_GATE_FIXED, fields.dtype = IMBREX_F32;
  }
  SelectionHandle selection() {
    const SpecHandle spec = make_handle<SpecHandle>([&](auto** out) { return imbrex_spec_create_recurrent(&fields, out); });
    return select_for(spec.get(), cpu().get(), "outside_lightning");
  }
  imbrex_status update(imbrex_plan* plan, int slot) {
    slots[1] = slot;
    imbrex_batch batch = init(imbrex_batch_init);
    batch.num_reqs = 2, batch.query_start_loc = starts, batch.seq_lens = lens, batch.state_slots = slots;
    return imbrex_plan_update(plan, &batch, nullptr);
  }
  imbrex_status run(imbrex_plan* plan, int64_t num_slots) {
    HostTensor<float> q({4, 1, 8}, kFloat), rates({1}, kFloat), slots_of({num_slots, 1, 1, 8, 8}, kFloat), out({4, 1, 8}, kFloat);
    imbrex_recurrent_inputs inputs = init(imbrex_recurrent_inputs_init);
    inputs.q = inputs.k = inputs.v = &q.view, inputs.rates = &rates.view, inputs.state = &slots_of.view;
    imbrex_recurrent_outputs outputs = init(imbrex_recurrent_outputs_init);
    outputs.out = &out.view;
    return imbrex_plan_run_recurrent(plan, &inputs, &outputs, nullptr);
  }
};

TEST_F(CApiFailingRecurrent, StatusAndTextReachTheCallerAndWhatIsWrongDoesNotReachTheBackend) {
  const imbrex_recurrent_backend backend = outside_lightning(state);
  ASSERT_EQ(imbrex_register_recurrent_backend(&backend), IMBREX_OK) << imbrex_last_error();
  const Registered until{"outside_lightning", unregister_recurrent};
  EXPECT_EQ(imbrex_register_recurrent_backend(&backend), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "registry.duplicate");
  const SelectionHandle chosen = selection();
  ASSERT_NE(chosen, nullptr) << imbrex_last_error();
  {
    const PlanHandle plan = make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(chosen.get(), nullptr, out); });
    ASSERT_NE(plan, nullptr) << imbrex_last_error();
    EXPECT_EQ(run(plan.get(), 1), IMBREX_OK) << "there is no step yet";
    ASSERT_EQ(update(plan.get(), 3), IMBREX_OK) << imbrex_last_error();
    EXPECT_EQ(update(plan.get(), 0), IMBREX_INVALID);
    EXPECT_EQ(last_code(), "batch.state.shared");
    EXPECT_EQ(run(plan.get(), 3), IMBREX_INVALID);
    EXPECT_EQ(last_code(), "recurrent.run.tensor");
    EXPECT_EQ(run(plan.get(), 4), IMBREX_OK) << imbrex_last_error();
    EXPECT_EQ(state.updates, 1);
    EXPECT_EQ(state.runs, 1);
    for (const char* function : {"update", "run"}) {
      state.function = function;
      const bool updates = state.function == "update";
      EXPECT_EQ(updates ? update(plan.get(), 3) : run(plan.get(), 4), updates ? IMBREX_DEVICE : IMBREX_INTERNAL);
      EXPECT_EQ(last_code(), "backend.outside");
      EXPECT_NE(std::string(imbrex_last_error()).find("as it was told"), std::string::npos);
    }
    EXPECT_EQ(imbrex_unregister_recurrent_backend("outside_lightning"), IMBREX_INVALID);
    EXPECT_EQ(last_code(), "registry.in_use");
  }
  EXPECT_EQ(state.plans, 0);
  state.function = "plan";
  imbrex_plan* none = nullptr;
  EXPECT_EQ(imbrex_plan_create(chosen.get(), nullptr, &none), IMBREX_OUT_OF_MEMORY);
}

TEST_F(CApiFailingRecurrent, WhatABackendCannotKnowIsRefusedInItsName) {
  imbrex_recurrent_backend backend = outside_lightning(state);
  fields.num_drafts = 2;
  for (const size_t size : {offsetof(imbrex_recurrent_fields, num_drafts), size_t(0)}) {  // 0: the first version, which has them
    backend.spec_size = size;
    ASSERT_EQ(imbrex_register_recurrent_backend(&backend), IMBREX_OK) << imbrex_last_error();
    const Registered until{"outside_lightning", unregister_recurrent};
    EXPECT_EQ(selection() != nullptr, size == 0);
    EXPECT_TRUE(size == 0 || std::string(imbrex_last_error()).find("num_drafts") != std::string::npos) << imbrex_last_error();
  }
  // Nor may a step have sources where the backend was compiled before there were any.
  backend.spec_size = offsetof(imbrex_recurrent_fields, tree_drafts);
  {
    ASSERT_EQ(imbrex_register_recurrent_backend(&backend), IMBREX_OK) << imbrex_last_error();
    const Registered until{"outside_lightning", unregister_recurrent};
    RecurrentSpec layer = recurrent_layer("lightning");
    layer.dtype = DType::f32;
    const auto chosen_plan = find_backend<RecurrentFamily>("outside_lightning")->plan(layer, probe_cpu(), {});
    const std::vector<int32_t> starts{0, 1}, lens{4}, slots{0}, sources{1};
    Batch batch;
    batch.query_start_loc = starts, batch.seq_lens = lens, batch.state_slots = slots;
    EXPECT_NO_THROW(chosen_plan->update(batch));
    batch.source_slots = sources;
    EXPECT_EQ(error_code([&] { chosen_plan->update(batch); }), "backend.source_slots");
    batch.source_slots = {}, batch.pad_slot = -1;
    EXPECT_EQ(error_code([&] { chosen_plan->update(batch); }), "backend.pad_slot");
  }
  const auto code = [&](auto&& change) {
    imbrex_recurrent_backend b = outside_lightning(state);
    change(b);
    EXPECT_EQ(imbrex_register_recurrent_backend(&b), IMBREX_INVALID);
    return last_code();
  };
  EXPECT_EQ(code([](auto& b) { b.run = nullptr; }), "api.backend");
  EXPECT_EQ(code([](auto& b) { b.struct_size = 104; }), "api.struct_size");
}

}  // namespace
}  // namespace imbrex::test
