// Backends from outside: the example of examples/backend, loaded as a plug-in, against the reference; and backends that fail.
#include <atomic>
#include <cmath>
#include <random>
#include <thread>

#include "api/handles.h"

namespace imbrex::test {
namespace {

SelectionHandle forced(const imbrex_spec_fields& fields, const char* backend) {
  const SpecHandle spec = spec_of(fields);
  const DeviceHandle device = cpu();
  return select_for(spec.get(), device.get(), backend);
}

// What a backend computes for one request of 40 tokens, whose pages are out of order.
std::vector<float> outputs_of(const char* backend) {
  const imbrex_spec_fields fields = small_fields();
  const SpecHandle spec = spec_of(fields);
  const DeviceHandle device = cpu();
  const SelectionHandle selection = select_for(spec.get(), device.get(), backend);
  EXPECT_NE(selection, nullptr) << imbrex_last_error();
  if (!selection) return {};
  EXPECT_STREQ(imbrex_selection_backend(selection.get()), backend);
  const PlanHandle plan = make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(selection.get(), nullptr, out); });
  const AllocationHandle memory =
      make_handle<AllocationHandle>([&](auto** out) { return imbrex_kv_allocation_create(spec.get(), device.get(), 1, 8, "lbthd", out); });
  imbrex_kv_cache cache = init(imbrex_kv_cache_init);
  EXPECT_EQ(imbrex_kv_allocation_layer(memory.get(), 0, &cache), IMBREX_OK);

