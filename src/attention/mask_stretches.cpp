// See mask_stretches.h.
#include "attention/mask_stretches.h"

#include <algorithm>

#include "attention/item_order.h"

namespace imbrex {
namespace {

// Of `count` bytes: whether any is not zero, and whether all are.
struct Shown {
  bool any, all;
};
Shown shown_of(const uint8_t* bytes, int count) {
  uint8_t most = 0;
  unsigned zeros = 0;
  for (int i = 0; i < count; ++i) {
    most |= bytes[i];
    zeros += bytes[i] == 0;
  }
  return {most != 0, zeros == 0};
}

}  // namespace

void find_stretches(const Batch& batch, std::span<const long> mask_start, int tile_kv, Schedule& list) {
  const auto* const mask = batch.custom_mask.as<const uint8_t>();
  ListDetails& details = list.details;
  const auto row_of = [&](const WorkItem& item, int query) {
    const int token = details.tokens.empty() ? query : details.tokens[size_t(query)];
    const int request = details.tokens.empty() ? item.table : details.request_of[size_t(token)];
    return mask + mask_start[size_t(request)] + long(token - batch.query_start_loc[size_t(request)]) * batch.seq_lens[size_t(request)];
  };
  for (WorkItem& item : list.work) {
    if (item.piece != 0) continue;
    const size_t first = details.stretches.size();
    bool plain = true;  // so far every tile is seen, and in part
    for (int begin = item.kv_begin; begin < item.kv_end; begin += tile_kv) {
      const int end = std::min(item.kv_end - begin, tile_kv) + begin;
      Shown tile{false, true};
      for (int query = item.q_begin; query < item.q_end && !(tile.any && !tile.all); ++query) {
        const Shown row = shown_of(row_of(item, query) + begin, end - begin);
        tile = {tile.any || row.any, tile.all && row.all};
      }
      plain = plain && tile.any && !tile.all;
      if (!tile.any) continue;
      if (details.stretches.size() > first && details.stretches.back().end == begin && details.stretches.back().shown == int(tile.all)) {
        details.stretches.back().end = end;
      } else {
        details.stretches.push_back({begin, end, int(tile.all)});
      }
    }
    if (plain) {
      details.stretches.resize(first);
      continue;
    }
    item.piece = ~int(details.items.size());
    details.items.push_back({.kv_head = -1, .first_stretch = int(first), .num_stretches = int(details.stretches.size() - first)});
  }
  if (!details.items.empty()) order_items(list);
}

}  // namespace imbrex
