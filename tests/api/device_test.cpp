// Devices from outside: the toy accelerator of examples/device, whose memory the host cannot touch, by everything that the library does on
// a device. device_table_test.cpp has tables that bring less.
#include <unistd.h>
#include <cerrno>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "api/handles.h"
#include "conformance/attention/case_runner.h"
#include "conformance/attention/device_mirror.h"
#include "expect_error.h"
#include "imbrex/capture.h"
#include "imbrex/device_platform.h"
#include "imbrex/device_stream.h"
#include "imbrex/kv_cache.h"
#include "imbrex/merge.h"
#include "imbrex/select.h"
#include "imbrex/workspace.h"

namespace imbrex::test {
namespace {

// Tests with the toy plug-in. It is unregistered at the end of each test, when nothing may be left that uses it.
class CApiDevice : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(imbrex_load_plugin(IMBREX_TOY_PLUGIN), IMBREX_OK) << imbrex_last_error(); }
  void TearDown() override {
    EXPECT_EQ(imbrex_unregister_backend("toy"), IMBREX_OK) << imbrex_last_error();
    EXPECT_EQ(imbrex_unregister_short_conv_backend("toy"), IMBREX_OK) << imbrex_last_error();
    EXPECT_EQ(imbrex_unregister_device("toy"), IMBREX_OK) << imbrex_last_error();
  }
};

DeviceInfo toy(int number = 0) { return describe_device("toy:" + std::to_string(number)); }

AttentionSpec small_spec() {
  AttentionSpec spec{
      .num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 32, .head_dim_v = 32, .q_dtype = DType::f32, .kv_dtype = DType::f32};
  spec.block_size = 8;
  return spec;
}

TEST_F(CApiDevice, IsNamedAndDescribed) {
  imbrex_device_properties p{};
  p.struct_size = sizeof p;
  int first = -1;
  for (const int number : {0, 1}) {
    const std::string name = "toy:" + std::to_string(number);
    const DeviceHandle device = make_handle<DeviceHandle>([&](auto** out) { return imbrex_device_create(name.c_str(), out); });
    ASSERT_NE(device, nullptr) << imbrex_last_error();
    EXPECT_NE(std::string(imbrex_device_str(device.get())).find(name), std::string::npos) << imbrex_device_str(device.get());
    ASSERT_EQ(imbrex_device_get_properties(device.get(), &p), IMBREX_OK);
    EXPECT_EQ(p.cuda, 2);
    EXPECT_STREQ(p.platform, "toy");
    EXPECT_EQ(p.platform_number, number);
    EXPECT_EQ(p.index % 64, number);
    EXPECT_EQ(p.memory_bytes, int64_t(512) << 20);
    if (number == 0) first = p.index;
    EXPECT_EQ(p.index, first + number);
  }
  EXPECT_EQ(describe_device("TOY").device, toy().device);
  EXPECT_EQ(toy(1).device.str(), "toy:1");
  EXPECT_EQ(probe_plugins().size(), 2u);
  imbrex_device* none = nullptr;
  for (const char* absent : {"toy:2", "toy:64"}) {
    EXPECT_EQ(imbrex_device_create(absent, &none), IMBREX_DEVICE);
    EXPECT_EQ(last_code(), "device.absent");
    EXPECT_NE(std::string(imbrex_last_error()).find("toy:1"), std::string::npos) << imbrex_last_error();
  }
  for (const char* unknown : {"toys", "toy:", "toy:-1", "toy:0x"}) EXPECT_EQ(imbrex_device_create(unknown, &none), IMBREX_DEVICE);
  EXPECT_EQ(last_code(), "device.unknown");
  EXPECT_NE(std::string(imbrex_last_error()).find("toy:0 (and so on)"), std::string::npos) << imbrex_last_error();
  const DeviceHandle host = cpu();
  ASSERT_EQ(imbrex_device_get_properties(host.get(), &p), IMBREX_OK);
  EXPECT_STREQ(p.platform, "cpu");
  EXPECT_EQ(p.cuda, 0);
  EXPECT_EQ(imbrex_load_plugin(IMBREX_TOY_PLUGIN), IMBREX_INVALID);  // its name is taken
  EXPECT_EQ(last_code(), "plugin.refused");
}

