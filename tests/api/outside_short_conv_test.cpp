// Backends of the short convolution from outside: the example of examples/backend, loaded as a plug-in, over the family's table of cases;
// and one that fails.
#include <memory>

#include "api/handles.h"
#include "api/structs.h"
#include "conformance/short_conv/device_mirror.h"
#include "conformance/short_conv/judge.h"
#include "sanitizers.h"

namespace imbrex::test {
namespace {

constexpr auto unregister_conv = imbrex_unregister_short_conv_backend;

imbrex_short_conv_fields conv_fields() {
  imbrex_short_conv_fields f = init(imbrex_short_conv_fields_init);
  f.dim = 8, f.dtype = IMBREX_F32;
  return f;
}
SelectionHandle conv_selection(const imbrex_short_conv_fields& fields, const char* backend) {
  const SpecHandle spec = make_handle<SpecHandle>([&](auto** out) { return imbrex_spec_create_short_conv(&fields, out); });
  return select_for(spec.get(), cpu().get(), backend);
}
PlanHandle conv_plan(const SelectionHandle& selection) {
  return make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(selection.get(), nullptr, out); });
}

// Every case that it can, as tests/conformance runs the backends of the library; with AddressSanitizer, which is slow, one in four.
TEST(CApiOutsideShortConv, PluginMatchesTheReference) {
  ASSERT_EQ(imbrex_load_plugin(IMBREX_NAIVE_PLUGIN), IMBREX_OK) << imbrex_last_error();
  const Registered until{"outside_naive", unregister_conv}, attention_until{"outside_naive"};
  EXPECT_STREQ(imbrex_selection_backend(conv_selection(conv_fields(), nullptr).get()), "outside_naive");  // in front of the built-in ones
  const BackendOf<ShortConvFamily>* const backend = find_backend<ShortConvFamily>("outside_naive");
  ASSERT_NE(backend, nullptr);
  int run = 0;
  for (size_t i = 0; i < short_conv_cases().size(); i += test::kAddressSanitizer ? 4 : 1) {
    const ShortConvCase& c = short_conv_cases()[i];
    if (has_padding(c.requests)) continue;  // which backends from outside do not have
    const std::vector<Reason> reasons = backend->unsupported(c.spec, probe_cpu());
    EXPECT_EQ(reasons.size(), (c.spec.dtype == DType::f32 ? 0u : 1u) + (c.spec.tree_drafts ? 1u : 0u)) << c.name;
    if (!reasons.empty()) continue;
    const ShortConvCaseInputs inputs = make_inputs(c);
    const ShortConvJudgement judgement = judge(expect(inputs), inputs, run_case(*backend, probe_cpu(), inputs, default_options(c)));
    EXPECT_TRUE(judgement.pass()) << c.name << ": " << judgement.failure;
    ++run;
  }
  EXPECT_GE(run, 20);

  imbrex_short_conv_fields halves = conv_fields();
  halves.dtype = IMBREX_F16;
  EXPECT_EQ(conv_selection(halves, "outside_naive"), nullptr);
  EXPECT_EQ(last_code(), "select.forced");
  EXPECT_NE(std::string(imbrex_last_error()).find("short_conv.dtype: wanted f32"), std::string::npos) << imbrex_last_error();
  EXPECT_STRNE(imbrex_selection_backend(conv_selection(halves, nullptr).get()), "outside_naive");
}

