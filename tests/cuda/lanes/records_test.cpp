// Records of variants: a change to anything that their tests read voids them, and nothing else does.
#include "cuda/lanes/records.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace imbrex::test {
namespace {

class LanesRecord : public testing::Test {
 protected:
  static Variant named(std::string_view name) {
    const std::vector<Variant> all = variants();
    return *std::ranges::find(all, name, &Variant::name);
  }
  // Names of those whose records an additional line at the end of a file voids.
  std::set<std::string> voided_by(const std::string& file, const std::string& line) {
    std::set<std::string> voided;
    std::string& text = records.text(file);
    const std::string before = text;
    text += "\n" + line + "\n";
    for (const char* name : kNames)
      if (records.content(named(name)) != contents.at(name)) voided.insert(name);
    text = before;
    return voided;
  }

  // Of attention_sm80.cu, attention_sm90_decode.cu, attention_sm90_verify.cu, attention_sm90.cu with a mask, and of latents that a test
  // compares.
  static constexpr const char* kNames[] = {"decode",       "tma",           "verify",   "masked",          "latent_tiles",
                                           "spread_tiles", "spread_fewest", "few_wide", "few_wide_spread", "few_wide_fewest"};
  const std::set<std::string> all{std::begin(kNames), std::end(kNames)};
  LanesRecords records{IMBREX_LANES, IMBREX_ROOT};
  const std::map<std::string, std::string> contents = [this] {
    std::map<std::string, std::string> made;
    for (const char* name : kNames) made[name] = records.content(named(name));
    return made;
  }();
};

TEST_F(LanesRecord, IsVoidWhereWhatItsTestsReadChanges) {
  const std::string line = "constexpr int kAnother = 1;";
  using Names = std::set<std::string>;
  for (const char* file :
       {"ptx.cuh", "cuda/lanes/machine.h", "cuda/lanes/machine.cpp", "cuda/lanes/kernel.cpp", "cuda/lanes/lanes_test.cpp", "cuda/params.h",
        "core/small_floats.h", "attention/schedule.cpp", "attention/balance.cpp", "attention/cut_item.h",
        "conformance/attention/case_runner.cpp", "attention/reference.cpp", "imbrex/work.h"})
    EXPECT_EQ(voided_by(file, line), all) << file;
  EXPECT_EQ(voided_by("attention_fold.cuh", line), (Names{"decode", "tma"}));
  EXPECT_EQ(voided_by("attention_sm80.cu", line), Names{"decode"});
  EXPECT_EQ(voided_by("attention_sm90_decode_load.cuh", line), Names{"tma"});
  EXPECT_EQ(voided_by("attention_sm90_verify_load.cuh", line), Names{"verify"});
  EXPECT_EQ(voided_by("attention_sm90_mask.cuh", line), Names{"masked"});
  EXPECT_EQ(voided_by("pack_mask.cu", line), Names{"masked"});
  EXPECT_EQ(voided_by("attention_sm90_latent_spread_load.cuh", line), (Names{"latent_tiles", "spread_tiles", "spread_fewest"}));
  EXPECT_EQ(voided_by("attention_sm90_latent_decode_spread_load.cuh", line), (Names{"few_wide", "few_wide_spread", "few_wide_fewest"}));
  EXPECT_EQ(voided_by("ptx.cuh", "// a comment"), Names{});
  EXPECT_EQ(voided_by("cuda/mla_params.h", line), Names{});
}

TEST_F(LanesRecord, IsVoidWhereItsVariantChanges) {
  const auto differs = [&](auto change) {
    Variant v = named("decode");
    change(v);
    return records.content(v) != contents.at("decode");
  };
  EXPECT_FALSE(differs([](Variant&) {}));
  EXPECT_TRUE(differs([](Variant& v) { v.c.spec.head_dim_v = 64; }));
  EXPECT_TRUE(differs([](Variant& v) { v.c.spec.mask.window_left = 5; }));
  EXPECT_TRUE(differs([](Variant& v) { v.c.seed = 77; }));
  EXPECT_TRUE(differs([](Variant& v) { v.c.order = "lbthd"; }));
  EXPECT_TRUE(differs([](Variant& v) { v.c.values = ValuePattern::spike; }));
  EXPECT_TRUE(differs([](Variant& v) { v.c.requests.pop_back(); }));
  EXPECT_TRUE(differs([](Variant& v) { v.rows = 32; }));
}

// Each variant has at least the kernel that its tests open.
TEST_F(LanesRecord, KnowsTheLibraries) {
  for (const Variant& v : variants()) {
    const std::vector<std::string> libraries = records.libraries_of(v);
    EXPECT_TRUE(std::ranges::find(libraries, std::string("attention_") + v.name) != libraries.end()) << v.name;
    EXPECT_EQ(v.packs_mask(), std::ranges::find(libraries, std::string("pack_mask_") + v.name) != libraries.end()) << v.name;
  }
}

}  // namespace
}  // namespace imbrex::test
