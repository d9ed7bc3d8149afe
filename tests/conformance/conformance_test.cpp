// Every backend, on every instruction set of this machine and in every KV format, over the whole table of cases; and no byte that a request
// does not own reaches its result.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <set>

#include "attention/reference.h"
#include "matrix.h"
#include "shards.h"

namespace imbrex::test {
namespace {

// Which bytes around a request a mistake can reach is a matter of its pages, table, mask, lengths and padding, and of how an element type
// is loaded: those axes and all mixed batches are run. The other axes vary what is done with the request's own bytes; one in eight of their
// cases has every head dimension and group size. On a GPU, where nothing else waits, all are run; for the reference, which reads element by
// element, one in eight.
bool runs_with_every_poison(const Case& c, const Target& target) {
  if (target.on_gpu() || c.seed % 8 == 0) return true;
  if (target.backend == &reference_backend()) return false;
  const std::string_view name = c.name;
  for (const char* axis :
       {"page_", "mask_", "mixed_", "length_", "long_", "prefill_", "group_", "packed_", "tree_latent_", "latent_masks_"})
    if (name.starts_with(axis)) return true;
  return name.ends_with("_mixed");
}

// Cases that prove something; logits with a trend are there to.
bool has_trend(const Case& c) { return c.values != ValuePattern::plain; }
bool is_exact(const Case& c) { return c.spec.q_dtype == DType::f32 && c.q_gain == 1.f; }

void expect_proof(const Case& c, const Expected& expected) {
  // The naive computation's error is the bound, so that it must not be bad at a case: values have a standard deviation of 1.
  if (has_trend(c)) {
    EXPECT_LT(expected.bounds.max, 0.4);
    EXPECT_LT(expected.bounds.mean, 0.03);
  }
  // Two implementations that share nothing but the mask and the bucket function: a mistake in the law would show as a large difference.
  // Logits with a trend are larger, of equal roundings.
  if (is_exact(c)) {
    EXPECT_LT(expected.naive.max, has_trend(c) ? 2e-5 : 1e-5);
  }
}

class Conformance : public testing::TestWithParam<Combination> {};

TEST_P(Conformance, MatchesReference) {
  const auto& [c, target] = GetParam();
  RunOptions options;
  ASSERT_TRUE(options_for(*c, *target, options));
  const RunResult result = run_case(*target->backend, target->device, inputs_of(*c), options);
  const Expected& expected = expected_of(*c);
  expect_proof(*c, expected);
  const Judgement judgement = judge(expected, result);
  EXPECT_TRUE(judgement.pass()) << run_spec(inputs_of(*c), options).str() << "\n" << judgement.failure;
  if (!runs_with_every_poison(*c, *target)) return;
  options.check_cache = false;
  for (const Poison poison : other_poisons(c->seed, target->on_gpu())) {
    options.poison = poison;
    const RunResult other = run_case(*target->backend, target->device, inputs_of(*c), options);
    EXPECT_TRUE(other.violations.empty()) << to_string(poison) << ": " << other.violations.front();
    EXPECT_TRUE(bit_identical(other.out, result.out)) << to_string(poison) << " instead of NaN changes out";
    EXPECT_TRUE(bit_identical(other.lse, result.lse)) << to_string(poison) << " instead of NaN changes lse";
  }
}

INSTANTIATE_TEST_SUITE_P(All, Conformance, testing::ValuesIn(by_shard(combinations())), [](const auto& info) { return info.param.name(); });

TEST(Table, HasAtLeast500CasesWithNamesOfTheirOwn) {
  std::set<std::string> names;
  for (const Case& c : cases()) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
    EXPECT_NO_THROW(c.spec.validate()) << c.name;
    EXPECT_LE(c.work(), 70'000'000) << c.name << " is too slow for the reference";
  }
  EXPECT_GE(names.size(), 500u);
  EXPECT_GE(std::ranges::count_if(cases(), has_trend), 150);
  EXPECT_GE(std::ranges::count_if(cases(), is_exact), 100);
}

TEST(Table, PoisonIsPutAroundEveryKindOfMemory) {
  std::set<std::string> all, poisoned;
  const auto add = [](const Case& c, std::set<std::string>& kinds) {
    const AttentionSpec& s = c.spec;
    kinds.insert(fmt::format("dims {} {}", s.head_dim_qk, s.head_dim_v));
    kinds.insert(fmt::format("group {}", s.group_size()));
    kinds.insert(fmt::format("types {} {}", to_string(s.q_dtype), to_string(s.kv_dtype)));
    kinds.insert(fmt::format("pages of {} {} {}", s.block_size, c.csr, c.order));
    kinds.insert(fmt::format("mask {} {} {} {} {}", s.mask.causal, s.mask.window_left >= 0, s.mask.window_right >= 0, s.mask.chunk > 0,
                             int(c.custom)));
    kinds.insert(fmt::format("score {} {} {} {}", s.score.soft_cap > 0, s.score.alibi, s.score.sinks, s.score.relative_buckets > 0));
    kinds.insert(fmt::format("values {}", int(c.values)));
    kinds.insert(fmt::format("padding {}", c.padding_tokens));
  };
  const Target generic{.backend = find_backend("cpu_generic"), .device = probe_cpu()};
  for (const Case& c : cases()) {
    if (!runs(c, generic)) continue;
    add(c, all);
    if (runs_with_every_poison(c, generic)) add(c, poisoned);
  }
  for (const std::string& kind : all) EXPECT_TRUE(poisoned.contains(kind)) << kind;
}

// The generic CPU kernels are to run everything but fp8 queries, which are for GPUs.
TEST(Table, ReferenceAndGenericRunEveryCase) {
  combinations();
  const auto fp8_queries = std::ranges::count_if(cases(), [](const Case& c) { return c.spec.q_dtype == DType::fp8_e4m3; });
  for (const auto& [name, count] : totals()) {
    std::printf("[ totals   ] %s: %d cases run", name.c_str(), count.run);
    if (count.left_out > 0) std::printf(", %d left out", count.left_out);
    for (const auto& [code, refused] : count.refused) std::printf(", %d %s", refused, code.c_str());
    std::printf("\n");
  }
  ASSERT_EQ(totals().count("reference__generic") + totals().count("cpu_generic__generic"), 2u);
  const Totals &reference = totals().at("reference__generic"), &generic = totals().at("cpu_generic__generic");
  const auto held = std::ranges::count_if(cases(), [](const Case& c) { return holds(KvFormat::strided, c.spec); });
  EXPECT_EQ(reference.run + reference.left_out, int(held));
  EXPECT_GT(reference.run, fp8_queries + 50);
  EXPECT_EQ(generic.run, int(held) - int(fp8_queries));
}

}  // namespace
}  // namespace imbrex::test
