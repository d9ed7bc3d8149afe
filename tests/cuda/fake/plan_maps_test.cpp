// Plans with a kernel that loads through tensor maps: which kernel runs what, when maps are made, and what runs where they cannot be. On
// the fake driver.
#include <gtest/gtest.h>

#include <cstring>

#include "cuda/driver/memory.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "cuda/params.h"
#include "expect_error.h"
#include "imbrex/select.h"

namespace imbrex::cuda {
namespace {

using imbrex::test::error_code;
constexpr Device kGpu{DeviceType::cuda, 0};
constexpr int kBlocks = 40, kBlockSize = 64, kHeads = 8, kKvHeads = 2, kDim = 64, kTokens = 64;

AttentionSpec mapped_spec() {
  return {.num_q_heads = kHeads, .num_kv_heads = kKvHeads, .head_dim_qk = kDim, .head_dim_v = kDim, .block_size = kBlockSize};
}

// The kernel of a launch, and the work that it was given.
struct Seen {
  std::string kernel;
  unsigned grid = 0, threads = 0;
  int heads_together = 0;
  std::vector<int> work;
};

class PlanMaps : public testing::Test {
 protected:
  PlanMaps() {
    fill_bytes(memory.address(), 0, memory.bytes(), nullptr);
    fake::run_on_host(spec);
    fake::state().on_launch = [this](const fake::Launch& launch) {
      if (!launch.entry.starts_with("attention")) return;
      AttentionParams p;
      std::memcpy(&p, launch.all_params.at(0).data(), sizeof p);
      std::vector<int> work(sizeof(WorkItem) / sizeof(int) * size_t(p.counts->num_work));
      std::memcpy(work.data(), p.work, work.size() * sizeof(int));
      seen.push_back({launch.module, launch.grid_x, launch.threads, p.counts->heads_together, std::move(work)});
    };
    in.q = TensorView::contiguous(memory.as<char>(), DType::bf16, {kTokens, kHeads, kDim}, kGpu);
    in.kv.k = TensorView::contiguous(memory.as<char>() + (1 << 18), DType::bf16, {kBlocks, kBlockSize, kKvHeads, kDim}, kGpu);
    in.kv.v = in.kv.k;
    out.out = TensorView::contiguous(memory.as<char>() + (2 << 20), DType::bf16, {kTokens, kHeads, kDim}, kGpu);
  }
  ~PlanMaps() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }

  std::unique_ptr<imbrex::Plan> plan_of(const char* backend, bool load_on_demand = false) {
    const PlanLimits limits{.max_num_reqs = 4, .max_num_tokens = kTokens, .max_seq_len = kBlocks * kBlockSize};
    return find_backend(backend)->plan(spec, probe_cuda().at(0), {.limits = limits, .threads = {}, .load_on_demand = load_on_demand});
  }
  // One request of so many query tokens, the last of kBlocks * kBlockSize keys.
  void update(imbrex::Plan& plan, int q_len) {
    const std::vector<int32_t> starts{0, q_len}, lens{kBlocks * kBlockSize};
    std::vector<int32_t> table;
    for (int b = 0; b < kBlocks; ++b) table.push_back(kBlocks - 1 - b);
    Batch batch;
    batch.query_start_loc = starts;
    batch.seq_lens = lens;
    batch.block_table = TensorView::contiguous(table.data(), DType::i32, {1, kBlocks});
    plan.update(batch, stream.get());
  }
  // The launches of one run.
  std::vector<Seen> launches_of(const imbrex::Plan& plan) {
    seen.clear();
    plan.run(in, out, stream.get());
    stream.synchronize();
    return seen;
  }
  std::string capture(const imbrex::Plan& plan) {
    CUgraph graph = nullptr;
    need_driver().cuStreamBeginCapture_v2(stream.get(), kCaptureThreadLocal);
    const std::string code = error_code([&] { plan.run(in, out, stream.get()); });
    need_driver().cuStreamEndCapture(stream.get(), &graph);
    need_driver().cuGraphDestroy(graph);
    return code;
  }