  constexpr int kTokens = 40;
  HostTensor<int> table({1, 3}, kInt);
  table.data = {6, 2, 4};
  HostTensor<int64_t> slots({kTokens}, kLong);
  for (int t = 0; t < kTokens; ++t) slots.data[size_t(t)] = table.data[size_t(t) / 16] * 16 + t % 16;
  HostTensor<float> q({kTokens, 4, 64}, kFloat), k({kTokens, 2, 64}, kFloat), v({kTokens, 2, 64}, kFloat), out({kTokens, 4, 64}, kFloat),
      lse({kTokens, 4}, kFloat);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (auto* t : {&q, &k, &v})
    for (float& x : t->data) x = normal(random);
  const int starts[2] = {0, kTokens}, len = kTokens;
  imbrex_batch batch = init(imbrex_batch_init);
  batch.num_reqs = 1, batch.query_start_loc = starts, batch.seq_lens = &len, batch.block_table = &table.view,
  batch.slot_mapping = &slots.view;
  imbrex_inputs inputs = init(imbrex_inputs_init);
  inputs.q = &q.view, inputs.kv = &cache;
  imbrex_outputs outputs = init(imbrex_outputs_init);
  outputs.out = &out.view, outputs.lse = &lse.view;
  EXPECT_EQ(imbrex_plan_update(plan.get(), &batch, nullptr), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(imbrex_plan_write_kv(plan.get(), &cache, &k.view, &v.view, nullptr), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(imbrex_plan_run(plan.get(), &inputs, &outputs, nullptr), IMBREX_OK) << imbrex_last_error();
  out.data.insert(out.data.end(), lse.data.begin(), lse.data.end());
  return out.data;
}

TEST(CApiOutside, PluginRunsLikeTheReference) {
  ASSERT_EQ(imbrex_load_plugin(IMBREX_NAIVE_PLUGIN), IMBREX_OK) << imbrex_last_error();
  const Registered until{"outside_naive"}, conv_until{"outside_naive", imbrex_unregister_short_conv_backend};
  EXPECT_STREQ(imbrex_selection_backend(forced(small_fields(), nullptr).get()), "outside_naive");  // in front of the built-in ones
  const std::vector<float> expected = outputs_of("reference"), actual = outputs_of("outside_naive");
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(actual[i], expected[i], 1e-6 * (1 + std::fabs(expected[i]))) << i;

  imbrex_spec_fields sinks = small_fields();
  sinks.sinks = 1, sinks.q_dtype = IMBREX_BF16, sinks.kv_dtype = IMBREX_BF16;
  EXPECT_EQ(forced(sinks, "outside_naive"), nullptr);
  const std::string why = imbrex_last_error();  // all reasons
  EXPECT_TRUE(why.find("f32 everywhere") != std::string::npos && why.find("logits as they are") != std::string::npos) << why;

  EXPECT_EQ(imbrex_load_plugin(IMBREX_NAIVE_PLUGIN), IMBREX_INVALID);  // its name is taken
  EXPECT_EQ(last_code(), "plugin.refused");
  EXPECT_NE(std::string(imbrex_last_error()).find("outside_naive"), std::string::npos);
}

TEST(CApiOutside, PluginsThatAreNone) {
  EXPECT_EQ(imbrex_load_plugin("/nowhere/plugin.so"), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "plugin.open");
  EXPECT_EQ(imbrex_load_plugin(IMBREX_NO_PLUGIN), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "plugin.entry");
  EXPECT_EQ(imbrex_load_plugin(nullptr), IMBREX_INVALID);
}

// Which function of a backend is to fail, and what is counted of the backend.
struct Failing {
  std::string function;
  int plans = 0, calls = 0;  // plans that are there; calls of `unsupported` and `plan`
};

imbrex_backend failing_backend(Failing& state) {
  imbrex_backend b{};
  b.struct_size = sizeof b;
  b.name = "failing", b.description = "fails where it is told to", b.context = &state;
  b.unsupported = [](void* context, const imbrex_spec_fields*, const imbrex_device_properties*, const imbrex_reasons*) {
    ++static_cast<Failing*>(context)->calls;
  };
  b.plan = [](void* context, const imbrex_spec_fields*, const imbrex_device_properties*, const imbrex_plan_options* options, void** plan) {
    auto& s = *static_cast<Failing*>(context);
    ++s.calls;
    EXPECT_EQ(options->max_num_reqs, 256);
    if (s.function == "plan") return imbrex_status(IMBREX_OUT_OF_MEMORY);
    *plan = context, ++s.plans;
    return imbrex_status(IMBREX_OK);
  };
  b.plan_free = [](void* plan) { --static_cast<Failing*>(plan)->plans; };
  b.update = [](void* plan, const imbrex_batch*, void*) {
    return imbrex_status(static_cast<Failing*>(plan)->function == "update" ? IMBREX_DEVICE : IMBREX_OK);
  };
  b.write_kv = [](void*, const imbrex_kv_cache*, const imbrex_tensor*, const imbrex_tensor*, void*) { return imbrex_status(IMBREX_OK); };
  b.run = [](void*, const imbrex_inputs*, const imbrex_outputs*, void*) { return imbrex_status(IMBREX_OK); };
  b.error = [](void*) { return "as it was told"; };
  return b;
}

// A backend that was compiled before there were such layers would run them as if they were others.
TEST(CApiOutside, LayersThatABackendCannotKnowAreRefusedInItsName) {
  Failing state;
  imbrex_backend backend = failing_backend(state);
  imbrex_spec_fields fields = small_fields();
  fields.alibi = 1, fields.alibi_sqrt = 1, fields.chunk = 64, fields.chunk_lookback = 1;
  for (const size_t size : {size_t(0), offsetof(imbrex_spec_fields, alibi_sqrt), sizeof fields}) {
    backend.spec_size = size;
    ASSERT_EQ(imbrex_register_backend(&backend), IMBREX_OK) << imbrex_last_error();
    const Registered until{"failing"};
    EXPECT_NE(forced(small_fields(), "failing"), nullptr) << imbrex_last_error();
    const SelectionHandle selection = forced(fields, "failing");
    EXPECT_EQ(selection != nullptr, size == sizeof fields);
    if (selection != nullptr) continue;
    EXPECT_EQ(last_code(), "select.forced");
    const std::string why = imbrex_last_error();
    EXPECT_NE(why.find("alibi_sqrt"), std::string::npos) << why;
    EXPECT_EQ(why.find("chunk_lookback") != std::string::npos, size == 0) << why;
  }
}

TEST(CApiOutside, StatusAndTextOfABackendReachTheCaller) {
  Failing state;
  const imbrex_backend backend = failing_backend(state);
  ASSERT_EQ(imbrex_register_backend(&backend), IMBREX_OK) << imbrex_last_error();
  const Registered until{"failing"};
  EXPECT_EQ(imbrex_register_backend(&backend), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "registry.duplicate");
  const SelectionHandle selection = forced(small_fields(), "failing");
  ASSERT_NE(selection, nullptr) << imbrex_last_error();
  {
    const PlanHandle plan = make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(selection.get(), nullptr, out); });
    ASSERT_NE(plan, nullptr) << imbrex_last_error();
    EXPECT_STREQ(imbrex_plan_str(plan.get()), "failing");
    EXPECT_EQ(state.plans, 1);
    const imbrex_batch nobody = init(imbrex_batch_init);
    EXPECT_EQ(imbrex_plan_update(plan.get(), &nobody, nullptr), IMBREX_OK) << imbrex_last_error();
    state.function = "update";
    EXPECT_EQ(imbrex_plan_update(plan.get(), &nobody, nullptr), IMBREX_DEVICE);
    EXPECT_EQ(last_code(), "backend.outside");
    EXPECT_NE(std::string(imbrex_last_error()).find("as it was told"), std::string::npos);
    // What is wrong does not come to the backend.
    imbrex_batch broken = nobody;
    const int starts[2] = {1, 1}, len = 1;
    broken.num_reqs = 1, broken.query_start_loc = starts, broken.seq_lens = &len;
    EXPECT_EQ(imbrex_plan_update(plan.get(), &broken, nullptr), IMBREX_INVALID);
    EXPECT_EQ(last_code(), "batch.query_start_loc.start");
  }
  EXPECT_EQ(state.plans, 0);
  state.function = "plan";
  imbrex_plan* none = nullptr;
  EXPECT_EQ(imbrex_plan_create(selection.get(), nullptr, &none), IMBREX_OUT_OF_MEMORY);
}