// On a device of a plug-in likewise: launch by launch, and from a graph where steps after the one of its capture have other lengths.
TEST(CApiOutsideShortConv, ADeviceOfAPluginMatchesTheReference) {
  ASSERT_EQ(imbrex_load_plugin(IMBREX_TOY_PLUGIN), IMBREX_OK) << imbrex_last_error();
  {
    const DeviceInfo device = describe_device("toy:1");
    const BackendOf<ShortConvFamily>& backend = *find_backend<ShortConvFamily>("toy");
    EXPECT_EQ(select<ShortConvFamily>({.dim = 8}, device).backend, &backend);
    int run = 0, captures = 0;
    for (size_t i = 0; i < short_conv_cases().size(); i += 7) {
      const ShortConvCase& c = short_conv_cases()[i];
      if (has_padding(c.requests)) continue;
      const ShortConvCaseInputs inputs = make_inputs(c);
      const ShortConvExpected expected = expect(inputs);
      for (const bool in_graph : {false, true}) {
        const auto mirror = device_mirror(backend, {.in_graph = in_graph, .captures = &captures});
        const ShortConvJudgement judgement = judge(expected, inputs, run_case(*mirror, device, inputs, default_options(c)));
        EXPECT_TRUE(judgement.pass()) << c.name << (in_graph ? ", from a graph: " : ": ") << judgement.failure;
        ++run;
      }
    }
    EXPECT_GE(run, 10);
    EXPECT_GE(captures, run / 2);
  }
  EXPECT_EQ(imbrex_unregister_backend("toy"), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(imbrex_unregister_short_conv_backend("toy"), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(imbrex_unregister_device("toy"), IMBREX_OK) << imbrex_last_error();
}

// Which function is to fail, and what the backend has seen.
struct FailingConv {
  std::string function;
  int plans = 0, updates = 0, runs = 0;
};

imbrex_short_conv_backend failing_conv(FailingConv& state) {
  imbrex_short_conv_backend b{};
  b.struct_size = sizeof b;
  b.name = "failing", b.description = "fails where it is told to", b.context = &state;
  b.unsupported = [](void*, const imbrex_short_conv_fields* fields, const imbrex_device_properties* device, const imbrex_reasons* reasons) {
    EXPECT_EQ(fields->dim, 8);
    if (device->cuda != 0) reasons->add(reasons->context, "device.type", "cpu", "another");
  };
  b.plan = [](void* context, const imbrex_short_conv_fields*, const imbrex_device_properties*, const imbrex_plan_options* options,
              void** plan) {
    auto& s = *static_cast<FailingConv*>(context);
    EXPECT_EQ(options->max_num_reqs, 256);
    EXPECT_EQ(options->workspace, nullptr);
    if (s.function == "plan") return imbrex_status(IMBREX_OUT_OF_MEMORY);
    *plan = context, ++s.plans;
    return imbrex_status(IMBREX_OK);
  };
  b.plan_free = [](void* plan) { --static_cast<FailingConv*>(plan)->plans; };
  b.update = [](void* plan, const imbrex_batch* batch, void*) {
    auto& s = *static_cast<FailingConv*>(plan);
    if (s.function == "update") return imbrex_status(IMBREX_DEVICE);
    ++s.updates;
    EXPECT_EQ(batch->state_slots[batch->num_reqs - 1], 3);
    EXPECT_TRUE(batch->num_drafts == nullptr && batch->block_table == nullptr);
    return imbrex_status(IMBREX_OK);
  };
  b.run = [](void* plan, const imbrex_short_conv_inputs*, const imbrex_short_conv_outputs*, void*) {
    auto& s = *static_cast<FailingConv*>(plan);
    if (s.function == "run") return imbrex_status(IMBREX_INTERNAL);
    ++s.runs;
    return imbrex_status(IMBREX_OK);
  };
  b.error = [](void*) { return "as it was told"; };
  return b;
}

struct CApiFailingShortConv : testing::Test {
  imbrex_status update(imbrex_plan* plan, int slot) {
    slots[1] = slot;
    imbrex_batch batch = init(imbrex_batch_init);
    batch.num_reqs = 2, batch.query_start_loc = starts, batch.seq_lens = lens, batch.state_slots = slots;
    return imbrex_plan_update(plan, &batch, nullptr);
  }
  imbrex_status run(imbrex_plan* plan, int64_t num_slots) {
    HostTensor<float> bcx({4, 24}, kFloat), weight({8, 3}, kFloat), state({num_slots, 2, 8}, kFloat), out({4, 8}, kFloat);
    imbrex_short_conv_inputs inputs = init(imbrex_short_conv_inputs_init);
    inputs.bcx = &bcx.view, inputs.weight = &weight.view, inputs.state = &state.view;
    imbrex_short_conv_outputs outputs = init(imbrex_short_conv_outputs_init);
    outputs.out = &out.view;
    return imbrex_plan_run_short_conv(plan, &inputs, &outputs, nullptr);
  }
  const int starts[3] = {0, 3, 4}, lens[2] = {3, 9};
  int slots[2] = {0, 3};
  FailingConv state;
};

TEST_F(CApiFailingShortConv, StatusAndTextReachTheCallerAndWhatIsWrongDoesNotReachTheBackend) {
  const imbrex_short_conv_backend backend = failing_conv(state);
  ASSERT_EQ(imbrex_register_short_conv_backend(&backend), IMBREX_OK) << imbrex_last_error();
  const Registered until{"failing", unregister_conv};
  EXPECT_EQ(imbrex_register_short_conv_backend(&backend), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "registry.duplicate");
  const SelectionHandle selection = conv_selection(conv_fields(), "failing");
  ASSERT_NE(selection, nullptr) << imbrex_last_error();
  {
    const PlanHandle plan = conv_plan(selection);
    ASSERT_NE(plan, nullptr) << imbrex_last_error();
    EXPECT_STREQ(imbrex_plan_str(plan.get()), "failing");
    EXPECT_EQ(imbrex_plan_capturable(plan.get()), 0);
    EXPECT_EQ(run(plan.get(), 1), IMBREX_OK) << "there is no step yet";
    ASSERT_EQ(update(plan.get(), 3), IMBREX_OK) << imbrex_last_error();
    EXPECT_EQ(update(plan.get(), 0), IMBREX_INVALID);
    EXPECT_EQ(last_code(), "batch.state.shared");
    EXPECT_EQ(run(plan.get(), 3), IMBREX_INVALID);
    EXPECT_EQ(last_code(), "short_conv.run.tensor");
    EXPECT_EQ(run(plan.get(), 4), IMBREX_OK) << imbrex_last_error();
    EXPECT_EQ(state.updates, 1);
    EXPECT_EQ(state.runs, 1);
    for (const char* function : {"update", "run"}) {
      state.function = function;
      EXPECT_EQ(state.function == "update" ? update(plan.get(), 3) : run(plan.get(), 4),
                state.function == "update" ? IMBREX_DEVICE : IMBREX_INTERNAL);
      EXPECT_EQ(last_code(), "backend.outside");
      EXPECT_NE(std::string(imbrex_last_error()).find("as it was told"), std::string::npos);
    }
  }
  EXPECT_EQ(state.plans, 0);
  state.function = "plan";
  imbrex_plan* none = nullptr;
  EXPECT_EQ(imbrex_plan_create(selection.get(), nullptr, &none), IMBREX_OUT_OF_MEMORY);
}

TEST_F(CApiFailingShortConv, UnregisteringWaitsForPlansAndIsOfOneFamily) {
  const imbrex_short_conv_backend backend = failing_conv(state);
  ASSERT_EQ(imbrex_register_short_conv_backend(&backend), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(imbrex_unregister_backend("failing"), IMBREX_INVALID);  // attention has none of that name
  EXPECT_EQ(last_code(), "registry.unknown");
  const SelectionHandle selection = conv_selection(conv_fields(), "failing");
  PlanHandle plan = conv_plan(selection);
  EXPECT_EQ(imbrex_unregister_short_conv_backend("failing"), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "registry.in_use");
  plan.reset();
  EXPECT_EQ(imbrex_unregister_short_conv_backend("failing"), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(conv_plan(selection), nullptr);
  EXPECT_EQ(last_code(), "backend.unsupported");
  EXPECT_EQ(conv_selection(conv_fields(), "failing"), nullptr);
  EXPECT_EQ(imbrex_unregister_short_conv_backend("cpu_generic"), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "registry.unknown");
}

TEST_F(CApiFailingShortConv, WhatABackendCannotKnowIsRefusedInItsName) {
  imbrex_short_conv_backend backend = failing_conv(state);
  imbrex_short_conv_fields drafts = conv_fields();
  drafts.num_drafts = 2;
  for (const size_t size : {offsetof(imbrex_short_conv_fields, num_drafts), size_t(0)}) {  // 0: the first version, which has them
    backend.spec_size = size;
    ASSERT_EQ(imbrex_register_short_conv_backend(&backend), IMBREX_OK) << imbrex_last_error();
    const Registered until{"failing", unregister_conv};
    EXPECT_NE(conv_selection(conv_fields(), "failing"), nullptr) << imbrex_last_error();
    EXPECT_EQ(conv_selection(drafts, "failing") != nullptr, size == 0);
    EXPECT_EQ(size == 0 || std::string(imbrex_last_error()).find("num_drafts") != std::string::npos, true) << imbrex_last_error();
  }
  imbrex_short_conv_fields plain = conv_fields();
  plain.form = IMBREX_CONV_PLAIN;
  for (const size_t size : {api::kFirstSize<imbrex_short_conv_fields>, sizeof(imbrex_short_conv_fields)}) {
    backend.spec_size = size;
    ASSERT_EQ(imbrex_register_short_conv_backend(&backend), IMBREX_OK) << imbrex_last_error();
    const Registered until{"failing", unregister_conv};
    EXPECT_EQ(conv_selection(plain, "failing") != nullptr, size == sizeof(imbrex_short_conv_fields)) << size;
  }
  const auto code = [&](auto&& change) {
    imbrex_short_conv_backend b = failing_conv(state);
    change(b);
    EXPECT_EQ(imbrex_register_short_conv_backend(&b), IMBREX_INVALID);
    return last_code();
  };
  EXPECT_EQ(code([](auto& b) { b.run = nullptr; }), "api.backend");
  EXPECT_EQ(code([](auto& b) { b.plan = nullptr; }), "api.backend");
  EXPECT_EQ(code([](auto& b) { b.struct_size = 104; }), "api.struct_size");
}

}  // namespace
}  // namespace imbrex::test
