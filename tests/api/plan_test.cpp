// Plans through the C ABI: the same bits as through C++, on threads of either side; and every refusal with its status and code.
#include <algorithm>
#include <numeric>
#include <random>

#include "api/handles.h"
#include "imbrex/imbrex.hpp"

namespace imbrex::test {
namespace {

// Two requests, of 20 query tokens and of one behind 30 keys, in blocks that are not in order.
struct Step {
  int query_start_loc[3] = {0, 20, 21}, seq_lens[2] = {20, 31};
  HostTensor<int> table{{2, 2}, kInt};
  HostTensor<int64_t> slots{{21}, kLong};
  HostTensor<float> q{{21, 4, 64}, kFloat}, k{{21, 2, 64}, kFloat}, v{{21, 2, 64}, kFloat}, out{{21, 4, 64}, kFloat}, lse{{21, 4}, kFloat};
  imbrex_batch batch = init(imbrex_batch_init);
  imbrex_inputs inputs = init(imbrex_inputs_init);
  imbrex_outputs outputs = init(imbrex_outputs_init);

  explicit Step(const imbrex_kv_cache& cache) {
    table.data = {7, 3, 5, 1};
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (auto* t : {&q, &k, &v}) std::ranges::generate(t->data, [&] { return normal(random); });
    for (int t = 0; t < 20; ++t) slots.data[size_t(t)] = t < 16 ? 7 * 16 + t : 3 * 16 + t - 16;
    slots.data[20] = 1 * 16 + 14;
    batch.num_reqs = 2, batch.query_start_loc = query_start_loc, batch.seq_lens = seq_lens;
    batch.block_table = &table.view, batch.slot_mapping = &slots.view;
    inputs.q = &q.view, inputs.kv = &cache;
    outputs.out = &out.view, outputs.lse = &lse.view;
  }
};

struct CApiPlan : testing::Test {
  DeviceHandle device = cpu();
  SpecHandle spec = spec_of(small_fields());
  AllocationHandle memory =
      make_handle<AllocationHandle>([&](auto** out) { return imbrex_kv_allocation_create(spec.get(), device.get(), 1, 8, nullptr, out); });
  imbrex_kv_cache cache = init(imbrex_kv_cache_init);

  void SetUp() override { ASSERT_EQ(imbrex_kv_allocation_layer(memory.get(), 0, &cache), IMBREX_OK); }

  PlanHandle plan(const imbrex_plan_options* options = nullptr, const char* forced = nullptr) {
    const SelectionHandle selection = select_for(spec.get(), device.get(), forced);
    return make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(selection.get(), options, out); });
  }
  void run(imbrex_plan* plan, Step& step) {
    ASSERT_EQ(imbrex_plan_update(plan, &step.batch, nullptr), IMBREX_OK) << imbrex_last_error();
    ASSERT_EQ(imbrex_plan_write_kv(plan, &cache, &step.k.view, &step.v.view, nullptr), IMBREX_OK) << imbrex_last_error();
    ASSERT_EQ(imbrex_plan_run(plan, &step.inputs, &step.outputs, nullptr), IMBREX_OK) << imbrex_last_error();
  }
};

TEST_F(CApiPlan, GivesTheBitsOfTheCppInterface) {
  Step step(cache);
  const PlanHandle c_plan = plan();
  run(c_plan.get(), step);
  EXPECT_NE(std::string(imbrex_plan_str(c_plan.get())), "");

  const AttentionSpec s{
      .num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 64, .head_dim_v = 64, .q_dtype = DType::f32, .kv_dtype = DType::f32};
  const DeviceInfo here = probe_cpu();
  const auto cpp_plan = select(s, here).backend->plan(s, here, {});
  const KvAllocation cpp_cache(s, 1, 8);
  const auto view = [](auto& t, DType type) {
    TensorView v{.data = t.data.data(), .dtype = type, .rank = int(t.shape.size())};
    int64_t stride = 1;
    for (size_t i = t.shape.size(); i-- > 0; stride *= t.shape[i]) v.sizes[i] = t.shape[i], v.strides[i] = stride;
    return v;
  };
  std::vector<float> out(step.out.data.size()), lse(step.lse.data.size());
  cpp_plan->update({.query_start_loc = step.query_start_loc,
                    .seq_lens = step.seq_lens,
                    .block_table = view(step.table, DType::i32),
                    .slot_mapping = view(step.slots, DType::i64)});
  cpp_plan->write_kv(cpp_cache.layer(0), view(step.k, DType::f32), view(step.v, DType::f32));
  cpp_plan->run(
      {.q = view(step.q, DType::f32), .kv = cpp_cache.layer(0)},
      {.out = TensorView::contiguous(out.data(), DType::f32, {21, 4, 64}), .lse = TensorView::contiguous(lse.data(), DType::f32, {21, 4})});
  EXPECT_EQ(step.out.data, out);
  EXPECT_EQ(step.lse.data, lse);
  EXPECT_GT(std::ranges::count_if(out, [](float x) { return x != 0.f; }), int64_t(out.size()) / 2);
}

