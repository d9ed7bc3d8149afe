// See device_batch.h.
#include "attention/device_batch.h"

#include "attention/plan_checks.h"
#include "core/check.h"
#include "core/tensor_format.h"
#include "family/batch_checks.h"

namespace imbrex {
namespace {

// What they are is the kernel's affair.
void check_positions(const AttentionSpec& spec, const TensorView& positions, int tokens) {
  check(spec.mask.positions || positions.empty(), "batch.positions.unexpected", "positions given for a spec whose mask is {}: {}",
        spec.mask.str(), positions);
  if (!spec.mask.positions) return;
  check(positions.size(0) >= tokens, "batch.positions.size", "the spec has given positions, expected i32[{} or more], got {}", tokens,
        positions);
  check(positions.dtype == DType::i32 && positions.rank == 1 && (positions.size(0) == 1 || positions.stride(0) == 1),
        "batch.positions.dtype", "expected contiguous i32[{} or more], got {}", tokens, positions);
}

void check_trees(const AttentionSpec& spec, const DeviceBatch& batch, int tokens) {
  const TensorView &parents = batch.draft_parents, &drafts = batch.num_drafts;
  if (parents.empty()) return;
  check(spec.mask.tree, "batch.draft_parents.unexpected", "draft_parents given for a spec whose mask is {}: {}", spec.mask.str(), parents);
  const auto is_list = [](const TensorView& t) { return t.dtype == DType::i32 && t.rank == 1 && (t.size(0) == 1 || t.stride(0) == 1); };
  check(is_list(parents) && parents.size(0) >= tokens, "batch.draft_parents.size", "expected contiguous i32[{} or more], got {}", tokens,
        parents);
  check(drafts.empty() || (is_list(drafts) && drafts.size(0) == batch.num_reqs()), "batch.draft_parents.num_drafts",
        "num_drafts: expected contiguous i32[{}], got {}", batch.num_reqs(), drafts);
}

}  // namespace

Batch arrays_of(const DeviceBatch& batch, const AttentionSpec& spec, const PlanLimits& limits, Device device,
                std::span<const int32_t> zeros) {
  check_lengths(batch, limits);
  const int64_t reqs = batch.num_reqs();
  const int tokens = max_tokens(batch, limits);
  const bool packed = !batch.packed_mask.empty();
  const TensorView &slots = batch.slot_mapping, &mask = packed ? batch.packed_mask : batch.custom_mask;
  const char* const mask_name = packed ? "packed_mask" : "custom_mask";
  Batch arrays{.query_start_loc = zeros.first(size_t(reqs) + 1),
               .seq_lens = zeros.first(size_t(reqs)),
               .block_table = batch.block_table,
               .kv_indptr = batch.kv_indptr,
               .kv_indices = batch.kv_indices,
               .kv_last_page_len = {},
               .kv_start_loc = batch.kv_start_loc,
               .slot_mapping = slots,
               .custom_mask = {}};
  validate(arrays, spec, limits, -1);
  check(slots.empty() || slots.size(0) >= tokens, "batch.slot_mapping.size", "expected {} entries, got {}", tokens, slots);
  check(!packed || batch.custom_mask.empty(), "batch.packed_mask.ambiguous", "expected a custom_mask or a packed_mask, got both");
  check(spec.mask.custom != mask.empty(),
        mask.empty() ? "batch.custom_mask.missing"
        : packed     ? "batch.packed_mask.unexpected"
                     : "batch.custom_mask.unexpected",
        "the spec's mask is {}, {} is {}", spec.mask.str(), mask_name, mask);
  check(mask.empty() || (mask.dtype == DType::u8 && mask.rank == 1 && (mask.size(0) <= 1 || mask.stride(0) == 1)),
        packed ? "batch.packed_mask.dtype" : "batch.custom_mask.dtype", "{}: expected contiguous u8 bytes, got {}", mask_name, mask);
  (packed ? arrays.packed_mask : arrays.custom_mask) = mask;
  check_positions(spec, batch.positions, tokens);
  check_trees(spec, batch, tokens);
  const auto on_device = [&](const TensorView& t, const char* name) { check_memory(t, name, "update.device", device); };
  on_device(batch.seq_lens, "seq_lens");
  on_device(batch.query_start_loc, "query_start_loc");
  on_device(batch.block_table, "block_table");
  on_device(batch.kv_indptr, "kv_indptr");
  on_device(batch.kv_indices, "kv_indices");
  on_device(batch.kv_start_loc, "kv_start_loc");
  on_device(slots, "slot_mapping");
  on_device(mask, mask_name);
  on_device(batch.positions, "positions");
  on_device(batch.draft_parents, "draft_parents");
  if (!batch.draft_parents.empty()) on_device(batch.num_drafts, "num_drafts");
  return arrays;
}

}  // namespace imbrex
