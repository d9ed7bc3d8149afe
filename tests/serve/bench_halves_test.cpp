// Batches that the bench cuts in two: where, that bits are those of the whole, and that others are noticed.
#include "serve/bench_halves.h"

#include <gtest/gtest.h>

#include <memory>

#include "expect_error.h"
#include "imbrex/select.h"

namespace imbrex::serve {
namespace {

BenchOptions quick() {
  static ThreadPool pool(3);
  BenchOptions options;
  options.min_seconds = 0, options.max_seconds = 0.001, options.min_samples = 2;
  options.threads = pool.parallel_for();
  return options;
}

HalvesResult halves(const AttentionSpec& spec, const std::vector<BenchRequest>& requests, int cut = 0,
                    const char* backend = "cpu_generic") {
  return bench_halves(*find_backend(backend), spec, describe_device("cpu"), requests, quick(), cut);
}

TEST(BenchHalves, HaveTheBitsOfTheWhole) {
  const AttentionSpec causal{.num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 16, .head_dim_v = 8};
  std::vector<AttentionSpec> specs(6, causal);
  specs[1].mask.window_left = 30;
  specs[2].block_size = 0;
  specs[3].kv_dtype = DType::fp8_e4m3;
  specs[4].mask.tree = true;
  specs[5].mask.custom = true;
  for (const AttentionSpec& spec : specs) {
    SCOPED_TRACE(spec.str());
    const HalvesResult r = halves(spec, {{8, 100}, {1, 50}, {8, 40}, {7, 300}});
    EXPECT_EQ(r.cut, 9) << "the end of a request that is nearest to 12";
    EXPECT_FALSE(r.through_request);
    EXPECT_FALSE(r.captured);
    EXPECT_EQ(r.values, 24 * 4 * 8);
    EXPECT_EQ(r.different, 0);
    for (const Timing& time : {r.whole, r.in_turn, r.together}) EXPECT_GT(time.median_s, 0);
  }
  const HalvesResult prompt = halves(causal, {{200, 260}});
  EXPECT_EQ(prompt.cut, 100);
  EXPECT_TRUE(prompt.through_request);
  EXPECT_EQ(prompt.different, 0);
  EXPECT_EQ(halves(causal, {{200, 260}, {1, 30}}, 7).cut, 7);
  EXPECT_EQ(halves(causal, {{200, 260}, {1, 30}}).cut, 100) << "the nearest end is that of the batch";
  EXPECT_EQ(halves(causal, {{150, 260}, {90, 90}}).cut, 150);
}

TEST(BenchHalves, AreRefused) {
  const AttentionSpec spec{.num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 16, .head_dim_v = 8};
  const auto code = [&](const std::vector<BenchRequest>& requests, int cut) {
    return test::error_code([&] { halves(spec, requests, cut); });
  };
  EXPECT_EQ(code({{1, 10}}, 0), "bench.halves");
  EXPECT_EQ(code({{2, 10}}, 2), "bench.halves");
  EXPECT_EQ(code({{2, 10}}, -1), "bench.halves");
  EXPECT_EQ(code({{2, 10}}, 1), "nothing thrown");
  AttentionSpec both = spec;
  both.mask = {.causal = false, .window_left = 4, .window_right = 4};
  EXPECT_EQ(test::error_code([&] { halves(both, {{20, 20}, {20, 20}}); }), "batch.part.keys");
}

// Rounds what it computes in a way that depends on the requests of a batch.
struct Dependent final : BackendOf<AttentionFamily> {
  struct OfBatch final : AttentionPlan {
    std::unique_ptr<AttentionPlan> inner;
    int requests = 0;
    void update(const Batch& batch, Stream stream) override { requests = batch.num_reqs(), inner->update(batch, stream); }
    void write_kv(const KvCache& cache, const TensorView& k, const TensorView& v, Stream stream) const override {
      inner->write_kv(cache, k, v, stream);
    }
    void run(const AttentionInputs& in, const AttentionOutputs& out, Stream stream) const override {
      inner->run(in, out, stream);
      if (requests > 1) out.out.as<uint16_t>()[0] ^= 1;
    }
    std::string str() const override { return "dependent"; }
  };
  std::string_view name() const override { return "dependent"; }
  std::string_view description() const override { return "rounds by the batch"; }
  std::vector<Reason> unsupported(const AttentionSpec&, const DeviceInfo&) const override { return {}; }
  std::unique_ptr<AttentionPlan> plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    auto made = std::make_unique<OfBatch>();
    made->inner = find_backend("reference")->plan(spec, device, options);
    return made;
  }
};

TEST(BenchHalves, OtherBitsAreNoticed) {
  const AttentionSpec spec{.num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 16, .head_dim_v = 8};
  const Dependent backend;
  const auto run = [&](std::vector<BenchRequest> requests) { bench_halves(backend, spec, describe_device("cpu"), requests, quick()); };
  EXPECT_EQ(test::error_code([&] { run({{1, 30}, {1, 30}}); }), "bench.halves");
  EXPECT_EQ(test::error_code([&] { run({{2, 30}}); }), "nothing thrown");
}

}  // namespace
}  // namespace imbrex::serve