TEST_F(CApiPlan, LatentValuesAreTheKeysThatAreThere) {
  Step copied(cache);
  copied.v.data = copied.k.data;
  run(plan().get(), copied);
  const int64_t both = imbrex_kv_allocation_bytes(memory.get());

  imbrex_spec_fields fields = small_fields();
  fields.kv_format = IMBREX_KV_LATENT;
  spec = spec_of(fields);
  memory =
      make_handle<AllocationHandle>([&](auto** out) { return imbrex_kv_allocation_create(spec.get(), device.get(), 1, 8, nullptr, out); });
  SetUp();
  EXPECT_EQ(cache.v, nullptr);
  EXPECT_EQ(2 * imbrex_kv_allocation_bytes(memory.get()), both);
  EXPECT_NE(std::string(imbrex_spec_str(spec.get())).find("latent"), std::string::npos);
  Step latent(cache);
  const PlanHandle p = plan();
  ASSERT_EQ(imbrex_plan_update(p.get(), &latent.batch, nullptr), IMBREX_OK);
  EXPECT_EQ(imbrex_plan_write_kv(p.get(), &cache, &latent.k.view, &latent.v.view, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "write_kv.v");
  ASSERT_EQ(imbrex_plan_write_kv(p.get(), &cache, &latent.k.view, nullptr, nullptr), IMBREX_OK) << imbrex_last_error();
  ASSERT_EQ(imbrex_plan_run(p.get(), &latent.inputs, &latent.outputs, nullptr), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(latent.out.data, copied.out.data);
  EXPECT_EQ(latent.lse.data, copied.lse.data);
  const int32_t from = 0, to = 7;
  EXPECT_EQ(imbrex_copy_blocks(spec.get(), &cache, &from, &to, 1, nullptr), IMBREX_OK) << imbrex_last_error();
}

TEST_F(CApiPlan, RunsOnThreadsOfTheLibraryOrTheHost) {
  Step alone(cache), pooled(cache), hosted(cache);
  run(plan().get(), alone);

  const ThreadsHandle threads = make_handle<ThreadsHandle>([](auto** out) { return imbrex_threads_create(3, out); });
  imbrex_plan_options options = init(imbrex_plan_options_init);
  options.threads = threads.get();
  run(plan(&options).get(), pooled);

  int calls = 0;
  options.threads = nullptr;
  options.parallel_for = [](void* context, int num_workers, void (*body)(void*, int), void* argument) {
    ++*static_cast<int*>(context);
    for (int w = num_workers - 1; w >= 0; --w) body(argument, w);
  };
  options.parallel_for_context = &calls, options.num_workers = 4;
  run(plan(&options).get(), hosted);
  EXPECT_GT(calls, 0);
  EXPECT_EQ(alone.out.data, pooled.out.data);
  EXPECT_EQ(alone.out.data, hosted.out.data);

  options.threads = threads.get();
  EXPECT_EQ(plan(&options), nullptr);
  EXPECT_EQ(last_code(), "api.threads");
  options.threads = nullptr, options.num_workers = 0;
  EXPECT_EQ(plan(&options), nullptr);
  EXPECT_EQ(last_code(), "api.threads");
}

TEST_F(CApiPlan, TakesAWorkspaceAndKeepsIt) {
  auto workspace = make_handle<WorkspaceHandle>([&](auto** out) { return imbrex_workspace_create(device.get(), out); });
  EXPECT_EQ(imbrex_workspace_bytes(workspace.get()), 0);
  imbrex_plan_options options = init(imbrex_plan_options_init);
  options.workspace = workspace.get();
  const PlanHandle one = plan(&options), other = plan(&options);
  workspace.reset();
  Step a(cache), b(cache);
  run(one.get(), a), run(other.get(), b);
  EXPECT_EQ(a.out.data, b.out.data);
  imbrex_device* described = nullptr;
  ASSERT_EQ(imbrex_device_create("h200", &described), IMBREX_OK);
  imbrex_workspace* none = nullptr;
  EXPECT_EQ(imbrex_workspace_create(described, &none), IMBREX_DEVICE);
  EXPECT_EQ(last_code(), "backend.device_absent");
  EXPECT_EQ(none, nullptr);
  EXPECT_EQ(imbrex_workspace_create(nullptr, &none), IMBREX_INVALID);
  imbrex_device_free(described);
}

TEST_F(CApiPlan, ByPhaseTakesTwoSelections) {
  Step together(cache), by_phase(cache);
  run(plan(nullptr, "cpu_generic").get(), together);
  const SelectionHandle prefill = select_for(spec.get(), device.get(), "cpu_generic"),
                        decode = select_for(spec.get(), device.get(), "reference");
  const auto make = [&](const imbrex_selection* p, const imbrex_selection* d) {
    return make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create_by_phase(p, d, nullptr, 1, out); });
  };
  const PlanHandle both = make(prefill.get(), decode.get());
  ASSERT_NE(both, nullptr) << imbrex_last_error();
  run(both.get(), by_phase);
  EXPECT_TRUE(std::equal(together.out.data.begin(), together.out.data.begin() + 20 * 4 * 64, by_phase.out.data.begin()));

  imbrex_spec_fields other = small_fields();
  other.window_left = 3;
  const SpecHandle other_spec = spec_of(other);
  const SelectionHandle not_the_same = select_for(other_spec.get(), device.get());
  EXPECT_EQ(make(prefill.get(), not_the_same.get()), nullptr);
  EXPECT_EQ(last_code(), "api.phases");
}

