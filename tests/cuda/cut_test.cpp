// The cut of a GPU's plan: a request alone fills the GPU, many requests do not pay for splits, and what is cut fits the memory.
#include "gpu/cut.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "attention/random_lengths.h"
#include "cuda/plan/plan.h"

namespace imbrex::cuda {
namespace {

AttentionSpec llama(int q_heads = 32, int kv_heads = 8, DType kv = DType::bf16) {
  return {.num_q_heads = q_heads, .num_kv_heads = kv_heads, .head_dim_qk = 128, .head_dim_v = 128, .kv_dtype = kv};
}

struct Step : imbrex::test::Lengths {
  Step(int num_reqs, int q_len, int seq_len) {
    for (int r = 0; r < num_reqs; ++r) add(q_len, seq_len);
  }
};

struct Cut {
  int regime = -1, items = 0, tasks = 0;
  double partial_share = 0;  // traffic of partial results, of that of keys and values
};

// All requests of a step of this kind belong to one regime.
Cut cut(const AttentionSpec& spec, const Step& step, const PlanLimits& limits = {}, const char* gpu = "h200") {
  const DeviceInfo device = describe_device(gpu);
  std::array<Tile, kNumRegimes> tiles;
  for (const Regime regime : kRegimes) tiles[regime] = kernels_sm80.kernel(arch_of(device), spec, regime).tile;
  const CutPolicy policies = gpu::cut_policy(spec, device, tiles, false);
  Cut result;
  for (const Regime regime : kRegimes) {
    Schedule s;
    schedule(step.view(), spec.mask, policies[regime], s);
    if (s.work.empty()) continue;
    EXPECT_EQ(result.regime, -1) << "two regimes for one kind of request";
    result.regime = regime;
    result.items = int(s.work.size());
    result.tasks = result.items * spec.num_kv_heads;
    double kv_bytes = 0;
    for (const WorkItem& w : s.work) kv_bytes += double(w.kv_end - w.kv_begin) * double(spec.kv_bytes_per_token());
    result.partial_share = 2. * s.num_partial_rows * spec.num_q_heads * (spec.head_dim_v + 2) * 4 / kv_bytes;
    EXPECT_LE(s.num_partial_rows, schedule_bounds(policies[regime], limits).num_partial_rows);
  }
  return result;
}

TEST(Cut, ARequestAloneSpreadsOverTheMultiprocessors) {
  const int context[] = {1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072};
  const int least[] = {16, 32, 48, 64, 72, 80, 80, 80};  // tasks; an H200 has 132 multiprocessors
  for (size_t i = 0; i < std::size(context); ++i) {
    const Cut one = cut(llama(), Step(1, 1, context[i]));
    EXPECT_GE(one.tasks, least[i]) << context[i];
    EXPECT_LE(one.tasks, 2 * 132) << context[i];
  }
  // A shard with one kv head has less to read, and as many pieces as its keys are worth.
  EXPECT_GE(cut(llama(8, 1), Step(1, 1, 131072)).tasks, 70);
  EXPECT_GE(cut(llama(8, 1), Step(1, 1, 8192)).tasks, 8);
}

TEST(Cut, PartialResultsAreAFewPercentOfTheTraffic) {
  for (const DType kv : {DType::bf16, DType::fp8_e4m3})
    for (const int q_heads : {8, 32, 64})
      for (const int q_len : {1, 2, 4, 8})
        for (const int context : {1024, 4096, 16384, 131072}) {
          const Cut many = cut(llama(q_heads, 8, kv), Step(64, q_len, context), {.max_num_reqs = 64, .max_num_tokens = 512});
          EXPECT_LT(many.partial_share, many.regime == kDecode ? 0.07 : 0.13)  // pieces of 5 or 10 %, made even
              << q_heads << " heads, " << q_len << " tokens, " << context << " keys, " << to_string(kv);
        }
}

TEST(Cut, RowsDecideTheRegime) {
  EXPECT_EQ(cut(llama(), Step(3, 1, 500)).regime, kDecode);
  EXPECT_EQ(cut(llama(), Step(3, 4, 500)).regime, kDecode);  // 16 rows
  EXPECT_EQ(cut(llama(), Step(3, 5, 500)).regime, kVerify);
  EXPECT_EQ(cut(llama(), Step(3, 16, 500)).regime, kVerify);  // 64 rows
  EXPECT_EQ(cut(llama(), Step(3, 17, 500)).regime, kPrefill);
  EXPECT_EQ(cut(llama(71, 1), Step(3, 1, 500)).regime, kDecode);  // more rows than a tile, for one token
  EXPECT_EQ(cut(llama(71, 1), Step(3, 2, 500)).regime, kPrefill);
}

TEST(Cut, TheLastChunkOfALongPromptIsNotLeftToAFewMultiprocessors) {
  EXPECT_GE(cut(llama(), Step(1, 20, 131072)).tasks, 3 * 8);
  EXPECT_GE(cut(llama(), Step(1, 8, 131072)).tasks, 6 * 8);
  // What a rank of a shared-out model has to do for eight drafted tokens, or for sixteen of a prompt.
  EXPECT_GE(cut(llama(8, 1), Step(1, 8, 16384)).tasks, 10);
  EXPECT_GE(cut(llama(4, 2), Step(1, 16, 6000)).tasks, 8);
}

TEST(Cut, DependsOnTheRequestAlone) {
  for (const int q_len : {1, 6, 40})
    for (const int context : {700, 5000, 100000}) {
      const Cut alone = cut(llama(), Step(1, q_len, context)), together = cut(llama(), Step(16, q_len, context));
      EXPECT_EQ(alone.items * 16, together.items) << q_len << " tokens, " << context << " keys";
    }
}

// Items of each request, for a kernel that takes runs: pieces while there are few requests, one when there are many.
TEST(Cut, RunsKeepTheMultiprocessorsBusyWithFewItems) {
  const DeviceInfo device = describe_device("h200");
  const AttentionSpec spec = llama();
  const auto policy_of = [&](const AttentionSpec& spec) {
    std::array<Tile, kNumRegimes> tiles;
    for (const Regime regime : kRegimes) tiles[regime] = kernels_sm90.kernel(arch_of(device), spec, regime).tile;
    return gpu::cut_policy(spec, device, tiles, false)[kDecode];
  };
  const SchedulePolicy policy = policy_of(spec);
  ASSERT_TRUE(policy.runs);
  const auto items = [&](const Step& step) {
    Schedule s;
    schedule(step.view(), spec.mask, policy, s);
    std::vector<int> of(step.lens.size());
    for (const WorkItem& w : s.work) ++of[size_t(w.table)];
    return of;
  };
  EXPECT_EQ(items(Step(1, 1, 1024)), std::vector<int>{8});
  EXPECT_EQ(items(Step(1, 1, 4096)), std::vector<int>{16});
  EXPECT_EQ(items(Step(1, 1, 16384)), std::vector<int>{16});
  EXPECT_EQ(items(Step(1, 1, 131072)), std::vector<int>{32});
  EXPECT_EQ(items(Step(4, 1, 4096)), std::vector<int>(4, 4));
  EXPECT_EQ(items(Step(16, 1, 4096)), std::vector<int>(16, 1));
  EXPECT_EQ(items(Step(17, 1, 4096)), std::vector<int>(17, 4));
  EXPECT_EQ(items(Step(64, 1, 4096)), std::vector<int>(64, 1));
  for (int reqs = 1; reqs <= 256; ++reqs) {  // a task for most multiprocessors, as far as there are pieces
    for (const int context : {1024, 4096, 16384}) {
      const std::vector<int> of = items(Step(reqs, 1, context));
      const int pieces = std::min(context / 128, 16);
      EXPECT_GE(std::accumulate(of.begin(), of.end(), 0) * spec.num_kv_heads, std::min(pieces * reqs * spec.num_kv_heads, 132 / 2))
          << reqs << " of " << context;
    }
  }
  const std::vector<int> rest =
      items(Step(3 * 33 + 8, 1, 4096));  // three rounds, and eight requests that would leave most idle in a fourth
  EXPECT_EQ(std::vector<int>(rest.begin(), rest.begin() + 99), std::vector<int>(99, 1));
  EXPECT_EQ(std::vector<int>(rest.begin() + 99, rest.end()), std::vector<int>(8, 4));
  Step mixed(64, 1, 1024);
  mixed.lens[0] = 131072;
  const std::vector<int> of = items(mixed);
  EXPECT_EQ(of[0], 32);
  EXPECT_EQ(std::vector<int>(of.begin() + 1, of.end()), std::vector<int>(63, 1));
  EXPECT_EQ(policy_of(llama(32, 32)).num_workers, 8);
}

// What a rank of a tensor-parallel model has: more pieces than anybody wants to join.
TEST(Cut, FewHeadsGetLongRuns) {
  const DeviceInfo device = describe_device("h200");
  const AttentionSpec spec = llama(8, 1);
  std::array<Tile, kNumRegimes> tiles;
  for (const Regime regime : kRegimes) tiles[regime] = kernels_sm90.kernel(arch_of(device), spec, regime).tile;
  const SchedulePolicy policy = gpu::cut_policy(spec, device, tiles, false)[kDecode];
  const auto items_each = [&](int reqs, int context) {
    Schedule s;
    schedule(Step(reqs, 1, context).view(), spec.mask, policy, s);
    return s.work.size() / size_t(reqs);
  };
  EXPECT_EQ(items_each(1, 1024), 8u);
  EXPECT_EQ(items_each(1, 16384), 32u);
  EXPECT_EQ(items_each(16, 16384), 8u);
  EXPECT_EQ(items_each(64, 16384), 2u);
  EXPECT_EQ(items_each(132, 4096), 1u);
  EXPECT_EQ(items_each(264, 8192), 1u);
}

// 16 tokens of 5 to 8 q heads a kv head are two tiles of verify; other groups have one, and prefill beyond.
TEST(Cut, VerifyHasTwoTilesOfARequestWhereTheSecondIsWorthIt) {
  const DeviceInfo device = describe_device("h200");
  const auto most = [&](const AttentionSpec& spec) {
    std::array<Tile, kNumRegimes> tiles;
    for (const Regime regime : kRegimes) tiles[regime] = kernels_sm90.kernel(arch_of(device), spec, regime).tile;
    const CutPolicy policies = gpu::cut_policy(spec, device, tiles, false);
    EXPECT_EQ(policies[kPrefill].min_q, policies[kVerify].max_q + 1);
    return policies[kVerify].max_q;
  };
  EXPECT_EQ(most(llama(32, 8)), 16);
  EXPECT_EQ(most(llama(20, 4)), 24);
  EXPECT_EQ(most(llama(64, 8)), 16);
  EXPECT_EQ(most(llama(12, 1)), 10);
  AttentionSpec wide = llama(8, 1);
  wide.head_dim_qk = wide.head_dim_v = 256;
  EXPECT_EQ(most(wide), 8);
}

// Whatever rows each has: the second one to run finds in L2 what the first has read.
TEST(Cut, TilesOfARequestStandTogether) {
  const DeviceInfo device = describe_device("h100");
  constexpr int kReqs = 8, kKeys = 16384;
  for (const int group : {5, 6, 7, 8}) {
    const AttentionSpec spec = llama(4 * group, 4);
    std::array<Tile, kNumRegimes> tiles;
    for (const Regime regime : kRegimes) tiles[regime] = kernels_sm90.kernel(arch_of(device), spec, regime).tile;
    const SchedulePolicy policy = gpu::cut_policy(spec, device, tiles, false)[kVerify];
    for (int q_len = policy.tile_q + 1; q_len <= policy.max_q; ++q_len) {
      Schedule s;
      schedule(Step(kReqs, q_len, kKeys).view(), spec.mask, policy, s);
      std::map<std::pair<int, int>, std::vector<int>> places;  // of a request's tasks that begin with the same key
      for (int i = 0; i < int(s.work.size()); ++i) places[{s.work[size_t(i)].table, s.work[size_t(i)].kv_begin}].push_back(i);
      for (const auto& [task, at] : places) {
        ASSERT_EQ(at.size(), 2u);
        EXPECT_LE((at[1] - at[0]) * spec.num_kv_heads, device.num_workers) << group << ": " << q_len << " tokens";
      }
    }
  }
}

// Pieces depend on the tokens of the whole request, which a tile has only some of.
TEST(Cut, ChunksBesideEachOtherFillTheMultiprocessors) {
  const DeviceInfo device = describe_device("h200");
  AttentionSpec narrow = llama(4, 2);
  narrow.head_dim_qk = narrow.head_dim_v = 256;
  AttentionSpec window = narrow;
  window.mask.window_left = 1023;
  struct {
    AttentionSpec spec;
    int requests, context, least_blocks;
  } const kSteps[] = {{llama(4, 1), 2, 8192, 120}, {llama(4, 4), 2, 8192, 120}, {narrow, 2, 8192, 120}, {window, 1, 4096, 32}};
  for (const auto& [spec, requests, context, least_blocks] : kSteps) {
    std::array<Tile, kNumRegimes> tiles;
    for (const Regime regime : kRegimes) tiles[regime] = kernels_sm90.kernel(arch_of(device), spec, regime).tile;
    Schedule s;
    schedule(Step(requests, 512, context).view(), spec.mask, gpu::cut_policy(spec, device, tiles, false)[kPrefill], s);
    EXPECT_GE(int(s.work.size()) * spec.num_kv_heads, least_blocks) << spec.str();
  }
}

// Chunks and extends of a GPU's share of a model in cuda_sm90's prefill: pieces alone, runs of them beside others.
TEST(Cut, PrefillMakesRunsWhereOthersKeepTheMultiprocessorsBusy) {
  const DeviceInfo device = describe_device("h200");
  const auto prefill = [&](const AttentionSpec& spec, const Step& step) {
    std::array<Tile, kNumRegimes> tiles;
    for (const Regime regime : kRegimes) tiles[regime] = kernels_sm90.kernel(arch_of(device), spec, regime).tile;
    const CutPolicy policies = gpu::cut_policy(spec, device, tiles, false);
    EXPECT_LE(policies[kPrefill].max_splits, policies[kPrefill].most_in_run) << "pieces for which an item has no run";
    Schedule s;
    schedule(step.view(), spec.mask, policies[kPrefill], s);
    return s;
  };
  struct {
    AttentionSpec spec;
    int q_len, seq_len, least_tasks;
  } const kSteps[] = {{llama(4, 1), 512, 8192, 128}, {llama(8, 2), 512, 8192, 64}, {llama(4, 4), 512, 8192, 64},
                      {llama(12, 1), 24, 6000, 16},  {llama(24, 8), 48, 6000, 32}, {llama(8, 1, DType::fp8_e4m3), 512, 8192, 120}};
  for (const auto& [spec, q_len, seq_len, least_tasks] : kSteps) {
    const std::string what = spec.str() + ", " + std::to_string(q_len) + " tokens";
    const Schedule alone = prefill(spec, Step(1, q_len, seq_len)), many = prefill(spec, Step(200, q_len, seq_len));
    EXPECT_GE(int(alone.work.size()) * spec.num_kv_heads, least_tasks) << what;
    EXPECT_GT(alone.merges.size(), 0u) << what;
    const auto whole = std::ranges::count_if(many.work, [](const WorkItem& w) { return w.partial < 0 && w.piece > 0; });
    EXPECT_GE(whole, std::ssize(many.work) * 3 / 5) << what;
  }
  EXPECT_TRUE(prefill(llama(), Step(1, 4096, 8192)).merges.empty()) << "enough rows";
}

TEST(Cut, MemoryIsBounded) {
  const DeviceInfo device = describe_device("h200");
  for (const auto& [q_heads, kv_heads] : {std::pair{32, 8}, {64, 8}, {8, 1}, {32, 32}, {71, 1}, {128, 8}})
    for (const PlanLimits& limits : {PlanLimits{}, PlanLimits{.max_num_reqs = 256, .max_num_tokens = 256, .max_query_len = 1}}) {
      const AttentionSpec spec = llama(q_heads, kv_heads);
      std::array<Tile, kNumRegimes> tiles;
      for (const AttentionKernels* kernels : {&kernels_sm80, &kernels_sm90}) {
        for (const Regime regime : kRegimes) tiles[regime] = kernels->kernel(arch_of(device), spec, regime).tile;
        const CutPolicy policies = gpu::cut_policy(spec, device, tiles, false);
        const int64_t rows = partial_rows_bound(policies, limits);
        const double mib = double(rows) * q_heads * (128 + 2) * 4 / (1 << 20);
        const bool takes_runs = std::ranges::all_of(tiles, &Tile::runs);
        EXPECT_LT(mib, takes_runs ? 56 : 700) << kernels->backend << ", " << q_heads << "/" << kv_heads;
        if (limits.max_query_len == 1) {
          EXPECT_EQ(schedule_bounds(policies[kPrefill], limits).num_work, 0);
        }
      }
    }
}

// 16384 keys of a head with their values are 8 MiB, of which an H200's L2 holds four beside the rest.
TEST(Cut, HeadsStandTogetherAsL2HasRoom) {
  const DeviceInfo h200 = describe_device("h200");
  AttentionSpec spec = llama();
  const auto heads = [&](long keys, const DeviceInfo& device = describe_device("h200")) {
    return heads_in_l2(gpu::keys_in_l2(spec, device, kPrefill), keys, spec.num_kv_heads);
  };
  EXPECT_EQ(heads(16384), 4);
  EXPECT_EQ(heads(16384, describe_device("a100")), 2);  // there is room for three, of which the last group would have two
  EXPECT_EQ(heads(1000), 8);
  EXPECT_EQ(heads(1 << 30), 1);
  EXPECT_EQ(gpu::keys_in_l2(spec, h200, kDecode), 0);
  spec.mask.causal = false;
  EXPECT_EQ(heads(1000), 1);  // one length: nothing to even out
}

TEST(Cut, ByLoadGivesAnEqualShareToEach) {
  const DeviceInfo device = describe_device("h200");
  const AttentionSpec spec = llama();
  std::array<Tile, kNumRegimes> tiles;
  for (const Regime regime : kRegimes) tiles[regime] = kernels_sm80.kernel(arch_of(device), spec, regime).tile;
  const CutPolicy policies = gpu::cut_policy(spec, device, tiles, true);
  Schedule s;
  Step step(63, 1, 1024);
  step.lens.back() = 131072;
  schedule(step.view(), spec.mask, policies[kDecode], s);
  const auto longest = std::max_element(s.work.begin(), s.work.end(),
                                        [](const WorkItem& a, const WorkItem& b) { return a.kv_end - a.kv_begin < b.kv_end - b.kv_begin; });
  const int share = (62 * 1024 + 131072) / 33;
  EXPECT_LE(longest->kv_end - longest->kv_begin, share + 4 * 64);  // short requests cost more than their keys, which others compute
}

}  // namespace
}  // namespace imbrex::cuda
