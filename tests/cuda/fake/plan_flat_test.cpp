// Prefill over flat keys (cuda/attention/flat_kv.h) as a plan launches it: when, for which heads at a time, and what is left of it where it
// may not or cannot be. On the fake driver.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "cuda/driver/memory.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "cuda/graph.h"
#include "cuda/params.h"
#include "imbrex/select.h"

namespace imbrex::cuda {
namespace {

constexpr int kFlatDim = 128, kMostKeys = 200000;

struct FlatSeen {
  std::string entry;
  int blocks;  // of flat keys
  unsigned cluster;
  int first_kv_head, kv_heads, num_work;
};

class PlanFlat : public testing::Test {
 protected:
  ~PlanFlat() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }

  void make(AttentionSpec of) {
    spec = of;
    fake::run_on_host(spec);
    fake::state().on_launch = [this](const fake::Launch& launch) {
      FlatSeen s{launch.entry, 0, launch.cluster, 0, 0, 0};
      if (launch.entry == "flatten_kv") {
        FlattenKvParams p;
        std::memcpy(&p, launch.all_params.at(0).data(), sizeof p);
        s.blocks = p.num_blocks_now != nullptr ? *p.num_blocks_now : p.num_blocks;
        s.first_kv_head = p.first_kv_head, s.kv_heads = p.num_heads;
        requests.assign(p.requests, p.requests + s.blocks);
        starts.assign(p.flat_start, p.flat_start + num_reqs);
        first_keys.assign(p.first_keys, p.first_keys + num_reqs);
      } else if (launch.entry == "attention_sm90" || launch.entry == "attention_sm90_fp8") {
        AttentionParams p;
        std::memcpy(&p, launch.all_params.at(0).data(), sizeof p);
        s.first_kv_head = p.first_kv_head, s.kv_heads = p.kv_heads_now, s.num_work = p.counts->num_work;
      } else {
        return;
      }
      seen.push_back(s);
    };
    plan = find_backend("cuda_sm90")
               ->plan(spec, probe_cuda().at(0),
                      {.limits = {.max_num_reqs = 4, .max_num_tokens = 4000, .max_seq_len = kMostKeys}, .threads = {}});
  }
  void update(const std::vector<int32_t>& q_lens, const std::vector<int32_t>& seq_lens) {
    num_reqs = q_lens.size();
    std::vector<int32_t> query_start{0};
    for (const int32_t n : q_lens) query_start.push_back(query_start.back() + n);
    const int width = kMostKeys / spec.block_size;
    std::vector<int32_t> table(size_t(num_reqs) * size_t(width));
    Batch batch{.query_start_loc = query_start, .seq_lens = seq_lens};
    batch.block_table = TensorView::contiguous(table.data(), DType::i32, {int64_t(num_reqs), width});
    plan->update(batch, stream.get());
  }
  void run() {
    seen.clear();
    plan->run(in(0), {.out = TensorView::contiguous(memory.as<char>(), spec.out_dtypes()[0], {4000, spec.num_q_heads, kFlatDim}, gpu)},
              stream.get());
    stream.synchronize();
  }
  // No kernel runs, so no tensor is read.
  Inputs in(int64_t key_offset) {
    const auto pages = [&] {
      return TensorView::contiguous(memory.as<char>() + key_offset, spec.kv_dtype, {8, spec.block_size, spec.num_kv_heads, kFlatDim}, gpu);
    };
    return {.q = TensorView::contiguous(memory.as<char>(), spec.q_dtype, {4000, spec.num_q_heads, kFlatDim}, gpu),
            .q_scale = {},
            .kv = {.k = pages(), .v = pages(), .k_scale = {}, .v_scale = {}}};
  }

  const Device gpu{DeviceType::cuda, 0};
  ContextPtr context = Context::of_device(0);
  CurrentContext current{*context};
  OwnedStream stream{context};
  DeviceBuffer memory{context, 4096};
  AttentionSpec spec;
  std::unique_ptr<imbrex::Plan> plan;
  size_t num_reqs = 0;
  std::vector<FlatSeen> seen;
  std::vector<int> requests, first_keys;
  std::vector<long> starts;
};

AttentionSpec bytes_of(int q_heads, int kv_heads, int page = 16) {
  return {.num_q_heads = q_heads,
          .num_kv_heads = kv_heads,
          .head_dim_qk = kFlatDim,
          .head_dim_v = kFlatDim,
          .kv_dtype = DType::fp8_e4m3,
          .block_size = page};
}

TEST_F(PlanFlat, OnceForManyRows) {
  make(bytes_of(8, 2));
  update({600, 1, 500}, {2000, 900, 501});
  EXPECT_NE(plan->str().find("prefill over 2560 keys made flat 2 kv heads at a time"), std::string::npos) << plan->str();
  run();
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen[0].entry, "flatten_kv");
  EXPECT_EQ(seen[0].blocks, 40);
  EXPECT_EQ(seen[0].kv_heads, 2);
  EXPECT_EQ(seen[1].cluster, 2u);  // whatever the cache needs
  EXPECT_EQ(seen[1].kv_heads, 2);
  EXPECT_EQ(std::ranges::count(requests, 0), 32);
  EXPECT_EQ(std::ranges::count(requests, 2), 8);
  EXPECT_EQ(starts[0], 0);
  EXPECT_EQ(starts[2], 2048);