// Both kinds of plan refuse what lies outside the cache, before anything is read or written.
TEST_F(CApiPlan, NothingBeyondTheCacheIsTouched) {
  const SelectionHandle selection = select_for(spec.get(), device.get(), "cpu_generic");
  const PlanHandle by_phase =
      make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create_by_phase(selection.get(), selection.get(), nullptr, 1, out); });
  ASSERT_NE(by_phase, nullptr) << imbrex_last_error();
  EXPECT_EQ(imbrex_plan_capturable(by_phase.get()), 0);
  EXPECT_EQ(imbrex_plan_capturable(nullptr), 0);
  const PlanHandle one = plan(nullptr, "cpu_generic");
  for (imbrex_plan* p : {one.get(), by_phase.get()}) {
    for (const size_t entry : {size_t(1), size_t(3)}) {  // of the prefill, of the decode
      Step step(cache);
      step.table.data[entry] = 8;
      step.batch.slot_mapping = nullptr;
      ASSERT_EQ(imbrex_plan_update(p, &step.batch, nullptr), IMBREX_OK) << imbrex_last_error();
      EXPECT_EQ(imbrex_plan_run(p, &step.inputs, &step.outputs, nullptr), IMBREX_INVALID);
      EXPECT_EQ(last_code(), "run.block_id");
    }
    for (const size_t token : {size_t(4), size_t(20)}) {
      Step step(cache);
      step.slots.data[token] = 8 * 16;
      ASSERT_EQ(imbrex_plan_update(p, &step.batch, nullptr), IMBREX_OK) << imbrex_last_error();
      EXPECT_EQ(imbrex_plan_write_kv(p, &cache, &step.k.view, &step.v.view, nullptr), IMBREX_INVALID);
      EXPECT_EQ(last_code(), "write_kv.slot");
    }
    Step step(cache);
    run(p, step);
    step.q.view.byte_offset = 1;
    EXPECT_EQ(imbrex_plan_run(p, &step.inputs, &step.outputs, nullptr), IMBREX_INVALID);
    EXPECT_EQ(last_code(), "tensor.alignment");
  }
}

