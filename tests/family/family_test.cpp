// What every family of layers has for nothing: a family made up here, whose specs are numbers, is registered, selected, forced and
// explained.
#include "imbrex/family.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "expect_error.h"
#include "family/select_of.h"
#include "imbrex/layer_spec.h"

namespace imbrex {
namespace {

struct SumPlan : BasicPlan {
  explicit SumPlan(int number) : number(number) {}
  void update(const Batch& batch, Stream) override { tokens = batch.num_tokens(); }
  std::string str() const override { return "sum"; }
  int sum() const { return number * tokens; }
  int number, tokens = 0;
};

struct SumFamily {
  static constexpr std::string_view name = "sum";
  struct Spec {
    int number = 0;
  };
  using Plan = SumPlan;
};

// Runs numbers up to a limit; 0: any.
class SumBackend final : public BackendOf<SumFamily> {
 public:
  SumBackend(std::string name, int limit) : name_(std::move(name)), limit_(limit) {}
  std::string_view name() const override { return name_; }
  std::string_view description() const override { return "adds up"; }
  std::vector<Reason> unsupported(const SumFamily::Spec& spec, const DeviceInfo& device) const override {
    std::vector<Reason> reasons;
    if (device.device.type != DeviceType::cpu) reasons.push_back({"device.type", "cpu", to_string(device.device.type)});
    if (limit_ > 0 && spec.number > limit_)
      reasons.push_back({"spec.number", "at most " + std::to_string(limit_), std::to_string(spec.number)});
    return reasons;
  }
  std::unique_ptr<SumPlan> plan(const SumFamily::Spec& spec, const DeviceInfo&, const PlanOptions&) const override {
    return std::make_unique<SumPlan>(spec.number);
  }

