// Plans made on the device, as far as the host sees them: what it refuses, what it launches, what it reports. On the fake driver.
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda/driver/memory.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "cuda/params.h"
#include "expect_error.h"
#include "imbrex/select.h"

namespace imbrex::cuda {
namespace {

using imbrex::test::error_code;
constexpr const char* kFine = "nothing thrown";
constexpr Device kGpu{DeviceType::cuda, 0};

TensorView on_host(TensorView t) {
  t.device = {};
  return t;
}

// Three requests in device memory: 2 tokens of 20 keys, none, 1 token of 70 keys.
class DevicePlans : public testing::Test {
 protected:
  ~DevicePlans() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }

  std::unique_ptr<imbrex::Plan> plan_for(bool on_device = true, bool balanced = false) {
    fake::run_on_host(spec);
    return find_backend("cuda_sm80")
        ->plan(spec, probe_cuda().at(0), {.limits = limits, .threads = {}, .balanced = balanced, .on_device = on_device});
  }
  template <class T>
  TensorView upload(const std::vector<T>& values, DType dtype, std::initializer_list<int64_t> sizes) {
    kept.emplace_back(context, values.size() * sizeof(T));
    copy_to_device(kept.back().address(), values.data(), kept.back().bytes(), nullptr);
    return TensorView::contiguous(kept.back().as<void>(), dtype, sizes, kGpu);
  }
  TensorView floats(std::initializer_list<int64_t> sizes) { return upload(std::vector<float>(1 << 14), DType::f32, sizes); }