TEST_F(CApiPlan, RaggedKeysLieInTheRowsOfKAndV) {
  imbrex_spec_fields fields = small_fields();
  fields.block_size = 0;
  const SpecHandle ragged = spec_of(fields);
  for (const char* backend : {"cpu_generic", "reference"}) {
    const SelectionHandle selection = select_for(ragged.get(), device.get(), backend);
    const PlanHandle p = make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(selection.get(), nullptr, out); });
    ASSERT_NE(p, nullptr) << imbrex_last_error();
    HostTensor<float> q({7, 4, 64}, kFloat), k({9, 2, 64}, kFloat), v({9, 2, 64}, kFloat), out({7, 4, 64}, kFloat);
    HostTensor<int> starts({2}, kInt);
    imbrex_kv_cache kv = init(imbrex_kv_cache_init);
    kv.k = &k.view, kv.v = &v.view;
    imbrex_inputs inputs = init(imbrex_inputs_init);
    inputs.q = &q.view, inputs.kv = &kv;
    imbrex_outputs outputs = init(imbrex_outputs_init);
    outputs.out = &out.view;
    const auto code = [&](int begin, int end) {
      const int queries[2] = {0, 7}, len = end - begin;
      starts.data = {begin, end};
      imbrex_batch batch = init(imbrex_batch_init);
      batch.num_reqs = 1, batch.query_start_loc = queries, batch.seq_lens = &len, batch.kv_start_loc = &starts.view;
      EXPECT_EQ(imbrex_plan_update(p.get(), &batch, nullptr), IMBREX_OK) << imbrex_last_error();
      return imbrex_plan_run(p.get(), &inputs, &outputs, nullptr) == IMBREX_OK ? "fine" : last_code();
    };
    EXPECT_EQ(code(0, 9), "fine");
    EXPECT_EQ(code(0, 900), "run.kv_rows");
    EXPECT_EQ(code(5, 14), "run.kv_rows");
    EXPECT_EQ(code(100000000, 100000009), "run.kv_rows");
  }
}

TEST_F(CApiPlan, LimitsAreSizes) {
  const auto code = [&](auto&& change) {
    imbrex_plan_options options = init(imbrex_plan_options_init);
    change(options);
    const SelectionHandle selection = select_for(spec.get(), device.get(), "cpu_generic");
    imbrex_plan* out = nullptr;
    EXPECT_EQ(imbrex_plan_create(selection.get(), &options, &out), IMBREX_INVALID);
    EXPECT_EQ(out, nullptr);
    return last_code();
  };
  EXPECT_EQ(code([](auto& o) { o.max_num_reqs = -1; }), "limits.max_num_reqs");
  EXPECT_EQ(code([](auto& o) { o.max_num_tokens = INT32_MAX; }), "limits.max_num_tokens");
  EXPECT_EQ(code([](auto& o) { o.max_seq_len = INT32_MIN; }), "limits.max_seq_len");
  EXPECT_EQ(code([](auto& o) { o.max_query_len = -1; }), "limits.max_query_len");
  EXPECT_EQ(code([](auto& o) { o.min_query_len = -1; }), "limits.min_query_len");
  EXPECT_EQ(code([](auto& o) { o.shared_prompts = 2; }), "api.enum");
  EXPECT_EQ(code([](auto& o) { o.max_query_len = 4, o.min_query_len = 5; }), "limits.min_query_len");
}

TEST_F(CApiPlan, RelativeDistancesAreBounded) {
  imbrex_spec_fields fields = small_fields();
  fields.relative_buckets = 32, fields.relative_max_distance = 1 << 30;
  EXPECT_EQ(spec_of(fields), nullptr);
  EXPECT_EQ(last_code(), "spec.score.relative_max_distance");
}

TEST_F(CApiPlan, SelectionExplains) {
  const SelectionHandle s = select_for(spec.get(), device.get());
  const std::string chosen = imbrex_selection_backend(s.get());
  EXPECT_NE(std::string(imbrex_selection_explain(s.get())).find(chosen), std::string::npos);
  EXPECT_NE(std::string(imbrex_selection_rule(s.get())), "");
  const int32_t candidates = imbrex_selection_num_candidates(s.get());
  bool found = false, refused = false;
  for (int32_t i = 0; i < candidates; ++i) {
    const int32_t reasons = imbrex_selection_num_reasons(s.get(), i);
    found = found || (imbrex_selection_candidate(s.get(), i) == chosen && reasons == 0);
    for (int32_t j = 0; j < reasons; ++j, refused = true) {
      imbrex_reason reason{};
      ASSERT_EQ(imbrex_selection_reason(s.get(), i, j, &reason), IMBREX_OK);
      EXPECT_TRUE(*reason.code && *reason.wanted && *reason.actual) << reason.code;
    }
  }
  EXPECT_TRUE(found);
  EXPECT_TRUE(refused);  // GPU backends, by a CPU
  for (const int32_t index : {-1, candidates}) {
    imbrex_reason reason{};
    EXPECT_EQ(imbrex_selection_candidate(s.get(), index), nullptr);
    EXPECT_EQ(imbrex_selection_num_reasons(s.get(), index), 0);
    EXPECT_EQ(imbrex_selection_reason(s.get(), index, 0, &reason), IMBREX_INVALID);
    EXPECT_EQ(last_code(), "api.index");
    EXPECT_EQ(imbrex_selection_proposal(s.get(), index), nullptr);
  }
}

