#pragma once
// A step of a layer with states, with drafts in trees and states that others keep, run as a whole and in parts.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "imbrex/batch_tools.h"

namespace imbrex::test {

struct StatePartsStep {
  std::vector<int32_t> starts{0, 0, 4, 5, 11, 18}, lens{0, 4, 9, 20, 30}, slots{9, 1, 2, 3, 4}, sources{9, 1, 7, 3, 8},
      drafts{0, 0, 1, 3, 4}, accepted{0, 0, 2, 0, 1}, parents = std::vector<int32_t>(18, 0);
  Batch batch;
  StatePartsStep() {
    parents[4] = -1, parents[8] = 2, parents[9] = 2, parents[10] = 4;
    parents[14] = 2, parents[15] = 3, parents[16] = 2, parents[17] = 5;
    batch.query_start_loc = starts, batch.seq_lens = lens;
    batch.state_slots = slots, batch.source_slots = sources, batch.num_drafts = drafts, batch.accepted_drafts = accepted;
    batch.draft_parents = parents;
  }
};

inline std::vector<float> random_floats(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> x(count);
  for (float& f : x) f = float(random() % 2001) / 1000 - 1;
  return x;
}

// run(batch, its first token, state, out) computes a batch. Compares outputs and states of parts with those of the whole, bit by bit.
using RunStep = std::function<void(const Batch&, int, std::vector<float>&, std::vector<float>&)>;
inline void expect_same_in_parts(const std::vector<std::vector<int32_t>>& all_cuts, size_t state_size, size_t out_size,
                                 const RunStep& run) {
  const StatePartsStep step;
  const std::vector<float> before = random_floats(state_size, 3);
  std::vector<float> state = before, out(out_size, -7.f);
  run(step.batch, 0, state, out);
  for (const auto& cuts : all_cuts) {
    std::vector<float> state_of_parts = before, out_of_parts(out_size, -7.f);
    for (const DerivedBatch& part : split_batch(step.batch, PartKeys::up_to_queries, cuts))
      run(part.batch, part.first_token, state_of_parts, out_of_parts);
    EXPECT_EQ(out_of_parts, out) << "first cut at " << cuts[0];
    EXPECT_EQ(state_of_parts, state) << "first cut at " << cuts[0];
  }
}

}  // namespace imbrex::test
