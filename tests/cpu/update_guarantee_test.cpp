// Failed updates of plans for CPUs: an allocation that fails, wherever it is, leaves the plan at the step before; so does the refusal of
// one phase after the other has taken its part.
#include "update_guarantee.h"

#include "allocations.h"
#include "attention/fake_backend.h"
#include "expect_error.h"
#include "imbrex/select.h"

namespace imbrex {
namespace {

using test::FailAllocation, test::MixedStep, test::Requests;

const Requests kSmall{{1, 30}, {0, 0}, {3, 9}, {1, 5}, {20, 20}};
// More requests and tokens than the small one, in another order of phases; split and merged, where that would not take the reference long.
const Requests kLarge{{30, 30}, {1, 4300}, {5, 4200}, {1, 40}, {1, 70}, {0, 17}, {2, 2}};
const Requests kLargeForReference{{30, 30}, {1, 200}, {5, 120}, {1, 40}, {1, 70}, {0, 17}, {2, 2}};

struct Plans {
  const char* name;
  const char *prefill, *decode;  // the same: a plan of one backend
};

class UpdateGuarantee : public testing::TestWithParam<Plans> {
 protected:
  void SetUp() override {
    for (const char* name : {GetParam().prefill, GetParam().decode})
      if (!find_backend(name)->unsupported(test::mixed_spec(4), device).empty()) GTEST_SKIP() << name << " does not run here";
  }
  std::unique_ptr<Plan> plan(const AttentionSpec& spec) const {
    const Backend &prefill = *find_backend(GetParam().prefill), &decode = *find_backend(GetParam().decode);
    const PlanOptions options{.limits = {.max_num_reqs = 16, .max_num_tokens = 100, .max_seq_len = 10000}, .threads = {}};
    return &prefill == &decode ? prefill.plan(spec, device, options) : plan_by_phase(prefill, decode, spec, device, options);
  }
  const DeviceInfo device = probe_cpu();
};

TEST_P(UpdateGuarantee, HoldsAtEveryAllocation) {
  const bool slow = std::string(GetParam().decode) == "reference";
  long places = 0;
  for (const int block_size : {4, 0})
    for (const bool custom : {false, true}) {
      const AttentionSpec spec = test::mixed_spec(block_size, custom);
      MixedStep small(spec, kSmall, 1), large(spec, slow ? kLargeForReference : kLarge, 2), nobody(spec, {}, 3);
      const auto make = [&] { return plan(spec); };
      const auto run = [](const Plan& p, MixedStep& step) { return step.run(p); };
      for (const auto& [first, second] : {std::pair(&small, &large), std::pair(&large, &small), std::pair(&nobody, &large)})
        places += test::fail_everywhere<FailAllocation>(make, *first, *second, run);
    }
  EXPECT_GE(places, 20);
}

INSTANTIATE_TEST_SUITE_P(Backends, UpdateGuarantee,
                         testing::Values(Plans{"reference", "reference", "reference"}, Plans{"cpu_generic", "cpu_generic", "cpu_generic"},
                                         Plans{"cpu_avx512", "cpu_avx512", "cpu_avx512"}, Plans{"by_phase", "cpu_generic", "reference"},
                                         Plans{"by_phase_of_cpu", "cpu_avx512", "cpu_generic"}),
                         [](const auto& info) { return info.param.name; });

// A backend with an update() and nothing behind it: it refuses steps with fewer tokens than `least`, and run() marks what it has.
struct Marker final : Plan {
  explicit Marker(const int& least) : least(least) {}
  void update(const Batch& batch, Stream) override {
    if (batch.num_tokens() < least) throw Error("marker.refused", "too few tokens");
    tokens = batch.num_tokens();
  }
  void write_kv(const KvCache&, const TensorView&, const TensorView&, Stream) const override {}
  void run(const Inputs&, const Outputs& o, Stream) const override {
    for (int t = 0; t < tokens; ++t)
      for (int h = 0; h < o.out.size(1); ++h) {
        for (int d = 0; d < o.out.size(2); ++d) o.out.as<float>()[t * o.out.stride(0) + h * o.out.stride(1) + d] = 1000.f + float(tokens);
        o.lse.as<float>()[t * o.lse.stride(0) + h * o.lse.stride(1)] = float(t);
      }
  }
  std::string str() const override { return "marker of " + std::to_string(tokens) + " tokens"; }
  const int& least;
  int tokens = 0;
};
struct MarkerBackend final : FakeBackend {
  explicit MarkerBackend(const int& least) : FakeBackend("marker", {}), least(least) {}
  std::unique_ptr<Plan> plan(const AttentionSpec&, const DeviceInfo&, const PlanOptions&) const override {
    return std::make_unique<Marker>(least);
  }
  const int& least;
};

TEST(UpdateOfPhases, IsOneOrNone) {
  const AttentionSpec spec = test::mixed_spec(4);
  MixedStep small(spec, kSmall, 1), large(spec, kLarge, 2);
  const Backend& generic = *find_backend("cpu_generic");
  int least = 0;
  const MarkerBackend marker(least);
  for (const bool marks_prefill : {true, false}) {
    const Backend &prefill = marks_prefill ? static_cast<const Backend&>(marker) : generic,
                  &decode = marks_prefill ? generic : static_cast<const Backend&>(marker);
    const auto plan = plan_by_phase(prefill, decode, spec, probe_cpu(), {});
    plan->update(small.batch);
    const std::vector<float> before = small.run(*plan);
    const std::string text = plan->str();
    least = 1000;
    EXPECT_EQ(test::error_code([&] { plan->update(large.batch); }), "marker.refused");
    EXPECT_EQ(plan->str(), text);
    EXPECT_TRUE(small.run(*plan) == before);
    least = 0;
    plan->update(large.batch);
    const auto fresh = plan_by_phase(prefill, decode, spec, probe_cpu(), {});
    fresh->update(large.batch);
    EXPECT_TRUE(large.run(*plan) == large.run(*fresh));
  }
}

// Neither of these can take an update back: after the second's refusal there is no step that both have.
TEST(UpdateOfPhases, ThatCannotBeTakenBackLeavesNoStep) {
  const AttentionSpec spec = test::mixed_spec(4);
  MixedStep small(spec, kSmall, 1), large(spec, kLarge, 2);
  int never = 0, least = 0;
  const MarkerBackend prefill(least), decode(never);
  const auto plan = plan_by_phase(prefill, decode, spec, probe_cpu(), {});
  plan->update(small.batch);
  least = 1000;
  EXPECT_EQ(test::error_code([&] { plan->update(large.batch); }), "marker.refused");
  EXPECT_EQ(test::error_code([&] { small.run(*plan); }), "plan.no_step");
  EXPECT_EQ(test::error_code([&] { plan->write_kv(small.in.kv, small.new_keys, small.new_values); }), "plan.no_step");
  least = 0;
  plan->update(small.batch);
  EXPECT_EQ(test::error_code([&] { small.run(*plan); }), "nothing thrown");
}

}  // namespace
}  // namespace imbrex
