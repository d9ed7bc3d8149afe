// Trees of drafts: what a batch says of them, which of them are refused, and the reference against masks of bytes.
#include "attention/draft_tree.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "expect_error.h"
#include "imbrex/schedule.h"

namespace imbrex {
namespace {

const std::string kNoError = "nothing thrown";

// Two requests: one token, and seven that are a tree behind 20 keys:  0 - 1 - 3 - 6
//                                                                      \   \ 4
//                                                                       2 - 5
struct TreeStep {
  std::vector<int32_t> starts{0, 1, 8}, lens{30, 27}, parents{-1, -1, 0, 0, 1, 1, 2, 3}, drafts;
  Batch batch() const {
    Batch b;
    b.query_start_loc = starts, b.seq_lens = lens, b.draft_parents = parents, b.num_drafts = drafts;
    return b;
  }
  std::string code(bool of_trees = true) const {
    return test::error_code([&] { check_draft_parents(batch(), of_trees); });
  }
};

std::vector<uint64_t> words_of(const TreeStep& step, const Mask& mask) {
  std::vector<TreeNode> nodes;
  find_nodes(step.batch(), mask, 1, nodes);
  std::vector<uint64_t> words;
  for (const TreeNode& node : nodes) words.push_back(node.seen);
  return words;
}

TEST(DraftTree, NodesSeeTheirAncestorsAndThemselves) {
  const TreeStep step;
  EXPECT_EQ(words_of(step, {}), (std::vector<uint64_t>{0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101, 0b1001011}));
  std::vector<TreeNode> nodes;
  find_nodes(step.batch(), {}, 1, nodes);
  std::vector<int> positions;
  for (const TreeNode& node : nodes) positions.push_back(node.position);
  EXPECT_EQ(positions, (std::vector<int>{20, 21, 21, 22, 22, 22, 23}));
}

TEST(DraftTree, WindowsAndChunksGoByDepth) {
  const TreeStep step;
  EXPECT_EQ(words_of(step, {.window_left = 1}), (std::vector<uint64_t>{0b1, 0b11, 0b101, 0b1010, 0b10010, 0b100100, 0b1001000}));
  EXPECT_EQ(words_of(step, {.window_left = 0}), (std::vector<uint64_t>{1, 2, 4, 8, 16, 32, 64}));
  // Chunks begin at positions 18 and 21, which is depth 1.
  EXPECT_EQ(words_of(step, {.chunk = 3}), (std::vector<uint64_t>{0b1, 0b10, 0b100, 0b1010, 0b10010, 0b100100, 0b1001010}));
}

TEST(DraftTree, WithoutParentsEachFollowsTheOneInFront) {
  TreeStep step;
  EXPECT_TRUE(is_chain(step.batch(), 0));
  EXPECT_FALSE(is_chain(step.batch(), 1));
  step.parents.clear();
  EXPECT_TRUE(is_chain(step.batch(), 1));
  EXPECT_EQ(words_of(step, {}).back(), 0b1111111u);
  EXPECT_EQ(step.code(false), kNoError);
}

TEST(DraftTree, TokensThatAreNoDraftsFollowTheOneInFront) {
  TreeStep step;
  step.parents = {99, 99, 99, 99, 1, 1, 2, 2}, step.drafts = {0, 4};
  EXPECT_EQ(step.code(), kNoError);
  EXPECT_EQ(words_of(step, {}), (std::vector<uint64_t>{0b1, 0b11, 0b111, 0b1011, 0b10011, 0b100111, 0b1000111}));
}

TEST(DraftTree, RefusesWhatIsNoTree) {
  const auto code_of = [](auto change) {
    TreeStep step;
    change(step);
    return step.code();
  };
  EXPECT_EQ(code_of([](TreeStep&) {}), kNoError);
  EXPECT_EQ(TreeStep{}.code(false), "batch.draft_parents.unexpected");
  EXPECT_EQ(code_of([](TreeStep& s) { s.parents.pop_back(); }), "batch.draft_parents.size");
  EXPECT_EQ(code_of([](TreeStep& s) { s.parents[3] = 2; }), "batch.draft_parents.range") << "itself";
  EXPECT_EQ(code_of([](TreeStep& s) { s.parents[3] = 3; }), "batch.draft_parents.range") << "a later one";
  EXPECT_EQ(code_of([](TreeStep& s) { s.parents[3] = -2; }), "batch.draft_parents.range");
  EXPECT_EQ(code_of([](TreeStep& s) { s.parents[0] = 0; }), "batch.draft_parents.range") << "the other request's";
  EXPECT_EQ(code_of([](TreeStep& s) { s.drafts = {1}; }), "batch.draft_parents.num_drafts");
  EXPECT_EQ(code_of([](TreeStep& s) { s.drafts = {1, 8}; }), "batch.draft_parents.num_drafts");
  EXPECT_EQ(code_of([](TreeStep& s) { s.drafts = {-1, 7}; }), "batch.draft_parents.num_drafts");
}

TEST(DraftTree, LongRequestsAreChains) {
  for (const int tokens : {kMostTreeTokens, kMostTreeTokens + 1}) {
    TreeStep step;
    step.starts = {0, tokens}, step.lens = {tokens + 5}, step.parents.clear();
    for (int t = 0; t < tokens; ++t) step.parents.push_back(t - 1);
    EXPECT_EQ(step.code(), kNoError);
    step.parents.back() = 3;
    EXPECT_EQ(step.code(), tokens <= kMostTreeTokens ? kNoError : "batch.draft_parents.chain");
  }
}

// An item's keys begin with those that the window of its least position shows, and end with the key of its last query.
TEST(DraftTree, ItemsHaveTheKeysOfTheirNodes) {
  TreeStep step;
  step.lens = {30, 1007};
  Schedule list;
  schedule(step.batch(), {.window_left = 99, .tree = true}, {.tile_q = 4, .tile_kv = 1, .split_kv = 4096}, list);
  ASSERT_EQ(list.work.size(), 3u);
  for (const WorkItem& item : list.work) {
    if (item.table == 0) continue;
    EXPECT_EQ(item.kv_begin, item.q_begin == 1 ? 1000 - 99 : 1002 - 99);
    EXPECT_EQ(item.kv_end, item.q_begin == 1 ? 1004 : 1007);
  }
}

TEST(DraftTree, StandsBesideCausalDecodersAlone) {
  AttentionSpec spec;
  spec.num_q_heads = spec.num_kv_heads = 1, spec.head_dim_qk = spec.head_dim_v = 64, spec.mask.tree = true;
  const auto code_of = [&](auto change) {
    AttentionSpec other = spec;
    change(other);
    return test::error_code([&] { other.validate(); });
  };
  EXPECT_EQ(code_of([](AttentionSpec&) {}), kNoError);
  EXPECT_EQ(spec.mask.str(), "causal tree");
  EXPECT_EQ(code_of([](AttentionSpec& s) { s.mask.causal = false; }), "spec.mask.tree.causal");
  EXPECT_EQ(code_of([](AttentionSpec& s) { s.kind = AttentionKind::encoder_decoder; }), "spec.mask.tree.causal");
  EXPECT_EQ(code_of([](AttentionSpec& s) { s.mask.custom = true; }), "spec.mask.tree.alone");
  EXPECT_EQ(code_of([](AttentionSpec& s) { s.mask.positions = true; }), "spec.mask.tree.alone");
}

}  // namespace
}  // namespace imbrex
