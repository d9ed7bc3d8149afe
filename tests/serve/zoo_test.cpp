// Tests of serve/zoo.h: the cells of published and of given layers, how they become smaller, and what a cliff is.
#include "serve/zoo.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "imbrex/model.h"

namespace imbrex::serve {
namespace {

TEST(Zoo, PublishedCellsMeetEverything) {
  const auto cells = published_cells();
  std::set<std::string> names, kinds;
  std::set<int> pages;
  std::set<DType> caches, queries;
  int unusual = 0;
  for (const ZooCell& cell : cells) {
    EXPECT_TRUE(names.insert(cell.name()).second) << cell.name();
    kinds.insert(cell.kind);
    pages.insert(cell.spec.block_size);
    caches.insert(cell.spec.kv_dtype);
    queries.insert(cell.spec.q_dtype);
    unusual += cell.name().ends_with("/eager") || cell.name().ends_with("/graph");
    EXPECT_NO_THROW(cell.spec.validate()) << cell.name();
    EXPECT_FALSE(cell.requests.empty()) << cell.name();
  }
  EXPECT_GT(cells.size(), 500u);
  EXPECT_EQ(kinds, (std::set<std::string>{"decode", "ragged", "verify", "extend", "chunk", "mixed", "prefill"}));
  EXPECT_EQ(pages, (std::set<int>{1, 16, 64, 128}));
  EXPECT_EQ(caches, (std::set<DType>{DType::bf16, DType::fp8_e4m3}));
  EXPECT_EQ(queries, (std::set<DType>{DType::bf16, DType::fp8_e4m3}));
  EXPECT_GT(unusual, 20);
}

const ZooCell& cell_named(const std::vector<ZooCell>& cells, const std::string& name) {
  const auto found = std::find_if(cells.begin(), cells.end(), [&](const ZooCell& cell) { return cell.name() == name; });
  if (found == cells.end()) throw std::runtime_error("no cell " + name);
  return *found;
}

TEST(Zoo, ACellIsWhatItsNameSays) {
  const auto cells = published_cells();
  const ZooCell& decode = cell_named(cells, "decode/32-32/d128/bf16/p128/256q1s2k");
  EXPECT_EQ(decode.requests.size(), 256u);
  EXPECT_EQ(decode.requests[255].seq_len, 2048);
  EXPECT_EQ(decode.spec.num_kv_heads, 32);
  EXPECT_EQ(decode.spec.block_size, 128);
  EXPECT_EQ(decode.launch, BenchLaunch::graph);
  EXPECT_EQ(decode.group(), "decode bf16");
  const ZooCell& bytes = cell_named(cells, "prefill/32-32/d128/fp8_e4m3/p64/2q8k/fp8_e4m3_queries");
  EXPECT_EQ(bytes.spec.q_dtype, DType::fp8_e4m3);
  EXPECT_EQ(bytes.launch, BenchLaunch::eager);
  EXPECT_EQ(bytes.group(), "prefill fp8_e4m3 and queries");
}

TEST(Zoo, LayersOfAModelAreSharedOutOverGpus) {
  std::vector<AttentionSpec> layers;
  for (const auto& kind : load_model("gpt-oss-20b").with_kv(DType::bf16, DType::bf16, KvFormat::strided, 16).kinds())
    layers.push_back(std::get<AttentionSpec>(kind.spec));
  const auto cells = cells_of(layers);
  std::set<std::string> shapes;
  std::set<int> pages;
  for (const ZooCell& cell : cells) {
    shapes.insert(cell.layer);
    pages.insert(cell.spec.block_size);
  }
  EXPECT_EQ(shapes,
            (std::set<std::string>{"64-8/d64/window128/sinks", "32-4/d64/window128/sinks", "16-2/d64/window128/sinks",
                                   "8-1/d64/window128/sinks", "64-8/d64/sinks", "32-4/d64/sinks", "16-2/d64/sinks", "8-1/d64/sinks"}));
  EXPECT_EQ(pages.size(), 4u);
  for (const ZooCell& cell : cells_of(layers, {.pages = {32}, .kv_dtypes = {DType::f16}})) {
    EXPECT_EQ(cell.spec.block_size, 32);
    EXPECT_EQ(cell.spec.kv_dtype, DType::f16);
  }
}

TEST(Zoo, TooFewKvHeadsAreRepeatedAndLayersWithoutACacheHavePrefill) {
  AttentionSpec spec;
  spec.num_q_heads = 24, spec.num_kv_heads = 2, spec.head_dim_qk = spec.head_dim_v = 64;
  std::set<std::string> shapes;
  for (const ZooCell& cell : cells_of({&spec, 1})) shapes.insert(cell.layer);
  EXPECT_EQ(shapes, (std::set<std::string>{"24-2/d64", "12-1/d64", "6-1/d64", "3-1/d64"}));
  spec.kind = AttentionKind::encoder_only;
  spec.mask.causal = false;
  for (const ZooCell& cell : cells_of({&spec, 1})) {
    EXPECT_EQ(cell.kind, "prefill");
    EXPECT_EQ(cell.spec.block_size, 0);
  }
}

TEST(Zoo, LargeCellsBecomeSmaller) {
  const auto cells = published_cells();
  const ZooCell& decode = cell_named(cells, "decode/32-32/d128/bf16/p128/256q1s2k");
  const double bytes = work_of(decode.spec, decode.requests).kv_bytes;
  EXPECT_EQ(fitted(decode, bytes, 1e30).name(), decode.name());
  EXPECT_EQ(fitted(decode, bytes / 3, 1e30).name(), "decode/32-32/d128/bf16/p128/64q1s2k");
  EXPECT_EQ(fitted(decode, bytes / 1024, 1e30).name(), "decode/32-32/d128/bf16/p128/q1s512");
  EXPECT_EQ(fitted(decode, 0, 0).requests[0].seq_len, 16);
  for (const ZooCell& cell : cells) {
    const ZooCell small = fitted(cell, 1e6, 1e9);
    EXPECT_FALSE(small.requests.empty());
    for (const BenchRequest& r : small.requests) {
      EXPECT_GE(r.q_len, 1);
      EXPECT_LE(r.q_len, r.seq_len);
    }
    if (cell.kind == "mixed") {
      EXPECT_GE(small.requests[0].q_len, 16);
    }
  }
}

ZooResult result_of(std::string name, std::string group, double share, std::string problem = {}) {
  return {.name = std::move(name), .group = std::move(group), .share = {share, "DRAM"}, .problem = std::move(problem)};
}

TEST(Zoo, ACliffIsFarBelowItsKind) {
  std::vector<ZooResult> results{result_of("a", "decode", 0.8), result_of("b", "decode", 0.3),       result_of("c", "decode", 0.9),
                                 result_of("d", "decode", 0.1), result_of("e", "prefill", 0.1),      result_of("f", "decode", 0.8),
                                 result_of("g", "decode", 0.8), result_of("h", "decode", 0, "wrong")};
  const auto cliffs = judge_zoo(results);
  ASSERT_EQ(cliffs.size(), 2u);
  EXPECT_EQ(cliffs[0]->name, "d");
  EXPECT_EQ(cliffs[1]->name, "b");
  EXPECT_DOUBLE_EQ(results[2].beside, 0.9 / 0.8);
  EXPECT_DOUBLE_EQ(results[4].beside, 1);  // alone of its kind
  EXPECT_EQ(results[7].beside, 0);
}

}  // namespace
}  // namespace imbrex::serve