  update({64, 1, 50}, {2000, 900, 501});  // few rows read a key
  run();
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(seen[0].cluster, 1u);
}

TEST_F(PlanFlat, AWindowLeavesKeysOut) {
  AttentionSpec windowed = bytes_of(8, 2);
  windowed.mask.window_left = 499;
  make(windowed);
  update({600, 1, 0, 600}, {2000, 900, 7, 600});
  run();
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(std::ranges::count(requests, 0), 18);  // from key 896, where the tile of the first that is seen begins
  EXPECT_EQ(starts[0], -896);
  EXPECT_EQ(first_keys, (std::vector<int>{901, 0, 0, 0}));  // blocks in front of it may be gone
  EXPECT_EQ(starts[3], 18 * kFlatRows);
}

TEST_F(PlanFlat, SomeHeadsAtATimeWhereThereIsNoRoomForAll) {
  make(bytes_of(32, 8));
  update({600, 400}, {30000, 5000});
  run();
  ASSERT_EQ(seen.size(), 8u);
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].entry, i % 2 == 0 ? "flatten_kv" : "attention_sm90");
    EXPECT_EQ(seen[i].first_kv_head, int(i) / 2 * 2);
    EXPECT_EQ(seen[i].kv_heads, 2);
    if (i % 2 == 1) {
      EXPECT_EQ(seen[i].num_work, seen[1].num_work);
    }
  }
  update({600, 400}, {70000, 5000});  // not for two heads, which a cluster has together
  run();
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(seen[0].kv_heads, 8);
  EXPECT_EQ(seen[0].cluster, 1u);
}

TEST_F(PlanFlat, SmallPagesOfBytesNeedFewRows) {
  make(bytes_of(8, 2, 1));
  update({70}, {2000});
  run();
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen[0].entry, "flatten_kv");
}

// Queries in e4m3 over small pages: bytes stay bytes, of which twice as many keys have room. Over larger ones TMA reads the cache.
TEST_F(PlanFlat, BytesForQueriesOfBytes) {
  AttentionSpec of = bytes_of(32, 8, 1);
  of.q_dtype = DType::fp8_e4m3;
  make(of);
  update({600, 400}, {30000, 5000});
  run();
  ASSERT_EQ(seen.size(), 4u);
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].entry, i % 2 == 0 ? "flatten_kv" : "attention_sm90_fp8");
    EXPECT_EQ(seen[i].first_kv_head, int(i) / 2 * 4);
    EXPECT_EQ(seen[i].kv_heads, 4);
    if (i % 2 == 1) {
      EXPECT_EQ(seen[i].cluster, 2u);
    }
  }
  update({64, 50}, {2000, 501});  // few rows read a key
  run();
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(seen[0].entry, "attention_sm90_fp8");
  EXPECT_EQ(seen[0].cluster, 1u);
  of.block_size = 8;
  make(of);
  update({600, 400}, {30000, 5000});
  run();
  ASSERT_EQ(seen.size(), 1u);
}

