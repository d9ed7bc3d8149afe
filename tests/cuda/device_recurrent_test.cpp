// Recurrent layers on a GPU: beside the reference over random steps, from lengths on the host and on the device, one by one and in a graph.
#include <algorithm>
#include <utility>

#include "conformance/recurrent/cases.h"
#include "conformance/recurrent/device_mirror.h"
#include "conformance/recurrent/judge.h"
#include "cuda/gpu.h"
#include "cuda/recurrent/recurrent.h"
#include "cuda/recurrent_problem.h"

namespace imbrex::cuda {
namespace {

using test::RecurrentBesideReference, test::RecurrentProblem, test::SlotRequests, test::SlotStep;

class DeviceRecurrent : public test::Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (!IsSkipped() && device.sm < 80) GTEST_SKIP() << "not for sm_" << device.sm;
  }
  static RecurrentSpec layer(const char* name, int num_drafts = 3) {
    RecurrentSpec spec = recurrent_layer(name);
    return spec.num_drafts = num_drafts, spec;
  }
  const BackendOf<RecurrentFamily>& backend = *find_backend<RecurrentFamily>("cuda_sm80");
  void run(const RecurrentProblem& problem) const { RecurrentBesideReference(backend, device, problem).run(); }
};

// Tensors one behind the other; no row aligned; all rows aligned, with gaps.
constexpr std::pair<int64_t, int64_t> kGapsAndShifts[] = {{0, 0}, {3, 1}, {8, 16}};

TEST_F(DeviceRecurrent, OutputsAndStatesAreThoseOfTheReference) {
  unsigned seed = 1;
  for (const char* name : {"gdn", "kda", "kda_bounded", "lightning", "mamba2", "mamba1"})
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      RecurrentSpec spec = layer(name, int(seed % 2) * 5);
      spec.dtype = dtype;
      spec.state_dtype = dtype == DType::f16 ? DType::bf16 : DType::f32;
      spec.layout = StateLayout(seed % 2);
      for (const auto& [gap, shift] : kGapsAndShifts)
        run({.spec = spec, .gap = gap, .shift = shift, .float_gates = gap != 8, .gate_bias = gap == 3, .steps = 10, .seed = seed++});
    }
}

// Gates and norms of outputs: of heads, of groups of them, and of so many numbers that warps share them or read them again.
TEST_F(DeviceRecurrent, OutputStages) {
  unsigned seed = 50;
  const auto run_all = [&](const char* name, OutputGate gate, OutputNorm norm, int groups, int heads) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
      for (const auto& [gap, shift] : kGapsAndShifts) {
        RecurrentSpec spec = layer(name, 2);
        spec.dtype = dtype, spec.out_gate = gate, spec.out_norm = norm, spec.norm_groups = groups;
        if (heads > 0) spec.num_v_heads = heads;
        run({.spec = spec, .gap = gap, .shift = shift, .float_gates = gap != 8, .longest = 80, .steps = 4, .seed = seed++});
      }
  };
  run_all("gdn", OutputGate::silu, OutputNorm::before_gate, 0, 0);
  run_all("kda", OutputGate::sigmoid, OutputNorm::before_gate, 0, 0);
  run_all("lightning", OutputGate::sigmoid, OutputNorm::before_gate, 1, 0);
  run_all("mamba2", OutputGate::silu, OutputNorm::after_gate, 1, 128);
  run_all("mamba2", OutputGate::silu, OutputNorm::after_gate, 1, 160);
  run_all("mamba1", OutputGate::silu, OutputNorm::none, 0, 0);
  run_all("gdn", OutputGate::none, OutputNorm::before_gate, 2, 0);
}

// Dimensions that fill the vectors of a lane, and those that do not; two values of a lane, and four; several thread blocks for a head.
TEST_F(DeviceRecurrent, Dimensions) {
  unsigned seed = 100;
  for (const auto& [dim_k, dim_v] : {std::pair{128, 128}, {256, 256}, {200, 130}, {136, 10}, {33, 31}, {16, 1}, {7, 5}, {1, 1}, {1, 256}})
    for (const StateLayout layout : {StateLayout::k_first, StateLayout::v_first}) {
      RecurrentSpec spec = layer(seed % 4 < 2 ? "gdn" : "kda");
      spec.head_dim_k = dim_k, spec.head_dim_v = dim_v, spec.layout = layout;
      spec.channel_rates = seed % 3 == 0;
      spec.state_dtype = seed % 5 == 0 ? DType::f16 : DType::f32;
      for (const auto& [gap, shift] : kGapsAndShifts)
        run({.spec = spec, .gap = gap, .shift = shift, .longest = 20, .steps = 4, .seed = seed});
      ++seed;
    }
}

