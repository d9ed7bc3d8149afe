#pragma once
// What attention_sm90_latent_decode.cu and attention_sm90_latent_decode_spread.cu share: where queries lie, and how a thread's columns are
// masked.
#include "attention_expression.cuh"
#include "attention_sm90_latent_mask.cuh"
#include "attention_sm90_stream.cuh"
#include "fragment.cuh"
#include "wgmma.cuh"

namespace imbrex::cuda {

// A thread block has kOwnDims of the output, and warpgroups that multiply values share them out: two where it has all, else one.
constexpr int kTeams = kOwnDims == kHeadDimV ? 2 : 1;
static_assert(kValuesInKeys && kCrews == 1 && kTileKeys == 64 && (kTileRows == 16 || kTileRows == 32));

// Log2 units that a row's maximum may outgrow what it was when it became the reference.
constexpr float kSlack = 8.f;

// Queries, and keys of 16 bits, lie in chunks of 64 dims: lines of 128 bytes, as TMA's swizzle puts them.
constexpr int kChunks = (kHeadDimQk + 63) / 64, kQChunkBytes = kTileRows * 128;

// Products have keys for rows and the rows of an item for columns. A thread has kColumns of these: columns 2 t and 2 t + 1 of each eight,
// with t = lane_id() % 4.
constexpr int kColumns = kTileRows / 4;
using Column = float[kTileRows / 2];  // Fragment of wgmma: of 64 rows of a product, all that a thread has
DEVICE int row_of_column(int column) { return column / 2 * 8 + first_column() + column % 2; }
// What a thread has of a column, of row g (h = 0) and g + 8 (h = 1) of its warp's 16, with g = lane_id() / 4.
template <class T, int n>
DEVICE T& of_column(T (&x)[n], int column, int h) {
  return at(x, column / 2, h, column % 2);
}
// Of lines of 128 bytes, the lower half of a descriptor, and the descriptor of those so many bytes further on. Descriptors of neighbouring
// products differ by a sum alone, so that the next one is there in time.
DEVICE u32 lines_at(u32 address) { return u32(wgmma_descriptor(address, 16, 1024, 1)); }
DEVICE u64 descriptor(u32 lines, int bytes) { return wgmma_descriptor(0, 0, 1024, 1) | u32(lines + bytes / 16); }

// A box of queries, and how many of an item's rows are written whatever the item is.
constexpr int kBoxHeads = kGroup < kTileRows ? kGroup : kTileRows, kBoxTokens = kTileRows / kBoxHeads;
constexpr int kWrittenRows = kMaps ? kBoxHeads * kBoxTokens : 0;

// Queries that no load writes are zeros: scores of anything else would outgrow their references again and again. By all threads.
template <class Shared>
DEVICE void clear_queries(Shared& shared) {
  if constexpr (kWrittenRows < kTileRows) {
    const u32 to = shared_address(shared.q);
    for (int i = int(threadIdx.x) * 16; i < int(sizeof(shared.q)); i += int(blockDim.x) * 16) store_shared(to + i, uint4{0, 0, 0, 0});
    async_proxy_fence();
  }
}

// Loads the queries of an item.
template <class Shared>
DEVICE void load_queries(const AttentionParams& p, const TensorMap& q_map, const Item& item, Shared& shared) {
  const u32 to = shared_address(shared.q), full = shared_address(&shared.q_full);
  if constexpr (kMaps) {
    if (!elect_one()) return;
    mbarrier_arrive_expect(full, u32(kChunks) * (kWrittenRows * 128));
    for (int c = 0; c < kChunks; ++c)
      tma_load(to + c * kQChunkBytes, q_map, full, l2_first_out(), c * 64, item.head_of(0), item.token_of(0));
  } else {
    copy_queries(p, item, 0, kChunks * 8, kQChunkBytes, to);
    async_proxy_fence();
    mbarrier_arrive(full);
  }
}

// Scores of a thread's keys of an item, with these numbers, become logits, in log2 units if they are not plain; with `hides`, -infinity
// where a row does not see the key.
template <int keys>
DEVICE void modify(const AttentionParams& p, const Item& item, const int (&key)[keys], bool hides, float (&s)[keys][kColumns]) {
#pragma unroll
  for (int i = 0; i < keys * kColumns; ++i) {
    const int h = i / kColumns, k = i % kColumns;
    float& x = s[h][k];
    const int row = min(row_of_column(k), item.num_rows - 1), position = item.position_of(row), bit = key[h] - item.first_bit;
    if constexpr (!kPlainLogits) {
      const RowTerms terms = row_terms(p, item.head_of(row), logit_scale(p, item.kv_head));
      int distance = key[h] - position;
      if (kTree && hides && bit >= 0) distance = depth_to(item.word_of(p, row), min(bit, kMostTreeTokens - 1));
      x = modified(p, terms, x, distance);
      if constexpr (kFactorLeft) x *= factor_of(p, terms);
    }
    if (!hides) continue;
    const KeyRange seen = kTree ? seen_by(p, item, row) : visible_keys(p, position);
    bool sees = key[h] >= max(seen.lo, item.lo) && key[h] < min(seen.hi, item.hi);
    if constexpr (kTree) sees = sees && shows(item.word_of(p, row), bit);
    if constexpr (kCustomMask) {
      const long query = item.query_index + (item.row_begin + row) / kGroup;
      if (sees) sees = custom_shows(p, p.custom_start[item.request] + query * item.seq_len + key[h]);
    }
    if (!sees) x = -infinity();
  }
}

template <int type>
DEVICE u32 pack_16(float low, float high) {
  return type == kBf16 ? pack_bf16(low, high) : pack_f16(low, high);
}

}  // namespace imbrex::cuda
