// See mask_tiles.h.
#include "cpu/mask_tiles.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "attention/mask_mod_stretches.h"
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

// The keys that a row of bytes shows, from the first one to the last one; the same key twice: none.
std::pair<long, long> shown_keys(const unsigned char* bytes, long count) {
  const auto* const first = static_cast<const unsigned char*>(std::memchr(bytes, 1, size_t(count)));
  if (first == nullptr) return {0, 0};
  long end = count;
  while (bytes[end - 1] == 0) --end;
  return {first - bytes, end};
}

}  // namespace

void MaskTiles::add_rows(const BoundExpression& mask, const Batch& batch, const WorkItem& item, const KeyStretch& stretch) {
  const int r = item.table, q_len = batch.query_len(r), seq_len = batch.seq_lens[size_t(r)];
  const long width = long(blocks_of(stretch.end - stretch.begin)) * kBlockKeys;
  long at = long(bytes_.size());
  for (int head = 0; head < heads_; ++head) {
    for (int token = item.q_begin; token < item.q_end; ++token) {
      check(width <= kMostBytes - at, "batch.mask_mod.size",
            "a mask_mod has a byte for each query and key of tiles that are seen in part: expected {} bytes of a step at most, got more",
            kMostBytes);
      bytes_.resize(size_t(at + width));
      unsigned char* const bytes = bytes_.data() + at;
      mask.mask_row({.batch = r,
                     .head = head,
                     .q = batch.context_len(r) + token - batch.query_start_loc[size_t(r)],
                     .q_len = q_len,
                     .kv_len = seq_len},
                    stretch.begin, stretch.end, bytes);
      const auto [begin, end] = shown_keys(bytes, stretch.end - stretch.begin);
      const bool whole = std::memchr(bytes + begin, 0, size_t(end - begin)) == nullptr;
      rows_.push_back({.begin = stretch.begin + int(begin), .end = stretch.begin + int(end), .bytes = whole ? -1 : at});
      if (!whole) at += width;
    }
  }
  bytes_.resize(size_t(at));
}

void MaskTiles::find(const Batch& batch, const AttentionSpec& spec, int tile_q, Schedule& list) {
  rows_.clear(), bytes_.clear(), starts_.clear();
  heads_ = mask_mod_heads(spec);
  const BoundExpression mask(spec.mask_mod, batch.mask_tensors, ranges_of(batch, spec.num_q_heads));
  find_mask_mod_stretches(mask, spec, batch, tile_q, kBlockKeys, std::numeric_limits<size_t>::max(), list);
  const ListDetails& details = list.details;
  starts_.assign(details.stretches.size(), -1);
  for (const WorkItem& item : list.work) {
    const int number = ~item.piece;
    const ItemDetails& of_item = details.items[size_t(number)];
    for (int s = of_item.first_stretch; s < of_item.first_stretch + of_item.num_stretches; ++s) {
      const KeyStretch& stretch = details.stretches[size_t(s)];
      if (stretch.shown != 0) continue;
      starts_[size_t(s)] = long(rows_.size());
      add_rows(mask, batch, item, stretch);
    }
  }
}

void MaskTiles::set(AttentionParams& a) const {
  a.stretch_rows = starts_.data();
  a.mask_rows = rows_.data();
  a.mask_bytes = bytes_.data();
  a.mask_heads = heads_;
}

}  // namespace imbrex::cpu