// Heads with values of one dimension: in several thread blocks, of which some share a key head and others do not.
TEST_F(DeviceRecurrent, NarrowHeads) {
  unsigned seed = 200;
  for (const int dim_k : {16, 128, 5})
    for (const auto& [k_heads, v_heads] : {std::pair{1, 130}, {1, 1024}, {2, 256}, {5, 200}, {150, 300}}) {
      RecurrentSpec spec = layer("mamba1");
      spec.num_k_heads = k_heads, spec.num_v_heads = v_heads, spec.head_dim_k = dim_k, spec.qk_norm = seed % 2 == 0;
      run({.spec = spec, .gap = int64_t(seed % 3), .longest = 20, .steps = 6, .seed = seed++});
    }
}

TEST_F(DeviceRecurrent, LongRequests) {
  for (const char* name : {"gdn", "kda", "mamba2", "mamba1"})
    run({.spec = layer(name),
         .limits = {.max_num_reqs = 12, .max_num_tokens = 1500, .max_seq_len = 1 << 20},
         .longest = 700,
         .steps = 4,
         .seed = 300});
}

// Requests that come in segments, alone and among others, of layers that do not forget and of those that do.
TEST_F(DeviceRecurrent, Segments) {
  unsigned seed = 350;
  for (const char* name : {"gdn", "kda", "mamba2"})
    for (const int dim : {64, 128}) {
      RecurrentSpec spec = layer(name, 0);
      spec.head_dim_k = dim, spec.num_k_heads = 1, spec.num_v_heads = 2, spec.layout = StateLayout(seed % 2);
      for (const bool forgets : {false, true}) {
        const RecurrentValues values = forgets ? RecurrentValues::plain : RecurrentValues::none;
        RecurrentCase c{.name = name, .spec = spec, .requests = {{7000, 5}, {300}, {1, 9}, {6211}}, .values = values, .seed = seed++};
        for (size_t r = 0; r < c.requests.size(); ++r) c.requests[r].id = int(r);
        const RecurrentCaseInputs in = make_inputs(c);
        const auto mirror = device_mirror(backend);
        const RecurrentRunResult together = run_case(*mirror, device, in, {});
        EXPECT_TRUE(together.violations.empty()) << together.violations.front();
        const RecurrentJudgement judgement = judge(expect(in, 0, true), in, together);
        EXPECT_TRUE(judgement.pass()) << spec.str() << ": " << judgement.failure;
        RecurrentRunOptions from_device;
        from_device.on_device = true;
        EXPECT_TRUE(same_bits(run_case(*mirror, device, in, from_device), together)) << spec.str() << ", lengths from the device";
        EXPECT_TRUE(same_bits(run_case(*device_mirror(backend, {.in_graph = true}), device, in, {}), together))
            << spec.str() << ", in a graph";
        c.requests = {c.requests.back()};
        const RecurrentRunResult alone = run_case(*mirror, device, make_inputs(c), {});
        EXPECT_TRUE(std::equal(alone.out.rbegin(), alone.out.rend(), together.out.rbegin())) << spec.str();
        EXPECT_TRUE(std::equal(alone.state.bytes.rbegin(), alone.state.bytes.rend(), together.state.bytes.rbegin())) << spec.str();
      }
    }
}

