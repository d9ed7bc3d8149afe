// See packed_mask.h.
#include "attention/packed_mask.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/check.h"
#include "core/tensor_format.h"

namespace imbrex {
namespace {

int64_t pairs_of(const Batch& batch, int r) { return int64_t(batch.query_len(r)) * batch.seq_lens[size_t(r)]; }
int64_t packed_bytes(const Batch& batch, int r) { return (pairs_of(batch, r) + 7) / 8; }
int64_t bytes_in_use(const Batch& batch, int r) { return batch.packed_mask.empty() ? pairs_of(batch, r) : packed_bytes(batch, r); }

}  // namespace

void find_mask_starts(const Batch& batch, std::vector<long>& starts) {
  starts.resize(size_t(batch.num_reqs()));
  const bool packed = !batch.packed_mask.empty();
  long next = 0;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    starts[size_t(r)] = batch.mask_indptr.empty() ? next : 8 * long(batch.mask_indptr[size_t(r)]);
    next += bytes_in_use(batch, r) * (packed ? 8 : 1);
  }
}

int64_t mask_bytes_in_use(const Batch& batch) {
  int64_t bytes = 0;
  for (int r = 0; r < batch.num_reqs(); ++r) bytes += bytes_in_use(batch, r);
  return bytes;
}

void gather_mask(const Batch& batch, uint8_t* to) {
  const auto* from = (batch.packed_mask.empty() ? batch.custom_mask : batch.packed_mask).as<const uint8_t>();
  int64_t next = 0;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int64_t begin = batch.mask_indptr.empty() ? next : batch.mask_indptr[size_t(r)];
    to = std::copy_n(from + begin, bytes_in_use(batch, r), to);
    next += bytes_in_use(batch, r);
  }
}

void check_packed_mask(const Batch& batch) {
  const TensorView& mask = batch.packed_mask;
  const auto indptr = batch.mask_indptr;
  if (mask.empty()) {
    check(indptr.empty(), "batch.mask_indptr.unexpected", "expected none without a packed_mask, got {} entries", indptr.size());
    return;
  }
  check(batch.custom_mask.empty(), "batch.packed_mask.ambiguous", "expected a custom_mask or a packed_mask, got both: {} and {}",
        batch.custom_mask, mask);
  check(mask.dtype == DType::u8, "batch.packed_mask.dtype", "expected u8, got {}", mask);
  check(mask.rank == 1 && (mask.size(0) <= 1 || mask.stride(0) == 1), "batch.packed_mask.stride", "expected contiguous u8[bytes], got {}",
        mask);
  const int reqs = batch.num_reqs();
  if (indptr.empty()) {
    int64_t bytes = 0;  // sum of products below 2^59 each; the token limit keeps the sum in range
    for (int r = 0; r < reqs; ++r) bytes += packed_bytes(batch, r);
    check(mask.size(0) == bytes, "batch.packed_mask.size", "expected {} bytes (sum of (q_len * seq_len + 7) / 8), got {}", bytes, mask);
    return;
  }
  check(indptr.size() == size_t(reqs) + 1, "batch.mask_indptr.size", "expected {} entries for {} requests, got {}", reqs + 1, reqs,
        indptr.size());
  check(indptr[0] >= 0, "batch.mask_indptr.start", "expected 0 or more, got {}", indptr[0]);
  for (int r = 0; r < reqs; ++r) {
    const int64_t room = int64_t(indptr[size_t(r) + 1]) - indptr[size_t(r)];
    check(room >= packed_bytes(batch, r), "batch.mask_indptr.room",
          "expected {} bytes or more for {} queries and {} keys of request {}, got {}", packed_bytes(batch, r), batch.query_len(r),
          batch.seq_lens[size_t(r)], r, room);
  }
  check(indptr.back() <= mask.size(0), "batch.packed_mask.size", "expected {} bytes (mask_indptr.back()) or more, got {}", indptr.back(),
        mask);
}

void unpack_bits(const uint8_t* bits, long first_bit, long count, uint8_t* bytes) {
  long i = 0;
  const auto one = [&] {
    const long at = first_bit + i;
    bytes[i++] = uint8_t(bits[at / 8] >> at % 8 & 1);
  };
  while (i < count && (first_bit + i) % 8 != 0) one();
  for (const uint8_t* from = bits + (first_bit + i) / 8; i + 8 <= count; i += 8) {
    const uint64_t eight = *from++ * 0x0101010101010101u & 0x8040201008040201u;  // byte k has bit k
    std::memcpy(bytes + i, &eight, 8);
  }
  while (i < count) one();
}

Batch with_mask_bytes(const Batch& batch, std::vector<uint8_t>& bytes) {
  if (batch.packed_mask.empty()) return batch;
  int64_t all = 0;
  for (int r = 0; r < batch.num_reqs(); ++r) all += pairs_of(batch, r);
  bytes.resize(size_t(all));
  const auto* const bits = batch.packed_mask.as<const uint8_t>();
  int64_t next = 0, from = 0;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    unpack_bits(bits + (batch.mask_indptr.empty() ? from : batch.mask_indptr[size_t(r)]), 0, pairs_of(batch, r), bytes.data() + next);
    next += pairs_of(batch, r), from += packed_bytes(batch, r);
  }
  Batch result = batch;
  result.packed_mask = {}, result.mask_indptr = {};
  result.custom_mask = all == 0 ? TensorView{} : TensorView::contiguous(bytes.data(), DType::u8, {all});
  return result;
}

std::span<const int32_t> mask_indptr_of(const Batch& batch, std::vector<int32_t>& made) {
  if (!batch.mask_indptr.empty()) return batch.mask_indptr;
  made.assign(1, 0);
  int64_t next = 0;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    next += packed_bytes(batch, r);
    check(next <= std::numeric_limits<int32_t>::max(), "batch.packed_mask.size",
          "expected bits of a batch that is taken apart in at most 2^31 - 1 bytes, got {} or more", next);
    made.push_back(int32_t(next));
  }
  return made;
}

}  // namespace imbrex
