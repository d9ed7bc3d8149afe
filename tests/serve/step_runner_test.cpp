// Sizes of a replay's step at the bounds of its options: more elements than 32 bits count.
#include "serve/step_runner.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace imbrex::serve {
namespace {

// 2^20 tokens, the most that max_num_batched_tokens may be, of 128 q heads of 512 elements: 2^36 elements in a layer.
TEST(StepRunner, RowsBeyond32BitsAreFetchedFromNearby) {
  constexpr int64_t kTokens = 1 << 20, kKvHeads = 8, kRow = 16 * 512;
  const auto row_start = [](const WantedRow& row) { return (int64_t(row.token) * kKvHeads + row.out_row) * kRow; };
  std::vector<WantedRow> wanted;
  for (const int layer : {0, 1, 7})
    for (const int64_t token : {int64_t(0), int64_t(1) << 14, (int64_t(1) << 15) - 1, int64_t(1) << 15, int64_t(1) << 18, kTokens - 1})
      for (const int head : {0, 7}) wanted.push_back({layer, int(token), head});
  std::vector<int32_t> offsets(wanted.size(), -1);
  const std::vector<RowGroup> groups = group_rows(wanted, row_start, offsets.data());
  ASSERT_GT(row_start(wanted.back()), int64_t(1) << 35);
  size_t next = 0;
  for (const RowGroup& group : groups) {
    EXPECT_EQ(group.begin, next) << "every row is in one group, in their order";
    ASSERT_LT(group.begin, group.end);
    next = group.end;
    for (size_t i = group.begin; i < group.end; ++i) {
      EXPECT_EQ(wanted[i].layer, wanted[group.begin].layer);
      EXPECT_GE(offsets[i], 0);
      EXPECT_LE(offsets[i] + kRow, std::numeric_limits<int32_t>::max());
      EXPECT_EQ(group.base + offsets[i], row_start(wanted[i])) << i;
    }
  }
  EXPECT_EQ(next, wanted.size());
  EXPECT_EQ(groups.size(), 15u) << "of each layer five that lie far apart";
}

TEST(StepRunner, RowsThatLieTogetherAreOneGroup) {
  const std::vector<WantedRow> wanted{{0, 5, 1}, {0, 2, 0}, {0, 7, 1}, {3, 1, 0}};
  std::vector<int32_t> offsets(4);
  const auto groups = group_rows(
      wanted, [](const WantedRow& row) { return int64_t(row.token) * 100 + row.out_row * 50; }, offsets.data());
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[1].begin, 3u);
  EXPECT_EQ(offsets, (std::vector<int32_t>{550, 200, 750, 100}));
  EXPECT_TRUE(group_rows(
                  {}, [](const WantedRow&) { return int64_t(0); }, nullptr)
                  .empty());
}

}  // namespace
}  // namespace imbrex::serve
