#pragma once
// What CPU kernels read of a mask_mod: which stretches of keys the queries of an item see, the keys that each query sees of those that are
// seen in part, and bytes where these are not neighbours. It is computed once a step, for all layers that share the plan.
#include <vector>

#include "cpu/params.h"
#include "imbrex/bound_expression.h"
#include "imbrex/schedule.h"
#include "imbrex/spec.h"

namespace imbrex::cpu {

class MaskTiles {
 public:
  // Of a step of a spec with a mask_mod. Gives the items of the list stretches; they are of one request and one piece each, and begin at
  // multiples of tile_q of its queries. Errors expression.tensor for the batch's mask_tensors, batch.mask_mod.size.
  void find(const Batch&, const AttentionSpec&, int tile_q, Schedule&);
  void set(AttentionParams&) const;

 private:
  void add_rows(const BoundExpression&, const Batch&, const WorkItem&, const KeyStretch&);

  std::vector<MaskRow> rows_;
  std::vector<unsigned char> bytes_;
  std::vector<long> starts_;  // of the list's stretches; -1: seen by all
  int heads_ = 1;             // that have bytes of their own
};

}  // namespace imbrex::cpu
