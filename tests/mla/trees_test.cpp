// Trees of drafts in latent attention: which way they take, and what is refused. That they are computed is tested in tests/conformance.
#include <gtest/gtest.h>

#include <span>

#include "expect_error.h"
#include "mla/backend.h"
#include "mla_step.h"

namespace imbrex {
namespace {

using test::kSmall, test::MlaStep;

// Which way a request takes depends on whether it is a tree: a chain of as many tokens may have its keys expanded.
TEST(MlaTrees, TreesStayInLatentSpaceBesideChainsWithExpandedKeys) {
  MlaSpec spec = kSmall;
  spec.mask.tree = true;
  const auto& backend = dynamic_cast<const MlaCompositeBackend&>(*find_backend<MlaFamily>("cpu_generic"));
  MlaStep step(spec, {{5, 20}, {5, 20}, {0, 3}, {9, 9}, {1, 30}});
  const PlanOptions options{.limits = {.max_num_reqs = 8, .max_num_tokens = 32, .max_seq_len = 64}};
  MlaParts parts = backend.parts(step.spec, probe_cpu(), options);
  parts.expand = true;
  const auto plan = make_mla_plan(step.spec, probe_cpu(), options, std::move(parts));
  const std::vector<int32_t> parents{-1, 0, 0, 1, 1, -1, 0, 1, 2, 3, -1, -1, 1, 2, 3, 4, 5, 6, 7, -1};
  step.batch.draft_parents = parents;
  plan->update(step.batch);
  for (const int r : {0, 2, 3}) EXPECT_FALSE(plan->expands(r)) << r;
  for (const int r : {1, 4}) EXPECT_TRUE(plan->expands(r)) << r;
  step.call(*plan);
  const std::vector<char> out = step.output().bytes;
  // The first token of request 3 that has no parent: the other root is not seen.
  const std::vector<int32_t> one_root{-1, 0, 0, 1, 1, -1, 0, 1, 2, 3, -1, 0, 1, 2, 3, 4, 5, 6, 7, -1};
  step.batch.draft_parents = one_root;
  plan->update(step.batch);
  EXPECT_TRUE(plan->expands(3));
  step.call(*plan);
  EXPECT_NE(step.output().bytes, out);
  step.batch.draft_parents = {};
  plan->update(step.batch);
  EXPECT_TRUE(plan->expands(0) && plan->expands(3));
}

constexpr const char* kNoError = "nothing thrown";

TEST(MlaTrees, TreesThatAreNoneAreRefused) {
  MlaSpec spec = kSmall;
  MlaStep step(spec, {{3, 20}, {2, 9}});
  const std::vector<int32_t> parents{-1, 0, 0, -1, 0}, wrong{-1, 0, 2, -1, 0};
  const auto refused = [&](const BackendOf<MlaFamily>& backend, std::span<const int32_t> given) {
    const auto plan = backend.plan(spec, probe_cpu(), {.limits = {.max_num_reqs = 4, .max_num_tokens = 128, .max_seq_len = 64}});
    step.batch.draft_parents = given;
    return test::error_code([&] { plan->update(step.batch); });
  };
  for (const BackendOf<MlaFamily>* backend : backends<MlaFamily>()) {
    spec = step.spec;
    if (!backend->unsupported(spec, probe_cpu()).empty()) continue;
    EXPECT_EQ(refused(*backend, parents), "batch.draft_parents.unexpected") << backend->name();
    spec.mask.tree = true;
    EXPECT_EQ(refused(*backend, wrong), "batch.draft_parents.range") << backend->name();
    EXPECT_EQ(refused(*backend, std::span(parents).first(4)), "batch.draft_parents.size") << backend->name();
    EXPECT_EQ(refused(*backend, parents), kNoError) << backend->name();
  }
  const auto code_of = [](const Mask& mask) {
    MlaSpec of = kSmall;
    of.mask = mask;
    return test::error_code([&] { of.validate(); });
  };
  EXPECT_EQ(code_of({.causal = false, .tree = true}), "spec.mask.tree.causal");
  EXPECT_EQ(code_of({.custom = true, .tree = true}), "spec.mask.tree.alone");
  EXPECT_EQ(code_of({.positions = true, .tree = true}), "spec.mask.tree.alone");
  EXPECT_EQ(code_of({.window_left = 3, .tree = true}), kNoError);
}

}  // namespace
}  // namespace imbrex
