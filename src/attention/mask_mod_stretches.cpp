// See mask_mod_stretches.h.
#include "attention/mask_mod_stretches.h"

#include <algorithm>
#include <limits>

#include "attention/item_order.h"

namespace imbrex {

int mask_mod_heads(const AttentionSpec& spec) { return spec.mask_mod.uses(ExpressionVariable::head) ? spec.num_q_heads : 1; }

MaskModTiles::MaskModTiles(const BoundExpression& mask, const AttentionSpec& spec, const Batch& batch, int tile_q, int tile_kv, int min_q,
                           int max_q)
    : batch_(batch), tile_q_(tile_q), tile_kv_(tile_kv) {
  const int heads = mask_mod_heads(spec);
  for (int r = 0; r < batch.num_reqs(); ++r) {
    first_.push_back(tiles_.size());
    BlockMaskShape shape{
        .batch = r, .q_len = batch.query_len(r), .kv_len = batch.seq_lens[size_t(r)], .tile_q = tile_q, .tile_kv = tile_kv};
    if (shape.q_len < min_q || shape.q_len > max_q) continue;
    const int each = tiles_of(shape.kv_len);
    tiles_.resize(tiles_.size() + size_t((shape.q_len + tile_q - 1) / tile_q) * size_t(each), Seen::never);
    for (shape.head = 0; shape.head < heads; ++shape.head)
      add(block_mask(mask, shape), each, shape.head == 0, tiles_.data() + first_.back());
  }
}

// A tile is seen by all, or by none, if every head says so.
void MaskModTiles::add(const BlockMask& found, int tiles, bool first, Seen* rows) const {
  for (size_t t = 0; t + 1 < found.first_stretch.size(); ++t) {
    Seen* const row = rows + t * size_t(tiles);
    int done = 0;
    const auto join = [&](int end, Seen seen) {
      for (; done < end; ++done) row[done] = first || row[done] == seen ? seen : Seen::partly;
    };
    for (int i = found.first_stretch[t]; i < found.first_stretch[t + 1]; ++i) {
      const KeyStretch& stretch = found.stretches[size_t(i)];
      join(stretch.begin / tile_kv_, Seen::never);
      join(tiles_of(stretch.end), stretch.shown != 0 ? Seen::always : Seen::partly);
    }
    join(tiles, Seen::never);
  }
}

KeyStretch MaskModTiles::seen(int request, int query) const {
  const int keys = batch_.seq_lens[size_t(request)];
  const Seen* const of_queries = row(request, query);
  int first = 0, end = tiles_of(keys);
  while (first < end && of_queries[first] == Seen::never) ++first;
  while (end > first && of_queries[end - 1] == Seen::never) --end;
  return {.begin = first * tile_kv_, .end = std::min(end * tile_kv_, keys), .shown = 0};
}

void MaskModTiles::put(const WorkItem& item, int query, std::vector<KeyStretch>& to) const {
  const Seen* const of_queries = row(item.table, query);
  for (int begin = item.kv_begin; begin < item.kv_end;) {
    const Seen seen = of_queries[begin / tile_kv_];
    int tile = begin / tile_kv_;
    while (tile < tiles_of(item.kv_end) && of_queries[tile] == seen) ++tile;
    const int end = std::min(tile * tile_kv_, item.kv_end);
    if (seen != Seen::never) to.push_back({begin, end, seen == Seen::always ? 1 : 0});
    begin = end;
  }
}

void MaskModTiles::give_stretches(size_t room, Schedule& list) const {
  ListDetails& details = list.details;
  for (WorkItem& item : list.work) {
    const size_t first = details.stretches.size();
    put(item, item.q_begin - batch_.query_start_loc[size_t(item.table)], details.stretches);
    if (details.stretches.size() > room) {
      details.stretches.resize(first);
      continue;
    }
    details.items.push_back(
        {.kv_head = -1, .first_stretch = int(first), .num_stretches = int(details.stretches.size() - first), .piece = item.piece});
    item.piece = ~int(details.items.size() - 1);
  }
  if (!details.items.empty()) order_items(list);
}

void find_mask_mod_stretches(const BoundExpression& mask, const AttentionSpec& spec, const Batch& batch, int tile_q, int tile_kv,
                             size_t room, Schedule& list) {
  MaskModTiles(mask, spec, batch, tile_q, tile_kv, 1, std::numeric_limits<int>::max()).give_stretches(room, list);
}

}  // namespace imbrex
