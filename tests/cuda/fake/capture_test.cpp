// What belongs to a captured graph, what may happen while a stream is captured, and the order of streams. On the fake driver.
#include "imbrex/capture.h"

#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "cuda/driver/graph_branches.h"
#include "cuda/driver/memory.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "expect_error.h"
#include "imbrex/select.h"

namespace imbrex::cuda {
namespace {

using fake::state;
using imbrex::test::error_code;
constexpr Device kFakeGpu{DeviceType::cuda, 0};

class Captures : public testing::TestWithParam<int> {
 protected:
  ~Captures() override { state().on_launch = nullptr, state().param_sizes.clear(), state().launches.clear(); }

  OwnedStream stream() const { return OwnedStream(context); }

  void begin(CUstream one, int mode = kCaptureGlobal) const { check_cuda(cu.cuStreamBeginCapture_v2(one, mode), "begin"); }
  CUgraphExec end(CUstream one) const {
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    check_cuda(cu.cuStreamEndCapture(one, &graph), "end a capture that nothing broke");
    check_cuda(cu.cuGraphInstantiateWithFlags(&exec, graph, 0), "instantiate");
    check_cuda(cu.cuGraphDestroy(graph), "destroy");
    return exec;
  }
  std::unique_ptr<imbrex::Plan> plan(const AttentionSpec& spec) const {
    const Backend& backend = *find_backend("cuda_sm80");
    return backend.plan(spec, probe_cuda().at(0), {.limits = {4, 64, 512}, .threads = {}, .on_device = true});
  }