// A graph holds prefill twice, and a step has work for one of them: over flat keys where they are worth it and all heads have room.
TEST_F(PlanFlat, AGraphHasBoth) {
  make(bytes_of(16, 4));
  update({1}, {900});
  const Outputs out{.out = TensorView::contiguous(memory.as<char>(), spec.q_dtype, {4000, spec.num_q_heads, kFlatDim}, gpu)};
  const test::Graph graph(stream.get(), [&] { plan->run(in(0), out, stream.get()); });
  const auto replay = [&] {
    seen.clear();
    graph.replay();
    stream.synchronize();
    ASSERT_EQ(seen.size(), 3u);
    EXPECT_EQ(seen[0].cluster, 1u) << "over the cache";
    EXPECT_EQ(seen[1].entry, "flatten_kv");
    EXPECT_EQ(seen[1].kv_heads, 4);
    EXPECT_EQ(seen[2].entry, "attention_sm90");
    EXPECT_EQ(seen[2].cluster, 2u) << "over flat keys";
  };
  const auto expect_flat = [&](int blocks) {
    replay();
    EXPECT_EQ(seen[0].num_work, 0);
    EXPECT_EQ(seen[1].blocks, blocks);
    EXPECT_GT(seen[2].num_work, 0);
  };
  const auto expect_cache = [&](bool any) {
    replay();
    EXPECT_EQ(seen[0].num_work > 0, any);
    EXPECT_EQ(seen[1].blocks, 0);
    EXPECT_EQ(seen[2].num_work, 0);
  };
  expect_cache(false);
  update({600, 1, 500}, {2000, 900, 501});
  expect_flat(40);
  EXPECT_EQ(std::ranges::count(requests, 2), 8);
  const int work = seen[2].num_work;
  run();  // eagerly, beside it
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen[1].num_work, work);
  expect_flat(40);
  update({64, 1, 50}, {2000, 900, 501});  // few rows read a key
  expect_cache(true);
  update({600}, {32768});  // as many as there is room for
  expect_flat(512);
  update({600}, {32769});
  expect_cache(true);
  run();
  EXPECT_EQ(seen.size(), 4u) << "two heads at a time";
}

// Heads are taken as many at a time as the step takes them that is captured; another graph may have room for less.
TEST_F(PlanFlat, AGraphTakesHeadsAsItsStepDoes) {
  make(bytes_of(16, 4));
  const Outputs out{.out = TensorView::contiguous(memory.as<char>(), spec.q_dtype, {4000, spec.num_q_heads, kFlatDim}, gpu)};
  const auto capture = [&] { return test::Graph(stream.get(), [&] { plan->run(in(0), out, stream.get()); }); };
  const auto replay = [&](const test::Graph& graph) {
    seen.clear();
    graph.replay();
    stream.synchronize();
  };
  update({600}, {40000});
  const test::Graph graph = capture();
  const auto expect_rounds = [&](bool flat) {
    replay(graph);
    ASSERT_EQ(seen.size(), 5u);
    EXPECT_EQ(seen[0].num_work > 0, !flat);
    for (const size_t i : {1, 3}) {
      EXPECT_EQ(seen[i].first_kv_head, int(i) - 1);
      EXPECT_EQ(seen[i].kv_heads, 2);
      EXPECT_EQ(seen[i].blocks > 0, flat);
      EXPECT_EQ(seen[i + 1].num_work > 0, flat);
    }
  };
  expect_rounds(true);
  update({600, 500}, {1000, 501});  // would fit as a whole
  expect_rounds(true);
  update({600}, {65536});  // as many as there is room for
  expect_rounds(true);
  update({600}, {65537});
  expect_rounds(false);
  update({1}, {900});
  const test::Graph for_fewer = capture();  // all heads at a time
  update({600}, {40000});
  expect_rounds(false);
  replay(for_fewer);
  ASSERT_EQ(seen.size(), 3u);
  EXPECT_GT(seen[0].num_work, 0);
  EXPECT_EQ(seen[1].blocks, 0);
  update({600}, {32768});
  expect_rounds(true);
}

TEST_F(PlanFlat, OnlyWhereQueriesMayBeLongEnough) {
  const auto launches = [&](int max_query_len) {
    make(bytes_of(8, 2));
    plan = find_backend("cuda_sm90")
               ->plan(spec, probe_cuda().at(0),
                      {.limits = {.max_num_reqs = 4, .max_num_tokens = 4000, .max_seq_len = kMostKeys, .max_query_len = max_query_len},
                       .threads = {}});
    update({max_query_len}, {max_query_len});
    run();
    return seen.size();
  };
  EXPECT_EQ(launches(162), 1u);  // 648 rows of a kv head
  EXPECT_EQ(launches(163), 2u);
}

TEST_F(PlanFlat, OnlyOfRowsThatCanBeReadSoWide) {
  make(bytes_of(8, 2));
  update({600}, {2000});
  seen.clear();
  plan->run(in(4), {.out = TensorView::contiguous(memory.as<char>(), spec.q_dtype, {4000, spec.num_q_heads, kFlatDim}, gpu)}, stream.get());
  stream.synchronize();
  EXPECT_TRUE(seen.empty()) << "cuda_sm80's kernel";
}

}  // namespace
}  // namespace imbrex::cuda
