// The short convolution on a GPU: beside the reference over random steps, from lengths on the host and on the device, one by one and in a
// graph; and how fast it is.
#include <cstdio>

#include "cuda/driver/module.h"
#include "cuda/gpu.h"
#include "cuda/short_conv/short_conv.h"
#include "cuda/short_conv_problem.h"
#include "expect_error.h"

namespace imbrex::cuda {
namespace {

using test::ConvBesideReference, test::ConvProblem, test::ConvStep;

class DeviceShortConv : public test::Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (!IsSkipped() && device.sm < 80) GTEST_SKIP() << "not for sm_" << device.sm;
  }
  const BackendOf<ShortConvFamily>& backend = *find_backend<ShortConvFamily>("cuda_sm80");
  void run(const ConvProblem& problem) const { ConvBesideReference(backend, device, problem).run(); }
};

TEST_F(DeviceShortConv, OutputsAndStatesAreThoseOfTheReference) {
  unsigned seed = 1;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const int width : {2, 3, 4, 8})
      for (const int dim : {1, 7, 100, 512, 2048}) {
        ConvProblem p{.spec = {.dim = dim, .width = width, .bias = dim != 512, .dtype = dtype, .num_drafts = width % 2 == 0 ? 5 : 0},
                      .steps = dim == 2048 ? 6 : 15,
                      .seed = seed++};
        run(p);
        p.gap = 3, p.shift = 1;  // no row is aligned
        run(p);
        p.gap = 8, p.shift = 16;  // all are, and do not lie one after the other
        run(p);
        p.spec.form = ShortConvForm::plain;
        p.spec.activation = width % 4 == 0 ? ShortConvActivation::silu : ShortConvActivation::none;
        run(p);
        p.gap = 3, p.shift = 1;
        run(p);
      }
}

// Rows and tensors begin at every place in 16 bytes that elements have, and B, C and x at different ones.
TEST_F(DeviceShortConv, RowsBeginAnywhere) {
  unsigned seed = 1000;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (int64_t shift = 0; shift < 16 / size_of(dtype); ++shift)
      for (const int dim : {33, 262, 1023, 2048})
        for (const int64_t gap : {0, 1, 2, 3, 6})
          run({.spec = {.dim = dim, .width = 3, .bias = dim == 262, .dtype = dtype, .num_drafts = 2},
               .gap = gap,
               .shift = shift,
               .weight_gap = gap % 3,
               .steps = 4,
               .seed = seed++});
}

// Chunks of many tokens, several waves of them: as if the GPU had two multiprocessors.
TEST_F(DeviceShortConv, LongRequests) {
  device.num_workers = 2;
  for (const int width : {3, 8})
    for (const int64_t gap : {0, 1})
      run({.spec = {.dim = 256, .width = width, .num_drafts = 64},
           .limits = {.max_num_reqs = 16, .max_num_tokens = 6000, .max_seq_len = 1 << 20},
           .gap = gap,
           .longest = 4000,
           .steps = 6,
           .seed = unsigned(width)});
}

TEST_F(DeviceShortConv, TreesOfDrafts) {
  unsigned seed = 30;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const int width : {2, 3, 4, 8})
      for (const int64_t gap : {0, 3}) {
        ConvProblem p{
            .spec = {.dim = gap == 3 ? 100 : 520, .width = width, .bias = true, .dtype = dtype, .num_drafts = 9, .tree_drafts = true},
            .gap = gap,
            .longest = 40,
            .steps = 10,
            .on_device = width > 2,
            .graph = seed % 4 == 0,
            .seed = seed++};
        run(p);
        p.spec.form = ShortConvForm::plain, p.spec.activation = ShortConvActivation::silu;
        run(p);
      }
}

TEST_F(DeviceShortConv, LengthsOnTheDevice) {
  unsigned seed = 50;
  for (const int width : {2, 3, 8})
    for (const int dim : {7, 256})
      run({.spec = {.dim = dim, .width = width, .num_drafts = 5}, .steps = 30, .on_device = true, .seed = seed++});
}