  AttentionSpec spec = mapped_spec();
  ContextPtr context = Context::of_device(0);
  CurrentContext current{*context};
  OwnedStream stream{context};
  DeviceBuffer memory{context, 4 << 20};
  Inputs in;
  Outputs out;
  std::vector<Seen> seen;
};

bool starts_with(const Seen& s, std::string_view kernel) { return s.kernel.starts_with(kernel); }

TEST_F(PlanMaps, EachRegimeHasAKernelAndItsMaps) {
  const auto sm90 = plan_of("cuda_sm90");
  for (const int q_len : {1, 4, 5, 16, 17, 40}) {  // 4 and 16 tokens fill the tiles of decode and verify
    update(*sm90, q_len);
    const int maps = fake::state().maps;
    const auto seen = launches_of(*sm90);
    ASSERT_EQ(seen.size(), 1u);
    EXPECT_FALSE(seen[0].work.empty());
    const char* const kernel = q_len <= 4 ? "attention_sm90_decode.cu" : q_len <= 16 ? "attention_sm90_verify.cu" : "attention_sm90.cu";
    EXPECT_TRUE(starts_with(seen[0], kernel)) << seen[0].kernel;
    EXPECT_EQ(seen[0].heads_together, q_len <= 16 ? 1 : kKvHeads);  // L2 holds the keys of all
    EXPECT_EQ(fake::state().maps, maps + (q_len <= 4 ? 2 : 3));
  }
}

// A plan for outputs of one type loads no kernels for others, and says so when it is given one.
TEST_F(PlanMaps, OutputsOfOneTypeNeedNoOtherKernels) {
  const auto loads_of = [&](std::optional<DType> type) {
    const int before = fake::state().library_loads;
    const PlanLimits limits{.max_num_reqs = 4, .max_num_tokens = kTokens, .max_seq_len = kBlocks * kBlockSize};
    const auto plan = find_backend("cuda_sm90")->plan(spec, probe_cuda().at(0), {.limits = limits, .threads = {}, .out_dtype = type});
    const int loads = fake::state().library_loads - before;
    update(*plan, 40);
    EXPECT_EQ(launches_of(*plan).size(), 1u);
    out.out.dtype = DType::f32;
    EXPECT_EQ(error_code([&] { launches_of(*plan); }), type ? "run.out_dtype" : "nothing thrown");
    out.out.dtype = DType::bf16;
    return loads;
  };
  const int all = loads_of({});
  EXPECT_EQ(loads_of(DType::bf16), all - 4);  // of three regimes, and the merge
  EXPECT_EQ(error_code([&] { loads_of(DType::f16); }), "backend.out_dtype");
}

// TMA reads no tensor whose address or strides are no multiples of 16 bytes, or whose elements are not next to each other. The kernel that
// runs instead has the same work, and is loaded when it is needed: prefill is cuda_sm80's, decode and verify are variants of their own.
TEST_F(PlanMaps, WhereThereIsNoMapAnotherKernelRunsTheSameItems) {
  const auto shifted = [](TensorView t) {
    t.data = static_cast<char*>(t.data) + 8;
    return t;
  };
  const auto wider = [](TensorView t) {
    t.strides[0] += 4;
    return t;
  };
  const auto transposed = [](TensorView t) {
    std::swap(t.strides[1], t.strides[3]);
    std::swap(t.sizes[1], t.sizes[3]);  // 64 each
    return t;
  };
  const std::pair<TensorView*, TensorView> changes[] = {{&in.q, shifted(in.q)},       {&in.q, wider(in.q)},
                                                        {&in.kv.k, shifted(in.kv.k)}, {&in.kv.k, wider(in.kv.k)},
                                                        {&in.kv.v, shifted(in.kv.v)}, {&in.kv.v, transposed(in.kv.v)}};
  for (const auto& [tensor, changed] : changes) {
    const auto plan = plan_of("cuda_sm90");
    std::vector<Seen> few;  // decode's and verify's
    for (const int q_len : {1, 8}) update(*plan, q_len), few.push_back(launches_of(*plan).at(0));
    update(*plan, 40);
    const Seen mapped = launches_of(*plan).at(0);
    EXPECT_TRUE(starts_with(mapped, "attention_sm90.cu"));
    const TensorView before = std::exchange(*tensor, changed);
    EXPECT_EQ(capture(*plan), "run.on_demand");
    const int loads = fake::state().library_loads;
    const Seen unmapped = launches_of(*plan).at(0);
    EXPECT_EQ(fake::state().library_loads, loads + 1);
    EXPECT_TRUE(starts_with(unmapped, "attention_sm80.cu")) << unmapped.kernel;
    EXPECT_EQ(unmapped.work, mapped.work);
    for (const Seen& with : few) {
      update(*plan, &with == &few[0] ? 1 : 8);
      const Seen without = launches_of(*plan).at(0);
      const bool decode = &with == &few[0];  // which has no map of the queries
      EXPECT_TRUE(starts_with(without, decode ? "attention_sm90_decode.cu" : "attention_sm90_verify.cu")) << without.kernel;
      EXPECT_EQ(without.kernel == with.kernel, decode && tensor == &in.q);
      EXPECT_EQ(without.work, with.work);
    }
    EXPECT_EQ(capture(*plan), "nothing thrown");
    *tensor = before;
    update(*plan, 40);
    EXPECT_EQ(launches_of(*plan).at(0).kernel, mapped.kernel);
  }
}

// A graph of any batch has the kernel of every regime, with maps of its own.
TEST_F(PlanMaps, ACaptureMakesMapsWhateverTheBatchIs) {
  const auto plan = plan_of("cuda_sm90");
  update(*plan, 1);
  const int maps = fake::state().maps;
  EXPECT_EQ(capture(*plan), "nothing thrown");
  EXPECT_EQ(fake::state().maps, maps + 3 + 3 + 2);
  const auto on_demand = plan_of("cuda_sm90", true);
  update(*on_demand, 1);
  EXPECT_EQ(capture(*on_demand), "run.on_demand");
}

}  // namespace
}  // namespace imbrex::cuda
