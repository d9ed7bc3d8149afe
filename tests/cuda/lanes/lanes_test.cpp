// The texts of the attention kernels and merge.cu, run lane by lane on the host and held to the reference: fragments, masks, pipelines,
// barriers, clusters, merges.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <set>

#include "attention/mask.h"
#include "conformance/attention/case_runner.h"
#include "conformance/attention/judge.h"
#include "core/env.h"
#include "cuda/lanes/lanes_plan.h"
#include "cuda/lanes/records.h"

namespace imbrex::test {
namespace {

// Whether .ci/run, which says so in a file, has left the variant out: the ledger of clean kernels says that its tests passed.
bool is_left_out(const Variant& v) {
  static const std::set<std::string> names = [] {
    std::set<std::string> read;
    if (const auto path = env::get("IMBREX_LANES_RECORDED")) {
      std::ifstream file(*path);
      EXPECT_TRUE(file.good()) << *path;
      for (std::string name; file >> name;) read.insert(name);
    }
    return read;
  }();
  return names.contains(v.name);
}

// Two variants whose results are compared; nothing where they are left out, which both are or neither.
std::optional<std::pair<Variant, Variant>> compared(std::string_view one, std::string_view other) {
  const std::vector<Variant> all = variants();
  const Variant a = *std::ranges::find(all, one, &Variant::name), b = *std::ranges::find(all, other, &Variant::name);
  EXPECT_TRUE(companions_of(a).contains(b.name)) << one << " " << other;
  if (is_left_out(a)) return std::nullopt;
  return std::pair(a, b);
}

class Lanes : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    if (is_left_out(GetParam())) GTEST_SKIP() << "recorded";
  }
  RunResult run(const How& how, const RunOptions& options) const {
    return run_case(LanesBackend(GetParam(), how), probe_cpu(), make_inputs(GetParam().c), options);
  }
  // What other runs are compared with; each is made once.
  const RunResult& whole() const { return kept("whole", {}); }
  const RunResult& pieces() const { return kept("pieces", {.split = 1, .workers = 1 << 10}); }

 private:
  const RunResult& kept(const std::string& name, const How& how) const {
    static std::map<std::string, RunResult> all;
    const std::string key = std::string(GetParam().name) + " " + name;
    if (!all.contains(key)) all[key] = run(how, default_options(GetParam().c));
    return all.at(key);
  }
};

class LanesWithRuns : public Lanes {};
class LanesOfClusters : public Lanes {};
class LanesThatShare : public Lanes {};

TEST_P(Lanes, AgreesWithTheReference) {
  const Case& c = GetParam().c;
  const Expected expected = expect(make_inputs(c));
  for (const RunResult* result : {&whole(), &pieces()}) {
    const Judgement j = judge(expected, *result);
    EXPECT_TRUE(j.pass()) << c.spec.str() << (result == &whole() ? ", whole: " : ", in pieces: ") << j.failure;
  }
}

// One thread block folds the pieces of a run in registers, others leave theirs for the last to join.
TEST_P(LanesWithRuns, HaveTheBitsOfTheirPieces) {
  const RunOptions options = default_options(GetParam().c);
  for (int workers : {1, 3}) {
    const RunResult runs = run({.launch = {.blocks = workers, .chance = unsigned(1 + workers)}, .split = 1, .workers = workers}, options);
    EXPECT_TRUE(bit_identical(pieces().out, runs.out)) << workers;
    EXPECT_TRUE(bit_identical(pieces().lse, runs.lse)) << workers;
  }
}

