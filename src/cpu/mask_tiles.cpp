// See mask_tiles.h.
#include "cpu/mask_tiles.h"

#include <algorithm>

#include "attention/item_order.h"
#include "core/check.h"

namespace imbrex::cpu {
namespace {

constexpr long kMostBytes = 4l << 30;

int blocks_of(int keys) { return (keys + kBlockKeys - 1) / kBlockKeys; }

// Where queries and keys of a batch's requests are.
ExpressionRanges ranges_of(const Batch& batch, int num_q_heads) {
  const int longest = batch.max_seq_len(), queries = batch.max_query_len();
  return {.batch = {0, std::max(batch.num_reqs() - 1, 0)},
          .head = {0, num_q_heads - 1},
          .q = {-queries, std::max(longest - 1, 0)},
          .kv = {0, std::max(longest - 1, 0)},
          .q_len = {0, queries},
          .kv_len = {0, longest}};
}

}  // namespace

// A block is seen by all, or by none, if it is so for every head.
void MaskTiles::find_blocks(const BoundExpression& mask, BlockMaskShape shape) {
  blocks_each_ = blocks_of(shape.kv_len);
  const int tiles = (shape.q_len + shape.tile_q - 1) / shape.tile_q;
  for (shape.head = 0; shape.head < heads_; ++shape.head) {
    const BlockMask found = block_mask(mask, shape);
    const bool first = shape.head == 0;
    if (first) blocks_.assign(size_t(tiles) * size_t(blocks_each_), Seen::never);
    for (int t = 0; t < tiles; ++t) {
      Seen* const row = blocks_.data() + size_t(t) * size_t(blocks_each_);
      int done = 0;
      const auto join = [&](int end, Seen seen) {
        for (; done < end; ++done) row[done] = first || row[done] == seen ? seen : Seen::partly;
      };
      for (int i = found.first_stretch[size_t(t)]; i < found.first_stretch[size_t(t) + 1]; ++i) {
        const KeyStretch& stretch = found.stretches[size_t(i)];
        join(stretch.begin / kBlockKeys, Seen::never);
        join(blocks_of(stretch.end), stretch.shown != 0 ? Seen::always : Seen::partly);
      }
      join(blocks_each_, Seen::never);
    }
  }
}

void MaskTiles::add_stretches(const WorkItem& item, int first_block, ListDetails& details) {
  const Seen* const row = blocks_.data() + first_block;
  for (int begin = item.kv_begin; begin < item.kv_end;) {
    const Seen seen = row[begin / kBlockKeys];
    int end = begin;
    while (end < item.kv_end && row[end / kBlockKeys] == seen) end = (end / kBlockKeys + 1) * kBlockKeys;
    end = std::min(end, item.kv_end);
    if (seen != Seen::never) details.stretches.push_back({begin, end, seen == Seen::always ? 1 : 0});
    begin = end;
  }
}

void MaskTiles::add_bytes(const BoundExpression& mask, const Batch& batch, const WorkItem& item, const KeyStretch& stretch) {
  if (stretch.shown != 0) {
    starts_.push_back(-1);
    return;
  }
  const int r = item.table, q_len = batch.query_len(r), seq_len = batch.seq_lens[size_t(r)];
  const long width = long(blocks_of(stretch.end - stretch.begin)) * kBlockKeys, rows = item.q_end - item.q_begin;
  const long all = checked_mul("batch.mask_mod.size", checked_mul("batch.mask_mod.size", width, rows), heads_);
  check(all <= kMostBytes - long(bytes_.size()), "batch.mask_mod.size",
        "a mask_mod has a byte for each query and key of tiles that are seen in part: expected {} bytes of a step at most, got {} or more",
        kMostBytes, long(bytes_.size()) + all);
  long at = long(bytes_.size());
  starts_.push_back(at);
  bytes_.resize(size_t(at + all));
  for (int head = 0; head < heads_; ++head)
    for (int token = item.q_begin; token < item.q_end; ++token, at += width)
      mask.mask_row({.batch = r,
                     .head = head,
                     .q = batch.context_len(r) + token - batch.query_start_loc[size_t(r)],
                     .q_len = q_len,
                     .kv_len = seq_len},
                    stretch.begin, stretch.end, bytes_.data() + at);
}

void MaskTiles::find(const Batch& batch, const AttentionSpec& spec, int tile_q, Schedule& list) {
  bytes_.clear(), starts_.clear();
  heads_ = spec.mask_mod.uses(ExpressionVariable::head) ? spec.num_q_heads : 1;
  const BoundExpression mask(spec.mask_mod, batch.mask_tensors, ranges_of(batch, spec.num_q_heads));
  ListDetails& details = list.details;
  int request = -1;
  // Items of a request are neighbours in no list that is sorted by cost: so they are visited in the order of their requests.
  std::vector<int> order(list.work.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = int(i);
  std::ranges::stable_sort(order, {}, [&](int i) { return list.work[size_t(i)].table; });
  for (const int i : order) {
    WorkItem& item = list.work[size_t(i)];
    if (item.table != request) {
      request = item.table;
      find_blocks(mask, {.batch = request,
                         .q_len = batch.query_len(request),
                         .kv_len = batch.seq_lens[size_t(request)],
                         .tile_q = tile_q,
                         .tile_kv = kBlockKeys});
    }
    const int tile = (item.q_begin - batch.query_start_loc[size_t(request)]) / tile_q;
    const size_t first = details.stretches.size();
    add_stretches(item, tile * blocks_each_, details);
    for (size_t s = first; s < details.stretches.size(); ++s) add_bytes(mask, batch, item, details.stretches[s]);
    item.piece = ~int(details.items.size());
    details.items.push_back({.kv_head = -1, .first_stretch = int(first), .num_stretches = int(details.stretches.size() - first)});
  }
  if (!details.items.empty()) order_items(list);
}

void MaskTiles::set(AttentionParams& a) const {
  a.mask_bytes = bytes_.data();
  a.stretch_bytes = starts_.data();
  a.mask_heads = heads_;
}

}  // namespace imbrex::cpu
