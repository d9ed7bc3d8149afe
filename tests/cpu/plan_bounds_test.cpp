// No batch, tensor or option that the host sees makes a plan for CPUs read or write outside the tensors it is given.
#include <limits>

#include "expect_error.h"
#include "imbrex/select.h"
#include "mixed_step.h"

namespace imbrex {
namespace {

using test::MixedStep, test::Requests;
constexpr const char* kAccepted = "nothing thrown";
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;

const Requests kMixed{{1, 30}, {5, 9}, {0, 7}, {1, 13}};

// Every way to a plan of the host: each backend, and two of them by phase.
class PlanBounds : public testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<Plan> plan(const AttentionSpec& spec, const PlanOptions& options = {}) const {
    const std::string name = GetParam();
    const DeviceInfo device = probe_cpu();
    const Backend &reference = *find_backend("reference"), &generic = *find_backend("cpu_generic");
    if (name == "by_phase") return plan_by_phase(generic, generic, spec, device, options);
    if (name == "by_phase_with_reference") return plan_by_phase(reference, generic, spec, device, options);
    return find_backend(name)->plan(spec, device, options);
  }
  void SetUp() override {
    const Backend* backend = find_backend(GetParam());
    if (backend != nullptr && !backend->unsupported(test::mixed_spec(4), probe_cpu()).empty()) GTEST_SKIP() << "does not run here";
  }
  std::string run_code(const MixedStep& step, const PlanOptions& options = {}) const {
    const auto p = plan(step.spec, options);
    p->update(step.batch);
    return test::error_code([&] { p->run(step.in, step.outputs); });
  }
};

TEST_P(PlanBounds, RaggedKeysLieInTheRowsOfKAndV) {
  MixedStep step(test::mixed_spec(0), kMixed);
  EXPECT_EQ(run_code(step), kAccepted);
  for (const bool validate : {true, false}) {
    const PlanOptions options{.threads = {}, .validate = validate};
    MixedStep short_keys(test::mixed_spec(0), kMixed);
    short_keys.in.kv.k.sizes[0] -= 1, short_keys.in.kv.v.sizes[0] -= 1;
    EXPECT_EQ(run_code(short_keys, options), "run.kv_rows");
    for (const int32_t far : {1, 100'000'000, INT32_MAX - 100}) {
      MixedStep moved(test::mixed_spec(0), kMixed);
      for (int32_t& start : moved.key_starts) start += far;
      EXPECT_EQ(run_code(moved, options), "run.kv_rows") << far;
    }
  }
}

TEST_P(PlanBounds, RaggedKeysDoNotFall) {
  const auto code = [&](std::vector<int32_t> starts) {
    MixedStep step(test::mixed_spec(0), {{1, 3}, {1, 4}});
    step.key_starts = std::move(starts);
    step.batch.kv_start_loc.data = step.key_starts.data();
    return test::error_code([&] { plan(step.spec)->update(step.batch); });
  };
  EXPECT_EQ(code({0, 3, 7}), kAccepted);
  EXPECT_EQ(code({-1, 2, 6}), "batch.kv_start_loc.negative");
  EXPECT_EQ(code({INT32_MIN, 3, 7}), "batch.kv_start_loc.negative");
  EXPECT_EQ(code({0, -3, 7}), "batch.kv_start_loc.monotone");
  EXPECT_EQ(code({5, 3, 7}), "batch.kv_start_loc.monotone");
  EXPECT_EQ(code({0, 4, 7}), "batch.kv_start_loc.length");
}

TEST_P(PlanBounds, BlocksAndSlotsLieInTheCache) {
  MixedStep step(test::mixed_spec(4), kMixed);
  EXPECT_EQ(run_code(step), kAccepted);
  for (const int32_t block : {step.num_blocks, step.num_blocks + 1'000'000, INT32_MAX}) {
    MixedStep wrong(test::mixed_spec(4), kMixed);
    wrong.table[0] = block;  // of a decode
    EXPECT_EQ(run_code(wrong), "run.block_id") << block;
    MixedStep wrong_prefill(test::mixed_spec(4), kMixed);
    wrong_prefill.table[size_t(wrong_prefill.batch.block_table.stride(0))] = block;
    EXPECT_EQ(run_code(wrong_prefill), "run.block_id") << block;
  }
  for (const size_t token : {size_t(0), size_t(3)})
    for (const int64_t slot : {int64_t(step.num_blocks) * 4, int64_t(1) << 32}) {
      MixedStep wrong(test::mixed_spec(4), kMixed);
      wrong.slots[token] = slot;
      const std::vector<float> k = wrong.k;
      const auto p = plan(wrong.spec);
      p->update(wrong.batch);
      EXPECT_EQ(test::error_code([&] { p->write_kv(wrong.in.kv, wrong.new_keys, wrong.new_values); }), "write_kv.slot") << slot;
      EXPECT_TRUE(wrong.k == k);
    }
}

using Spoil = void (*)(MixedStep&);

TEST_P(PlanBounds, StridesStayInTheAddressSpace) {
  const std::pair<const char*, Spoil> refusals[] = {
      {kAccepted, [](MixedStep& s) { s.in.kv.k.strides[3] = 1; }},
      {"tensor.strides", [](MixedStep& s) { s.in.q.strides[0] = kHuge; }},
      {"tensor.strides", [](MixedStep& s) { s.in.q.strides[1] = -kHuge; }},
      {"tensor.strides", [](MixedStep& s) { s.outputs.out.strides[0] = kHuge; }},
      {"tensor.strides", [](MixedStep& s) { s.outputs.lse.strides[1] = std::numeric_limits<int64_t>::min(); }},
      {"tensor.overlap", [](MixedStep& s) { s.outputs.out.strides[0] = 0; }},
      {"tensor.overlap", [](MixedStep& s) { s.outputs.out.strides[1] = 1; }},
      {"tensor.overlap", [](MixedStep& s) { s.outputs.lse.strides[0] = 1; }},
      {"tensor.alignment", [](MixedStep& s) { s.in.q.data = s.in.q.as<char>() + 1; }},
      {"tensor.alignment", [](MixedStep& s) { s.outputs.out.data = s.outputs.out.as<char>() + 2; }},
      {"tensor.alignment", [](MixedStep& s) { s.in.kv.v.data = s.in.kv.v.as<char>() + 3; }},
  };
  for (const auto& [code, spoil] : refusals) {
    MixedStep step(test::mixed_spec(4), kMixed);
    spoil(step);
    EXPECT_EQ(run_code(step), code) << &spoil - &refusals[0].second;
  }
  // A dimension of one element has any stride: nobody multiplies with it.
  MixedStep one(test::mixed_spec(4), {{1, 6}});
  one.in.q.strides[0] = one.outputs.out.strides[0] = one.outputs.lse.strides[0] = std::numeric_limits<int64_t>::min();
  EXPECT_EQ(run_code(one), kAccepted);

  const std::pair<const char*, Spoil> writes[] = {
      {kAccepted, [](MixedStep&) {}},
      {"tensor.strides", [](MixedStep& s) { s.new_keys.strides[0] = kHuge; }},
      {"tensor.strides", [](MixedStep& s) { s.new_values.strides[2] = -kHuge; }},
      {"tensor.alignment", [](MixedStep& s) { s.new_values.data = s.new_values.as<char>() + 1; }},
      {"tensor.overlap", [](MixedStep& s) { s.in.kv.k.strides[0] = s.in.kv.k.strides[1]; }},
  };
  for (const auto& [code, spoil] : writes) {
    MixedStep step(test::mixed_spec(4), kMixed);
    const auto p = plan(step.spec);
    p->update(step.batch);
    spoil(step);
    EXPECT_EQ(test::error_code([&] { p->write_kv(step.in.kv, step.new_keys, step.new_values); }), code);
  }
}

TEST_P(PlanBounds, BatchArraysStayInTheAddressSpace) {
  const std::pair<const char*, Spoil> refusals[] = {
      {kAccepted, [](MixedStep&) {}},
      {"tensor.strides", [](MixedStep& s) { s.batch.block_table.strides[0] = kHuge; }},
      {"tensor.alignment", [](MixedStep& s) { s.batch.block_table.data = s.batch.block_table.as<char>() + 2; }},
      {"tensor.alignment", [](MixedStep& s) { s.batch.slot_mapping.data = s.batch.slot_mapping.as<char>() + 4; }},
  };
  for (const auto& [code, spoil] : refusals) {
    MixedStep step(test::mixed_spec(4), kMixed);
    spoil(step);
    EXPECT_EQ(test::error_code([&] { plan(step.spec)->update(step.batch); }), code);
  }
}

TEST_P(PlanBounds, LimitsAreSizes) {
  const auto code = [&](const PlanLimits& limits) {
    return test::error_code([&] { plan(test::mixed_spec(4), {.limits = limits, .threads = {}}); });
  };
  const PlanLimits good{.max_num_reqs = 4, .max_num_tokens = 64, .max_seq_len = 2000};
  PlanLimits limits = good;
  EXPECT_EQ(code(limits), kAccepted);
  for (const int bad : {-1, INT32_MIN, INT32_MAX}) {
    limits = good, limits.max_num_reqs = bad;
    EXPECT_EQ(code(limits), "limits.max_num_reqs") << bad;
    limits = good, limits.max_num_tokens = bad;
    EXPECT_EQ(code(limits), "limits.max_num_tokens") << bad;
  }
  limits = good, limits.max_seq_len = -1;
  EXPECT_EQ(code(limits), "limits.max_seq_len");
  limits = good, limits.max_query_len = -1;
  EXPECT_EQ(code(limits), "limits.max_query_len");
  const auto threads_code = [&](int count) {
    const auto invoke = [](void*, int, ParallelFor::Body, void*) {};
    return test::error_code([&] { plan(test::mixed_spec(4), {.threads = {.num_workers = count, .context = nullptr, .invoke = invoke}}); });
  };
  for (const int bad : {-1, 0, INT32_MAX}) EXPECT_EQ(threads_code(bad), "threads.num_workers") << bad;
}

INSTANTIATE_TEST_SUITE_P(Plans, PlanBounds,
                         testing::Values("reference", "cpu_generic", "cpu_avx512", "by_phase", "by_phase_with_reference"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace imbrex