// Requests whose tables name the same blocks are read together, and have the bits that they have with copies of the blocks.
TEST_P(LanesThatShare, ItemsOfSeveralRequestsHaveTheBitsOfEach) {
  Case c = GetParam().c;
  c.values = ValuePattern::plain;
  c.requests = {{1, 570, 0}, {2, 575, 0}, {1, 290, 1}, {1, 566, 0}, {0, 0, 2}, {1, 576, 0}, {2, 275, 1}, {1, 560, 0}, {1, 40, 2}};
  RunOptions options = default_options(c);
  const CaseInputs in = make_inputs(c);
  const auto run = [&](const How& how, bool share_blocks) {
    options.share_blocks = share_blocks;
    return run_case(LanesBackend(GetParam(), how), probe_cpu(), in, options);
  };
  const RunResult apart = run({.split = 1, .workers = 1 << 10}, false);
  const Judgement j = judge(expect(in), apart);
  EXPECT_TRUE(j.pass()) << j.failure;
  // Under a window or chunks requests share where two of a prompt see the keys that they begin with.
  const auto see_first = [&](int prompt) {
    return std::ranges::count_if(c.requests, [&](const CaseRequest& r) {
      return r.q_len > 0 && r.id == prompt && first_visible_key(c.spec.mask, r.seq_len - 1) == 0;
    });
  };
  const bool shares = see_first(0) > 1 || see_first(1) > 1, windows = windows_of(c.spec.mask) != nullptr;
  for (const int workers : {2, 1 << 10})
    for (unsigned chance : {1u, 2u}) {
      LanesPlan::shared_items = 0;
      const How how{.launch = {.blocks = int(3 * chance), .late_copies = chance == 2, .chance = chance},
                    .split = 1,
                    .share = true,
                    .workers = workers};
      const RunResult together = run(how, true);
      // Two workers take runs, which end within what few tokens read together only where that is worthwhile.
      const bool few = GetParam().tiles().rows / c.spec.group_size() < 3;
      EXPECT_GE(LanesPlan::shared_items, !shares ? 0 : workers > 2 ? (windows ? 2 : 4) : few || windows ? 0 : 1) << workers;
      EXPECT_TRUE(together.violations.empty());
      EXPECT_TRUE(bit_identical(apart.out, together.out)) << workers;
      EXPECT_TRUE(bit_identical(apart.lse, together.lse)) << workers;
    }
}

// Larger tiles, in which tokens of many q heads share items, give the bits of those that have room for one token.
TEST(LanesThatShareManyHeads, HaveTheBitsOfTilesOfOneToken) {
  for (const auto& variants : {compared("shared_heads", "heads"), compared("tma_shared_heads", "tma_heads")}) {
    if (!variants) continue;
    const auto& [larger, usual] = *variants;
    EXPECT_TRUE(larger.tiles().may_share && !usual.tiles().may_share);
    Case c = larger.c;
    for (const ValuePattern values : {ValuePattern::plain, ValuePattern::rising}) {
      c.values = values;
      c.requests = {{1, 570, 0}, {1, 575, 0}, {1, 290, 1}, {0, 0, 2}, {1, 40, 2}};
      const CaseInputs in = make_inputs(c);
      const auto run = [&](const Variant& v, const How& how) {
        return run_case(LanesBackend(v, how), probe_cpu(), in, default_options(c));
      };
      for (const How& how : {How{}, How{.split = 1, .workers = 1 << 10}}) {
        const RunResult a = run(larger, how), b = run(usual, how);
        EXPECT_TRUE(bit_identical(a.out, b.out)) << larger.name;
        EXPECT_TRUE(bit_identical(a.lse, b.lse)) << larger.name;
      }
    }
  }
}

// No bit of a result depends on when copies happen, which warp runs first, how many blocks share the work, where pages lie, or what is in
// other memory.
// Nor on whether a custom mask has bytes or bits.
TEST_P(Lanes, ResultsDoNotDependOnChance) {
  RunOptions options = default_options(GetParam().c);
  options.page_seed = 3, options.poison = Poison::ones, options.packed_mask = true;
  const RunResult other = run({.launch = {.blocks = 50, .late_copies = false, .chance = 3}, .heads_together = 3}, options);
  EXPECT_TRUE(bit_identical(whole().out, other.out));
  EXPECT_TRUE(bit_identical(whole().lse, other.lse));
}

// Values that are read from the tile of keys are what a copy of them would be.
TEST(LanesOfLatents, HaveTheBitsOfStoredValues) {
  const auto variants = compared("latent", "latent_stored");
  if (!variants) GTEST_SKIP() << "recorded";
  const auto& [latent, stored] = *variants;
  EXPECT_LT(cuda::attention_sm80_smem_bytes(latent.c.spec, stored.tiles()), cuda::attention_sm80_smem_bytes(stored.c.spec, stored.tiles()));
  const CaseInputs in = make_inputs(latent.c);
  for (const How& how : {How{}, How{.split = 1, .workers = 1 << 10}}) {
    const RunResult a = run_case(LanesBackend(latent, how), probe_cpu(), in, default_options(latent.c)),
                    b = run_case(LanesBackend(stored, how), probe_cpu(), in, default_options(stored.c));
    EXPECT_TRUE(bit_identical(a.out, b.out));
    EXPECT_TRUE(bit_identical(a.lse, b.lse));
  }
}

