// validate(Batch): every rule a batch must follow before a plan may trust it. Called once a step, so it has to be cheap.
#include "imbrex/batch.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "attention/draft_tree.h"
#include "attention/packed_mask.h"
#include "core/check.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"
#include "family/batch_checks.h"
#include "imbrex/spec.h"

namespace imbrex {

namespace {

int ceil_div(int a, int b) { return a / b + (a % b != 0); }  // a + b - 1 would overflow for lengths near INT_MAX

bool on_host(const TensorView& t) { return t.device.type == DeviceType::cpu; }

// The error codes of an array's rules. They are static strings, so that nothing is formatted for a valid batch.
struct ArrayCodes {
  const char *dtype, *rank, *stride;
};

void check_array(const TensorView& t, DType dtype, int rank, const ArrayCodes& codes) {
  check(t.dtype == dtype, codes.dtype, "expected {}, got {}", to_string(dtype), t);
  check(t.rank == rank, codes.rank, "expected {} dimensions, got {}", rank, t);
  check(t.size(rank - 1) <= 1 || t.stride(rank - 1) == 1, codes.stride, "expected innermost stride 1, got {} in {}", t.stride(rank - 1), t);
}

// Block ids are checked without a branch in the loop: the sign bit of `seen` says that some id is not in [0, last].
void check_block_ids(const int32_t* ids, int64_t count, uint32_t last, const char* code, int request) {
  uint32_t seen = 0;
  for (int64_t i = 0; i < count; ++i) seen |= uint32_t(ids[i]) | (last - uint32_t(ids[i]));
  if (int32_t(seen) >= 0) [[likely]]
    return;
  for (int64_t i = 0; i < count; ++i)
    check(ids[i] >= 0 && uint32_t(ids[i]) <= last, code, "block {} of request {} is {}, expected 0 to {}", i, request, ids[i], last);
}

uint32_t last_block(int64_t num_blocks) { return num_blocks < 0 ? INT32_MAX : uint32_t(std::min<int64_t>(num_blocks, INT32_MAX)) - 1; }

void validate_dense(const Batch& batch, const AttentionSpec& spec, int64_t num_blocks) {
  const TensorView& table = batch.block_table;
  check_array(table, DType::i32, 2, {"batch.block_table.dtype", "batch.block_table.rank", "batch.block_table.stride"});
  check(table.size(0) <= 1 || table.stride(0) >= 0, "batch.block_table.stride", "expected a row stride of 0 or more, got {} in {}",
        table.stride(0), table);
  check(table.size(0) >= batch.num_reqs(), "batch.block_table.rows", "expected {} rows, got {}", batch.num_reqs(), table);
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int needed = ceil_div(batch.seq_lens[r], spec.block_size);
    check(needed <= table.size(1), "batch.block_table.columns", "request {} with {} keys needs {} blocks of {}, got {}", r,
          batch.seq_lens[r], needed, spec.block_size, table);
    if (needed == 0 || !on_host(table)) continue;
    check(num_blocks != 0, "batch.block_table.no_blocks", "request {} needs {} blocks, the cache has none", r, needed);
    check_block_ids(table.as<const int32_t>() + r * table.stride(0), needed, last_block(num_blocks), "batch.block_table.id", r);
  }
}

void validate_csr(const Batch& batch, const AttentionSpec& spec, int64_t num_blocks) {
  const TensorView &indptr = batch.kv_indptr, &indices = batch.kv_indices, &last_page = batch.kv_last_page_len;
  const int num_reqs = batch.num_reqs();
  check(!indptr.empty(), "batch.kv_indptr.missing", "kv_indices or kv_last_page_len given without kv_indptr");
  check_array(indptr, DType::i32, 1, {"batch.kv_indptr.dtype", "batch.kv_indptr.rank", "batch.kv_indptr.stride"});
  check(indptr.size(0) == num_reqs + 1, "batch.kv_indptr.size", "expected {} entries for {} requests, got {}", num_reqs + 1, num_reqs,
        indptr);
  if (!indices.empty()) check_array(indices, DType::i32, 1, {"batch.kv_indices.dtype", "batch.kv_indices.rank", "batch.kv_indices.stride"});
  if (!last_page.empty()) {
    check_array(last_page, DType::i32, 1, {"batch.kv_last_page_len.dtype", "batch.kv_last_page_len.rank", "batch.kv_last_page_len.stride"});
    check(last_page.size(0) == num_reqs, "batch.kv_last_page_len.size", "expected {} entries, got {}", num_reqs, last_page);
  }
  if (!on_host(indptr)) return;
  const int32_t* starts = indptr.as<const int32_t>();
  check(starts[0] == 0, "batch.kv_indptr.start", "expected kv_indptr[0] = 0, got {}", starts[0]);
  for (int r = 0; r < num_reqs; ++r)
    check(starts[r + 1] >= starts[r], "batch.kv_indptr.monotone", "kv_indptr falls from {} to {} at request {}", starts[r], starts[r + 1],
          r);
  check(starts[num_reqs] == 0 || !indices.empty(), "batch.kv_indices.missing", "kv_indptr names {} blocks, kv_indices is not given",
        starts[num_reqs]);
  check(indices.empty() || indices.size(0) >= starts[num_reqs], "batch.kv_indices.size", "expected {} entries (kv_indptr.back()), got {}",
        starts[num_reqs], indices);
  for (int r = 0; r < num_reqs; ++r) {
    const int count = starts[r + 1] - starts[r], seq_len = batch.seq_lens[r], needed = ceil_div(seq_len, spec.block_size);
    check(count >= needed, "batch.kv_indptr.too_few", "request {} with {} keys needs {} blocks of {}, got {}", r, seq_len, needed,
          spec.block_size, count);
    if (count == 0) continue;
    if (!last_page.empty() && on_host(last_page)) {
      const int filled = last_page.as<const int32_t>()[r];
      check(filled >= 1 && filled <= spec.block_size, "batch.kv_last_page_len.range", "expected 1 to {}, got {} for request {}",
            spec.block_size, filled, r);
      const int64_t keys = int64_t(count - 1) * spec.block_size + filled;
      check(keys == seq_len, "batch.kv_last_page_len.mismatch", "{} blocks of {}, the last with {}, are {} keys; seq_lens[{}] is {}", count,
            spec.block_size, filled, keys, r, seq_len);
    }
    if (needed == 0 || !on_host(indices)) continue;
    check(num_blocks != 0, "batch.kv_indices.no_blocks", "request {} needs {} blocks, the cache has none", r, needed);
    check_block_ids(indices.as<const int32_t>() + starts[r], needed, last_block(num_blocks), "batch.kv_indices.id", r);
  }
}

void validate_ragged(const Batch& batch) {
  const TensorView& loc = batch.kv_start_loc;
  check_array(loc, DType::i32, 1, {"batch.kv_start_loc.dtype", "batch.kv_start_loc.rank", "batch.kv_start_loc.stride"});
  check(loc.size(0) == batch.num_reqs() + 1, "batch.kv_start_loc.size", "expected {} entries for {} requests, got {}", batch.num_reqs() + 1,
        batch.num_reqs(), loc);
  if (!on_host(loc)) return;
  const int32_t* starts = loc.as<const int32_t>();
  check(starts[0] >= 0, "batch.kv_start_loc.negative", "kv_start_loc[0] is {}", starts[0]);
  for (int r = 0; r < batch.num_reqs(); ++r) {
    check(starts[r + 1] >= starts[r], "batch.kv_start_loc.monotone", "kv_start_loc falls from {} to {} at request {}", starts[r],
          starts[r + 1], r);
    check(starts[r + 1] - starts[r] == batch.seq_lens[r], "batch.kv_start_loc.length", "request {} has {} rows but seq_lens {}", r,
          starts[r + 1] - starts[r], batch.seq_lens[r]);
  }
}

void validate_keys(const Batch& batch, const AttentionSpec& spec, int64_t num_blocks) {
  const bool dense = !batch.block_table.empty(), ragged = !batch.kv_start_loc.empty();
  const bool csr = !batch.kv_indptr.empty() || !batch.kv_indices.empty() || !batch.kv_last_page_len.empty();
  if (spec.block_size == 0) {
    check(!dense, "batch.keys.dense_for_ragged", "block_table given for a spec without blocks (block_size 0)");
    check(!csr, "batch.keys.csr_for_ragged", "kv_indptr, kv_indices or kv_last_page_len given for a spec without blocks (block_size 0)");
  } else {
    check(!ragged, "batch.keys.ragged_for_paged", "kv_start_loc given for a spec with blocks of {}", spec.block_size);
    check(!dense || !csr, "batch.keys.ambiguous", "both block_table and kv_indptr, kv_indices or kv_last_page_len given");
  }
  if (dense) return validate_dense(batch, spec, num_blocks);
  if (csr) return validate_csr(batch, spec, num_blocks);
  if (ragged) return validate_ragged(batch);
  check(batch.max_seq_len() == 0, "batch.keys.missing", "expected {}, got none",
        spec.block_size == 0 ? "kv_start_loc" : "block_table or kv_indptr");
}

// Refuses two tokens with one slot, which would race. They are found with an open-addressed table of slots, at least twice as large as the
// batch.
void check_duplicate_slots(const int64_t* slots, int count) {
  constexpr int kSmall = 1024;
  const size_t size = std::bit_ceil(size_t(count) * 2);
  const int shift = 64 - std::countr_zero(size);
  int64_t small[kSmall];
  static thread_local std::vector<int64_t> large;  // kept, so that a warm call allocates nothing
  if (size > kSmall && large.size() < size) large.resize(size);
  int64_t* table = size > kSmall ? large.data() : small;
  std::fill_n(table, size, int64_t(-1));
  for (int i = 0; i < count; ++i) {
    if (slots[i] < 0) continue;
    size_t at = (uint64_t(slots[i]) * 0x9e3779b97f4a7c15ull) >> shift;
    for (; table[at] >= 0; at = (at + 1) & (size - 1))
      check(table[at] != slots[i], "batch.slot_mapping.duplicate", "slot {} is given to two tokens, the later one is {}", slots[i], i);
    table[at] = slots[i];
  }
}

void validate_slots(const Batch& batch, const AttentionSpec& spec, int64_t num_blocks) {
  const TensorView& slots = batch.slot_mapping;
  if (slots.empty()) return;
  check(spec.block_size > 0, "batch.slot_mapping.ragged", "slot_mapping given for a spec without blocks (block_size 0)");
  check_array(slots, DType::i64, 1, {"batch.slot_mapping.dtype", "batch.slot_mapping.rank", "batch.slot_mapping.stride"});
  const int count = batch.num_tokens();
  check(slots.size(0) >= count, "batch.slot_mapping.size", "expected {} entries, got {}", count, slots);
  if (!on_host(slots) || count == 0) return;
  const int64_t blocks = num_blocks < 0 ? INT32_MAX : std::min<int64_t>(num_blocks, INT32_MAX), end = blocks * spec.block_size;
  const int64_t* values = slots.as<const int64_t>();
  for (int i = 0; i < count; ++i)
    check(values[i] >= -1 && values[i] < end, "batch.slot_mapping.range", "slot of token {} is {}, expected -1 to {}", i, values[i],
          end - 1);
  check_duplicate_slots(values, count);
}

void validate_custom_mask(const Batch& batch, const AttentionSpec& spec) {
  const TensorView& mask = batch.custom_mask;
  if (!spec.mask.custom) {
    if (!mask.empty()) fail("batch.custom_mask.unexpected", "custom_mask given for a spec whose mask is {}", spec.mask.str());
    if (!batch.packed_mask.empty() || !batch.mask_indptr.empty())
      fail("batch.packed_mask.unexpected", "packed_mask or mask_indptr given for a spec whose mask is {}", spec.mask.str());
    return;
  }
  check_packed_mask(batch);
  if (!batch.packed_mask.empty()) return;
  int64_t bytes = 0;  // sum of products below 2^62 each; the token limit keeps the sum in range
  for (int r = 0; r < batch.num_reqs(); ++r) bytes += int64_t(batch.query_len(r)) * batch.seq_lens[r];
  if (mask.empty()) {
    check(bytes == 0, "batch.custom_mask.missing", "the spec has a custom mask, expected u8[{}], or a packed one", bytes);
    return;
  }
  check_array(mask, DType::u8, 1, {"batch.custom_mask.dtype", "batch.custom_mask.rank", "batch.custom_mask.stride"});
  check(mask.size(0) == bytes, "batch.custom_mask.size", "expected {} bytes (sum of q_len * seq_len), got {}", bytes, mask);
}

void validate_positions(const Batch& batch, const AttentionSpec& spec) {
  const auto positions = batch.positions;
  const size_t count = size_t(batch.num_tokens());
  if (!spec.mask.positions) {
    check(positions.empty(), "batch.positions.unexpected", "{} positions given for a spec whose mask is {}", positions.size(),
          spec.mask.str());
    return;
  }
  check(positions.size() >= count, "batch.positions.size", "the spec has given positions, expected {}, got {}", count, positions.size());
  for (size_t t = 0; t < count; ++t)
    check(positions[t] >= 0 && positions[t] <= kMostPosition, "batch.positions.range", "position of token {} is {}, expected 0 to {}", t,
          positions[t], kMostPosition);
}

void validate_memory(const Batch& batch) {
  const TensorView* first = nullptr;
  const auto look_at = [&](const TensorView& t, const char* name) {
    if (t.empty()) return;
    if (first == nullptr) first = &t;
    check(t.device == first->device, "batch.device", "expected all arrays on {}, got {}", first->device, t);
    check_layout(t, name);
  };
  look_at(batch.block_table, "block_table");
  look_at(batch.kv_indptr, "kv_indptr");
  look_at(batch.kv_indices, "kv_indices");
  look_at(batch.kv_last_page_len, "kv_last_page_len");
  look_at(batch.kv_start_loc, "kv_start_loc");
  look_at(batch.slot_mapping, "slot_mapping");
  look_at(batch.custom_mask, "custom_mask");
  look_at(batch.packed_mask, "packed_mask");
}

}  // namespace

void validate(const Batch& batch, const AttentionSpec& spec, const PlanLimits& limits, int64_t num_blocks) {
  check_lengths(batch, limits, spec.kind != AttentionKind::encoder_decoder);
  validate_memory(batch);
  validate_keys(batch, spec, num_blocks);
  validate_slots(batch, spec, num_blocks);
  validate_custom_mask(batch, spec);
  validate_positions(batch, spec);
  check_draft_parents(batch, spec.mask.tree);
}

}  // namespace imbrex