// Five blocks that stay take all units in turn, with the bits of a block for each unit; drafts, requests without states and steps in a
// graph among them. Then a plan's own number of blocks.
TEST_F(DeviceRecurrent, ManyStatesStream) {
  unsigned seed = 900;
  for (const char* name : {"gdn", "kda", "lightning", "mamba2"})
    for (const auto& [dim_k, dim_v] : {std::pair{128, 128}, {128, 64}, {64, 64}, {256, 256}, {72, 160}, {128, 80}})
      for (const DType state_dtype : {DType::f32, DType::f16}) {
        RecurrentSpec spec = layer(name, int(seed % 2) * 3);
        spec.head_dim_k = dim_k, spec.head_dim_v = dim_v, spec.state_dtype = state_dtype, spec.layout = StateLayout(seed / 2 % 2);
        if (seed % 3 != 0) spec.out_gate = OutputGate::silu, spec.out_norm = OutputNorm(seed % 3);  // before or behind the gate
        RecurrentCase c{.name = name, .spec = spec, .requests = {{1, 9}, {0, 0}, {12}, {1}, {0, 25}, {9, 1}, {79}, {1, 3}, {17, 2}}};
        if (spec.num_drafts > 0) c.requests.insert(c.requests.end(), {{4, 14, 3, 2}, {3, 0, 3, 0}, {2, 7, 1, 3}});
        for (size_t r = 0; r < c.requests.size(); ++r) c.requests[r].id = int(r);
        c.seed = seed++, c.other_sources = true;
        const RecurrentCaseInputs in = make_inputs(c);
        const auto mirror = device_mirror(backend);
        const RecurrentRunOptions options = default_options(c);
        const RecurrentRunResult expected = run_case(*mirror, device, in, options);
        const int64_t before = std::exchange(most_stream_blocks, 5);
        const RecurrentRunResult streamed = run_case(*mirror, device, in, options);
        const RecurrentRunResult replayed = run_case(*device_mirror(backend, {.in_graph = true}), device, in, options);
        most_stream_blocks = before;
        EXPECT_TRUE(streamed.violations.empty()) << streamed.violations.front();
        EXPECT_TRUE(same_bits(streamed, expected)) << spec.str();
        EXPECT_TRUE(same_bits(replayed, expected)) << spec.str() << ", in a graph";
      }
  for (const StateLayout layout : {StateLayout::v_first, StateLayout::k_first}) {
    RecurrentSpec spec = layer("gdn", 0);
    spec.num_k_heads = 16, spec.num_v_heads = 32, spec.layout = layout;
    RecurrentCase c{.name = "gdn", .spec = spec, .requests = StateCaseRequests(40, {1, 9})};
    for (size_t r = 0; r < c.requests.size(); ++r) c.requests[r].id = int(r);
    const RecurrentCaseInputs in = make_inputs(c);
    const RecurrentJudgement judgement = judge(expect(in, 0, false), in, run_case(*device_mirror(backend), device, in, {}));
    EXPECT_TRUE(judgement.pass()) << judgement.failure;
  }
}

// Outputs that are gated and normed where they are computed have the bits of the kernel behind, in all kinds of steps.
TEST_F(DeviceRecurrent, FinishedOutputsAreThoseOfTheKernelBehind) {
  unsigned seed = 1300;
  for (const char* name : {"gdn", "kda", "mamba2"})
    for (const auto& [dim_k, dim_v] : {std::pair{128, 128}, {128, 64}, {64, 72}, {16, 8}, {256, 64}})
      for (const OutputNorm norm : {OutputNorm::none, OutputNorm::before_gate, OutputNorm::after_gate})
        for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
          RecurrentSpec spec = layer(name, int(seed % 2) * 3);
          spec.head_dim_k = dim_k, spec.head_dim_v = dim_v, spec.dtype = dtype, spec.layout = StateLayout(seed / 2 % 2);
          spec.out_norm = norm, spec.out_gate = seed % 4 != 0 ? OutputGate(1 + seed % 2) : OutputGate::none;
          if (norm != OutputNorm::before_gate && spec.out_gate == OutputGate::none) spec.out_gate = OutputGate::silu;
          RecurrentCase c{.name = name, .spec = spec, .requests = {{1, 9}, {0, 0}, {12}, {1}, {9, 1}, {79}, {1, 3}, {17, 2}}};
          if (spec.num_drafts > 0) c.requests.insert(c.requests.end(), {{4, 14, 3, 2}, {3, 0, 3, 0}, {2, 7, 1, 3}});
          for (size_t r = 0; r < c.requests.size(); ++r) c.requests[r].id = int(r);
          c.seed = seed++, c.shared_weight = seed % 2 == 0, c.float_gates = seed % 3 != 0;
          const RecurrentCaseInputs in = make_inputs(c);
          const auto mirror = device_mirror(backend);
          const RecurrentRunResult finished = run_case(*mirror, device, in, default_options(c));
          may_finish_outputs = false;
          const RecurrentRunResult apart = run_case(*mirror, device, in, default_options(c));
          may_finish_outputs = true;
          EXPECT_TRUE(finished.violations.empty()) << finished.violations.front();
          EXPECT_TRUE(same_bits(finished, apart)) << spec.str();
        }
}

TEST_F(DeviceRecurrent, TreesOfDrafts) {
  unsigned seed = 350;
  for (const char* name : {"gdn", "kda", "lightning", "mamba2", "mamba1"})
    for (const bool on_device : {false, true})
      for (const auto& [gap, shift] : kGapsAndShifts) {
        RecurrentSpec spec = layer(name, 7);
        spec.tree_drafts = true, spec.layout = StateLayout(seed % 2);
        run({.spec = spec,
             .gap = gap,
             .shift = shift,
             .longest = 20,
             .steps = 8,
             .on_device = on_device,
             .graph = seed % 4 == 0,
             .seed = seed});
        ++seed;
      }
}

TEST_F(DeviceRecurrent, LengthsOnTheDevice) {
  unsigned seed = 400;
  for (const char* name : {"gdn", "kda", "mamba2", "mamba1"}) run({.spec = layer(name), .steps = 20, .on_device = true, .seed = seed++});
}

