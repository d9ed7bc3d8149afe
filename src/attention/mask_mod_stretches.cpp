// See mask_mod_stretches.h.
#include "attention/mask_mod_stretches.h"

#include <algorithm>
#include <vector>

#include "attention/item_order.h"

namespace imbrex {
namespace {

// What queries see of a tile of keys: nothing, all that every head shows, or something else.
enum class Seen : unsigned char { never, partly, always };

// Of one request at a time, the tiles of keys of each tile of its queries.
class SeenTiles {
 public:
  SeenTiles(const BoundExpression& mask, int heads, int tile_q, int tile_kv)
      : mask_(mask), heads_(heads), tile_q_(tile_q), tile_kv_(tile_kv) {}

  void find(const Batch& batch, int request) {
    BlockMaskShape shape{.batch = request,
                         .q_len = batch.query_len(request),
                         .kv_len = batch.seq_lens[size_t(request)],
                         .tile_q = tile_q_,
                         .tile_kv = tile_kv_};
    each_ = tiles_of(shape.kv_len);
    tiles_.assign(size_t((shape.q_len + tile_q_ - 1) / tile_q_) * size_t(each_), Seen::never);
    for (shape.head = 0; shape.head < heads_; ++shape.head) add(block_mask(mask_, shape), shape.head == 0);
  }

  void put(const WorkItem& item, int query, std::vector<KeyStretch>& to) const {
    const Seen* const row = tiles_.data() + size_t(query / tile_q_) * size_t(each_);
    for (int begin = item.kv_begin; begin < item.kv_end;) {
      const Seen seen = row[begin / tile_kv_];
      int tile = begin / tile_kv_;
      while (tile < tiles_of(item.kv_end) && row[tile] == seen) ++tile;
      const int end = std::min(tile * tile_kv_, item.kv_end);
      if (seen != Seen::never) to.push_back({begin, end, seen == Seen::always ? 1 : 0});
      begin = end;
    }
  }

 private:
  int tiles_of(int keys) const { return (keys + tile_kv_ - 1) / tile_kv_; }

  // A tile is seen by all, or by none, if every head says so.
  void add(const BlockMask& found, bool first) {
    for (size_t t = 0; t + 1 < found.first_stretch.size(); ++t) {
      Seen* const row = tiles_.data() + t * size_t(each_);
      int done = 0;
      const auto join = [&](int end, Seen seen) {
        for (; done < end; ++done) row[done] = first || row[done] == seen ? seen : Seen::partly;
      };
      for (int i = found.first_stretch[t]; i < found.first_stretch[t + 1]; ++i) {
        const KeyStretch& stretch = found.stretches[size_t(i)];
        join(stretch.begin / tile_kv_, Seen::never);
        join(tiles_of(stretch.end), stretch.shown != 0 ? Seen::always : Seen::partly);
      }
      join(each_, Seen::never);
    }
  }

  const BoundExpression& mask_;
  const int heads_, tile_q_, tile_kv_;
  std::vector<Seen> tiles_;
  int each_ = 0;  // of a tile of queries
};

}  // namespace

int mask_mod_heads(const AttentionSpec& spec) { return spec.mask_mod.uses(ExpressionVariable::head) ? spec.num_q_heads : 1; }

void find_mask_mod_stretches(const BoundExpression& mask, const AttentionSpec& spec, const Batch& batch, int tile_q, int tile_kv,
                             size_t room, Schedule& list) {
  SeenTiles tiles(mask, mask_mod_heads(spec), tile_q, tile_kv);
  ListDetails& details = list.details;
  std::vector<int> order(list.work.size());  // by requests
  for (size_t i = 0; i < order.size(); ++i) order[i] = int(i);
  std::ranges::stable_sort(order, {}, [&](int i) { return list.work[size_t(i)].table; });
  int request = -1;
  for (const int i : order) {
    WorkItem& item = list.work[size_t(i)];
    if (item.table != request) tiles.find(batch, request = item.table);
    const size_t first = details.stretches.size();
    tiles.put(item, item.q_begin - batch.query_start_loc[size_t(request)], details.stretches);
    if (details.stretches.size() > room) {
      details.stretches.resize(first);
      continue;
    }
    item.piece = ~int(details.items.size());
    details.items.push_back({.kv_head = -1, .first_stretch = int(first), .num_stretches = int(details.stretches.size() - first)});
  }
  if (!details.items.empty()) order_items(list);
}

}  // namespace imbrex