// Thread blocks that take a task's rows together compute what one does alone.
TEST(LanesOfLatents, HaveTheSameBitsWhereTheyAreSpread) {
  for (const auto& variants :
       {compared("latent_tiles", "spread_tiles"), compared("latent_tiles", "spread_fewest"), compared("nodes_latent_tiles", "nodes_spread"),
        compared("few_wide", "few_wide_spread"), compared("pair_tiles", "spread_paired"), compared("few_wide", "few_wide_fewest"),
        compared("few_latents", "few_spread")}) {
    if (!variants) continue;
    const auto& [alone, spread] = *variants;
    EXPECT_EQ(alone.c.spec, spread.c.spec);
    Case c = spread.c;
    c.out_dtype = alone.c.out_dtype;
    for (const ValuePattern values : {ValuePattern::plain, ValuePattern::rising}) {
      c.values = values;
      const CaseInputs in = make_inputs(c);
      for (const How& how : {How{}, How{.split = 3, .workers = 1}, How{.split = 20, .workers = 1 << 10}}) {
        const RunResult a = run_case(LanesBackend(alone, how), probe_cpu(), in, default_options(c)),
                        b = run_case(LanesBackend(spread, how), probe_cpu(), in, default_options(c));
        EXPECT_TRUE(bit_identical(a.out, b.out) && bit_identical(a.lse, b.lse)) << spread.name;
      }
    }
  }
}

// A warp that comes late to a barrier finds it as the others left it: of each block, one that multiplies, and one that loads or transposes.
TEST_P(LanesOfClusters, AnyWarpMayBeLate) {
  const RunOptions options = default_options(GetParam().c);
  const cuda::Sm90Tiles tiles = GetParam().wgmma_tiles();
  const int warps = int(tiles.threads()) / 32;
  for (int rank = 0; rank < tiles.cluster; ++rank)
    for (const int from_end : {5, 2}) {
      const int starved = (rank + 1) * warps - from_end;
      const RunResult other = run({.launch = {.blocks = 1, .starved = starved}}, options);
      EXPECT_TRUE(bit_identical(whole().out, other.out)) << starved;
      EXPECT_TRUE(bit_identical(whole().lse, other.lse)) << starved;
    }
}

// Weights times scales that f16 cannot hold beside each other are bf16.
TEST(LanesOfRecords, AgreeWithTheReferenceForScalesOfAnySize) {
  for (const Variant& v : variants()) {
    if (!v.is_latent_decode() || v.c.spec.kv_format != KvFormat::fp8_ds_mla || is_left_out(v)) continue;
    CaseInputs in = make_inputs(v.c);
    constexpr int kGroup = 128;
    const int dims = v.c.spec.head_dim_qk;
    for (int64_t i = 0; i < in.k.num_elements(); ++i)
      if (i % dims / kGroup == 1 && i / dims % 5 == 3) in.k.set(i, in.k.get(i) * 0x1p-12);
    const Judgement j = judge(expect(in), run_case(LanesBackend(v, {}), probe_cpu(), in, default_options(v.c)));
    EXPECT_TRUE(j.pass()) << v.name << ": " << j.failure;
  }
}

std::string name_of(const testing::TestParamInfo<Variant>& info) { return info.param.name; }

std::vector<Variant> variants_where(bool (*is)(const Variant&)) {
  std::vector<Variant> all = variants();
  std::erase_if(all, [=](const Variant& v) { return !is(v); });
  return all;
}
bool takes_runs(const Variant& v) { return v.takes_runs(); }
bool has_clusters(const Variant& v) { return v.has_wgmma() && v.wgmma_tiles().cluster > 1; }
bool may_share(const Variant& v) { return v.tiles().may_share; }

INSTANTIATE_TEST_SUITE_P(All, LanesThatShare, testing::ValuesIn(variants_where(may_share)), name_of);
INSTANTIATE_TEST_SUITE_P(All, Lanes, testing::ValuesIn(variants()), name_of);
INSTANTIATE_TEST_SUITE_P(All, LanesOfClusters, testing::ValuesIn(variants_where(has_clusters)), name_of);
INSTANTIATE_TEST_SUITE_P(All, LanesWithRuns, testing::ValuesIn(variants_where(takes_runs)), name_of);

}  // namespace
}  // namespace imbrex::test