// What a plug-in may free after unregistering is not used again, whoever still holds a selection.
TEST(CApiOutside, UnregisteringWaitsForPlansAndEndsSelections) {
  auto state = std::make_unique<Failing>();
  const imbrex_backend backend = failing_backend(*state);
  ASSERT_EQ(imbrex_register_backend(&backend), IMBREX_OK) << imbrex_last_error();
  const SelectionHandle selection = forced(small_fields(), "failing");
  ASSERT_NE(selection, nullptr) << imbrex_last_error();
  const auto plan_of = [&](const SelectionHandle& of) {
    return make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(of.get(), nullptr, out); });
  };
  PlanHandle first = plan_of(selection), second = plan_of(selection);
  for (PlanHandle* plan : {&first, &second}) {
    EXPECT_EQ(imbrex_unregister_backend("failing"), IMBREX_INVALID);
    EXPECT_EQ(last_code(), "registry.in_use");
    EXPECT_NE(forced(small_fields(), "failing"), nullptr) << "nothing has changed";
    EXPECT_STREQ(imbrex_plan_str(plan->get()), "failing");
    plan->reset();
  }
  EXPECT_EQ(imbrex_unregister_backend("failing"), IMBREX_OK) << imbrex_last_error();
  const int calls = state->calls;
  EXPECT_EQ(state->plans, 0);
  EXPECT_EQ(plan_of(selection), nullptr);
  EXPECT_EQ(last_code(), "backend.unsupported");
  EXPECT_NE(std::string(imbrex_last_error()).find("unregistered"), std::string::npos) << imbrex_last_error();
  imbrex_plan* by_phase = nullptr;
  EXPECT_EQ(imbrex_plan_create_by_phase(selection.get(), selection.get(), nullptr, 1, &by_phase), IMBREX_UNSUPPORTED);
  EXPECT_EQ(state->calls, calls);
  state.reset();  // as a plug-in that is unloaded
  EXPECT_STREQ(imbrex_selection_backend(selection.get()), "failing");
  EXPECT_NE(std::string(imbrex_selection_explain(selection.get())).find("failing"), std::string::npos);
  EXPECT_EQ(plan_of(selection), nullptr);
  EXPECT_EQ(forced(small_fields(), "failing"), nullptr);
  EXPECT_EQ(imbrex_unregister_backend("failing"), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "registry.unknown");
}

