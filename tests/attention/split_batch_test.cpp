// split_batch(): parts say of every token what the whole batch says, share its memory, and give its bits one after the other.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "attention/draft_tree.h"
#include "batch_kinds.h"
#include "batch_meaning.h"
#include "expect_error.h"
#include "imbrex/backend.h"
#include "imbrex/batch_tools.h"
#include "mixed_step.h"

namespace imbrex {
namespace {

using test::append;
using test::error_code;
using test::Kind;
using test::kinds;
using test::KindStep;
using test::MixedStep;
using Ints = std::vector<int32_t>;

TEST(SplitBatch, PartsSayWhatTheWholeSays) {
  std::mt19937 random(11);
  for (const Kind& kind : kinds()) {
    const KindStep step(kind);
    const PartKeys keys = part_keys(kind.spec);
    const bool by_position = keys != PartKeys::all;
    const auto expected = test::meanings(step.batch, kind.spec, by_position);
    const int tokens = step.batch.num_tokens();
    for (int trial = 0; trial < 60; ++trial) {
      Ints cuts;
      for (int i = trial % 5; i > 0; --i) cuts.push_back(trial < 40 ? int(random() % unsigned(tokens + 1)) : trial - 40);
      std::sort(cuts.begin(), cuts.end());
      std::vector<std::string> said;
      int requests = 0;
      for (const DerivedBatch& part : split_batch(step.batch, keys, cuts)) {
        EXPECT_EQ(part.first_token, int(said.size()));
        validate(part.batch, kind.spec, {}, kind.tables == 2 ? -1 : step.num_blocks);
        append(said, test::meanings(part.batch, kind.spec, by_position));
        EXPECT_LE(part.first_request, requests);
        EXPECT_GE(part.first_request, requests - 1) << "only a request that is cut is in two parts";
        requests = part.first_request + part.batch.num_reqs();
      }
      ASSERT_EQ(said, expected) << kind.name;
      EXPECT_EQ(requests, step.batch.num_reqs()) << "no request is lost, those without tokens neither";
    }
  }
}

// Which keys each token sees under Mask::tree, and from where.
std::vector<std::string> seen_in_trees(const Batch& batch, const Mask& mask) {
  std::vector<std::string> texts;
  std::vector<TreeNode> nodes;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    find_nodes(batch, mask, r, nodes);
    for (const TreeNode& node : nodes) {
      std::string text =
          "request of key " + std::to_string(batch.kv_start_loc.as<const int32_t>()[r]) + " at " + std::to_string(node.position) + ":";
      const int context = batch.context_len(r);
      for (int j = 0; j < context + int(nodes.size()); ++j)
        if (j < context || (node.seen >> (j - context) & 1) != 0) text += " " + std::to_string(j);
      texts.push_back(text);
    }
  }
  return texts;
}

// A request that is a tree stays whole; one that is a chain is cut as any other, and follows the keys in front of it.
TEST(SplitBatch, TreesStayWhole) {
  Kind kind = kinds().back();
  ASSERT_EQ(kind.tables, 2);
  kind.spec.mask = {.tree = true}, kind.packed = false;
  KindStep step(kind);
  const Ints parents{-1, 0, 1, /**/ -1, /**/ -1, 0, 0, 1, 1, /**/ -1, 0, 1, 2, 3, 4, /**/ -1, -1, 0, 1};
  step.batch.draft_parents = parents;
  const auto expected = seen_in_trees(step.batch, kind.spec.mask);
  ASSERT_EQ(expected.size(), parents.size());
  int whole = 0;
  for (int cut = 0; cut <= int(parents.size()); ++cut) {
    const bool in_a_tree = (cut > 4 && cut < 9) || (cut > 15 && cut < 19);
    const auto split = [&] { return split_batch(step.batch, part_keys(kind.spec), cut); };
    if (in_a_tree) {
      EXPECT_EQ(error_code(split), "batch.part.drafts") << cut;
      continue;
    }
    std::vector<std::string> said;
    for (const DerivedBatch& part : split()) {
      validate(part.batch, kind.spec, {}, -1);
      append(said, seen_in_trees(part.batch, kind.spec.mask));
    }
    EXPECT_EQ(said, expected) << "cut at " << cut;
    ++whole;
  }
  EXPECT_EQ(whole, 13);
  const Ints kept{2, 3, 4, 5, 6, 7, 8, 14}, in_a_tree{7, 8};
  const auto rest = seen_in_trees(keep_tokens(step.batch, part_keys(kind.spec), kept).batch, kind.spec.mask);
  ASSERT_EQ(rest.size(), kept.size());
  for (size_t i = 0; i < kept.size(); ++i) EXPECT_EQ(rest[i], expected[size_t(kept[i])]);
  EXPECT_EQ(error_code([&] { keep_tokens(step.batch, part_keys(kind.spec), in_a_tree); }), "batch.part.drafts");
}

TEST(SplitBatch, PositionsAreMadeWhereTheBatchHasNone) {
  for (const Kind& kind : kinds()) {
    if (!kind.spec.mask.positions) continue;
    const KindStep plain(kind, false);
    AttentionSpec without = kind.spec;
    without.mask.positions = false;
    const auto expected = test::meanings(plain.batch, without, true);
    for (int cut = 0; cut <= plain.batch.num_tokens(); ++cut) {
      std::vector<std::string> said;
      for (const DerivedBatch& part : split_batch(plain.batch, PartKeys::all_with_positions, cut))
        append(said, test::meanings(part.batch, kind.spec, true));
      ASSERT_EQ(said, expected) << kind.name << " cut at " << cut;
    }
  }
}

// Copies would cost as much as the step's arrays: views have the addresses of the batch's.
TEST(SplitBatch, PartsAreViewsWhereTheyCanBe) {
  for (const Kind& kind : kinds()) {
    KindStep step(kind);
    const int64_t width = kind.tables == 0 ? step.batch.block_table.stride(0) : 0;
    for (const int cut : {4, 6}) {  // between requests, and through one
      const auto [front, back] = split_batch(step.batch, part_keys(kind.spec), cut);
      const Batch &a = front.batch, &b = back.batch;
      // Of an array that the kind of step has.
      const auto expect_view = [&](bool given, const void* part, const auto& whole, int64_t offset) {
        EXPECT_EQ(part, given ? whole.data() + offset : nullptr) << kind.name << " cut at " << cut;
      };
      const bool dense = kind.tables == 0, csr = kind.tables == 1, ragged = kind.tables == 2,
                 custom = kind.spec.mask.custom && !kind.packed;
      EXPECT_EQ(b.seq_lens.data(), step.lens.data() + 3);
      EXPECT_EQ(a.query_start_loc.data() == step.starts.data(), cut == 4);
      EXPECT_EQ(a.seq_lens.data() == step.lens.data(), cut == 4 || part_keys(kind.spec) != PartKeys::up_to_queries);
      expect_view(dense, b.block_table.data, step.table, 3 * width);
      expect_view(csr, a.kv_indptr.data, step.indptr, 0);
      expect_view(csr, b.kv_indices.data, step.indices, csr ? step.indptr[3] : 0);
      expect_view(csr, b.kv_last_page_len.data, step.last_page, 3);
      expect_view(ragged, b.kv_start_loc.data, step.key_starts, 3);
      expect_view(!ragged, b.slot_mapping.data, step.slots, cut);
      const bool shortened = cut == 6 && part_keys(kind.spec) == PartKeys::up_to_queries;
      if (!kind.packed) expect_view(custom, b.custom_mask.data, step.mask, 9 + 40 + (cut - 4) * 21);
      EXPECT_EQ(custom && a.custom_mask.data == step.mask.data(), custom && !shortened);
      // Of a request that is cut the rows become bytes.
      for (const Batch* part : {&a, &b})
        if (kind.packed) {
          EXPECT_EQ(part->packed_mask.data, cut == 4 ? step.bits.data() : nullptr) << kind.name;
        }
      expect_view(kind.spec.mask.positions, b.positions.data(), step.given, cut);
    }
  }
}

TEST(SplitBatch, PaddingStaysBehindTheLastPart) {
  KindStep step(kinds()[0]);
  step.slots.insert(step.slots.end(), {-1, -1, -1});
  step.batch.slot_mapping = TensorView::contiguous(step.slots.data(), DType::i64, {int64_t(step.slots.size())});
  const auto [front, back] = split_batch(step.batch, PartKeys::up_to_queries, 7);
  EXPECT_EQ(front.batch.slot_mapping.size(0), 7);
  EXPECT_EQ(back.batch.slot_mapping.size(0), int64_t(step.slots.size()) - 7);
}

// The splits of a prefill that vLLM's tests have.
TEST(SplitBatch, KnownSplits) {
  const Ints starts{0, 8, 16}, lens{32, 40};
  Batch batch;
  batch.query_start_loc = starts, batch.seq_lens = lens;
  const auto ints = [](std::span<const int32_t> list) { return Ints(list.begin(), list.end()); };
  const auto [a, b] = split_batch(batch, PartKeys::up_to_queries, 12);
  EXPECT_EQ(ints(a.batch.query_start_loc), (Ints{0, 8, 12}));
  EXPECT_EQ(ints(a.batch.seq_lens), (Ints{32, 36}));
  EXPECT_EQ(ints(b.batch.query_start_loc), (Ints{0, 4}));
  EXPECT_EQ(ints(b.batch.seq_lens), (Ints{40}));
  const auto [c, d] = split_batch(batch, PartKeys::up_to_queries, 4);
  EXPECT_EQ(ints(c.batch.seq_lens), (Ints{28}));
  EXPECT_EQ(ints(d.batch.query_start_loc), (Ints{0, 4, 12}));
  EXPECT_EQ(ints(d.batch.seq_lens), lens);
  EXPECT_EQ(split_batch(Batch(), PartKeys::all, 0)[1].batch.num_reqs(), 0);
  EXPECT_EQ(nearest_boundary(batch, 4), 0);
  EXPECT_EQ(nearest_boundary(batch, 5), 8);
  EXPECT_EQ(nearest_boundary(batch, INT_MAX), 16);
  EXPECT_EQ(nearest_boundary(batch, INT_MIN), 0);
  EXPECT_EQ(nearest_boundary(Batch(), 3), 0);
}

// Queries of cross attention are not among the keys, and may be more than these.
TEST(SplitBatch, FewerKeysThanQueries) {
  AttentionSpec spec = test::mixed_spec(0);
  spec.kind = AttentionKind::encoder_decoder;
  const Ints starts{0, 6}, lens{3}, rows{0, 3};
  Batch batch;
  batch.query_start_loc = starts, batch.seq_lens = lens;
  batch.kv_start_loc = TensorView::contiguous(const_cast<int32_t*>(rows.data()), DType::i32, {2});
  const auto expected = test::meanings(batch, spec, true);
  for (int cut = 0; cut <= 6; ++cut) {
    std::vector<std::string> said;
    for (const DerivedBatch& part : split_batch(batch, PartKeys::up_to_queries, cut)) {
      validate(part.batch, spec, {}, -1);
      append(said, test::meanings(part.batch, spec, true));
    }
    EXPECT_EQ(said, expected) << cut;
  }
}

std::vector<float> run_parts(MixedStep& step, Plan& plan, const std::vector<DerivedBatch>& parts) {
  std::fill(step.out.begin(), step.out.end(), -7.f);
  std::fill(step.lse.begin(), step.lse.end(), -7.f);
  for (const DerivedBatch& part : parts) {
    const int begin = part.first_token, end = begin + part.batch.num_tokens();
    plan.update(part.batch);
    Inputs in = step.in;
    in.q = step.in.q.slice(0, begin, end);
    plan.run(in, {step.outputs.out.slice(0, begin, end), step.outputs.lse.slice(0, begin, end)});
  }
  std::vector<float> results = step.out;
  results.insert(results.end(), step.lse.begin(), step.lse.end());
  return results;
}

TEST(SplitBatch, PartsGiveTheBitsOfTheWhole) {
  int runs = 0;
  test::for_each_plan([&](const Kind& kind, const Backend& backend, KindStep& step, Plan& plan) {
    const std::vector<float> whole = step.run(plan);
    const PartKeys keys = part_keys(kind.spec);
    for (const Ints& cuts : {Ints{4}, Ints{9, 15}, Ints{1}, Ints{6}, Ints{5, 7, 8, 17}})
      EXPECT_EQ(run_parts(step, plan, split_batch(step.batch, keys, cuts)), whole) << kind.name << " by " << backend.name();
    ++runs;
  });
  EXPECT_GE(runs, 40);
}

// --- layers with a state

struct StateStep {
  Ints starts{0, 0, 4, 5, 11, 18}, lens{0, 4, 9, 20, 30}, slots{9, 1, 2, 3, 4}, sources{9, 1, 7, 3, 8}, drafts{0, 0, 1, 3, 4},
      accepted{0, 0, 2, 0, 1}, parents;
  std::vector<std::string> inputs;
  Batch batch;
  StateStep() {
    parents.assign(18, 99);  // of tokens that are no drafts it is not read
    parents[4] = -1, parents[8] = 2, parents[9] = 2, parents[10] = 4;
    parents[14] = 2, parents[15] = 3, parents[16] = 2, parents[17] = 5;
    for (int t = 0; t < 18; ++t) inputs.push_back(std::to_string(t));
    batch.query_start_loc = starts, batch.seq_lens = lens;
    batch.state_slots = slots, batch.source_slots = sources, batch.num_drafts = drafts, batch.accepted_drafts = accepted;
    batch.draft_parents = parents;
  }
  static test::TextStates states() {
    test::TextStates all;
    for (int slot = 0; slot < 10; ++slot)
      for (int row = 0; row < 5; ++row) all[slot][row] = "s" + std::to_string(slot) + "r" + std::to_string(row) + ":";
    return all;
  }
};

TEST(SplitBatch, StatesGoOnFromPartToPart) {
  StateStep step;
  for (const bool all_fields : {true, false}) {
    if (!all_fields) step.batch.source_slots = step.batch.accepted_drafts = step.batch.draft_parents = {};
    test::TextStates expected_states = StateStep::states();
    const auto expected = test::run_text_layer(step.batch, step.inputs, expected_states);
    int cut_through = 0;
    for (int first = 0; first <= 18; ++first)
      for (int second = first; second <= 18; ++second) {
        std::vector<DerivedBatch> parts;
        const std::string code = error_code([&] { parts = split_batch(step.batch, PartKeys::up_to_queries, Ints{first, second}); });
        const auto among_drafts = [](int t) { return (t > 8 && t < 11) || (t > 14 && t < 18); };
        EXPECT_EQ(code, among_drafts(first) || among_drafts(second) ? "batch.part.drafts" : "nothing thrown");
        if (parts.empty()) continue;
        cut_through += first == 8 || second == 14;
        test::TextStates states = StateStep::states();
        std::vector<std::string> outputs;
        for (const DerivedBatch& part : parts) {
          const std::vector<std::string> inputs(step.inputs.begin() + part.first_token, step.inputs.end());
          append(outputs, test::run_text_layer(part.batch, inputs, states));
        }
        ASSERT_EQ(outputs, expected) << first << " " << second;
        // Rows behind those of a step's drafts may be any.
        for (auto& [slot, rows] : states)
          for (auto& [row, text] : rows) ASSERT_EQ(text, expected_states[slot][row]) << slot << " " << row;
      }
    EXPECT_GT(cut_through, 5);
  }
}

TEST(SplitBatch, StateListsAreViewsBetweenRequests) {
  StateStep step;
  const auto [front, back] = split_batch(step.batch, PartKeys::up_to_queries, 5);
  EXPECT_EQ(front.batch.state_slots.data(), step.slots.data());
  EXPECT_EQ(front.batch.num_drafts.data(), step.drafts.data());
  EXPECT_EQ(back.batch.accepted_drafts.data(), step.accepted.data() + 3);
  EXPECT_EQ(back.batch.source_slots.data(), step.sources.data() + 3);
  EXPECT_EQ(back.batch.draft_parents.data(), step.parents.data() + 5);
}

// --- what is refused

TEST(SplitBatch, Errors) {
  const auto code = [](const Kind& kind, auto&& change, PartKeys keys = PartKeys::up_to_queries, int cut = 6) {
    KindStep step(kind);
    change(step);
    return error_code([&] { split_batch(step.batch, keys, cut); });
  };
  const Kind dense = kinds()[0], csr{"", dense.spec, 1}, ragged{"", test::mixed_spec(0), 2}, custom{"", test::mixed_spec(8, true), 0};
  Kind positions = dense;
  positions.spec.mask.positions = true;
  const auto nothing = [](KindStep&) {};
  EXPECT_EQ(code(dense, nothing, PartKeys::all, -1), "batch.part.cuts");
  EXPECT_EQ(code(dense, nothing, PartKeys::all, 20), "batch.part.cuts");
  EXPECT_EQ(code(dense, nothing, PartKeys::all, 19), "nothing thrown");
  EXPECT_EQ(code(positions, nothing, PartKeys::all), "batch.part.keys");
  EXPECT_EQ(code(
                positions, [](KindStep& s) { s.batch.positions = s.batch.positions.first(18); }, PartKeys::all_with_positions),
            "batch.positions.size");
  EXPECT_EQ(code(dense, [](KindStep& s) { s.starts[3] = 99; }), "batch.query_start_loc.monotone");
  EXPECT_EQ(code(dense, [](KindStep& s) { s.lens[1] = -1; }), "batch.seq_len.negative");
  EXPECT_EQ(code(dense, [](KindStep& s) { s.batch.block_table.sizes[0] = 8; }), "batch.block_table.rows");
  EXPECT_EQ(code(dense, [](KindStep& s) { s.batch.block_table.dtype = DType::i64; }), "batch.block_table.rows");
  EXPECT_EQ(code(dense, [](KindStep& s) { s.batch.slot_mapping.sizes[0] = 18; }), "batch.slot_mapping.size");
  EXPECT_EQ(code(dense, [](KindStep& s) { s.batch.slot_mapping.strides[0] = 2; }), "batch.slot_mapping.size");
  EXPECT_EQ(code(csr, [](KindStep& s) { s.batch.kv_indptr.sizes[0] = 9; }), "batch.kv_indptr.size");
  EXPECT_EQ(code(csr, [](KindStep& s) { s.indptr[3] = -1; }), "batch.kv_indptr.monotone");
  EXPECT_EQ(code(csr, [](KindStep& s) { s.indptr[5] = 0; }), "batch.kv_indptr.monotone");
  EXPECT_EQ(code(csr, [](KindStep& s) { s.batch.kv_indices.sizes[0] = 2; }), "batch.kv_indices.size");
  EXPECT_EQ(code(csr, [](KindStep& s) { s.batch.kv_last_page_len.sizes[0] = 2; }), "batch.kv_last_page_len.size");
  EXPECT_EQ(code(ragged, [](KindStep& s) { s.batch.kv_start_loc.sizes[0] = 2; }), "batch.kv_start_loc.size");
  EXPECT_EQ(code(ragged, [](KindStep& s) { s.key_starts[4] = INT_MIN; }), "batch.kv_start_loc.length");
  EXPECT_EQ(code(custom, [](KindStep& s) { s.batch.custom_mask.sizes[0] -= 1; }), "batch.custom_mask.size");
  // A mask on a device is a view of the whole one, or cannot be made.
  EXPECT_EQ(code(custom, [](KindStep& s) { s.batch.custom_mask.device = {DeviceType::cuda, 0}; }), "batch.part.memory");
  EXPECT_EQ(code(
                custom,
                [](KindStep& s) {
                  s.batch.custom_mask.device = {DeviceType::cuda, 0};
                },
                PartKeys::up_to_queries, 4),
            "nothing thrown");
  const auto state_code = [](auto&& change) {
    StateStep step;
    change(step);
    return error_code([&] { split_batch(step.batch, PartKeys::up_to_queries, 6); });
  };
  EXPECT_EQ(state_code([](StateStep& s) { s.batch.num_drafts = s.batch.num_drafts.first(2); }), "batch.state.size");
  EXPECT_EQ(state_code([](StateStep& s) { s.batch.source_slots = s.batch.source_slots.first(2); }), "batch.state.size");
  EXPECT_EQ(state_code([](StateStep& s) { s.drafts[3] = 7; }), "batch.state.num_drafts");
  EXPECT_EQ(state_code([](StateStep& s) { s.batch.draft_parents = s.batch.draft_parents.first(2); }), "batch.draft_parents.size");
}

TEST(PartKeys, OfSpecs) {
  AttentionSpec spec = test::mixed_spec(8);
  EXPECT_EQ(part_keys(spec), PartKeys::up_to_queries);
  spec.mask.causal = false;
  EXPECT_EQ(part_keys(spec), PartKeys::all);
  for (const auto change : {+[](AttentionSpec& s) { s.mask.window_left = 3; }, +[](AttentionSpec& s) { s.mask.window_right = 3; },
                            +[](AttentionSpec& s) { s.mask.chunk = 3; }, +[](AttentionSpec& s) { s.score.alibi = true; },
                            +[](AttentionSpec& s) { s.score.relative_buckets = 8; }}) {
    AttentionSpec other = spec;
    change(other);
    EXPECT_EQ(error_code([&] { part_keys(other); }), "batch.part.keys");
    other.mask.positions = true;
    EXPECT_EQ(part_keys(other), PartKeys::all_with_positions);
  }
}

}  // namespace
}  // namespace imbrex
