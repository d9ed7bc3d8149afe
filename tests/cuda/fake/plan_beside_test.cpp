// Which kernels of a run may begin beside the one in front of them, and which masks are packed in front. On the fake driver.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver/memory.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "cuda/graph.h"
#include "cuda/params.h"
#include "imbrex/select.h"

namespace imbrex::cuda {
namespace {

constexpr int kDim = 128, kWidth = 300, kTokens = 2000;

struct Launched {
  std::string entry;
  bool beside, next_waits;
  friend bool operator==(const Launched&, const Launched&) = default;
};
void PrintTo(const Launched& l, std::ostream* to) {
  *to << l.entry << (l.beside ? " beside" : " waits") << (l.next_waits ? ", lets the next in at once" : "");
}

class PlanBeside : public testing::Test {
 protected:
  ~PlanBeside() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }

  using Requests = std::vector<std::pair<int, int>>;  // query tokens and keys
  std::vector<Launched> launches_of(const Requests& requests, bool captured = false) {
    fake::run_on_host(spec);
    std::vector<Launched> seen;
    fake::state().on_launch = [&](const fake::Launch& launch) {
      if (!launch.entry.starts_with("attention") && launch.entry != "pack_mask") return;
      AttentionParams p;
      std::memcpy(&p, launch.all_params.at(0).data(), sizeof p);
      seen.push_back({launch.entry, p.beside, p.next_waits});
    };
    std::vector<int32_t> starts{0}, lens;
    int64_t mask_bytes = 0;
    for (const auto& [q_len, seq_len] : requests) {
      starts.push_back(starts.back() + q_len), lens.push_back(seq_len);
      mask_bytes += int64_t(q_len) * seq_len;
    }
    const std::vector<int32_t> table(requests.size() * kWidth);
    const std::vector<uint8_t> mask(static_cast<size_t>(mask_bytes), 1);
    Batch batch{.query_start_loc = starts, .seq_lens = lens};
    batch.block_table = TensorView::contiguous(const_cast<int32_t*>(table.data()), DType::i32, {int64_t(requests.size()), kWidth});
    if (spec.mask.custom) batch.custom_mask = TensorView::contiguous(const_cast<uint8_t*>(mask.data()), DType::u8, {mask_bytes});
    const auto plan = find_backend("cuda_sm90")
                          ->plan(spec, probe_cuda().at(0),
                                 {.limits = {.max_num_reqs = 8,
                                             .max_num_tokens = kTokens,
                                             .max_seq_len = kWidth * spec.block_size,
                                             .min_query_len = min_query_len},
                                  .threads = {}});
    plan->update(batch, stream.get());
    const auto pages = [&] {
      return TensorView::contiguous(memory.as<char>(), spec.kv_dtype, {8, spec.block_size, spec.num_kv_heads, kDim}, gpu);
    };
    const auto run = [&] {
      plan->run({.q = TensorView::contiguous(memory.as<char>(), spec.q_dtype, {kTokens, spec.num_q_heads, kDim}, gpu),
                 .q_scale = {},
                 .kv = {.k = pages(), .v = pages(), .k_scale = {}, .v_scale = {}}},
                {.out = TensorView::contiguous(memory.as<char>(), spec.out_dtypes()[0], {kTokens, spec.num_q_heads, kDim}, gpu)},
                stream.get());
    };
    if (captured) {
      test::Graph(stream.get(), run).replay();
    } else {
      run();
    }
    stream.synchronize();
    return seen;
  }

  int min_query_len = 0;
  AttentionSpec spec{.num_q_heads = 8, .num_kv_heads = 2, .head_dim_qk = kDim, .head_dim_v = kDim};
  ContextPtr context = Context::of_device(0);
  CurrentContext current{*context};
  OwnedStream stream{context};
  DeviceBuffer memory{context, size_t(kTokens) * 8 * kDim * sizeof(float)};
  Device gpu{DeviceType::cuda, 0};
};

// Each launch but the last lets the next one begin beside it, once it has waited for what came before; what follows the last one waits.
TEST_F(PlanBeside, DecodeBeginsBesidePrefill) {
  EXPECT_EQ(launches_of({{1, 300}, {500, 900}}),
            (std::vector<Launched>{{"attention_sm90", false, false}, {"attention_sm90_decode", true, true}}));
  EXPECT_EQ(launches_of({{1, 300}}), (std::vector<Launched>{{"attention_sm90_decode", false, true}}));
  EXPECT_EQ(launches_of({{500, 900}}), (std::vector<Launched>{{"attention_sm90", false, true}}));
}

// Verify and prefill both fold runs of pieces, each in memory of its own.
TEST_F(PlanBeside, VerifyBeginsBesidePrefill) {
  EXPECT_EQ(launches_of({{1, 300}, {8, 300}, {500, 900}}),
            (std::vector<Launched>{
                {"attention_sm90", false, false}, {"attention_sm90_verify", true, false}, {"attention_sm90_decode", true, true}}));
  EXPECT_EQ(launches_of({{1, 300}, {8, 300}}),
            (std::vector<Launched>{{"attention_sm90_verify", false, false}, {"attention_sm90_decode", true, true}}));
}

// In a graph each kernel is a branch, of which the fake driver takes the last one first.
TEST_F(PlanBeside, GraphsHaveBranches) {
  EXPECT_EQ(launches_of({{1, 300}, {500, 900}}, true),
            (std::vector<Launched>{
                {"attention_sm90", false, true}, {"attention_sm90_verify", false, true}, {"attention_sm90_decode", false, true}}));
}

TEST_F(PlanBeside, GraphsHoldWhatTheLimitsAllow) {
  min_query_len = 8;
  EXPECT_EQ(launches_of({{8, 300}}, true),
            (std::vector<Launched>{{"attention_sm90", false, true}, {"attention_sm90_verify", false, true}}));
}

TEST_F(PlanBeside, MasksArePackedForPrefillAlone) {
  spec.mask.custom = true;
  const std::vector<Launched> masked = launches_of({{1, 300}, {500, 900}});
  ASSERT_EQ(masked.size(), 3u);
  EXPECT_EQ(masked[0].entry, "pack_mask");
  EXPECT_EQ(masked[1].entry, "attention_sm90");
  EXPECT_EQ(launches_of({{1, 300}}).front().entry, "attention_sm90_decode");
  spec.score.soft_cap = 20.f;
  EXPECT_EQ(launches_of({{500, 900}}).front().entry, "pack_mask");  // 128 dims have registers for both
}

}  // namespace
}  // namespace imbrex::cuda