// A described GPU: selection answers, plans do not exist; and what nothing runs comes with proposals.
TEST_F(CApiPlan, DescribedDevicesAndWhatNothingRuns) {
  const DeviceHandle h200 = make_handle<DeviceHandle>([](auto** out) { return imbrex_device_create("h200", out); });
  imbrex_device_properties properties{};
  properties.struct_size = sizeof properties;
  ASSERT_EQ(imbrex_device_get_properties(h200.get(), &properties), IMBREX_OK);
  EXPECT_TRUE(properties.cuda == 1 && properties.sm == 90 && properties.present == 0);
  imbrex_spec_fields fields = small_fields();
  fields.q_dtype = fields.kv_dtype = IMBREX_BF16;
  const SpecHandle bf16 = spec_of(fields);
  const SelectionHandle there = select_for(bf16.get(), h200.get());
  EXPECT_STREQ(imbrex_selection_backend(there.get()), "cuda_sm90");
  imbrex_plan* none = nullptr;
  EXPECT_EQ(imbrex_plan_create(there.get(), nullptr, &none), IMBREX_DEVICE);
  EXPECT_EQ(last_code(), "backend.device_absent");

  fields.kv_format = IMBREX_KV_AMX_PACKED, fields.block_size = 32;
  const SpecHandle packed = spec_of(fields);
  const SelectionHandle nothing = select_for(packed.get(), h200.get());
  EXPECT_EQ(imbrex_selection_backend(nothing.get()), nullptr);
  EXPECT_NE(imbrex_selection_proposal(nothing.get(), 0), nullptr);
  EXPECT_EQ(imbrex_plan_create(nothing.get(), nullptr, &none), IMBREX_UNSUPPORTED);
  EXPECT_EQ(last_code(), "backend.unsupported");
  EXPECT_EQ(none, nullptr);

  imbrex_select_options options = init(imbrex_select_options_init);
  options.forced = "no_such_backend";
  imbrex_selection* forced = nullptr;
  EXPECT_EQ(imbrex_select(bf16.get(), h200.get(), &options, &forced), IMBREX_UNSUPPORTED);
  EXPECT_EQ(last_code(), "select.forced");
}

TEST_F(CApiPlan, RefusesWhatBreaksRules) {
  const PlanHandle p = plan();
  Step step(cache);
  run(p.get(), step);
  const auto expect = [](imbrex_status status, const char* code) {
    EXPECT_EQ(status, IMBREX_INVALID) << code;
    EXPECT_EQ(last_code(), code);
    EXPECT_STRNE(imbrex_last_error(), "");
  };
  const auto run_now = [&] { return imbrex_plan_run(p.get(), &step.inputs, &step.outputs, nullptr); };
  expect(imbrex_plan_update(nullptr, &step.batch, nullptr), "api.null");
  expect(imbrex_plan_update(p.get(), nullptr, nullptr), "api.null");
  expect(imbrex_plan_run(p.get(), nullptr, &step.outputs, nullptr), "api.null");
  expect(imbrex_plan_write_kv(p.get(), &cache, nullptr, &step.v.view, nullptr), "api.null");
  step.batch.seq_lens = nullptr;
  expect(imbrex_plan_update(p.get(), &step.batch, nullptr), "api.null");
  step.batch.seq_lens = step.seq_lens, step.seq_lens[1] = -1;
  expect(imbrex_plan_update(p.get(), &step.batch, nullptr), "batch.seq_len.negative");
  step.seq_lens[1] = 31, step.batch.num_reqs = -1;
  expect(imbrex_plan_update(p.get(), &step.batch, nullptr), "api.batch");

  const imbrex_tensor good = step.q.view;
  const auto broken = [&](auto&& change) {
    step.q.view = good;
    change(step.q.view);
    expect(run_now(), "api.tensor");
  };
  broken([](imbrex_tensor& t) { t.ndim = 6; });
  broken([](imbrex_tensor& t) { t.ndim = -1; });
  broken([](imbrex_tensor& t) { t.shape = nullptr; });
  broken([](imbrex_tensor& t) { t.data = nullptr; });
  broken([](imbrex_tensor& t) { t.device.type = 7; });
  broken([](imbrex_tensor& t) { t.dtype.bits = 64; });
  broken([](imbrex_tensor& t) { t.dtype.lanes = 2; });
  int64_t huge[3] = {int64_t(1) << 40, int64_t(1) << 40, 64}, negative[3] = {-1, 4, 64};
  broken([&](imbrex_tensor& t) { t.shape = huge; });
  broken([&](imbrex_tensor& t) { t.shape = negative; });
  int64_t far[3] = {int64_t(1) << 61, 64, 1}, farther[3] = {INT64_MIN, 64, 1};
  broken([&](imbrex_tensor& t) { t.strides = far; });
  broken([&](imbrex_tensor& t) { t.strides = farther; });
  broken([](imbrex_tensor& t) { t.byte_offset = UINT64_MAX; });
  step.q.view = good;
  step.q.view.dtype = {2, 16, 1};
  expect(run_now(), "run.q");
  step.q.view = good;
  EXPECT_EQ(run_now(), IMBREX_OK);  // and nothing of it has stayed
}

