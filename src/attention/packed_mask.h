#pragma once
// Custom masks with a bit for each query and key (Batch::packed_mask), beside those that have a byte.
#include <cstdint>
#include <vector>

#include "imbrex/batch.h"

namespace imbrex {

// Which number in the mask the first query and key of each request have: its byte of custom_mask, or its bit of packed_mask.
void find_mask_starts(const Batch&, std::vector<long>& starts);

// What the rows of a custom or packed mask take one behind the other, without what mask_indptr leaves between requests; and a copy of them,
// from host memory.
int64_t mask_bytes_in_use(const Batch&);
void gather_mask(const Batch&, uint8_t* to);

// Whether the mask, in host memory, shows the key to the query that have such a number.
inline bool mask_shows(const Batch& batch, long number) {
  if (batch.packed_mask.empty()) return batch.custom_mask.as<const uint8_t>()[number] != 0;
  return (batch.packed_mask.as<const uint8_t>()[number / 8] >> number % 8 & 1) != 0;
}

// Errors batch.packed_mask.*, batch.mask_indptr.*
void check_packed_mask(const Batch&);

// Writes a byte for each of `count` bits, 0 where the bit is 0.
void unpack_bits(const uint8_t* bits, long first_bit, long count, uint8_t* bytes);

// The batch with custom_mask, in `bytes`, in place of a packed mask in host memory; as it is where it has none. For plans whose kernels
// read bytes: a step then has one for each query and key of its requests.
Batch with_mask_bytes(const Batch&, std::vector<uint8_t>& bytes);

// The batch's mask_indptr or, where it has none, what it would be, in `made`. Parts of a batch that keep its packed mask need one.
std::span<const int32_t> mask_indptr_of(const Batch&, std::vector<int32_t>& made);

}  // namespace imbrex