// The kernel copies from no page without access.
bool host_can_read(const void* address) {
  int ends[2] = {};
  EXPECT_EQ(pipe(ends), 0);
  const bool can = write(ends[1], address, 1) == 1;
  EXPECT_TRUE(can || errno == EFAULT) << errno;
  close(ends[0]), close(ends[1]);
  return can;
}

TEST_F(CApiDevice, MemoryOfTheDeviceIsNotTheHosts) {
  const auto stream = open_stream(toy());
  EXPECT_TRUE(stream->asynchronous());
  std::vector<int32_t> numbers(1000), back(1000);
  std::iota(numbers.begin(), numbers.end(), 7);
  const DeviceTensor there = stream->copy_of(TensorView::contiguous(numbers.data(), DType::i32, {1000}));
  EXPECT_EQ(there.view.device, toy().device);
  EXPECT_FALSE(host_can_read(there.view.data));
  EXPECT_TRUE(host_can_read(stream->allocate_host(16).get()));
  stream->download(back.data(), there.view.data, 4000);
  stream->synchronize();
  EXPECT_EQ(back, numbers);
  stream->fill(there.view.as<char>() + 4, 0x11, 8);
  stream->download(back.data(), there.view.data, 4000);
  stream->synchronize();
  EXPECT_EQ(back[0], 7);
  EXPECT_EQ(back[1], 0x11111111);
  EXPECT_EQ(back[3], 10);

  // The plug-in's table has no gather, so the host looks up where the rows are.
  std::vector<int32_t> offsets{500, 0, 996, 500};
  const DeviceTensor at = stream->copy_of(TensorView::contiguous(offsets.data(), DType::i32, {4}));
  const DeviceTensor rows = stream->tensor(DType::i32, {4, 3});
  stream->upload(there.view.data, numbers.data(), 4000);
  stream->gather(there.view, at.view, rows.view);
  std::vector<int32_t> gathered(12);
  stream->download(gathered.data(), rows.view.data, 48);
  stream->synchronize();
  EXPECT_EQ(gathered, (std::vector<int32_t>{507, 508, 509, 7, 8, 9, 1003, 1004, 1005, 507, 508, 509}));

  stream->mark(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  stream->mark(1);
  EXPECT_GE(stream->seconds(0, 1), 0.015);
  EXPECT_LT(stream->seconds(0, 1), 10);
}

// Bit for bit what the reference gives on the host: the device's bytes are the same, and so is who computes with them.
TEST_F(CApiDevice, ConformanceCasesGiveTheBitsOfTheReference) {
  const Backend* const backend = find_backend("toy");
  ASSERT_NE(backend, nullptr);
  const std::unique_ptr<Backend> mirror = device_mirror(*backend);
  const DeviceInfo device = toy(1), host = probe_cpu();
  const Backend& reference = *find_backend("reference");
  int count = 0;
  for (size_t i = 0; i < cases().size(); i += 11) {
    const Case& c = cases()[i];
    if (!reference.unsupported(c.spec, host).empty() || !backend->unsupported(c.spec, device).empty() || c.work() > 10'000'000) continue;
    if (c.packed_mask) continue;  // refused: a backend from outside reads bytes
    SCOPED_TRACE(c.name);
    const CaseInputs inputs = make_inputs(c);
    const RunOptions options = default_options(c);
    const RunResult expected = run_case(reference, host, inputs, options), actual = run_case(*mirror, device, inputs, options);
    EXPECT_TRUE(actual.violations.empty()) << actual.violations.front();
    EXPECT_EQ(actual.out, expected.out);
    EXPECT_EQ(actual.lse, expected.lse);
    ++count;
  }
  EXPECT_GT(count, 30);
}

// A layer on the device, for one request of so many keys: what it computes, and what the reference does on the host.
class Layer {
 public:
  static constexpr int kMostTokens = 4, kMostKeys = 64;
  explicit Layer(const DeviceInfo& device)
      : device_(device),
        stream(open_stream(device)),
        cache_(spec_, 1, kMostKeys / spec_.block_size, "lbhtd", stream.get()),
        host_cache_(spec_, 1, kMostKeys / spec_.block_size),
        plan(find_backend("toy")->plan(spec_, device, {.limits = limits()})),
        host_plan_(find_backend("reference")->plan(spec_, probe_cpu(), {.limits = limits()})) {
    for (size_t i = 0; i < values_.size(); ++i) values_[i] = float(int(i * 37 % 101) - 50) / 50;
    const TensorView on_host = TensorView::contiguous(values_.data(), DType::f32, {int64_t(values_.size())});
    rows_ = stream->copy_of(on_host), out_ = stream->tensor(DType::f32, {kMostTokens, spec_.num_q_heads, spec_.head_dim_v});
    stream->fill(out_.memory.get(), 0, out_.view.num_elements() * 4);
  }
  static PlanLimits limits() { return {.max_num_reqs = 1, .max_num_tokens = kMostTokens, .max_seq_len = kMostKeys}; }

  void update(int keys, int tokens) {
    const std::vector<int32_t> starts{0, tokens}, lens{keys};
    std::vector<int32_t> blocks(kMostKeys / size_t(spec_.block_size));
    std::iota(blocks.rbegin(), blocks.rend(), 0);
    std::vector<int64_t> slots;
    for (int i = keys - tokens; i < keys; ++i)
      slots.push_back(blocks[size_t(i / spec_.block_size)] * spec_.block_size + i % spec_.block_size);
    slots.resize(kMostTokens, -1);
    batch_starts_ = starts, batch_lens_ = lens, blocks_ = blocks, slots_ = slots;
    const Batch batch{.query_start_loc = batch_starts_,
                      .seq_lens = batch_lens_,
                      .block_table = TensorView::contiguous(blocks_.data(), DType::i32, {1, int64_t(blocks_.size())}),
                      .slot_mapping = TensorView::contiguous(slots_.data(), DType::i64, {kMostTokens})};
    plan->update(batch, stream->get());
    host_plan_->update(batch);
    tokens_ = tokens;
  }
  void launch() const { launch(*plan, cache_.layer(0), rows_.view, out_.view, stream->get()); }
  // Expects, after a launch or a replay, the outputs that the host computes for the step of the last update().
  void expect_as_on_the_host() {
    std::vector<float> expected(size_t(out_.view.num_elements())), actual(expected.size());
    TensorView host_out = out_.view;
    host_out.device = {}, host_out.data = expected.data();
    launch(*host_plan_, host_cache_.layer(0), TensorView::contiguous(values_.data(), DType::f32, {int64_t(values_.size())}), host_out,
           nullptr);
    stream->download(actual.data(), out_.view.data, int64_t(actual.size()) * 4);
    stream->synchronize();
    const size_t count = size_t(tokens_) * size_t(out_.view.stride(0));
    EXPECT_EQ(std::vector<float>(actual.begin(), actual.begin() + long(count)),
              std::vector<float>(expected.begin(), expected.begin() + long(count)));
    EXPECT_NE(actual[count - 1], 0);
  }

 private:
  // Tokens of q, k and v lie side by side in `rows`.
  void launch(const Plan& plan, const KvCache& cache, const TensorView& rows, const TensorView& out, Stream on) const {
    const auto part = [&](int64_t at, int64_t heads) {
      return TensorView::contiguous(rows.as<float>() + at, DType::f32, {kMostTokens, heads, 32}, rows.device);
    };
    plan.write_kv(cache, part(0, 2), part(1000, 2), on);
    plan.run({.q = part(2000, 4), .kv = cache}, {.out = out}, on);
  }

  DeviceInfo device_;
  AttentionSpec spec_ = small_spec();
  std::vector<float> values_ = std::vector<float>(3000);
  std::vector<int32_t> batch_starts_, batch_lens_, blocks_;
  std::vector<int64_t> slots_;
  int tokens_ = 0;

 public:
  std::unique_ptr<DeviceStream> stream;

 private:
  KvAllocation cache_, host_cache_;
  DeviceTensor rows_, out_;

 public:
  std::unique_ptr<Plan> plan;

 private:
  std::unique_ptr<Plan> host_plan_;
};

TEST_F(CApiDevice, AGraphReplaysTheStepOfTheTime) {
  Layer layer(toy());
  EXPECT_TRUE(layer.plan->capturable());
  layer.update(3, 3);
  EXPECT_EQ(capture_of(toy().device, layer.stream->get()), 0u);
  uint64_t first = 0, second = 0;
  const DeviceGraph graph = layer.stream->capture([&] {
    layer.launch();
    first = capture_of(toy().device, layer.stream->get());
    EXPECT_EQ(error_code([&] { layer.update(4, 1); }), "backend.outside") << "an update is no launch";
    EXPECT_EQ(error_code([&] { keep_for_capture(toy().device, layer.stream->get(), std::make_shared<int>(1)); }), "stream.capture");
  });
  EXPECT_NE(first, 0u);
  EXPECT_EQ(capture_of(toy().device, layer.stream->get()), 0u);
  layer.stream->synchronize();
  layer.update(3, 3);
  layer.stream->replay(graph);
  layer.expect_as_on_the_host();
  for (const auto& [keys, tokens] : {std::pair(4, 1), {8, 4}, {9, 1}, {12, 3}}) {
    layer.update(keys, tokens);
    layer.stream->replay(graph);
    layer.expect_as_on_the_host();
  }
  // What throws in a capture ends it, and the stream goes on.
  EXPECT_EQ(error_code([&] {
              layer.stream->capture([&] {
                second = capture_of(toy().device, layer.stream->get());
                throw Error("test.stop", "as it was told");
              });
            }),
            "test.stop");
  EXPECT_NE(second, first);
  layer.update(13, 1);
  layer.launch();
  layer.expect_as_on_the_host();
}

TEST_F(CApiDevice, StreamsAreOrderedByEventsAlone) {
  constexpr int64_t kBytes = int64_t(8) << 20;
  const auto writer = open_stream(toy()), reader = open_stream(toy());
  ASSERT_NE(writer->get(), reader->get());
  const std::shared_ptr<void> memory = writer->allocate(kBytes), host = reader->allocate_host(1);
  const StreamOrder order(toy().device);
  const auto last = [&] { return *static_cast<const unsigned char*>(host.get()); };
  for (int round = 1; round <= 5; ++round) {
    order.begin(writer->get());
    for (int i = 0; i < 10; ++i) writer->fill(memory.get(), static_cast<unsigned char>(10 * round + i), kBytes);
    order.end(writer->get());
    order.begin(reader->get());
    reader->download(host.get(), static_cast<char*>(memory.get()) + kBytes - 1, 1);
    order.end(reader->get());
    order.synchronize();
    EXPECT_EQ(last(), 10 * round + 9);
  }
}

TEST_F(CApiDevice, WhatFailsInTheMiddleLeavesTheRest) {
  Layer layer(toy());
  const int64_t before = layer.stream->free_bytes();
  EXPECT_EQ(error_code([&] { layer.stream->allocate(before + 1); }), "stream.memory");
  const DeviceHandle device = make_handle<DeviceHandle>([](auto** out) { return imbrex_device_create("toy", out); });
  const SpecHandle spec = spec_of(small_fields());
  imbrex_kv_allocation* none = nullptr;
  EXPECT_EQ(imbrex_kv_allocation_create(spec.get(), device.get(), 100, 10000, nullptr, &none), IMBREX_OUT_OF_MEMORY);
  EXPECT_EQ(last_code(), "stream.memory");
  EXPECT_NE(std::string(imbrex_last_error()).find("are left"), std::string::npos) << imbrex_last_error();
  EXPECT_EQ(layer.stream->free_bytes(), before);
  EXPECT_EQ(error_code([&] { layer.stream->fill(&layer, 0, 1); }), "device.outside") << "an address that is not the device's";
  // A layer before any step: it fails in the stream, and who waits for the stream hears of it, once.
  layer.launch();
  EXPECT_EQ(error_code([&] { layer.stream->synchronize(); }), "device.outside");
  layer.stream->synchronize();
  layer.update(2, 2);
  layer.launch();
  layer.expect_as_on_the_host();
}

TEST_F(CApiDevice, BlocksAreCopiedAndResultsMerged) {
  const auto stream = open_stream(toy());
  const AttentionSpec spec = small_spec();
  KvAllocation memory(spec, 1, 4, "lbhtd", stream.get());
  const KvCache cache = memory.layer(0);
  for (const TensorView& side : {cache.k, cache.v})
    for (int block = 0; block < 4; ++block)
      stream->fill(side.slice(0, block, block + 1).data, static_cast<unsigned char>(block + 1), side.stride(0) * 4);
  const std::vector<BlockCopy> copies{{.from = 0, .to = 3}, {.from = 1, .to = 2}};
  const auto copier = make_block_copier(toy());
  copier->copy(spec, cache, copies, stream->get());
  std::vector<unsigned char> bytes(size_t(memory.bytes()));
  for (const TensorView& side : {cache.k, cache.v}) {
    const int64_t block_bytes = side.stride(0) * 4;
    stream->download(bytes.data(), side.data, 4 * block_bytes);
    stream->synchronize();
    for (const auto& [block, value] : {std::pair(0, 1), {1, 2}, {2, 2}, {3, 1}})
      for (int64_t i = 0; i < block_bytes; ++i) ASSERT_EQ(bytes[size_t(block * block_bytes + i)], value) << block << " " << i;
  }
  const std::vector<BlockCopy> chained{{.from = 0, .to = 1}, {.from = 1, .to = 2}};
  EXPECT_EQ(error_code([&] { copier->copy(spec, cache, chained, stream->get()); }), "kv_cache.copy.chained");

  std::vector<float> out[2], lse[2];
  for (int part : {0, 1})
    for (int i = 0; i < 24; ++i) {
      out[part].push_back(float(i * (part + 1) % 7));
      if (i < 6) lse[part].push_back(float(i - 3 * part));
    }
  std::vector<float> expected(24), expected_lse(6), actual(24);
  const auto views = [](float* o, float* l, Device device) {
    return PartialResult{TensorView::contiguous(o, DType::f32, {3, 2, 4}, device), TensorView::contiguous(l, DType::f32, {3, 2}, device)};
  };
  std::vector<PartialResult> host_parts, parts;
  std::vector<DeviceTensor> kept;
  for (int part : {0, 1}) {
    host_parts.push_back(views(out[part].data(), lse[part].data(), {}));
    kept.push_back(stream->copy_of(host_parts.back().out)), kept.push_back(stream->copy_of(host_parts.back().lse));
    parts.push_back({kept[kept.size() - 2].view, kept.back().view});
  }
  const PartialResult host_result = views(expected.data(), expected_lse.data(), {});
  merge_partial_results(host_parts, host_result.out, host_result.lse);
  make_partial_merger(toy())->merge(parts, parts[0].out, parts[0].lse, stream->get());
  stream->download(actual.data(), parts[0].out.data, 96);
  stream->synchronize();
  EXPECT_EQ(actual, expected);
  EXPECT_EQ(error_code([&] { make_partial_merger(toy())->merge(host_parts, parts[0].out, parts[0].lse, stream->get()); }), "merge.device");
}

TEST_F(CApiDevice, StaysUntilNobodyUsesIt) {
  const auto in_use = [] {
    EXPECT_EQ(imbrex_unregister_device("toy"), IMBREX_INVALID);
    return last_code() == "registry.in_use";
  };
  const DeviceInfo device = toy();
  auto stream = open_stream(device);
  EXPECT_TRUE(in_use());
  std::shared_ptr<void> memory = stream->allocate(100);
  DeviceGraph graph = stream->capture([&] { stream->fill(memory.get(), 1, 100); });
  stream.reset();
  memory.reset();
  EXPECT_TRUE(in_use()) << "a graph";
  graph.reset();
  auto plan = find_backend("toy")->plan(small_spec(), device, {.limits = Layer::limits()});
  EXPECT_TRUE(in_use()) << "a plan";
  EXPECT_EQ(imbrex_unregister_backend("toy"), IMBREX_INVALID);
  EXPECT_EQ(toy().device, device.device) << "nothing has changed";
  plan.reset();
  EXPECT_EQ(make_workspace(device)->device(), device.device);
  EXPECT_EQ(make_workspace(device)->bytes(), 0);

  EXPECT_EQ(imbrex_unregister_device("toy"), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(error_code([&] { open_stream(device); }), "device.absent");
  EXPECT_EQ(error_code([&] { make_block_copier(device); }), "device.absent");
  EXPECT_EQ(error_code([&] { find_backend("toy")->plan(small_spec(), device, {}); }), "device.absent");
  EXPECT_EQ(error_code([] { toy(); }), "device.unknown");
  EXPECT_EQ(device.device.str(), "toy:0") << "its name stays";
  EXPECT_TRUE(probe_plugins().empty());
  EXPECT_EQ(imbrex_unregister_device("toy"), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "registry.unknown");
  // Another registration is another device, and old numbers do not come to mean it.
  EXPECT_EQ(imbrex_unregister_backend("toy"), IMBREX_OK);
  EXPECT_EQ(imbrex_unregister_short_conv_backend("toy"), IMBREX_OK);
  SetUp();
  EXPECT_NE(toy().device, device.device);
  EXPECT_EQ(error_code([&] { open_stream(device); }), "device.absent");
}

// Built-in backends and those that were compiled before there were such devices do not run there.
TEST_F(CApiDevice, OthersRefuseIt) {
  const Selection selection = select(small_spec(), toy());
  ASSERT_NE(selection.backend, nullptr);
  EXPECT_EQ(selection.backend->name(), "toy");
  for (const Candidate& candidate : selection.candidates) {
    if (candidate.backend == selection.backend) continue;
    ASSERT_FALSE(candidate.reasons.empty()) << candidate.backend->name();
    EXPECT_EQ(candidate.reasons[0].code, "device.type") << candidate.backend->name();
  }
  imbrex_backend old{};
  old.struct_size = 96, old.name = "of_before", old.description = "knows CPUs and CUDA";
  old.unsupported = [](void*, const imbrex_spec_fields*, const imbrex_device_properties*, const imbrex_reasons*) {};
  old.plan = [](void*, const imbrex_spec_fields*, const imbrex_device_properties*, const imbrex_plan_options*, void**) {
    return imbrex_status(IMBREX_INTERNAL);
  };
  old.plan_free = [](void*) {};
  old.update = [](void*, const imbrex_batch*, void*) { return imbrex_status(IMBREX_OK); };
  old.write_kv = [](void*, const imbrex_kv_cache*, const imbrex_tensor*, const imbrex_tensor*, void*) { return imbrex_status(IMBREX_OK); };
  old.run = [](void*, const imbrex_inputs*, const imbrex_outputs*, void*) { return imbrex_status(IMBREX_OK); };
  ASSERT_EQ(imbrex_register_backend(&old), IMBREX_OK) << imbrex_last_error();
  const Backend& backend = *find_backend("of_before");
  EXPECT_TRUE(backend.unsupported(small_spec(), probe_cpu()).empty());
  const std::vector<Reason> reasons = backend.unsupported(small_spec(), toy());
  ASSERT_EQ(reasons.size(), 1u);
  EXPECT_EQ(reasons[0].code, "device.type");
  EXPECT_EQ(reasons[0].actual, "toy:0");
  EXPECT_EQ(imbrex_unregister_backend("of_before"), IMBREX_OK);
}

}  // namespace
}  // namespace imbrex::test