TEST_F(CApiPlan, TakesStridesAndOffsets) {
  const PlanHandle p = plan();
  Step step(cache);
  run(p.get(), step);
  HostTensor<float> wide({21, 4, 128}, kFloat);
  for (int row = 0; row < 21 * 4; ++row) std::copy_n(&step.q.data[size_t(row) * 64], 64, &wide.data[size_t(row) * 128 + 64]);
  int64_t strides[3] = {4 * 128, 128, 1};
  imbrex_tensor view = step.q.view;
  view.data = wide.data.data(), view.strides = strides, view.byte_offset = 64 * sizeof(float);
  step.inputs.q = &view;
  const std::vector<float> before = step.out.data;
  std::ranges::fill(step.out.data, -1.f);
  ASSERT_EQ(imbrex_plan_run(p.get(), &step.inputs, &step.outputs, nullptr), IMBREX_OK);
  EXPECT_EQ(step.out.data, before);
}

TEST_F(CApiPlan, DevicePlansAreRefusedByCpus) {
  const PlanHandle p = plan();
  Step step(cache);
  imbrex_device_batch batch = init(imbrex_device_batch_init);
  EXPECT_EQ(imbrex_plan_update_on_device(p.get(), &batch, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
  HostTensor<int> starts({3}, kInt), lens({2}, kInt);
  batch.query_start_loc = &starts.view, batch.seq_lens = &lens.view, batch.block_table = &step.table.view;
  EXPECT_EQ(imbrex_plan_update_on_device(p.get(), &batch, nullptr), IMBREX_UNSUPPORTED);
  EXPECT_EQ(last_code(), "update.on_device");
  int32_t count = -1;
  EXPECT_EQ(imbrex_plan_device_problems(p.get(), nullptr, &count), IMBREX_OK);
  EXPECT_EQ(count, 0);
  imbrex_reason reason{};
  EXPECT_EQ(imbrex_plan_device_problem(p.get(), 0, &reason), IMBREX_INVALID);
}

TEST(CApi, FreeingNothingDoesNothing) {
  imbrex_device_free(nullptr), imbrex_spec_free(nullptr), imbrex_selection_free(nullptr), imbrex_threads_free(nullptr);
  imbrex_plan_free(nullptr), imbrex_kv_allocation_free(nullptr), imbrex_block_pool_free(nullptr), imbrex_workspace_free(nullptr);
  EXPECT_EQ(imbrex_workspace_bytes(nullptr), 0);
  EXPECT_STREQ(imbrex_plan_str(nullptr), "");
  EXPECT_EQ(imbrex_selection_backend(nullptr), nullptr);
  EXPECT_EQ(imbrex_selection_num_candidates(nullptr), 0);
  EXPECT_EQ(imbrex_abi_version(), uint32_t(IMBREX_ABI_VERSION));
  EXPECT_STRNE(imbrex_version(), "");
  const char* why = nullptr;
  if (imbrex_num_cuda_devices(&why) == 0) {
    EXPECT_STRNE(why, "");
  }
}

}  // namespace
}  // namespace imbrex::test
