#pragma once
// What CPU kernels read of a mask_mod: which stretches of keys the queries of an item see, and bytes for those that they see in part. It is
// computed once a step, for all layers that share the plan.
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
  // A tile of queries and a block of keys, of one head or of all.
  enum class Seen : unsigned char { never, partly, always };
  void find_blocks(const BoundExpression&, BlockMaskShape);
  void add_stretches(const WorkItem&, int first_block, ListDetails&);
  void add_bytes(const BoundExpression&, const Batch&, const WorkItem&, const KeyStretch&);

  std::vector<unsigned char> bytes_;
  std::vector<long> starts_;  // of the list's stretches; -1: seen by all
  int heads_ = 1;             // that have bytes of their own
  // Of one request at a time: of its tiles of queries, one behind the other, the blocks of all of its keys.
  std::vector<Seen> blocks_;
  int blocks_each_ = 0;
};

}  // namespace imbrex::cpu