TEST_F(DeviceRecurrent, OneGraphForAllSteps) {
  unsigned seed = 500;
  for (const bool on_device : {false, true})
    for (const char* name : {"gdn", "kda", "mamba2", "mamba1"})
      run({.spec = layer(name),
           .limits = {.max_num_reqs = 16, .max_num_tokens = 300, .max_seq_len = 1 << 20},
           .longest = 100,
           .steps = 12,
           .on_device = on_device,
           .graph = true,
           .seed = seed++});
}

// Steps whose lengths are on the device have the same bits as those whose lengths are on the host.
TEST_F(DeviceRecurrent, LengthsOnTheDeviceGiveTheBitsOfTheHost) {
  for (const char* name : {"gdn", "mamba1"}) {
    RecurrentProblem p{.spec = layer(name), .seed = 7};
    RecurrentBesideReference host(backend, device, p);
    p.on_device = true;
    RecurrentBesideReference there(backend, device, p);
    SlotRequests requests(p.requests(), RecurrentBesideReference::kSlots);
    for (int i = 0; i < 30 && !HasFailure(); ++i) {
      const SlotStep step = requests.next();
      host.begin(step), there.begin(step);
      host.plan().update(step.batch(p.spec), host.stream().get());
      there.send(step), there.update_on_device();
      host.layer(), there.layer();
      EXPECT_EQ(host.output(), there.output());
      EXPECT_EQ(host.state(), there.state());
    }
  }
}

TEST_F(DeviceRecurrent, StepsAndNeighboursChangeNoBit) {
  for (const char* name : {"gdn", "kda", "lightning", "mamba2", "mamba1"})
    test::expect_same_in_steps(backend, device, layer(name), {1, 7, 120, 3, 68, 1});
}

// Two plans on two streams at a time: each has its own lists.
TEST_F(DeviceRecurrent, TwoStreams) {
  const RecurrentProblem p{
      .spec = layer("gdn"), .limits = {.max_num_reqs = 12, .max_num_tokens = 800, .max_seq_len = 1 << 20}, .longest = 300, .seed = 3};
  RecurrentBesideReference one(backend, device, p), two(backend, device, p);
  SlotRequests requests(p.requests(), RecurrentBesideReference::kSlots);
  SlotRequests others({.limits = p.limits, .longest = p.longest, .num_drafts = p.spec.num_drafts, .seed = 4},
                      RecurrentBesideReference::kSlots);
  for (int i = 0; i < 6 && !HasFailure(); ++i) {
    const SlotStep first = requests.next(), second = others.next();
    one.begin(first), two.begin(second);
    one.plan().update(first.batch(p.spec), one.stream().get());
    two.plan().update(second.batch(p.spec), two.stream().get());
    one.layer(), two.layer();
    one.expect(first), two.expect(second);
  }
}

// Slots on the device that the state does not have, and whatever else a host cannot see: left out, and told.
TEST_F(DeviceRecurrent, LeavesOutRequestsThatBreakRules) {
  for (const char* name : {"gdn", "mamba1"}) {
    const RecurrentProblem p{.spec = layer(name, 2), .on_device = true};
    RecurrentBesideReference problem(backend, device, p);
    const SlotStep step{.starts = {0, 2, 5, 9, 10, 12, 13, 15},
                        .lens = {2, 3, 4, 1, 2, 9, 2},
                        .slots = {4, 17, -1, 5, 6, 3, 3},
                        .drafts = {0, 0, 0, 0, 3, 0, 0},
                        .accepted = {0, 0, 0, 1, 0, 0, 0}};
    problem.begin(step);
    problem.send(step), problem.update_on_device(), problem.layer();
    const std::vector<char> out = problem.output();
    const long rows = 2 * long(p.spec.num_v_heads) * p.spec.head_dim_v * 2;  // of the first request, the only one that is computed
    const auto untouched = [](char b) { return b == char(0x5a); };
    EXPECT_TRUE(std::all_of(out.begin() + rows, out.end(), untouched)) << name;
    EXPECT_FALSE(std::all_of(out.begin(), out.begin() + rows, untouched)) << name;
    std::string codes;
    for (const Reason& reason : problem.plan().device_problems(problem.stream().get())) codes += reason.code + " " + reason.actual + "\n";
    EXPECT_EQ(codes,
              "batch.state.slot something else in request 2\nbatch.state.num_drafts something else in request 4\n"
              "batch.state.accepted_drafts something else in request 3\nbatch.state.shared something else in request 6\n"
              "batch.state.slot something else in request 1\n")
        << name;
  }
}

}  // namespace
}  // namespace imbrex::cuda