  AttentionSpec spec{
      .num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 16, .head_dim_v = 8, .q_dtype = DType::f32, .kv_dtype = DType::f32};
  PlanLimits limits{.max_num_reqs = 4, .max_num_tokens = 64, .max_seq_len = 2000};
  ContextPtr context = Context::of_device(0);
  CurrentContext current{*context};
  std::vector<DeviceBuffer> kept;
  DeviceBatch batch{.query_start_loc = upload<int32_t>({0, 2, 2, 3}, DType::i32, {4}),
                    .seq_lens = upload<int32_t>({20, 0, 70}, DType::i32, {3}),
                    .block_table = upload<int32_t>({3, 0, 1, 1, 1, 0, 0, 0, 0, 0, 7, 1, 2, 9, 4}, DType::i32, {3, 5}),
                    .slot_mapping = upload<int64_t>({50, 51, 70, -1, -1}, DType::i64, {5}),
                    .max_num_tokens = 5};
  const TensorView k = floats({10, 16, 2, 16}), v = floats({10, 16, 2, 8});
  Inputs in{.q = floats({5, 4, 16}), .kv = {.k = k, .v = v, .k_scale = {}, .v_scale = {}}};
  Outputs out{.out = floats({5, 4, 8}), .lse = {}};
};

TEST_F(DevicePlans, HaveToBeAskedFor) {
  EXPECT_EQ(error_code([&] { plan_for(false)->update_on_device(batch); }), "update.on_device");
  EXPECT_EQ(error_code([&] { plan_for()->update_on_device(batch); }), kFine);
  EXPECT_EQ(error_code([&] { plan_for(true, true); }), "backend.on_device");
  const auto cpu = find_backend("reference")->plan(spec, probe_cpu(), {.limits = limits, .threads = {}});
  EXPECT_EQ(error_code([&] { cpu->update_on_device(batch); }), "update.on_device");
  EXPECT_TRUE(cpu->device_problems().empty());
}

TEST_F(DevicePlans, RefuseWhatTheHostSees) {
  const std::pair<const char*, void (*)(DeviceBatch&)> refusals[] = {
      {kFine, [](DeviceBatch&) {}},
      {kFine, [](DeviceBatch& b) { b.slot_mapping = {}; }},
      {"batch.lengths", [](DeviceBatch& b) { b.query_start_loc.sizes[0] = 3; }},
      {"batch.lengths", [](DeviceBatch& b) { b.seq_lens.dtype = DType::i64; }},
      {"update.device", [](DeviceBatch& b) { b.seq_lens = on_host(b.seq_lens); }},
      {"update.device", [](DeviceBatch& b) { b.block_table.device.index = b.slot_mapping.device.index = 1; }},
      {"batch.block_table.rows", [](DeviceBatch& b) { b.block_table.sizes[0] = 2; }},
      {"batch.keys.ambiguous", [](DeviceBatch& b) { b.kv_indices = b.seq_lens; }},
      {"batch.slot_mapping.size", [](DeviceBatch& b) { b.slot_mapping.sizes[0] = 4; }},
      {"batch.slot_mapping.size", [](DeviceBatch& b) { b.max_num_tokens = 0; }},
      {"batch.num_tokens.limit", [](DeviceBatch& b) { b.max_num_tokens = 65; }},
      {"batch.custom_mask.unexpected", [](DeviceBatch& b) { b.custom_mask = b.seq_lens; }},
      {"batch.packed_mask.unexpected", [](DeviceBatch& b) { b.packed_mask = b.seq_lens; }},
      {"batch.packed_mask.ambiguous", [](DeviceBatch& b) { b.packed_mask = b.custom_mask = b.seq_lens; }},
      {"batch.num_reqs.limit", [](DeviceBatch& b) { b.seq_lens.sizes[0] = 5; }},
  };
  const auto plan = plan_for();
  for (const auto& [code, spoil] : refusals) {
    DeviceBatch spoiled = batch;
    spoil(spoiled);
    fake::state().launches.clear();
    EXPECT_EQ(error_code([&] { plan->update_on_device(spoiled); }), code);
    EXPECT_EQ(fake::state().launches.size(), std::string(code) == kFine ? 1u : 0u) << code;
  }
  spec.mask.custom = true;
  EXPECT_EQ(error_code([&] { plan_for()->update_on_device(batch); }), "batch.custom_mask.missing");
  DeviceBatch packed = batch;
  packed.packed_mask = batch.seq_lens;
  EXPECT_EQ(error_code([&] { plan_for()->update_on_device(packed); }), "batch.packed_mask.dtype");
  spec.mask.custom = false;
  const TensorView positions = upload<int32_t>({19, 18, 69, 0, 0}, DType::i32, {5});
  const auto code_with = [&](TensorView given) {
    DeviceBatch b = batch;
    b.positions = given;
    return error_code([&] { plan_for()->update_on_device(b); });
  };
  EXPECT_EQ(code_with(positions), "batch.positions.unexpected");
  spec.mask.positions = true;
  EXPECT_EQ(code_with(positions), kFine);
  EXPECT_EQ(code_with({}), "batch.positions.size");
  EXPECT_EQ(code_with(upload<int32_t>({19, 18, 69, 0}, DType::i32, {4})), "batch.positions.size");
  EXPECT_EQ(code_with(upload<int64_t>({19, 18, 69, 0, 0}, DType::i64, {5})), "batch.positions.dtype");
  EXPECT_EQ(code_with(on_host(positions)), "update.device");
}

TEST_F(DevicePlans, RefuseParentsThatTheHostSees) {
  const TensorView parents = upload<int32_t>({-1, -1, -1, 0, 0}, DType::i32, {5}), drafts = upload<int32_t>({2, 0, 1}, DType::i32, {3});
  const auto code_with = [&](TensorView given, TensorView counts) {
    DeviceBatch b = batch;
    b.draft_parents = given, b.num_drafts = counts;
    return error_code([&] { plan_for()->update_on_device(b); });
  };
  EXPECT_EQ(code_with(parents, {}), "batch.draft_parents.unexpected");
  spec.mask.tree = true;
  EXPECT_EQ(code_with({}, {}), kFine);
  EXPECT_EQ(code_with(parents, {}), kFine);
  EXPECT_EQ(code_with(parents, drafts), kFine);
  EXPECT_EQ(code_with(parents.slice(0, 0, 4), {}), "batch.draft_parents.size");
  EXPECT_EQ(code_with(upload<int64_t>({-1, -1, -1, 0, 0}, DType::i64, {5}), {}), "batch.draft_parents.size");
  EXPECT_EQ(code_with(on_host(parents), {}), "update.device");
  EXPECT_EQ(code_with(parents, drafts.slice(0, 0, 2)), "batch.draft_parents.num_drafts");
  EXPECT_EQ(code_with(parents, on_host(drafts)), "update.device");
}

// All logits are 0: a row's LSE is the logarithm of the number of keys that it sees.
TEST_F(DevicePlans, TakeTrees) {
  spec.mask.tree = true;
  batch.draft_parents = upload<int32_t>({-1, -1, -1, 0, 0}, DType::i32, {5});
  for (const bool siblings : {true, false}) {
    if (!siblings) batch.num_drafts = upload<int32_t>({0, 0, 1}, DType::i32, {3});
    out.lse = floats({5, 4});
    const auto plan = plan_for();
    plan->update_on_device(batch);
    plan->run(in, out);
    std::vector<float> lse(12);
    copy_to_host(lse.data(), kept.back().address(), lse.size() * sizeof(float), nullptr);
    const float seen[] = {19.f, siblings ? 19.f : 20.f, 70.f};
    for (size_t i = 0; i < lse.size(); ++i) EXPECT_FLOAT_EQ(lse[i], std::log(seen[i / 4])) << i;
  }
}

TEST_F(DevicePlans, TakePositionsIntoTheirRange) {
  spec.mask.positions = true;
  batch.positions = upload<int32_t>({11, -5, INT32_MAX, 0, 0}, DType::i32, {5});
  out.lse = floats({5, 4});
  const auto plan = plan_for();
  plan->update_on_device(batch);
  copy_to_device(kept[kept.size() - 2].address(), std::vector<int32_t>(5, 3).data(), 5 * sizeof(int32_t), nullptr);  // the next step's
  plan->run(in, out);
  std::vector<float> lse(12);
  copy_to_host(lse.data(), kept.back().address(), lse.size() * sizeof(float), nullptr);
  for (int token = 0; token < 3; ++token)
    for (int head = 0; head < 4; ++head)
      EXPECT_FLOAT_EQ(lse[size_t(4 * token + head)], std::log(token == 0 ? 12.f : token == 1 ? 1.f : 70.f));
}

// A server's process goes on as it was: its signal masks and handlers are its own.
TEST_F(DevicePlans, LeaveSignalsAlone) {
  const auto signals = [] {
    std::vector<std::pair<void*, int>> found;
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    for (int signal = 1; signal < 32; ++signal) {
      struct sigaction action;
      sigaction(signal, nullptr, &action);
      found.emplace_back(reinterpret_cast<void*>(action.sa_handler), action.sa_flags | (sigismember(&blocked, signal) << 30));
    }
    return found;
  };
  const auto before = signals();
  for (const bool on_device : {false, true}) {
    const auto plan = plan_for(on_device);
    if (on_device) {
      plan->update_on_device(batch);
      plan->write_kv(in.kv, floats({5, 2, 16}), floats({5, 2, 8}));
      plan->run(in, out);
    }
    EXPECT_EQ(signals(), before);
  }
  EXPECT_EQ(signals(), before);
}

TEST_F(DevicePlans, LetTheProcessExit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a child that is only forked has no GPU
  EXPECT_EXIT(
      {
        const auto plan = plan_for();
        plan->update_on_device(batch);
        plan->run(in, out);
        std::exit(0);
      },
      testing::ExitedWithCode(0), "");
}

// The host does not know how much there is to do, so everything is launched that the limits allow; tensors need room for max_num_tokens.
TEST_F(DevicePlans, LaunchWhatTheLimitsAllow) {
  const auto plan = plan_for();
  plan->update_on_device(batch);
  fake::state().launches.clear();
  plan->write_kv(in.kv, floats({5, 2, 16}), floats({5, 2, 8}));
  plan->run(in, out);
  std::string entries;
  for (const fake::Launch& l : fake::state().launches) entries += l.entry + " ";
  EXPECT_EQ(entries, "copy_kv attention_sm80 attention_sm80 attention_sm80 merge ");
  EXPECT_EQ(plan->str(), "cuda_sm80 (sm_90a): planned on the device, for at most 5 tokens");
  in.q.sizes[0] = 4;
  EXPECT_EQ(error_code([&] { plan->run(in, out); }), "run.q");
  EXPECT_EQ(error_code([&] { plan->write_kv(in.kv, floats({4, 2, 16}), floats({5, 2, 8})); }), "write_kv.k");
}

TEST_F(DevicePlans, TellWhichRulesWereBroken) {
  const auto plan = plan_for();
  plan->update_on_device(batch);
  EXPECT_TRUE(plan->device_problems().empty());
  fake::state().on_launch = [](const fake::Launch& launch) {
    const int* broken;
    std::memcpy(&broken, launch.all_params[0].data() + offsetof(PlanBatchParams, broken), sizeof broken);
    const_cast<int*>(broken)[kKeysFit] = 3;
    const_cast<int*>(broken)[kBlocksSuffice] = 1;
  };
  plan->update_on_device(batch);
  const std::vector<Reason> problems = plan->device_problems();
  ASSERT_EQ(problems.size(), 2u);
  EXPECT_EQ(problems[0].str(), "batch.seq_len.limit: wanted 0 to 2000 keys, got something else in request 2");
  EXPECT_EQ(problems[1].code, "batch.keys.room");
  EXPECT_TRUE(plan->device_problems().empty());
}

}  // namespace
}  // namespace imbrex::cuda