TEST_F(DeviceShortConv, OneGraphForAllSteps) {
  unsigned seed = 100;
  for (const bool on_device : {false, true})
    for (const int dim : {100, 2048})
      for (const int width : {3, 4})
        run({.spec = {.dim = dim, .width = width, .bias = true, .num_drafts = 3},
             .limits = {.max_num_reqs = 16, .max_num_tokens = dim == 100 ? 3000 : 300, .max_seq_len = 1 << 20},
             .longest = 900,
             .steps = 12,
             .on_device = on_device,
             .graph = true,
             .seed = seed++});
}

TEST_F(DeviceShortConv, StepsAndNeighboursChangeNoBit) {
  for (const int width : {3, 8})
    for (const DType dtype : {DType::bf16, DType::f32})
      for (const int dim : {100, 2048}) {
        const ShortConvSpec spec{.dim = dim, .width = width, .bias = true, .dtype = dtype};
        const std::vector<char> whole = test::in_steps(backend, device, spec, 700, 1 << 20, 1);
        for (const int longest : {1, 4, 30, 300})
          EXPECT_TRUE(test::in_steps(backend, device, spec, 700, longest, unsigned(longest)) == whole) << spec.str() << ", " << longest;
      }
}

// Steps whose lengths are on the device have the same bits as those whose lengths are on the host.
TEST_F(DeviceShortConv, LengthsOnTheDeviceGiveTheBitsOfTheHost) {
  ConvProblem p{.spec = {.dim = 520, .width = 4, .bias = true, .num_drafts = 4}, .seed = 7};
  ConvBesideReference host(backend, device, p);
  p.on_device = true;
  ConvBesideReference there(backend, device, p);
  test::ConvRequests requests(p, ConvBesideReference::kSlots);
  for (int i = 0; i < 30 && !HasFailure(); ++i) {
    const ConvStep step = requests.next();
    host.begin(step), there.begin(step);
    host.plan().update(step.batch(p.spec), host.stream().get());
    there.send(step), there.update_on_device();
    host.layer(), there.layer();
    EXPECT_EQ(host.output(), there.output());
    EXPECT_EQ(host.state(), there.state());
  }
}

// Two plans on two streams at a time: each has its own lists.
TEST_F(DeviceShortConv, TwoStreams) {
  const ConvProblem p{.spec = {.dim = 2048, .width = 3},
                      .limits = {.max_num_reqs = 12, .max_num_tokens = 2000, .max_seq_len = 1 << 20},
                      .longest = 700,
                      .seed = 3};
  ConvBesideReference one(backend, device, p), two(backend, device, p);
  test::ConvRequests requests(p, ConvBesideReference::kSlots),
      others({.spec = p.spec, .limits = p.limits, .seed = 4}, ConvBesideReference::kSlots);
  for (int i = 0; i < 6 && !HasFailure(); ++i) {
    const ConvStep first = requests.next(), second = others.next();
    one.begin(first), two.begin(second);
    one.plan().update(first.batch(p.spec), one.stream().get());
    two.plan().update(second.batch(p.spec), two.stream().get());
    one.layer(), two.layer();
    one.expect(first), two.expect(second);
  }
}

// Slots on the device that the state does not have, and whatever else a host cannot see: left out, and told.
TEST_F(DeviceShortConv, LeavesOutRequestsThatBreakRules) {
  const ConvProblem p{.spec = {.dim = 256, .width = 3, .num_drafts = 2}, .on_device = true};
  ConvBesideReference problem(backend, device, p);
  ConvStep step{.starts = {0, 2, 5, 9, 10, 12, 13, 15},
                .lens = {2, 3, 4, 1, 2, 9, 2},
                .slots = {4, 17, -1, 5, 6, 3, 3},
                .drafts = {0, 0, 0, 0, 3, 0, 0},
                .accepted = {0, 0, 0, 1, 0, 0, 0}};
  problem.begin(step);
  problem.send(step), problem.update_on_device(), problem.layer();
  // The reference computes what is left; the other rows are as they were.
  const std::vector<char> out = problem.output();
  const size_t row = 256 * 2;
  EXPECT_TRUE(std::all_of(out.begin() + long(2 * row), out.end(), [](char b) { return b == char(0x5a); }));
  EXPECT_FALSE(std::all_of(out.begin(), out.begin() + long(2 * row), [](char b) { return b == char(0x5a); }));
  std::string codes;
  for (const Reason& reason : problem.plan().device_problems(problem.stream().get())) codes += reason.code + " " + reason.actual + "\n";
  EXPECT_EQ(codes,
            "batch.state.slot something else in request 2\nbatch.state.num_drafts something else in request 4\n"
            "batch.state.accepted_drafts something else in request 3\nbatch.state.shared something else in request 6\n"
            "batch.state.slot something else in request 1\n");
}

