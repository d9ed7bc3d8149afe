// Every backend of MLA, on every instruction set of this machine, over the whole table of cases: as it chooses its ways, all requests in
// latent space, and all with expanded keys in chunks of some sizes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>

#include "mla_targets.h"
#include "shards.h"

namespace imbrex::test {
namespace {

struct MlaCombination {
  const MlaCase* c;
  const MlaTarget* target;
};

std::vector<MlaCombination> mla_combinations() {
  std::vector<MlaCombination> all;
  for (const MlaCase& c : mla_cases())
    for (const MlaTarget& target : mla_targets())
      if (target.backend->unsupported(c.spec, target.device).empty()) all.push_back({&c, &target});
  return all;
}

class MlaConformance : public testing::TestWithParam<MlaCombination> {};

TEST_P(MlaConformance, MatchesTheReference) {
  const auto& [c, target] = GetParam();
  const MlaCaseInputs& inputs = inputs_of(*c);
  const Expected& expected = expected_of(*c);
  RunOptions options = default_options(c->attention);
  const RunResult result = run_case(*target->backend, target->device, inputs, options);
  const Judgement judgement = judge(expected, result);
  EXPECT_TRUE(judgement.pass()) << c->spec.str() << "\n" << judgement.failure;
  options.check_cache = false;
  if (is_composite(*target->backend) && !c->spec.absorbed) {
    for (const auto& [expand, chunk] : {std::pair(false, 0), {true, 128}, {true, 33}}) {
      const Judgement forced = judge(expected, run_case(*target->backend, target->device, inputs, options, forced_way(expand, chunk)));
      EXPECT_TRUE(forced.pass()) << c->spec.str() << (expand ? " expanded by " : " in latent space ") << chunk << "\n" << forced.failure;
    }
    if (c->attention.requests.size() > 2) {
      const Judgement both = judge(expected, run_case(*target->backend, target->device, inputs, options, both_ways(33)));
      EXPECT_TRUE(both.pass()) << c->spec.str() << " both ways\n" << both.failure;
    }
    for (const bool expand : {false, true}) {
      if (target->device.device.type != DeviceType::cuda) continue;
      const Judgement cut = judge(expected, run_case(*target->backend, target->device, inputs, options, in_slices(expand, 9, 3)));
      EXPECT_TRUE(cut.pass()) << c->spec.str() << (expand ? " expanded" : " in latent space") << " in slices\n" << cut.failure;
    }
  }
  if (c->attention.seed % 3 != 0) return;
  for (const Poison poison : other_poisons(c->attention.seed, target->device.device.type == DeviceType::cuda)) {
    options.poison = poison;
    const RunResult other = run_case(*target->backend, target->device, inputs, options);
    EXPECT_TRUE(other.violations.empty()) << to_string(poison) << ": " << other.violations.front();
    EXPECT_TRUE(bit_identical(other.out, result.out)) << to_string(poison) << " instead of NaN changes out";
    EXPECT_TRUE(bit_identical(other.lse, result.lse)) << to_string(poison) << " instead of NaN changes lse";
  }
}

INSTANTIATE_TEST_SUITE_P(All, MlaConformance, testing::ValuesIn(by_shard(mla_combinations())),
                         [](const auto& info) { return info.param.c->attention.name + "__" + info.param.target->name(); });

TEST(MlaTable, HasCasesOfEveryKindWithNamesOfTheirOwn) {
  std::set<std::string> names, kinds;
  for (const MlaCase& c : mla_cases()) {
    EXPECT_TRUE(names.insert(c.attention.name).second) << c.attention.name;
    EXPECT_NO_THROW(c.spec.validate()) << c.attention.name;
    for (const CaseRequest& r : c.attention.requests)
      if (r.q_len > 0)
        kinds.insert(fmt::format("{} context {}", r.q_len == 1 ? "decode" : r.q_len < 9 ? "verify" : "prefill", r.seq_len > r.q_len));
    kinds.insert(fmt::format("types {} {}", to_string(c.spec.dtype), to_string(c.spec.kv_dtype)));
    kinds.insert(fmt::format("page {}", c.spec.block_size));
    kinds.insert(fmt::format("{} {} {}", c.spec.sinks ? "sinks" : "", c.spec.absorbed ? "absorbed" : "", c.spec.mask.str()));
  }
  EXPECT_GE(names.size(), 250u);
  for (const char* kind : {"decode context true", "verify context true", "prefill context true", "prefill context false",
                           "types bf16 fp8_e4m3", "page 1", "page 64", "sinks  full", " absorbed causal"})
    EXPECT_TRUE(kinds.contains(kind)) << kind;
}

// Whatever the machine: a backend that runs nothing of the table would be judged by nobody.
TEST(MlaTable, TheReferenceAndTheGenericBackendRunEveryCase) {
  for (const char* name : {"cpu_generic", "reference"})
    for (const MlaCase& c : mla_cases())
      EXPECT_TRUE(find_backend<MlaFamily>(name)->unsupported(c.spec, probe_cpu()).empty()) << c.attention.name;
}

}  // namespace
}  // namespace imbrex::test
