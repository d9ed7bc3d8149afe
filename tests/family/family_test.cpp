// What every family of layers has for nothing: a family made up here, whose specs are numbers, is registered, selected, forced and
// explained.
#include "imbrex/family.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "expect_error.h"
#include "family/select_of.h"

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
  EXPECT_EQ(test::error_code([] { select<SumFamily>({3}, describe_device("cpu"), {.forced = "cpu_avx512"}); }), "select.forced");
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