// --- speed: build/tests/cuda_tests --gtest_also_run_disabled_tests --gtest_filter='DeviceShortConvSpeed.*'

struct Work {
  const char* name;
  int requests, tokens;  // of each
  bool fresh;            // no state is read
  int drafts;
};
constexpr Work kWorks[] = {{"prefill 1 x 8192", 1, 8192, true, 0}, {"prefill 8 x 1024", 8, 1024, true, 0},
                           {"chunks 8 x 1024", 8, 1024, false, 0}, {"decode 256 x 1", 256, 1, false, 0},
                           {"decode 64 x 1", 64, 1, false, 0},     {"verify 64 x 4", 64, 4, false, 3}};

// Tensors of a call, many times over, so that L2 holds none of them when its turn comes. `shift`: elements in front of all that has rows.
class Rotation {
 public:
  Rotation(DeviceStream& stream, const ShortConvSpec& spec, const Work& work, int64_t shift = 0) : work_(work), spec_(spec) {
    const int64_t tokens = int64_t(work.requests) * work.tokens, dim = spec.dim, size = size_of(spec.dtype);
    const int64_t bytes = (tokens * 4 + int64_t(work.requests) * spec.state_rows()) * dim * size;
    std::mt19937 random(1);
    std::vector<char> values(size_t(std::max((tokens + 1) * 3, int64_t(spec.state_rows()) * (work.requests + 1)) * dim * size));
    const size_t drawn = std::min(values.size(), size_t(8) << 20);  // and then the same again
    for (int64_t i = 0; i < int64_t(drawn) / size; ++i) store_from_float(values.data(), spec.dtype, i, float(int32_t(random())) * 0x1p-30f);
    for (size_t i = drawn; i < values.size(); ++i) values[i] = values[i - drawn];
    const auto filled = [&](std::initializer_list<int64_t> sizes) {
      DeviceTensor t = stream.tensor(spec.dtype, sizes);
      stream.upload(t.view.data, values.data(), t.view.num_elements() * size);
      return t;
    };
    const auto shifted = [&](int64_t rows, int64_t parts, int64_t channels) {
      DeviceTensor t = parts == 1 ? filled({rows + 1, channels}) : filled({rows + 1, parts, channels});
      t.view.data = t.view.as<char>() + shift * size, t.view.sizes[0] = rows;
      return t;
    };
    weight_ = filled({dim, spec.width}), bias_ = filled({dim});
    const int64_t sets = std::clamp<int64_t>((int64_t(500) << 20) / bytes, 2, 64);
    for (int64_t i = 0; i < sets; ++i)
      sets_.push_back({shifted(tokens, 1, spec.input_channels()), shifted(work.requests, spec.state_rows(), dim), shifted(tokens, 1, dim)});
    stream.synchronize();
    for (int r = 0; r < work.requests; ++r) {
      step.starts.push_back((r + 1) * work.tokens);
      step.lens.push_back(work.tokens + (work.fresh ? 0 : 100));
      step.slots.push_back(work.requests - 1 - r);
      step.drafts.push_back(work.drafts), step.accepted.push_back(0);
    }
  }
  ShortConvInputs inputs(size_t i) const {
    const Set& set = sets_[i % sets_.size()];
    return {.input = set.input.view, .weight = weight_.view, .bias = spec_.bias ? bias_.view : TensorView{}, .state = set.state.view};
  }
  ShortConvOutputs outputs(size_t i) const { return {.out = sets_[i % sets_.size()].out.view}; }
  size_t size() const { return sets_.size(); }
  double bytes() const {  // read and written by a call
    const double rows =
        (spec_.input_channels() / spec_.dim + 1.) * work_.tokens + (work_.fresh ? 0 : spec_.width - 1) + spec_.width - 1 + work_.drafts;
    return (rows * work_.requests + spec_.width) * spec_.dim * double(size_of(spec_.dtype));
  }
  ConvStep step;