  const DriverApi& cu = need_driver();
  ContextPtr context = Context::of_device(0);
  CurrentContext current{*context};
  AttentionSpec spec{
      .num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 16, .head_dim_v = 16, .q_dtype = DType::f32, .kv_dtype = DType::f32};
};

TEST_F(Captures, AreNumbered) {
  const OwnedStream a = stream(), b = stream();
  EXPECT_EQ(capture_of(kFakeGpu, a.get()), 0u);
  EXPECT_EQ(capture_of(kFakeGpu, nullptr), 0u);
  EXPECT_EQ(capture_of({}, nullptr), 0u) << "a CPU has none";
  begin(a.get()), begin(b.get());
  const uint64_t first = capture_of(kFakeGpu, a.get()), other = capture_of(kFakeGpu, b.get());
  EXPECT_NE(first, 0u);
  EXPECT_NE(first, other);
  cu.cuGraphExecDestroy(end(a.get())), cu.cuGraphExecDestroy(end(b.get()));
  EXPECT_EQ(capture_of(kFakeGpu, a.get()), 0u);
  begin(a.get());
  EXPECT_NE(capture_of(kFakeGpu, a.get()), first);
  cu.cuGraphExecDestroy(end(a.get()));
}

TEST_F(Captures, StreamsThatJoinHaveTheSameNumber) {
  const OwnedStream a = stream(), b = stream();
  const Event fork(context), join(context);
  begin(a.get());
  fork.record(a.get());
  cu.cuStreamWaitEvent(b.get(), fork.get(), 0);
  EXPECT_EQ(capture_of(kFakeGpu, b.get()), capture_of(kFakeGpu, a.get()));
  join.record(b.get());
  cu.cuStreamWaitEvent(a.get(), join.get(), 0);
  cu.cuGraphExecDestroy(end(a.get()));
  EXPECT_EQ(capture_of(kFakeGpu, b.get()), 0u);
}

TEST_F(Captures, AGraphKeepsWhatItWasGivenAsLongAsItLives) {
  const OwnedStream a = stream();
  auto share = std::make_shared<int>(7);
  const std::weak_ptr<int> watched = share;
  EXPECT_EQ(error_code([&] { keep_for_capture(kFakeGpu, a.get(), share); }), "stream.capture");
  EXPECT_EQ(error_code([&] { keep_for_capture({}, nullptr, share); }), "stream.capture");
  begin(a.get());
  keep_for_capture(kFakeGpu, a.get(), std::move(share));
  const CUgraphExec exec = end(a.get());  // the graph it was made of is gone
  release_captured();
  EXPECT_FALSE(watched.expired());
  cu.cuGraphExecDestroy(exec);
  EXPECT_FALSE(watched.expired()) << "freed on a thread of the driver";
  release_captured();
  EXPECT_TRUE(watched.expired());
  release_captured();
}

TEST_F(Captures, AGraphThatFailsToKeepGivesBack) {
  const OwnedStream a = stream();
  auto share = std::make_shared<int>(7);
  const std::weak_ptr<int> watched = share;
  begin(a.get());
  state().fail_next = kCudaOutOfMemory;
  EXPECT_EQ(error_code([&] { keep_for_capture(kFakeGpu, a.get(), std::move(share)); }), "cuda.memory");
  cu.cuGraphExecDestroy(end(a.get()));
  release_captured();
  EXPECT_TRUE(watched.expired());
}

TEST_F(Captures, AFailedCaptureGivesBackToo) {
  const OwnedStream a = stream();
  const std::weak_ptr<int> watched = [&] {
    auto share = std::make_shared<int>(7);
    begin(a.get());
    keep_for_capture(kFakeGpu, a.get(), share);
    return std::weak_ptr<int>(share);
  }();
  EXPECT_NE(cu.cuStreamSynchronize(a.get()), kCudaSuccess) << "which breaks it";
  CUgraph graph = nullptr;
  EXPECT_NE(cu.cuStreamEndCapture(a.get(), &graph), kCudaSuccess);
  release_captured();
  EXPECT_TRUE(watched.expired());
}

// The fake driver does the last branch first.
TEST_F(Captures, BranchesWaitForWhatIsInFrontAndNotForEachOther) {
  const OwnedStream a = stream();
  const DeviceBuffer memory = zeroed(context, 4);
  char* const at = memory.as<char>();
  const auto write = [&](int i, unsigned char value) { cu.cuMemsetD8Async(CUdeviceptr(at + i), value, 1, a.get()); };
  const auto copy = [&](int from, int to) { cu.cuMemcpyDtoDAsync_v2(CUdeviceptr(at + to), CUdeviceptr(at + from), 1, a.get()); };
  begin(a.get());
  write(0, 7);
  GraphBranches branches(a.get());
  branches.next();
  copy(0, 1), write(3, 1);
  {
    GraphBranches within(a.get());
    within.next(), write(3, 2), within.next(), copy(1, 2), within.join();
  }
  branches.next();
  write(3, 9), copy(0, 0);
  branches.join();
  copy(3, 0);
  const CUgraphExec exec = end(a.get());
  cu.cuGraphLaunch(exec, a.get()), a.synchronize();
  EXPECT_EQ(std::vector<char>(at, at + 4), (std::vector<char>{2, 7, 7, 2}));
  cu.cuGraphExecDestroy(exec);
}

TEST_F(Captures, BranchesThatAnExceptionLeavesAreJoined) {
  const OwnedStream a = stream();
  const DeviceBuffer memory = zeroed(context, 4);
  char* const at = memory.as<char>();
  const auto write = [&](int i, unsigned char value) { cu.cuMemsetD8Async(CUdeviceptr(at + i), value, 1, a.get()); };
  begin(a.get());
  write(0, 7);
  const auto fails = [&] {
    GraphBranches branches(a.get());
    branches.next(), write(0, 1);
    GraphBranches within(a.get());
    within.next(), write(1, 1), within.next(), write(2, 1);
    throw Error("test.left", "between two branches");
  };
  EXPECT_EQ(error_code(fails), "test.left");
  write(0, 2), write(1, 2), write(2, 2);
  const CUgraphExec exec = end(a.get());
  cu.cuGraphLaunch(exec, a.get()), a.synchronize();
  EXPECT_EQ(std::vector<char>(at, at + 4), (std::vector<char>{2, 2, 2, 0}));
  cu.cuGraphExecDestroy(exec);
}

TEST_F(Captures, BranchesThatTheDriverRefusesAreAnError) {
  const OwnedStream a = stream();
  const DeviceBuffer memory = zeroed(context, 1);
  begin(a.get());
  GraphBranches branches(a.get());
  branches.next();
  cu.cuMemsetD8Async(CUdeviceptr(memory.as<char>()), 1, 1, a.get());
  for (const long call : {1, 2}) {  // of those that join() makes
    const fake::FailCall<false> failing(call);
    EXPECT_EQ(error_code([&] { branches.join(); }), "cuda.driver");
  }
  cu.cuGraphExecDestroy(end(a.get()));
}

// A capture is not disturbed when plans are made and end, on the thread that captures or on another one.
TEST_P(Captures, PlansAreMadeAndEndWhileAStreamIsCaptured) {
  spec.score.relative_buckets = 32, spec.score.relative_max_distance = 128;
  fake::run_on_host(spec);
  CUstream blocking = nullptr;
  ASSERT_EQ(cu.cuStreamCreate(&blocking, kStreamDefault), 0);
  const auto one_plan = [&] {
    const CurrentContext here(*context);
    const auto made = plan(spec);
    const OwnedStream own = stream();
    const std::vector<int32_t> starts{0, 1}, lens{5}, table{0};
    made->update({.query_start_loc = starts,
                  .seq_lens = lens,
                  .block_table = TensorView::contiguous(const_cast<int*>(table.data()), DType::i32, {1, 1})},
                 own.get());
  };
  begin(blocking, GetParam());
  one_plan();
  std::thread(one_plan).join();
  cu.cuGraphExecDestroy(end(blocking));
  cu.cuStreamDestroy_v2(blocking);
}
INSTANTIATE_TEST_SUITE_P(Modes, Captures, testing::Values(kCaptureGlobal, kCaptureThreadLocal, kCaptureRelaxed));

TEST_F(Captures, TheFakeRefusesWhatCudaRefuses) {
  CUdeviceptr memory = 0;
  const OwnedStream a = stream(), b = stream();
  CUgraph graph = nullptr;
  begin(a.get());
  EXPECT_NE(cu.cuMemAlloc_v2(&memory, 16), kCudaSuccess);
  EXPECT_NE(cu.cuStreamEndCapture(a.get(), &graph), kCudaSuccess);
  begin(a.get());
  std::thread([&] {
    const CurrentContext here(*context);
    EXPECT_NE(cu.cuStreamSynchronize(b.get()), kCudaSuccess);
  }).join();
  EXPECT_NE(cu.cuStreamEndCapture(a.get(), &graph), kCudaSuccess);
}

// The layers of a step have tables of their own, at addresses of their own.
TEST_F(Captures, LayersOfOneCaptureMayPlanAnewWithOtherArrays) {
  fake::run_on_host(spec);
  const auto upload = [&](const auto& values) { return copy_of(context, values.data(), values.size() * sizeof(int)); };
  const auto made = plan(spec);
  const std::vector<int> starts{0, 1}, lens{20};
  const DeviceBuffer on_gpu[] = {upload(starts), upload(lens), upload(std::vector<int>{0, 1}), upload(std::vector<int>{2, 3})};
  const DeviceBuffer pages = zeroed(context, size_t(4 * 16 * 2 * 16) * sizeof(float)), rows = zeroed(context, 4 * 16 * sizeof(float));
  const auto view = [](const DeviceBuffer& memory, DType type, std::initializer_list<int64_t> sizes) {
    return TensorView::contiguous(memory.as<void>(), type, sizes, kFakeGpu);
  };
  const OwnedStream a = stream();
  const auto layer = [&](const DeviceBuffer& table) {
    made->update_on_device({.query_start_loc = view(on_gpu[0], DType::i32, {2}),
                            .seq_lens = view(on_gpu[1], DType::i32, {1}),
                            .block_table = view(table, DType::i32, {1, 2}),
                            .max_num_tokens = 1},
                           a.get());
    const TensorView k = view(pages, DType::f32, {4, 16, 2, 16}), q = view(rows, DType::f32, {1, 4, 16});
    made->run({.q = q, .kv = {.k = k, .v = k, .k_scale = {}, .v_scale = {}}}, {.out = q, .lse = {}}, a.get());
  };
  begin(a.get());
  layer(on_gpu[2]);
  EXPECT_NO_THROW(layer(on_gpu[3]));
  cu.cuGraphExecDestroy(end(a.get()));
}

TEST_F(Captures, AStreamWaitsForTheLastUseOnAnother) {
  const StreamOrder order(kFakeGpu), none(Device{});
  const OwnedStream a = stream(), b = stream();
  const DeviceBuffer memory = zeroed(context, 4);
  int seen = 9;
  const auto use = [&](unsigned char value, CUstream one) {
    order.begin(one);
    fill_bytes(memory.address(), value, 1, one);
    order.end(one);
  };
  use(1, a.get());
  use(2, b.get());
  use(3, a.get());
  order.begin(b.get());
  copy_to_host(&seen, memory.address(), 4, b.get());
  b.synchronize();
  EXPECT_EQ(seen, 3);
  none.begin(nullptr), none.end(nullptr), none.synchronize();
}

TEST_F(Captures, TheHostWaitsForTheLastUse) {
  const StreamOrder order(kFakeGpu);
  const OwnedStream a = stream();
  const DeviceBuffer memory = zeroed(context, 4);
  int seen = 9;
  order.begin(a.get());
  copy_to_host(&seen, memory.address(), 4, a.get());
  order.end(a.get());
  EXPECT_EQ(seen, 9);
  order.synchronize();
  EXPECT_EQ(seen, 0);
}

}  // namespace
}  // namespace imbrex::cuda
