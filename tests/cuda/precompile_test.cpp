// What `imbrex compile` compiles without a model: a sample that has every option of a kernel's text in every regime.
#include "cuda/precompile.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>
#include <variant>

#include "cuda/attention/attention_sm80.h"

namespace imbrex::cuda {
namespace {

// Values of each constant of attention_sm80.cu that a sample has in a regime.
std::map<std::string, std::set<int>> values_of(std::string_view arch, gpu::Regime regime) {
  std::map<std::string, std::set<int>> values;
  for (const AttentionSpec& spec : covering_specs()) {
    const auto tiles = attention_sm80_tiles(arch, spec, regime);
    if (!tiles) continue;
    for (const Constant& c : attention_sm80_key(arch, spec, spec.out_dtypes()[0], *tiles).config)
      std::visit(
          [&](const auto& value) {
            if constexpr (std::is_integral_v<std::decay_t<decltype(value)>>) values[std::string(c.name)].insert(int(value));
          },
          c.value);
  }
  return values;
}

TEST(CoveringSpecs, HaveEveryOptionInEveryRegime) {
  const std::set<int> both{0, 1}, q_types{0, 1, 2, 3}, kv_types{0, 1, 2, 3, 4};
  for (const char* arch : {"sm_80", "sm_90a", "sm_100a"}) {
    for (const gpu::Regime regime : gpu::kRegimes) {
      SCOPED_TRACE(std::string(arch) + ", regime " + std::to_string(int(regime)));
      auto values = values_of(arch, regime);
      for (const char* option : {"kCausal", "kWindow", "kCustomMask", "kPositions", "kTree", "kHeadScales", "kSoftCap", "kAlibi",
                                 "kRelative", "kSinks", "kValuesInKeys", "kRopeApart", "kDsMla"})
        EXPECT_EQ(values[option], both) << option;
      EXPECT_EQ(values["kQType"], q_types);
      EXPECT_EQ(values["kKvType"], kv_types);
      for (const int dim : {64, 80, 128, 192, 256, 512, 576}) EXPECT_TRUE(values["kHeadDimQk"].contains(dim)) << dim;
    }
  }
}

// Registers depend on the shape of tiles most of all: options and types share specs where it stays the same.
TEST(CoveringSpecs, HaveTheShapesOfTilesOfAllTypes) {
  using Shape = std::tuple<int, int, int, int, int, int>;
  for (const char* arch : {"sm_80", "sm_100a"}) {
    for (const gpu::Regime regime : gpu::kRegimes) {
      std::set<Shape> sample;
      const auto shape_of = [&](const AttentionSpec& spec) {
        const AttentionTiles t = *attention_sm80_tiles(arch, spec, regime);
        return Shape{t.rows, t.keys, t.row_warps, t.key_warps, t.dim_warps, t.blocks};
      };
      for (const AttentionSpec& spec : covering_specs()) sample.insert(shape_of(spec));
      for (const AttentionSpec& spec : thorough_specs()) {
        if (spec.head_dim_qk != 128) continue;
        EXPECT_TRUE(sample.contains(shape_of(spec))) << arch << " " << spec.str();
      }
    }
  }
}

}  // namespace
}  // namespace imbrex::cuda