 private:
  struct Set {
    DeviceTensor input, state, out;
  };
  Work work_;
  ShortConvSpec spec_;
  DeviceTensor weight_, bias_;
  std::vector<Set> sets_;
};

class DeviceShortConvSpeed : public DeviceShortConv {
 protected:
  // Seconds of a call, the best of some rounds of `calls`.
  template <class Calls>
  static double seconds(DeviceStream& s, int calls, const Calls& round) {
    double best = 1e30;
    for (int i = 0; i < 8; ++i) {
      s.mark(0);
      round();
      s.mark(1);
      if (i > 1) best = std::min(best, s.seconds(0, 1) / calls);
    }
    return best;
  }
};

TEST_F(DeviceShortConvSpeed, DISABLED_Plans) {
  const auto s = open_stream(device);
  constexpr int64_t kCopied = int64_t(256) << 20;
  const DeviceTensor from = s->tensor(DType::u8, {kCopied}), to = s->tensor(DType::u8, {kCopied});
  s->fill(from.view.data, 0x3c, kCopied);
  const CUstream cu = cu_stream(s->get());
  const double copy = seconds(*s, 4, [&] {
    for (int i = 0; i < 4; ++i) copy_on_device(device_address(to.view.data), device_address(from.view.data), size_t(kCopied), cu);
  });
  const double write = seconds(*s, 4, [&] {
    for (int i = 0; i < 4; ++i) s->fill(to.view.data, 0x3c, kCopied);
  });
  std::printf("%s: a copy reads and writes %.0f GB/s, a fill writes %.0f GB/s\n", device.str().c_str(), 2e-9 * double(kCopied) / copy,
              1e-9 * double(kCopied) / write);
  struct Layer {
    ShortConvSpec spec;
    int64_t shift = 0;
  };
  constexpr ShortConvForm kPlain = ShortConvForm::plain;
  constexpr ShortConvActivation kSilu = ShortConvActivation::silu;
  const Layer layers[] = {{{.dim = 2048, .width = 3}},
                          {{.dim = 2048, .width = 4, .bias = true}},
                          {{.dim = 1024, .width = 3}},
                          {{.dim = 2048, .width = 3, .dtype = DType::f32}},
                          {{.dim = 2047, .width = 3}},
                          {{.dim = 2044, .width = 3}},
                          {{.dim = 2048, .width = 3}, 1},
                          {{.dim = 2047, .width = 4, .bias = true}},
                          {{.dim = 1023, .width = 3}},
                          {{.dim = 2047, .width = 3, .dtype = DType::f32}},
                          {{.dim = 8192, .width = 4, .form = kPlain}},
                          {{.dim = 8192, .width = 4, .form = kPlain, .activation = kSilu}},
                          {{.dim = 2048, .width = 4, .bias = true, .form = kPlain, .activation = kSilu}},
                          {{.dim = 2047, .width = 4, .form = kPlain, .activation = kSilu}}};
  for (auto [spec, shift] : layers) {
    spec.num_drafts = 3;
    std::printf("%s, rows shifted by %d, GB/s and us of a call: launched one by one; in a graph\n", spec.str().c_str(), int(shift));
    for (const Work& work : kWorks) {
      Rotation r(*s, spec, work, shift);
      const auto plan = backend.plan(spec, device, {.limits = {.max_num_reqs = 256, .max_num_tokens = 8192, .max_seq_len = 1 << 20}});
      plan->update(r.step.batch(spec), s->get());
      const int calls = int(std::max<size_t>(r.size(), 20));
      const auto round = [&] {
        for (int i = 0; i < calls; ++i) plan->run(r.inputs(size_t(i)), r.outputs(size_t(i)), s->get());
      };
      const double eager = seconds(*s, calls, round);
      const DeviceGraph graph = s->capture(round);
      const double replayed = seconds(*s, calls, [&] { s->replay(graph); });
      std::printf("  %-18s %7.0f %8.2f %7.0f %8.2f\n", work.name, r.bytes() / eager * 1e-9, eager * 1e6, r.bytes() / replayed * 1e-9,
                  replayed * 1e6);
    }
  }
}

