#pragma once
// Which keys of an item a mask_mod shows at all: tiles that it hides from every query of the item are neither read nor computed.
#include <vector>

#include "imbrex/batch.h"
#include "imbrex/bound_expression.h"
#include "imbrex/schedule.h"
#include "imbrex/spec.h"

namespace imbrex {

// The q heads that a layer's mask_mod may differ in: 1 where it does not depend on the head.
int mask_mod_heads(const AttentionSpec&);

// Of requests of min_q to max_q query tokens, the tiles of keys that each tile of their queries sees by a layer's mask_mod. `mask`: the
// mask_mod with the batch's tensors. The batch has to live as long.
class MaskModTiles {
 public:
  MaskModTiles(const BoundExpression& mask, const AttentionSpec&, const Batch&, int tile_q, int tile_kv, int min_q, int max_q);

  // From the first to the last seen tile of the tile of queries that begins with `query`, for cut(). Empty where no key is seen.
  KeyStretch seen(int request, int query) const;

  // Gives the items of Schedule::work, which begin at multiples of tile_q of their request's queries, stretches of
  // whole tiles of keys: shown ones are seen by every query of the item in every head. Items whose stretches are not among the first
  // `room` of the list stay as they are.
  void give_stretches(size_t room, Schedule&) const;

 private:
  // What queries see of a tile of keys: nothing, all that every head shows, or something else.
  enum class Seen : unsigned char { never, partly, always };

  int tiles_of(int keys) const { return (keys + tile_kv_ - 1) / tile_kv_; }
  const Seen* row(int request, int query) const {
    return tiles_.data() + first_[size_t(request)] + size_t(query / tile_q_) * size_t(tiles_of(batch_.seq_lens[size_t(request)]));
  }
  void add(const BlockMask&, int tiles, bool first, Seen* rows) const;
  void put(const WorkItem&, int query, std::vector<KeyStretch>& to) const;

  const Batch& batch_;
  const int tile_q_, tile_kv_;
  std::vector<Seen> tiles_;
  std::vector<size_t> first_;  // of each request
};

// As MaskModTiles::give_stretches(), of requests of any length.
void find_mask_mod_stretches(const BoundExpression& mask, const AttentionSpec&, const Batch&, int tile_q, int tile_kv, size_t room,
                             Schedule&);

}  // namespace imbrex
