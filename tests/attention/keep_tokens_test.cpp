// keep_tokens(): what is kept says of every token what the whole batch says, and gives its bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "batch_kinds.h"
#include "batch_meaning.h"
#include "expect_error.h"
#include "imbrex/backend.h"
#include "imbrex/batch_tools.h"

namespace imbrex {
namespace {

using test::error_code;
using test::Kind;
using test::kinds;
using test::KindStep;
using Ints = std::vector<int32_t>;

// Some tokens of a step: any, or where parts end with their queries neighbours of each request, the last ones where keys are ragged.
Ints some_tokens(const Batch& batch, PartKeys keys, bool ragged, std::mt19937& random) {
  Ints tokens;
  const unsigned rarity = 1 + random() % 3;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int begin = batch.query_start_loc[size_t(r)], q_len = batch.query_len(r);
    if (q_len == 0 || random() % rarity != 0) continue;
    const int first = int(random() % unsigned(q_len)), behind = ragged ? q_len : first + 1 + int(random() % unsigned(q_len - first));
    for (int i = 0; i < q_len; ++i)
      if (keys == PartKeys::up_to_queries ? i >= first && i < behind : random() % rarity == 0) tokens.push_back(begin + i);
  }
  return tokens;
}

TEST(KeepTokens, TheySayWhatTheWholeSays) {
  std::mt19937 random(5);
  for (const Kind& kind : kinds()) {
    const KindStep step(kind);
    const PartKeys keys = part_keys(kind.spec);
    const bool by_position = keys != PartKeys::all;
    const auto all = test::meanings(step.batch, kind.spec, by_position);
    for (int trial = 0; trial < 60; ++trial) {
      const Ints tokens = some_tokens(step.batch, keys, kind.tables == 2, random);
      const DerivedBatch part = keep_tokens(step.batch, keys, tokens);
      std::vector<std::string> expected;
      for (const int32_t t : tokens) expected.push_back(all[size_t(t)]);
      validate(part.batch, kind.spec, {}, kind.tables == 2 ? -1 : step.num_blocks);
      ASSERT_EQ(test::meanings(part.batch, kind.spec, by_position), expected) << kind.name;
      EXPECT_EQ(part.batch.num_reqs(), step.batch.num_reqs());
    }
  }
}

TEST(KeepTokens, PositionsAreMadeWhereTheBatchHasNone) {
  std::mt19937 random(6);
  for (const Kind& kind : kinds()) {
    if (!kind.spec.mask.positions) continue;
    const KindStep plain(kind, false);
    AttentionSpec without = kind.spec;
    without.mask.positions = false;
    const auto all = test::meanings(plain.batch, without, true);
    for (int trial = 0; trial < 20; ++trial) {
      const Ints tokens = some_tokens(plain.batch, PartKeys::all, false, random);
      std::vector<std::string> expected;
      for (const int32_t t : tokens) expected.push_back(all[size_t(t)]);
      const DerivedBatch part = keep_tokens(plain.batch, PartKeys::all_with_positions, tokens);
      EXPECT_EQ(test::meanings(part.batch, kind.spec, true), expected);
    }
  }
}

// The step of vLLM's test of fast prefill.
TEST(KeepTokens, KnownStep) {
  const Ints starts{0, 15, 20, 28}, lens{41, 31, 40};
  Batch batch;
  batch.query_start_loc = starts, batch.seq_lens = lens;
  const DerivedBatch part = keep_tokens(batch, PartKeys::up_to_queries, Ints{14, 18, 19, 27});
  EXPECT_EQ(Ints(part.batch.query_start_loc.begin(), part.batch.query_start_loc.end()), (Ints{0, 1, 3, 4}));
  EXPECT_EQ(part.batch.seq_lens.data(), lens.data()) << "the last tokens of requests see all keys";
  EXPECT_EQ(keep_tokens(batch, PartKeys::up_to_queries, Ints{}).batch.num_tokens(), 0);
  Ints all(28);
  for (int t = 0; t < 28; ++t) all[size_t(t)] = t;
  EXPECT_EQ(keep_tokens(batch, PartKeys::up_to_queries, all).batch.query_start_loc.data(), starts.data());
}

TEST(KeepTokens, TheyGiveTheBitsOfTheWhole) {
  std::mt19937 random(7);
  int runs = 0;
  test::for_each_plan([&](const Kind& kind, const Backend& backend, KindStep& step, Plan& plan) {
    step.run(plan);
    const std::vector<float> whole = step.out, whole_lse = step.lse;
    const auto keys = part_keys(kind.spec);
    for (int trial = 0; trial < 4; ++trial) {
      const Ints tokens = some_tokens(step.batch, keys, kind.tables == 2, random);
      const size_t q_row = 4 * 16, out_row = 4 * 8, lse_row = 4;
      std::vector<float> q, expected, out(tokens.size() * out_row + 1), lse(tokens.size() * lse_row + 1), expected_lse;
      const auto take = [](std::vector<float>& to, const std::vector<float>& from, int32_t t, size_t row) {
        to.insert(to.end(), from.begin() + long(size_t(t) * row), from.begin() + long(size_t(t + 1) * row));
      };
      for (const int32_t t : tokens)
        take(q, step.q, t, q_row), take(expected, whole, t, out_row), take(expected_lse, whole_lse, t, lse_row);
      q.resize(q.size() + 1);  // never empty, so that there is an address
      const DerivedBatch part = keep_tokens(step.batch, keys, tokens);
      plan.update(part.batch);
      const int64_t count = int64_t(tokens.size());
      Inputs in = step.in;
      in.q = TensorView::contiguous(q.data(), DType::f32, {count, 4, 16});
      plan.run(in,
               {TensorView::contiguous(out.data(), DType::f32, {count, 4, 8}), TensorView::contiguous(lse.data(), DType::f32, {count, 4})});
      out.pop_back(), lse.pop_back();
      EXPECT_EQ(out, expected) << kind.name << " by " << backend.name();
      EXPECT_EQ(lse, expected_lse) << kind.name << " by " << backend.name();
      ++runs;
    }
  });
  EXPECT_GE(runs, 160);
}

// Of ragged keys the last ones may be left out, whatever requests without keys stand behind them.
TEST(KeepTokens, RaggedKeysBeforePadding) {
  AttentionSpec spec = test::mixed_spec(0);
  const Ints starts{0, 2, 6, 6, 6}, lens{4, 7, 0, 0};
  Ints rows{3, 7, 14, 14, 14};
  Batch batch;
  batch.query_start_loc = starts, batch.seq_lens = lens;
  batch.kv_start_loc = TensorView::contiguous(rows.data(), DType::i32, {5});
  const DerivedBatch part = keep_tokens(batch, PartKeys::up_to_queries, Ints{1, 3});
  validate(part.batch, spec, {}, -1);
  const auto whole = test::meanings(batch, spec, true);
  EXPECT_EQ(test::meanings(part.batch, spec, true), (std::vector<std::string>{whole[1], whole[3]}));
  rows[3] = 15;
  EXPECT_EQ(error_code([&] { keep_tokens(batch, PartKeys::up_to_queries, Ints{1, 3}); }), "batch.kv_start_loc.length");
}

TEST(KeepTokens, RequestsWithAStateAreWhole) {
  const Ints starts{0, 2, 6, 7}, lens{2, 9, 4}, slots{3, 1, 0}, drafts{0, 3, 0}, parents{9, 9, 9, 0, 0, 2, 9};
  Batch batch;
  batch.query_start_loc = starts, batch.seq_lens = lens, batch.state_slots = slots, batch.num_drafts = drafts,
  batch.draft_parents = parents;
  const std::vector<std::string> inputs{"a", "b", "c", "d", "e", "f", "g"}, kept{"a", "b", "g"};
  test::TextStates states, states_of_whole;
  const auto whole = test::run_text_layer(batch, inputs, states_of_whole);
  const DerivedBatch two = keep_tokens(batch, PartKeys::up_to_queries, Ints{0, 1, 6});
  EXPECT_EQ(test::run_text_layer(two.batch, kept, states), (std::vector<std::string>{whole[0], whole[1], whole[6]}));
  const DerivedBatch one = keep_tokens(batch, PartKeys::up_to_queries, Ints{2, 3, 4, 5});
  test::run_text_layer(one.batch, {"c", "d", "e", "f"}, states);
  EXPECT_EQ(states, states_of_whole);
  EXPECT_EQ(error_code([&] { keep_tokens(batch, PartKeys::up_to_queries, Ints{1}); }), "batch.part.states");
}

TEST(KeepTokens, Errors) {
  const Kind causal = kinds()[0], ragged{"", test::mixed_spec(0), 2}, custom{"", test::mixed_spec(8, true), 0};
  const auto code = [](const Kind& kind, const Ints& tokens, auto&& change, PartKeys keys = PartKeys::up_to_queries) {
    KindStep step(kind);
    change(step);
    return error_code([&] { keep_tokens(step.batch, keys, tokens); });
  };
  const auto nothing = [](KindStep&) {};
  EXPECT_EQ(code(causal, {-1}, nothing), "batch.part.tokens");
  EXPECT_EQ(code(causal, {19}, nothing), "batch.part.tokens");
  EXPECT_EQ(code(causal, {3, 3}, nothing), "batch.part.tokens");
  EXPECT_EQ(code(causal, {3, 1}, nothing), "batch.part.tokens");
  EXPECT_EQ(code(causal, {4, 6}, nothing), "batch.part.gap");
  EXPECT_EQ(code(causal, {4, 6}, nothing, PartKeys::all_with_positions), "nothing thrown");
  EXPECT_EQ(code(ragged, {4}, nothing), "batch.part.rows");
  EXPECT_EQ(code(ragged, {4}, nothing, PartKeys::all_with_positions), "nothing thrown");
  EXPECT_EQ(code(causal, {1}, [](KindStep& s) { s.batch.slot_mapping.sizes[0] = 3; }), "batch.slot_mapping.size");
  // Arrays of a device are viewed, and never gathered.
  const auto slots_on_gpu = [](KindStep& s) { s.batch.slot_mapping.device = {DeviceType::cuda, 0}; };
  const auto mask_on_gpu = [](KindStep& s) { s.batch.custom_mask.device = {DeviceType::cuda, 0}; };
  EXPECT_EQ(code(causal, {2, 18}, slots_on_gpu), "batch.part.memory");
  EXPECT_EQ(code(causal, {2, 3}, slots_on_gpu), "nothing thrown");
  EXPECT_EQ(code(custom, {2, 18}, mask_on_gpu), "batch.part.memory");
  EXPECT_EQ(code(custom, {2, 3}, mask_on_gpu), "nothing thrown");
}

}  // namespace
}  // namespace imbrex
