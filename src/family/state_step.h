#pragma once
// A step of layers that keep a state of each request in a slot: what backends of all such families read of a batch.
#include <cstdint>
#include <vector>

#include "imbrex/batch.h"

namespace imbrex {

// A request that has tokens in the step. With drafts a slot holds a row of state for each number of them that may be kept; a family says
// what its rows are.
struct StateRequest {
  int begin, end;  // tokens of the batch
  int slot;
  bool fresh;     // the request has no earlier tokens: its state is zero, and the slot may hold anything
  int first_row;  // the row of the slot that the state before the step begins at: how many drafts of the step before were kept
  int drafts;     // how many of the last tokens may be taken back: row i is to be of the state before the last `drafts` - i tokens
};

struct StateStep {
  std::vector<StateRequest> requests;
  int num_tokens = 0;
  int64_t num_slots = 0;  // that the state has at least: one more than the largest number of a slot, which may be that of an int
};

// Reads a batch into a step of a layer that has up to most_drafts. Error batch.*; with `checked` false the batch is not checked.
void read_batch(int most_drafts, const PlanLimits&, const Batch&, bool checked, StateStep&);

}  // namespace imbrex
