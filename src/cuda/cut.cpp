// See cut.h.
#include "cuda/cut.h"

#include <algorithm>

namespace imbrex::cuda {
namespace {

constexpr int kPieceKeys = 384;      // that a piece has at least; a share of its request's comes on top
constexpr int kPartialPercent = 5;   // traffic of partial results, of that of keys and values at most
constexpr int kLongestPiece = 4096;  // keys: a longer one would still run when all short ones beside it are done
constexpr int kTasksEach = 2;        // of a multiprocessor: two thread blocks share one
constexpr int kL2Percent = 60;       // for keys and values; queries and outputs pass through the rest

int round_up(int64_t n, int unit) { return int((n + unit - 1) / unit * unit); }

// Keys of a piece for one query token.
int piece_keys(const AttentionSpec& spec, int tile_keys) {
  const int64_t partial_bytes = 2 * int64_t(spec.group_size()) * (spec.head_dim_v + 2) * int64_t(sizeof(float));  // written and read
  const int64_t key_bytes = (spec.head_dim_qk + spec.head_dim_v) * size_of(spec.kv_dtype);
  return round_up(std::max<int64_t>(kPieceKeys, partial_bytes * 100 / (kPartialPercent * key_bytes)), tile_keys);
}

}  // namespace

CutPolicy cut_policy(const AttentionSpec& spec, const DeviceInfo& device, const std::array<Tile, kNumShapes>& tiles, bool balanced) {
  const int group = spec.group_size();
  const int decode_q = std::max(1, tiles[kDecode].rows / group);  // a token has rows for several tiles when the group is large
  const int workers = std::max(device.num_workers, 1);
  const int row_blocks = (group + tiles[kDecode].rows - 1) / tiles[kDecode].rows;
  const int heads = spec.num_kv_heads * row_blocks, most = (workers + heads - 1) / heads;  // a task for each multiprocessor
  CutPolicy policies;
  for (const Shape shape : kShapes) {
    SchedulePolicy& p = policies[shape];
    p.tile_q = std::max(1, tiles[shape].rows / group);
    p.tile_kv = tiles[shape].keys;
    p.split_kv = piece_keys(spec, p.tile_kv);
    p.growth = std::max(1, kLongestPiece / p.split_kv);
    // Alone, a request does with fewer: a multiprocessor then gets more than its share of the memory's pace, unless it is busy widening
    // fp8.
    p.share_splits = is_fp8(spec.kv_dtype) ? most : std::max(most * 3 / 4, 1);
    p.max_splits = kTasksEach * most;
    p.longest_kv = kLongestPiece;
    p.max_split_rows = most * decode_q;
    p.split_max_q = std::max(1, p.max_split_rows / 2);
    p.balanced = balanced;
    p.num_workers = (kTasksEach * workers + spec.num_kv_heads - 1) / spec.num_kv_heads;
  }
  policies[kDecode].max_q = decode_q;
  policies[kVerify].min_q = decode_q + 1;
  policies[kVerify].max_q = std::max(decode_q, policies[kVerify].tile_q);
  policies[kPrefill].min_q = policies[kVerify].max_q + 1;
  return policies;
}

long keys_in_l2(const AttentionSpec& spec, const DeviceInfo& device, Shape shape) {
  if (shape != kPrefill || !spec.mask.causal) return 0;
  return device.l2_bytes * kL2Percent / 100 / ((spec.head_dim_qk + spec.head_dim_v) * size_of(spec.kv_dtype));
}

}  // namespace imbrex::cuda