 private:
  std::string name_;
  int limit_;
};

const SumBackend fast("sum_fast", 10), slow("sum_slow", 0);

}  // namespace

template <>
Registry<SumFamily>::List Registry<SumFamily>::built_in() {
  return {&fast, &slow};
}
template <>
std::vector<std::string> propose<SumFamily>(const SumFamily::Spec&, const DeviceInfo&, std::span<const CandidateOf<SumFamily>>,
                                            const BackendOf<SumFamily>&) {
  return {"number 10: sum_fast"};
}

namespace {

TEST(Family, TheFirstThatRunsASpecIsSelected) {
  const auto selection = select<SumFamily>({3}, describe_device("cpu"));
  EXPECT_EQ(selection.backend, &fast);
  EXPECT_EQ(selection.rule, "first of 2 that run it");
  const auto plan = selection.backend->plan({3}, describe_device("cpu"), {});
  const std::vector<int32_t> starts{0, 4}, lens{4};
  Batch batch;
  batch.query_start_loc = starts, batch.seq_lens = lens;
  plan->update(batch, nullptr);
  EXPECT_EQ(plan->sum(), 12);
  EXPECT_EQ(test::error_code([&] { plan->update_on_device(DeviceBatch{}); }), "update.on_device");
  EXPECT_TRUE(plan->device_problems().empty());
  EXPECT_FALSE(plan->capturable());
}

TEST(Family, WhatOnlyTheReferenceRunsHasProposals) {
  const auto selection = select<SumFamily>({11}, describe_device("cpu"));
  EXPECT_EQ(selection.backend, &slow);
  EXPECT_EQ(selection.rule, "only the reference runs it: correct but slow");
  EXPECT_EQ(selection.proposals, std::vector<std::string>{"number 10: sum_fast"});
  EXPECT_EQ(selection.str(),
            "sum_slow (only the reference runs it: correct but slow)\n"
            "  sum_fast  refuses    adds up\n"
            "              - spec.number: wanted at most 10, got 11\n"
            "  sum_slow  chosen     adds up\n"
            "  would run with number 10: sum_fast\n");
}

TEST(Family, NothingRunsOnADeviceOfOthersButACpuIsProposed) {
  const auto selection = select<SumFamily>({3}, describe_device("h200"));
  EXPECT_EQ(selection.backend, nullptr);
  ASSERT_EQ(selection.proposals.size(), 2u);
  EXPECT_EQ(selection.proposals[1], "device cpu: sum_fast");
}

TEST(Family, ABackendIsForcedByName) {
  EXPECT_EQ(select<SumFamily>({3}, describe_device("cpu"), {.forced = "sum_slow"}).backend, &slow);
  EXPECT_EQ(test::error_code([] { select<SumFamily>({11}, describe_device("cpu"), {.forced = "sum_fast"}); }), "select.forced");
  EXPECT_EQ(test::error_code([] { select<SumFamily>({3}, describe_device("cpu"), {.forced = "no_such"}); }), "select.forced");
}

TEST(Family, ANameOfAnotherFamilyLeavesThisOneToItsOrder) {
  const auto selection = select<SumFamily>({3}, describe_device("cpu"), {.forced = "CPU_amx"});
  EXPECT_EQ(selection.backend, &fast);
  EXPECT_EQ(selection.rule, "first of 2 that run it; CPU_amx, forced, is of the family attention");
  EXPECT_EQ(select<SumFamily>({3}, describe_device("cpu"), {.forced_decode = "fa3", .phase = Phase::decode}).rule,
            "first of 2 that run it; fa3, forced for decode, is of the family attention");
  EXPECT_EQ(select<SumFamily>({3}, describe_device("cpu"), {.forced = "short_conv"}).rule,
            "first of 2 that run it; short_conv, forced, is of the family short_conv");
}

// What one name makes of the layers of a model of attention and short convolutions.
TEST(Family, OneNameForcesTheFamiliesThatHaveIt) {
  const ShortConvSpec conv{.dim = 64};
  const AttentionSpec attention{.num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 64, .head_dim_v = 64};
  const DeviceInfo amx = describe_device("amx,2 threads");
  const auto names = [&](const char* forced) {
    return std::pair(std::string(select<ShortConvFamily>(conv, amx, {.forced = forced}).backend->name()),
                     std::string(select<AttentionFamily>(attention, amx, {.forced = forced}).backend->name()));
  };
  using Names = std::pair<std::string, std::string>;
  EXPECT_EQ(names("cpu_amx"), Names("cpu_avx512", "cpu_amx"));
  EXPECT_EQ(names("cpu_generic"), Names("cpu_generic", "cpu_generic"));
  EXPECT_EQ(names("reference"), Names("reference", "reference"));
  EXPECT_EQ(names("intel_amx"), Names("cpu_avx512", "cpu_amx")) << "an alias of attention";
  EXPECT_EQ(names("SHORT_CONV"), Names("cpu_avx512", "cpu_amx")) << "an alias of the other";
  for (const char* nobody : {"no_such", "FLASHMLA_SPARSE"}) {
    EXPECT_EQ(test::error_code([&] { select<ShortConvFamily>(conv, amx, {.forced = nobody}); }), "select.forced") << nobody;
    EXPECT_EQ(test::error_code([&] { select<AttentionFamily>(attention, amx, {.forced = nobody}); }), "select.forced") << nobody;
  }
  // A backend of the family that cannot is an error, whoever else might.
  EXPECT_EQ(test::error_code([&] { select<ShortConvFamily>(conv, describe_device("h200"), {.forced = "cpu_generic"}); }), "select.forced");

  setenv("IMBREX_BACKEND", "cpu_amx", 1);
  const auto by_environment = select<ShortConvFamily>(conv, amx);
  unsetenv("IMBREX_BACKEND");
  EXPECT_EQ(by_environment.backend->name(), "cpu_avx512");
  EXPECT_EQ(by_environment.rule, "first of 3 that run it; cpu_amx, forced by IMBREX_BACKEND, is of the family attention");
}

TEST(Family, BackendsOfOthersFromOutsideAreKnown) {
  struct Mine final : BackendOf<ShortConvFamily> {
    std::string_view name() const override { return "my_conv"; }
    std::string_view description() const override { return "mine"; }
    std::vector<Reason> unsupported(const ShortConvSpec&, const DeviceInfo&) const override { return {}; }
    std::unique_ptr<ShortConvPlan> plan(const ShortConvSpec&, const DeviceInfo&, const PlanOptions&) const override { return nullptr; }
  };
  const SelectOptions force{.forced = "my_conv"};
  EXPECT_EQ(test::error_code([&] { select<SumFamily>({3}, describe_device("cpu"), force); }), "select.forced");
  register_backend<ShortConvFamily>(std::make_shared<Mine>());
  EXPECT_EQ(select<SumFamily>({3}, describe_device("cpu"), force).backend, &fast);
  unregister_backend<ShortConvFamily>("my_conv");
}

TEST(Family, RegisteredBackendsComeFirstAndAreOfOneFamily) {
  const auto mine = std::make_shared<const SumBackend>("mine", 0);
  register_backend<SumFamily>(mine);
  EXPECT_EQ(test::error_code([&] { register_backend<SumFamily>(mine); }), "registry.duplicate");
  EXPECT_EQ(select<SumFamily>({3}, describe_device("cpu")).backend, mine.get());
  EXPECT_EQ(find_backend<SumFamily>("mine"), mine.get());
  EXPECT_EQ(find_backend<SumFamily>("reference"), nullptr);
  unregister_backend<SumFamily>("mine");
  EXPECT_EQ(test::error_code([] { unregister_backend<SumFamily>("mine"); }), "registry.unknown");
  EXPECT_EQ(backends<SumFamily>().size(), 2u);
}

}  // namespace
}  // namespace imbrex