TEST(CApiOutside, UnregisteringWhileOthersSelectIsOrdered) {
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) {
      const SelectionHandle selection = forced(small_fields(), nullptr);
      const PlanHandle plan = make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(selection.get(), nullptr, out); });
    }
  });
  for (int round = 0; round < 200; ++round) {
    auto state = std::make_unique<std::atomic<bool>>(true);  // a function that were called later would find it freed
    imbrex_backend b{};
    Failing unused;
    b = failing_backend(unused);
    b.name = "coming_and_going", b.context = state.get();
    b.unsupported = [](void* context, const imbrex_spec_fields*, const imbrex_device_properties*, const imbrex_reasons* reasons) {
      EXPECT_TRUE(*static_cast<std::atomic<bool>*>(context));
      reasons->add(reasons->context, "device.type", "another", "this");
    };
    ASSERT_EQ(imbrex_register_backend(&b), IMBREX_OK) << imbrex_last_error();
    ASSERT_EQ(imbrex_unregister_backend("coming_and_going"), IMBREX_OK) << imbrex_last_error();
    *state = false;
  }
  stop = true;
  other.join();
}

// A plug-in that refuses its part of a step leaves a plan of two phases at the step before, whichever of them it is.
TEST(CApiOutside, AFailedUpdateOfOnePhaseIsNone) {
  Failing state;
  const imbrex_backend backend = failing_backend(state);
  ASSERT_EQ(imbrex_register_backend(&backend), IMBREX_OK) << imbrex_last_error();
  const Registered until{"failing"};
  const SelectionHandle outside = forced(small_fields(), "failing"), inside = forced(small_fields(), "reference");
  HostTensor<int> table({3, 3}, kInt, 1);
  const auto update = [&](imbrex_plan* plan, int decodes, int tokens) {  // and a prefill
    const int starts[4] = {0, 1, decodes == 1 ? 1 + tokens : 2, 2 + tokens}, lens[3] = {30, decodes == 1 ? tokens : 31, tokens};
    imbrex_batch batch = init(imbrex_batch_init);
    batch.num_reqs = decodes + 1, batch.query_start_loc = starts, batch.seq_lens = lens, batch.block_table = &table.view;
    return imbrex_plan_update(plan, &batch, nullptr);
  };
  for (const bool decodes : {true, false}) {
    state.function = {};
    const PlanHandle plan = make_handle<PlanHandle>([&](auto** out) {
      return imbrex_plan_create_by_phase((decodes ? inside : outside).get(), (decodes ? outside : inside).get(), nullptr, 1, out);
    });
    ASSERT_NE(plan, nullptr) << imbrex_last_error();
    ASSERT_EQ(update(plan.get(), 1, 7), IMBREX_OK) << imbrex_last_error();
    const std::string before = imbrex_plan_str(plan.get());
    state.function = "update";
    EXPECT_EQ(update(plan.get(), 2, 20), IMBREX_DEVICE);
    EXPECT_EQ(imbrex_plan_str(plan.get()), before);
    EXPECT_NE(before.find(decodes ? "reference: 2 requests, 7 tokens" : "reference: 2 requests, 1 tokens"), std::string::npos) << before;
    state.function = {};
    EXPECT_EQ(update(plan.get(), 2, 20), IMBREX_OK);
  }
}

TEST(CApiOutside, IncompleteBackendsAreRefused) {
  Failing state;
  const auto code = [&](auto&& change) {
    imbrex_backend b = failing_backend(state);
    change(b);
    EXPECT_EQ(imbrex_register_backend(&b), IMBREX_INVALID);
    return last_code();
  };
  EXPECT_EQ(code([](auto& b) { b.run = nullptr; }), "api.backend");
  EXPECT_EQ(code([](auto& b) { b.name = ""; }), "api.backend");
  EXPECT_EQ(code([](auto& b) { b.struct_size = 8; }), "api.struct_size");
  EXPECT_EQ(imbrex_unregister_backend("failing"), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "registry.unknown");
}

}  // namespace
}  // namespace imbrex::test