// us of update_on_device() in a graph, for some numbers of requests: slots one behind the other, and slots so far apart that many have one
// bit in the kernel's claims.
TEST_F(DeviceShortConvSpeed, DISABLED_LengthsOnTheDevice) {
  const auto s = open_stream(device);
  constexpr int kCalls = 50;
  for (const int reqs : {1, 64, 256, 1024, 4096})
    for (const int apart : {1, 1 << 16}) {
      const auto plan = backend.plan({.dim = 64}, device, {.limits = {.max_num_reqs = reqs, .max_num_tokens = reqs}, .on_device = true});
      std::vector<int32_t> starts{0}, lens(size_t(reqs), 9), slots;
      for (int r = 0; r < reqs; ++r) starts.push_back(r + 1), slots.push_back(r * apart % (1 << 27) + r / (1 << 11));
      const DeviceBuffer a = upload(starts), b = upload(lens), c = upload(slots);
      const auto list = [&](const DeviceBuffer& of, int count) {
        return TensorView::contiguous(of.as<void>(), DType::i32, {count}, device.device);
      };
      const DeviceBatch batch{.query_start_loc = list(a, reqs + 1), .seq_lens = list(b, reqs), .state_slots = list(c, reqs)};
      plan->update_on_device(batch, s->get());
      EXPECT_TRUE(plan->device_problems(s->get()).empty()) << reqs << " " << apart;
      const DeviceGraph graph = s->capture([&] {
        for (int i = 0; i < kCalls; ++i) plan->update_on_device(batch, s->get());
      });
      std::printf("%5d requests, slots %5d apart: %6.2f us\n", reqs, apart, 1e6 * seconds(*s, kCalls, [&] { s->replay(graph); }));
    }
}

// Other numbers of tokens under way and of thread blocks than short_conv_tuning() says: GB/s, launched one by one.
TEST_F(DeviceShortConvSpeed, DISABLED_Tunings) {
  const auto s = open_stream(device);
  const ShortConvSpec spec{.dim = 2048, .width = 3, .num_drafts = 3};
  for (const Work& work : kWorks) {
    Rotation r(*s, spec, work);
    std::vector<StateRequest> requests;
    for (size_t i = 0; i < r.step.lens.size(); ++i)
      requests.push_back({r.step.starts[i], r.step.slots[i], r.step.slots[i], short(work.fresh ? -1 : 0), short(work.drafts)});
    requests.push_back({r.step.tokens(), -1, -1, -1, 0});
    const StateCounts counts_of_step{r.step.tokens(), work.requests, {}};
    const DeviceBuffer list = upload(requests), counts = upload(std::vector{counts_of_step});
    std::printf("%-18s", work.name);
    for (const ShortConvTuning& tuning : {ShortConvTuning{2, 5}, {3, 5}, {4, 5}, {6, 5}, {4, 4}, {8, 4}, {4, 3}, {8, 3}, {8, 2}}) {
      const auto module = Module::load(context, short_conv_key(arch_of(device), spec, tuning));
      const Kernel kernel = module->kernel("short_conv_aligned");
      const int64_t resident = int64_t(device.num_workers) * std::min(kernel.blocks_per_multiprocessor(kShortConvThreads), tuning.blocks);
      const ShortConvGrid grid(spec, resident);
      const auto launch = [&](size_t i) {
        ShortConvParams p = short_conv_params(spec, r.inputs(i), r.outputs(i));
        p.requests = list.as<StateRequest>(), p.counts = counts.as<StateCounts>(), p.lists_are_there = true;
        p.chunks_at_once = grid.chunks_at_once, p.most_chunks = grid.most_chunks;
        kernel.launch({.grid_x = unsigned(grid.blocks_for(counts_of_step)), .threads = kShortConvThreads, .programmatic = device.sm >= 90},
                      cu_stream(s->get()), p);
      };
      const int calls = int(std::max<size_t>(r.size(), 20));
      const double each = seconds(*s, calls, [&] {
        for (int i = 0; i < calls; ++i) launch(size_t(i));
      });
      std::printf("  %d,%d: %5.0f", tuning.stages, tuning.blocks, r.bytes() / each * 1e-9);
    }
    std::printf("\n");
  }
}

}  // namespace
}  // namespace imbrex::cuda
