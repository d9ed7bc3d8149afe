// Runs of pieces in a plan's lists: from a lone request to many, the same lists whether the lengths are on the host or on the device. On
// the fake driver.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "cuda/driver/memory.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "cuda/plan/plan.h"
#include "imbrex/device.h"

namespace imbrex::cuda {
namespace {

constexpr Device kGpu{DeviceType::cuda, 0};
// kMostReqs is as many as leave each worker of the GPU one request, which it then computes whole.
constexpr int kKeys = 8192, kBlockSize = 16, kMostReqs = 132, kHeads = 4, kKvHeads = 2, kDimK = 16, kDimV = 8;

// cuda_sm80, if its kernels took runs where they join pieces.
RegimeKernel kernel_with_runs(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  RegimeKernel kernel = kernels_sm80.kernel(arch, spec, regime);
  kernel.tile.runs = kernel.joins_pieces;
  return kernel;
}

struct Lists {
  std::vector<WorkItem> work;
  std::vector<MergeItem> merges;
};

class PlanRuns : public testing::Test {
 protected:
  ~PlanRuns() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }
  void SetUp() override {
    kernels.kernel = kernel_with_runs;
    fake::run_on_host(spec);
    const auto run = fake::state().on_launch;
    fake::state().on_launch = [this, run](const fake::Launch& launch) {
      if (launch.entry == "plan_batch") return run(launch);
      AttentionParams p;
      std::memcpy(&p, launch.all_params.at(0).data(), sizeof p);
      if (launch.entry != "attention_sm80" || p.counts->num_work == 0) return;
      seen.push_back({{p.work, p.work + p.counts->num_work}, {p.merges, p.merges + p.counts->num_merges}});
    };
  }
  template <class T>
  TensorView upload(const std::vector<T>& values, DType dtype, std::initializer_list<int64_t> sizes) {
    kept.emplace_back(context, values.size() * sizeof(T));
    copy_to_device(kept.back().address(), values.data(), kept.back().bytes(), nullptr);
    return TensorView::contiguous(kept.back().as<void>(), dtype, sizes, kGpu);
  }
  TensorView floats(std::initializer_list<int64_t> sizes) {
    const int64_t count = std::accumulate(sizes.begin(), sizes.end(), int64_t(1), std::multiplies<>());
    return upload(std::vector<float>(size_t(count)), DType::f32, sizes);
  }

  // The list that the requests' regime is run with; each has q_len tokens.
  Lists lists_of(int reqs, int q_len, bool on_device) {
    std::vector<int32_t> starts(size_t(reqs) + 1), lens(size_t(reqs), kKeys);
    for (int r = 0; r <= reqs; ++r) starts[size_t(r)] = r * q_len;
    const int tokens = reqs * q_len, blocks = kKeys / kBlockSize;
    const TensorView table = upload(std::vector<int32_t>(size_t(reqs) * size_t(blocks)), DType::i32, {reqs, blocks});
    const PlanOptions options{.limits = limits, .threads = {}, .on_device = on_device};
    Plan plan(kernels, spec, probe_cuda().at(0), options);
    if (on_device) {
      plan.update_on_device({.query_start_loc = upload(starts, DType::i32, {reqs + 1}),
                             .seq_lens = upload(lens, DType::i32, {reqs}),
                             .block_table = table,
                             .max_num_tokens = tokens},
                            {});
    } else {
      Batch batch;
      batch.query_start_loc = starts, batch.seq_lens = lens, batch.block_table = table;
      plan.update(batch, {});
    }
    seen.clear();
    const TensorView k = floats({1, kBlockSize, kKvHeads, kDimK}), v = floats({1, kBlockSize, kKvHeads, kDimV});
    plan.run({.q = floats({tokens, kHeads, kDimK}), .kv = {.k = k, .v = v, .k_scale = {}, .v_scale = {}}},
             {.out = floats({tokens, kHeads, kDimV}), .lse = {}}, {});
    fake::state().launches.clear();
    kept.clear();  // the driver waits for what was launched
    EXPECT_EQ(seen.size(), 1u);
    return seen.empty() ? Lists{} : seen[0];
  }

  AttentionKernels kernels = kernels_sm80;
  AttentionSpec spec{.num_q_heads = kHeads,
                     .num_kv_heads = kKvHeads,
                     .head_dim_qk = kDimK,
                     .head_dim_v = kDimV,
                     .q_dtype = DType::f32,
                     .kv_dtype = DType::f32};
  PlanLimits limits{.max_num_reqs = kMostReqs, .max_num_tokens = 1024, .max_seq_len = kKeys};
  ContextPtr context = Context::of_device(0);
  CurrentContext current{*context};
  std::vector<DeviceBuffer> kept;
  std::vector<Lists> seen;
};

TEST_F(PlanRuns, AreAsLongAsTheLoadAllowsWhereverLengthsAre) {
  for (const int q_len : {1, 5}) {
    std::vector<size_t> items;  // of a request
    for (const int reqs : {1, 95, kMostReqs}) {
      const Lists host = lists_of(reqs, q_len, false), device = lists_of(reqs, q_len, true);
      ASSERT_EQ(host.work.size(), device.work.size());
      ASSERT_EQ(host.merges.size(), device.merges.size());
      EXPECT_EQ(std::memcmp(host.work.data(), device.work.data(), host.work.size() * sizeof(WorkItem)), 0);
      if (!host.merges.empty()) {
        EXPECT_EQ(std::memcmp(host.merges.data(), device.merges.data(), host.merges.size() * sizeof(MergeItem)), 0);
      }
      items.push_back(host.work.size() / size_t(reqs));
    }
    EXPECT_GT(items[0], items[1]) << q_len;
    EXPECT_GT(items[1], 1u) << q_len;
    EXPECT_EQ(items[2], 1u) << q_len;
  }
}

}  // namespace
}  // namespace imbrex::cuda
