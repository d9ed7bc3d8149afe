#pragma once
// A step of layers that keep a state of each request in a slot: what backends of all such families read of a batch.
#include <cstdint>
#include <vector>

#include "imbrex/batch.h"
#include "imbrex/tensor.h"

namespace imbrex {

// A request that has tokens in the step. With drafts a slot holds a row of state for each number of them that may be kept; a family says
// what its rows are.
struct StateRequest {
  int begin, end;  // tokens of the batch
  int slot;        // that is written
  int source;      // the slot that is read
  bool fresh;      // the request has no earlier tokens: its state is zero, and no slot is read
  int first_row;   // the row of the source that the state before the step begins at: the last draft of the step before that was kept
  int drafts;      // how many of the last tokens may be taken back: row 0 is to be of the state in front of these, row i behind the i-th
};

// The tokens of a request that is padding.
struct StatePadding {
  int begin, end;
};

struct StateStep {
  std::vector<StateRequest> requests;
  std::vector<StatePadding> padding;  // in the order of the batch: outputs of these tokens are to be zeros
  // Of layers with trees of drafts: for each token of the batch that is a draft, the row that it begins from, in front of its own. Empty
  // where no draft begins elsewhere than from the one in front of it.
  std::vector<int> parent_rows;
  int num_tokens = 0;
  int64_t num_slots = 0;  // that the state has at least: one more than the largest number of a slot, which may be that of an int
};

// The drafts that a layer may have.
struct StateDrafts {
  int most = 0;
  bool tree = false;
  StateDrafts(int most, bool tree) : most(most), tree(tree) {}
  template <class Spec>
  explicit StateDrafts(const Spec& spec) : most(spec.num_drafts), tree(spec.tree_drafts) {}
};

// Reads a batch into a step of a layer. Error batch.*; with `checked` false the batch is not checked.
void read_batch(const StateDrafts&, const PlanLimits&, const Batch&, bool checked, StateStep&);

// Writes zeros to the rows of a step's padding, in host memory: out [tokens, ..], of two or three dimensions.
void zero_padding(const StateStep&, const TensorView& out);

}  // namespace imbrex
