// See batch_part.h.
#include "attention/batch_part.h"

#include "attention/packed_mask.h"

namespace imbrex {
namespace {

// The mask rows of a part lie together when its tokens do, because the rows follow the tokens.
TensorView custom_mask_of(const Batch& batch, BatchPart& part) {
  part.custom_mask.clear();
  int64_t offset = 0, begin = -1, end = -1;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int64_t bytes = int64_t(batch.query_len(r)) * batch.seq_lens[r];
    const bool mine = part.query_start_loc[r + 1] > part.query_start_loc[r];
    if (mine && part.contiguous()) {
      if (begin < 0) begin = offset;
      end = offset + bytes;
    } else if (mine) {
      const auto* rows = batch.custom_mask.as<const uint8_t>() + offset;
      part.custom_mask.insert(part.custom_mask.end(), rows, rows + bytes);
    }
    offset += bytes;
  }
  if (part.contiguous()) return batch.custom_mask.slice(0, begin, end);
  return TensorView::contiguous(part.custom_mask.data(), DType::u8, {int64_t(part.custom_mask.size())});
}

// What a list of all tokens says of those of a part; gathered in `kept` where they do not lie together.
std::span<const int32_t> of_tokens(std::span<const int32_t> list, const BatchPart& part, std::vector<int32_t>& kept) {
  if (list.empty()) return {};
  if (part.contiguous()) return list.subspan(size_t(part.ranges[0].begin), size_t(part.num_tokens));
  kept.clear();
  for (const TokenRange& range : part.ranges) kept.insert(kept.end(), list.begin() + range.begin, list.begin() + range.end);
  return kept;
}

}  // namespace

Batch batch_of(const Batch& batch, BatchPart& part) {
  Batch result = batch;
  result.query_start_loc = part.query_start_loc;
  if (part.contiguous()) {
    if (!batch.slot_mapping.empty()) result.slot_mapping = batch.slot_mapping.slice(0, part.ranges[0].begin, part.ranges[0].end);
  } else if (!batch.slot_mapping.empty()) {
    part.slots.clear();
    for (const TokenRange& range : part.ranges) {
      for (int t = range.begin; t < range.end; ++t) {
        part.slots.push_back(batch.slot_mapping.as<const int64_t>()[t * batch.slot_mapping.stride(0)]);
      }
    }
    result.slot_mapping = TensorView::contiguous(part.slots.data(), DType::i64, {part.num_tokens});
  }
  if (!batch.custom_mask.empty()) result.custom_mask = custom_mask_of(batch, part);
  if (!batch.packed_mask.empty()) result.mask_indptr = mask_indptr_of(batch, part.mask_indptr);
  result.positions = of_tokens(batch.positions, part, part.positions);
  result.draft_parents = of_tokens(batch.draft_parents, part, part.draft_parents);
  return result;
}

}  // namespace imbrex
